"""Kernels that different processes compiled, and one loads from Numba's cache, stay what they are.

Each process counts what it compiles; functions of one name, with arguments of the same types, that
are compiled as the same number in two processes would be one function in a third, which loads both.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from numba.core.dispatcher import Dispatcher

from ballast.kernels import (
    attention_code,
    attention_steps_code,
    experts_code,
    intrinsics,
    layer_code,
    linear_code,
    lora_code,
)

ROOT = Path(__file__).parents[2]
COMPILE = "from ballast.kernels.lora_code import address_of; [address_of(n) for n in {!r}]"


def test_intrinsics_that_can_be_arguments_have_names_of_their_own() -> None:
    pointers = [getattr(intrinsics, n) for n in vars(intrinsics) if n.endswith("_at")]
    assert len(pointers) > 3
    assert len({repr(p) for p in pointers}) == len(pointers), [repr(p) for p in pointers]


CODE = [
    attention_code,
    attention_steps_code,
    experts_code,
    layer_code,
    linear_code,
    lora_code,
]


@pytest.mark.parametrize("code", CODE)
def test_functions_that_kernels_call_have_names_of_their_own(code: ModuleType) -> None:
    functions = {id(f): f for f in vars(code).values() if isinstance(f, Dispatcher)}
    names = [f.py_func.__qualname__ for f in functions.values()]
    assert len(names) > 1
    assert len(set(names)) == len(names), sorted(names)


def test_kernels_of_two_processes_work_in_a_third(tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    for dtypes in ("float32_float32", "float32_bfloat16"):
        names = [f"{kernel}_{dtypes}" for kernel in ("shrink", "expand")]
        compiled = run("-c", COMPILE.format(names))
        assert compiled.returncode == 0, compiled.stderr
    assert len(list(tmp_path.rglob("*.nbc"))) == 4
    which = "test_rows_ranks_and_shapes and 5-3 and (1-act0 or 1-act1)"
    found = run(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels/test_lora.py", "-k", which
    )
    assert found.returncode == 0, found.stdout
    assert "2 passed" in found.stdout
