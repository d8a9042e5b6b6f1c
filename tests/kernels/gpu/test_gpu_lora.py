"""Runs `lora_cases.py` on a GPU where there is one; compiles the kernels, which takes none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ballast.core.errors import BrokenPromise
from ballast.kernels.gpu.attention_plan import Bucket
from ballast.kernels.gpu.lora import GpuLoraGroup
from ballast.kernels.lora import LoraTarget, tiled
from tests.kernels.lora_cases import Random, check, plain_lora, rows_of
from tests.kernels.triton_here import compiled, run_cases


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no GPU")
def test_cases_hold_on_a_gpu() -> None:
    run_cases("lora_cases.py", TRITON_INTERPRET="0")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decodes", [True, False])
def test_rows_of_several_adapters_and_of_none(dtype: torch.dtype, decodes: bool) -> None:
    torch.manual_seed(0)
    adapters = [0, 2, -1, 1, 0, 3, 1, -1, *[1] * 70, 0]
    ranks = [[8, 3, 33, 0], [0, 5, 1, 0]]
    check(plain_lora, adapters, (37, [41, 6]), ranks, dtype, decodes)


@pytest.mark.parametrize("rows", [1, 5, 64, 200])
@pytest.mark.parametrize("adapters", [1, 3, 40])
@pytest.mark.parametrize("decodes", [True, False])
def test_a_bucket_has_room_for_any_adapters(rows: int, adapters: int, decodes: bool) -> None:
    bucket = (
        Bucket.decode(rows, 1, adapters) if decodes else Bucket.holding([rows], rows, 1, adapters)
    )
    for step in (1, 2, 7, rows):
        each = torch.arange(rows).div(step, rounding_mode="floor") % adapters
        for index in (each, each.sort().values):
            _, tiles = tiled(index.numpy(), bucket.adapted_rows)
            assert len(tiles) <= bucket.adapted_tiles(bucket.tokens)


def test_what_the_kernels_would_misread_is_refused() -> None:
    random = Random(torch.float32)
    group = random.group(16, [8], [[4]])
    rows = rows_of([0, 0], Bucket.decode(2, 1, 1))
    lora = plain_lora([group], torch.float32)
    x, y = torch.zeros(2, 16), torch.zeros(2, 8)
    for bad_x, bad_y in (
        (x[:1], y[:1]),
        (x[:1], y),
        (x, y[:, :4]),
        (x.bfloat16(), y),
        (x.t().contiguous().t(), y),
        (x, y[:1].expand(2, 8)),
    ):
        with pytest.raises(BrokenPromise, match="adapters of 2 rows"):
            lora.add(0, rows, bad_x, bad_y)
    with pytest.raises(BrokenPromise, match="side by side"):
        GpuLoraGroup(16, (LoraTarget(64, (None,), 0, 32, 64),))


@pytest.mark.parametrize("kernel", ["shrink", "expand"])
@pytest.mark.parametrize(
    ("dtype", "rows", "ranks", "capability"),
    [("bf16", 16, 16, 80), ("bf16", 64, 64, 90), ("bf16", 64, 16, 100), ("fp32", 64, 64, 80)],
)
def test_what_a_gpu_gets_is_vectorised_and_fits_its_shared_memory(
    kernel: str, dtype: str, rows: int, ranks: int, capability: int
) -> None:
    import triton.language as tl

    from ballast.kernels.triton import lora_code as code
    from ballast.kernels.triton.lora import sizes

    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    function = code.shrink_code if kernel == "shrink" else code.expand_code
    chosen = sizes(rows, ranks, kind)
    constants: dict[str, Any] = {
        "ADAPTERS": 3,
        "M": rows,
        "R": ranks,
        "FIELDS": 3,
        "WIDEN": dtype == "fp32",
        "DTYPE": getattr(tl, str(kind).removeprefix("torch.")),
        "ALIGNED": 16,
        "STEP": 16,
        "K": chosen["K"],
        "N": chosen["N"],
    }
    names = list(function.arg_names)
    constants = {name: value for name, value in constants.items() if name in names}
    types = {
        **dict.fromkeys(("x", "y"), f"*{dtype}"),
        **dict.fromkeys(("t", "scales"), "*fp32"),
        **dict.fromkeys(("order", "tiles", "columns"), "*i32"),
        "matrices": "*i64",
    }
    aligned = {"x", "y", "t", "x_row", "y_row", "inputs", "part_inputs", "t_part", "t_row"}
    aligned &= set(names)
    types = {name: kind for name, kind in types.items() if name in names}
    made = compiled(function, types, constants, aligned, capability, num_warps=chosen["num_warps"])
    assert made.metadata.shared <= 99 * 1024
    # Matrices are loaded 16 bytes at once, though their address is found in a table.
    ptx = made.asm["ptx"]
    wide = ("cp.async.cg.shared.global", "ld.global.v4", "ld.global.v2.b64")
    assert sum(ptx.count(name) for name in wide) > 0
    assert "ld.global.b16" not in ptx
