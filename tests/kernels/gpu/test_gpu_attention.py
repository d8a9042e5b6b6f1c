"""Runs `attention_cases.py` on a GPU where there is one; compiles the kernels, which takes none."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_here import compiled, run_cases


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no GPU")
def test_cases_hold_on_a_gpu() -> None:
    run_cases("attention_cases.py", TRITON_INTERPRET="0")


@pytest.mark.parametrize(
    ("dtype", "dim", "rows", "capability", "sinks", "invariant"),
    [
        ("bf16", 128, 16, 90, False, False),
        ("bf16", 128, 64, 90, False, True),
        ("bf16", 128, 64, 100, False, False),
        ("fp16", 64, 16, 80, True, False),
        ("fp32", 256, 64, 80, True, False),
    ],
)
def test_what_a_gpu_gets_is_vectorised_and_fits_its_shared_memory(
    dtype: str, dim: int, rows: int, capability: int, sinks: bool, invariant: bool
) -> None:
    import triton.language as tl

    from ballast.kernels.triton.attention import sizes
    from ballast.kernels.triton.attention_code import attend_code

    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    chosen = sizes(rows, dim, kinds[dtype])
    options = {name: chosen.pop(name) for name in ("num_warps", "num_stages")}
    constants = {
        "HEADS": 32,
        "KV_HEADS": 8,
        "DIM": dim,
        "D": dim,
        "BLOCK_TOKENS": 16,
        "M": rows,
        "FIELDS": 7,
        "WINDOW": True,
        "SOFTCAP": True,
        "SINKS": sinks,
        "WIDEN": dtype == "fp32",
        "DTYPE": getattr(tl, str(kinds[dtype]).removeprefix("torch.")),
        "ALIGNED": 16,
        "CUT": 256 if invariant else 0,
        **chosen,
    }
    types = {
        **dict.fromkeys(("query", "out"), f"*{dtype}"),
        **dict.fromkeys(("keys", "values", "sinks"), "i64"),
        **dict.fromkeys(("items", "count", "tables"), "*i32"),
        **dict.fromkeys(("scale", "softcap"), "fp32"),
        "partial": "*fp32",
    }
    aligned = ("query", "keys", "values", "out", "query_token", "query_head", "block_stride")
    made = compiled(attend_code, types, constants, aligned, capability, **options)
    assert made.metadata.shared <= 99 * 1024
    # K and V are loaded 16 bytes at once, though their address comes as a number.
    copies = made.asm["ptx"].count("cp.async.cg.shared.global")
    whole = made.asm["ptx"].count("ld.global.v4") + made.asm["ptx"].count("ld.global.v2.b64")
    assert copies + whole > 0
    # But for sinks, of which a row has one.
    assert sinks or "ld.global.b16" not in made.asm["ptx"]
