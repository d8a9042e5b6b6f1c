"""Runs the cases of every Triton kernel in Triton's interpreter, on the CPU.

In one process, as each spends seconds on imports.
"""

from __future__ import annotations

import pytest

from tests.kernels.triton_here import run_interpreted


@pytest.mark.slow
def test_cases_hold_in_the_interpreter() -> None:
    run_interpreted(
        "attention_cases.py",
        "gemm_cases.py",
        "layer_cases.py",
        "lora_cases.py",
        "sampling_cases.py",
    )
