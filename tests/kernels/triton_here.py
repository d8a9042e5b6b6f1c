"""Triton's kernels with a GPU and without: cases in a process of their own, and its compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any


def run_cases(file: str, **environment: str) -> None:
    """In a process of its own: what is interpreted is decided when Triton is first imported."""
    cases = Path(__file__).with_name(file)
    # Hooks of other plugins cost seconds.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:schemathesis", str(cases)]
    told = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert told.returncode == 0, told.stdout + told.stderr


def run_interpreted(file: str) -> None:
    """Without the devices, or the cases would take the GPU's tensors."""
    run_cases(file, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


def compiled(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    aligned: Collection[str],
    capability: int,
    **options: int,
) -> Any:
    """What Triton's compiler makes of it for a GPU. `types` of arguments; others are int32.
    `aligned`: those that are multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(kernel.arg_names)
    told = {**dict.fromkeys(names, "i32"), **types, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(
        kernel,
        told,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
