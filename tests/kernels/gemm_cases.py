"""GEMMs with one order of summation: on a GPU, else in Triton's interpreter.

`test_gpu_gemm.py` and `triton/test_triton_interpreted.py` run this file in a process of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from ballast.kernels.triton.gemm import INVARIANT_DTYPES, TILES, invariant_gemm, tile_of
from ballast.kernels.triton.hybrid_gemm import TILES as HYBRID_TILES
from ballast.kernels.triton.hybrid_gemm import HybridTiles, hybrid_gemm
from ballast.kernels.triton.layer import TritonLayer
from benchmarks.interpreted import chained_dots

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
SHARES = (0.0, 0.2, 0.5, 0.85, 1.0)
SMALL = HybridTiles(os_rows=64, os_columns=32, ws_rows=64, ws_columns=16, depth=32, warps=4)
NEAR = {torch.bfloat16: 5e-3, torch.float16: 5e-4}
"""Of a product's norm: what rounding the output costs."""
SHAPES = [(1, 40, 72), (3, 100, 33), (130, 70, 256), (65, 129, 300)]
if GPU:
    SHAPES += [(1, 4096, 4096), (200, 1000, 4100), (777, 4096, 14336)]


@pytest.fixture(autouse=True)
def _chained() -> Iterator[None]:
    with chained_dots():
        yield


def operands(
    m: int, n: int, k: int, dtype: torch.dtype, pinned: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(m + n + k)
    x = torch.randn(m, k).to(dtype).to(DEVICE)
    w = (torch.randn(n, k) * k**-0.5).to(dtype)
    return x, w.pin_memory() if pinned else w.to(DEVICE)


def distance(found: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> float:
    expected = x.double() @ w.to(x.device).double().T
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", list(NEAR))
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_a_hybrid_gemm_is_the_same_for_every_share(
    m: int, n: int, k: int, dtype: torch.dtype
) -> None:
    x, w = operands(m, n, k, dtype, pinned=GPU)
    tiles = HYBRID_TILES if GPU else SMALL
    # What a workspace held before must not be read.
    workspace = torch.full((m * n,), float("nan"), device=DEVICE)
    found = [hybrid_gemm(x, w.data_ptr(), n, s, tiles, workspace=workspace) for s in SHARES]
    assert distance(found[0], x, w) < NEAR[dtype]
    for other in found[1:]:
        assert torch.equal(other, found[0])


@pytest.mark.parametrize("programs", [(1, 1), (3, 2)])
def test_neither_programs_nor_tiles_change_a_bit_of_a_hybrid_gemm(
    programs: tuple[int, int],
) -> None:
    x, w = operands(150, 96, 320, torch.bfloat16)
    expected = hybrid_gemm(x, w.data_ptr(), 96, 0.5, SMALL)
    other = replace(SMALL, os_columns=16, ws_columns=32, os_rows=128, ws_rows=128)
    for tiles in (SMALL, other):
        found = hybrid_gemm(x, w.data_ptr(), 96, 0.5, tiles, programs)
        assert torch.equal(found, expected)


def test_rows_of_x_may_lie_apart_and_the_matrix_unaligned() -> None:
    wide, w = operands(70, 48, 96, torch.bfloat16)
    x = wide[:, :64]
    memory = torch.zeros(48 * 64 + 1, dtype=torch.bfloat16, device=DEVICE)
    moved = memory[1:].view(48, 64)
    moved.copy_(w[:, :64])
    found = hybrid_gemm(x, moved.data_ptr(), 48, 0.5, SMALL)
    assert torch.equal(found, hybrid_gemm(x.contiguous(), moved.data_ptr(), 48, 0, SMALL))
    assert distance(found, x, moved) < NEAR[torch.bfloat16]


def test_what_a_hybrid_gemm_refuses() -> None:
    x, w = operands(4, 64, 32, torch.bfloat16)
    with pytest.raises(ValueError, match=r"os_share is 1\.5"):
        hybrid_gemm(x, w.data_ptr(), 64, 1.5, SMALL)
    with pytest.raises(ValueError, match="float32"):
        hybrid_gemm(x.float(), w.data_ptr(), 64, 0.5, SMALL)
    with pytest.raises(ValueError, match="workspace of 128"):
        hybrid_gemm(x, w.data_ptr(), 64, 0.5, SMALL, workspace=torch.empty(127, device=DEVICE))
    assert hybrid_gemm(x[:0], w.data_ptr(), 64, 0.5, SMALL).shape == (0, 64)


@pytest.mark.parametrize("dtype", INVARIANT_DTYPES)
@pytest.mark.parametrize(("n", "k"), [(48, 72), (100, 320)] + [(4096, 4096)] * GPU)
def test_a_rows_product_depends_on_no_other_row(n: int, k: int, dtype: torch.dtype) -> None:
    x, w = operands(300, n, k, dtype)
    whole = TritonLayer().multiply(x, w)
    assert distance(whole, x, w) < NEAR[dtype]
    for begin, end in ((0, 1), (299, 300), (7, 40), (100, 229)):
        assert torch.equal(TritonLayer().multiply(x[begin:end], w), whole[begin:end])


@pytest.mark.parametrize("k", [72, 256] + [4096] * GPU)
def test_every_tile_gives_the_same_bits(k: int) -> None:
    x, w = operands(140, 300, k, torch.bfloat16)
    found = [invariant_gemm(x, w, tile) for _, tile in TILES]
    for other in found[1:]:
        assert torch.equal(other, found[0])
    # As a hybrid GEMM does, wherever its weights lie.
    assert torch.equal(hybrid_gemm(x, w.data_ptr(), 300, 0.5), found[0])


def test_tiles_fill_the_device_and_are_one_where_instructions_differ() -> None:
    assert tile_of(4096, 4096, 132, True) == TILES[0][1]
    assert tile_of(256, 6144, 132, True) == TILES[1][1]
    assert tile_of(1, 28672, 132, True) == TILES[2][1]
    assert tile_of(1, 6144, 132, True) == TILES[3][1]
    assert tile_of(1, 4096, 132, True) == TILES[-1][1]
    assert tile_of(1, 4096, 132, False) == tile_of(5000, 28672, 132, False)
