"""Runs `device_cases.py`: in Triton's interpreter, and on a GPU where there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


def run_cases(**environment: str) -> None:
    """In a process of its own: what is interpreted is decided when Triton is first imported."""
    cases = Path(__file__).with_name("device_cases.py")
    # Hooks of other plugins cost seconds.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:schemathesis", str(cases)]
    told = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert told.returncode == 0, told.stdout + told.stderr


@pytest.mark.slow
def test_cases_hold_in_the_interpreter() -> None:
    # Without the devices, or the cases would take the GPU's tensors.
    run_cases(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no GPU")
def test_cases_hold_on_a_gpu() -> None:
    run_cases(TRITON_INTERPRET="0")
