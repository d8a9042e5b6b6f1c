"""Runs `gemm_cases.py` on a GPU where there is one; compiles the kernels, which takes none."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests.kernels.triton_here import compiled, run_cases

INSTRUCTION = re.compile(r"(?:wgmma\.mma_async|(?<!\w)mma)\.sync\.aligned\.m\d+n\d+k(\d+)[\w.]*")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no GPU")
def test_cases_hold_on_a_gpu() -> None:
    run_cases("gemm_cases.py", TRITON_INTERPRET="0")


def _ptx(kernel: Any, constants: dict[str, Any], capability: int, warps: int, shared: int) -> str:
    import triton.language as tl

    common = {"EVEN": True, "WIDEN": False, "DTYPE": tl.bfloat16, "ALIGNED": 16}
    types = {"x": "*bf16", "out": "*bf16", "matrix": "i64", "partial": "*fp32"}
    types = {name: kind for name, kind in types.items() if name in kernel.arg_names}
    constants = {**constants, **common}
    aligned = [n for n in kernel.arg_names if n not in {*constants, "m", "os_programs"}]
    made = compiled(kernel, types, constants, aligned, capability, num_warps=warps)
    assert made.metadata.shared <= shared * 1024
    result: str = made.asm["ptx"]
    # Operands come 16 bytes at once, though the matrix's address is a number.
    assert "cp.async.cg.shared.global" in result
    assert "ld.global.b16" not in result
    return result


@pytest.mark.parametrize(("capability", "kind"), [(80, "mma"), (90, "wgmma")])
def test_all_tiles_take_the_same_kind_of_matrix_instruction(capability: int, kind: str) -> None:
    from ballast.kernels.triton.gemm import ONE_CHAIN, TILES
    from ballast.kernels.triton.gemm_code import gemm_code

    assert divmod(capability, 10) in ONE_CHAIN
    for _, t in TILES:
        sizes = {"M": t.rows, "N": t.columns, "K": t.depth, "STAGES": t.stages}
        ptx = _ptx(gemm_code, sizes, capability, t.warps, 227 if capability == 90 else 163)
        found = [(match[0].split(".")[0], match[1]) for match in INSTRUCTION.finditer(ptx)]
        assert set(found) == {(kind, "16")}


@pytest.mark.parametrize(("capability", "kind"), [(80, "mma"), (90, "wgmma")])
def test_both_parts_of_a_hybrid_gemm_take_the_same_kind(capability: int, kind: str) -> None:
    from ballast.kernels.triton.gemm_code import hybrid_gemm_code
    from ballast.kernels.triton.hybrid_gemm import TILES

    t = TILES
    sizes = {
        "OS_M": t.os_rows,
        "OS_N": t.os_columns,
        "WS_M": t.ws_rows,
        "WS_N": t.ws_columns,
        "K": t.depth,
        "OS_STAGES": t.os_stages,
        "WS_STAGES": t.ws_stages,
    }
    ptx = _ptx(hybrid_gemm_code, sizes, capability, t.warps, 227)
    found = [(match[0].split(".")[0], match[1]) for match in INSTRUCTION.finditer(ptx)]
    assert set(found) == {(kind, "16")}
    assert not re.search(r"\b(atom|red)\.(global|relaxed|gpu)", ptx)
