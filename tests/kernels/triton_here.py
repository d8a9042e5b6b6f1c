"""Triton's kernels with a GPU and without: run in another process, or compiled alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any


def run_cases(*files: str, **environment: str) -> None:
    """Run files of cases in another process: Triton reads TRITON_INTERPRET when it is imported."""
    cases = [str(Path(__file__).with_name(file)) for file in files]
    # Hooks of other plugins cost seconds.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:schemathesis", *cases]
    ended = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def run_interpreted(*files: str) -> None:
    """Run files of cases in Triton's interpreter, on one core and without the GPU, if any."""
    run_cases(
        *files,
        TRITON_INTERPRET="1",
        CUDA_VISIBLE_DEVICES="",
        OMP_NUM_THREADS="1",
        OPENBLAS_NUM_THREADS="1",
    )


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
    result = {**dict.fromkeys(names, "i32"), **types, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(
        kernel,
        result,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
