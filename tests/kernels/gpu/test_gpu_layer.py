"""Runs `layer_cases.py` on a GPU where there is one; compiles the kernels, which takes none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ballast.kernels.gpu.layer import layer_kernels
from ballast.kernels.plain.layer import PlainLayer
from tests.kernels.triton_here import compiled, run_cases


def test_a_cpu_has_pytorchs_operations() -> None:
    assert isinstance(layer_kernels(torch.device("cpu")), PlainLayer)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no GPU")
def test_cases_hold_on_a_gpu() -> None:
    run_cases("layer_cases.py", TRITON_INTERPRET="0")


@pytest.mark.parametrize(
    ("dtype", "capability"), [("bf16", 80), ("bf16", 90), ("bf16", 100), ("fp32", 90)]
)
def test_what_a_gpu_gets_loads_several_elements_at_once(dtype: str, capability: int) -> None:
    import triton.language as tl

    from ballast.kernels.triton import layer_code as code
    from ballast.kernels.triton.layer import ROTATE

    kind = {"bf16": tl.bfloat16, "fp32": tl.float32}[dtype]
    memory = f"*{dtype}"
    common = {"DTYPE": kind, "ALIGNED": 16}

    def wide(
        kernel: Any,
        types: dict[str, str],
        constants: dict[str, Any],
        **options: Any,
    ) -> str:
        aligned = [n for n in kernel.arg_names if n not in constants and n != "epsilon"]
        made = compiled(kernel, types, constants, aligned, capability, **options)
        assert made.metadata.shared <= 99 * 1024
        result: str = made.asm["ptx"]
        return result

    result = wide(
        code.add_norm_code,
        {
            **dict.fromkeys(("hidden", "more", "out"), memory),
            **dict.fromkeys(("bias", "weight"), "i64"),
            "epsilon": "fp32",
        },
        {"ADD": True, "BIAS": True, "WIDTH": 4096, **common},
        num_warps=8,
    )
    assert "ld.global.v4" in result
    assert "ld.global.b16" not in result
    assert "st.global.v4" in result
    result = wide(
        code.rotate_code,
        {
            **dict.fromkeys(("qkv", "cosine", "sine"), memory),
            **dict.fromkeys(("bias", "q_norm", "k_norm", "keys", "values"), "i64"),
            "slots": "*i32",
            "epsilon": "fp32",
        },
        {
            "HEADS": 32,
            "KV_HEADS": 8,
            "DIM": 128,
            "HALF": 64,
            "BLOCK_TOKENS": 16,
            "BIAS": True,
            "NORM": True,
            **common,
        },
        **ROTATE,
    )
    assert "ld.global.b16" not in result
    if capability >= 90:  # before, a product is a multiply-add of nothing
        # Products are rounded before they are added.
        assert "fma.rn.bf16" not in result
    result = wide(
        code.gate_code, dict.fromkeys(("gate_up", "out"), memory), {"BLOCK": 1024}, num_warps=4
    )
    assert "ld.global.v4" in result
    assert "ld.global.b16" not in result


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    ("dtype", "capability"), [("bf16", 80), ("bf16", 90), ("bf16", 100), ("fp32", 90)]
)
def test_a_rows_weights_are_on_their_way_before_they_are_wanted(
    dtype: str, capability: int, gated: bool
) -> None:
    import triton.language as tl

    from ballast.kernels.triton.layer import MOST_ROWS, STAGES, STEP_BYTES
    from ballast.kernels.triton.row_code import row_code

    kind = {"bf16": tl.bfloat16, "fp32": tl.float32}[dtype]
    constants = {
        "NORM": gated,
        "BIAS": not gated,
        "ADD": not gated,
        "GATED": gated,
        "N": MOST_ROWS // 2 if gated else MOST_ROWS,
        "K": STEP_BYTES // (kind.primitive_bitwidth // 8),
        "STAGES": STAGES,
        "DTYPE": kind,
        "ALIGNED": 16,
    }
    types = {
        **dict.fromkeys(("x", "added", "out"), f"*{dtype}"),
        **dict.fromkeys(("matrix", "norm", "bias"), "i64"),
        "epsilon": "fp32",
    }
    aligned = [n for n in row_code.arg_names if n not in constants and n != "epsilon"]
    made = compiled(row_code, types, constants, aligned, capability, num_warps=4)
    ptx = made.asm["ptx"]
    # 16 bytes at once, straight to shared memory.
    assert ptx.count("cp.async.cg.shared.global") >= (STAGES - 1) * MOST_ROWS * STEP_BYTES // 2048
    # As much as four programs of a multiprocessor can have on every GPU.
    assert made.metadata.shared <= 40 * 1024
