"""Launch the batch-invariant GEMM: a row's product does not depend on the rows beside it.

cuBLAS chooses another kernel, and so another order of summation, for another number of rows. Here
every element is one chain of matrix instructions in ascending order over K (`triton/gemm_code.py`),
so that tile shapes may follow the number of rows. That all shapes of `TILES` give the same bits is
asserted on GPUs by `tests/kernels/gemm_cases.py`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ballast.kernels.triton.attention import LOADED, multiprocessors, widened
from ballast.kernels.triton.gemm_code import gemm_code

INVARIANT_DTYPES = (torch.bfloat16, torch.float16)
"""What `invariant_gemm` multiplies; in float32 other orders have changed no token."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Shape of an output tile, and how a program computes it."""

    rows: int
    columns: int
    depth: int
    stages: int
    warps: int


TILES = (
    (1.4, Tile(128, 128, 64, 3, 8)),
    (0.7, Tile(128, 128, 64, 4, 8)),
    (1.4, Tile(64, 64, 64, 5, 4)),
    (0.7, Tile(64, 64, 128, 6, 4)),
    (0.0, Tile(64, 32, 128, 7, 4)),
)
"""The first of which there are at least so many per multiprocessor is taken: the best for an 8B
model's matrices on an H200."""
ONE_CHAIN = ((8, 0), (9, 0))
"""Compute capabilities on which all of `TILES` fit into shared memory and take one kind of matrix
instruction, so that they give the same bits: seen on 9.0."""
COMMON = Tile(64, 64, 64, 4, 4)
"""Of all numbers of rows on GPUs that are not of `ONE_CHAIN`, whose shared memory may be small."""


def invariant_gemm(x: Tensor, matrix: Tensor, tile: Tile | None = None) -> Tensor:
    """Return x W^T (m, n) of `x` (m, k) and `matrix` W (n, k), whose rows are contiguous, of one
    dtype of 16 bits. `tile`: by default chosen by the sizes and the device."""
    (m, k), n = x.shape, len(matrix)
    out = x.new_empty(m, n)
    if not out.numel():
        return out
    if tile is None:
        tile = tile_of(m, n, multiprocessors(x.device), of_one_chain(x.device))
    address = matrix.data_ptr()
    aligned = LOADED if address % LOADED == 0 and k % 8 == 0 else x.dtype.itemsize
    gemm_code[(triton.cdiv(m, tile.rows) * triton.cdiv(n, tile.columns),)](
        x,
        address,
        out,
        m,
        n,
        k,
        x.stride(0),
        M=tile.rows,
        N=tile.columns,
        K=tile.depth,
        STAGES=tile.stages,
        EVEN=k % tile.depth == 0,
        WIDEN=widened(x.dtype, x.device),
        DTYPE=getattr(tl, str(x.dtype).removeprefix("torch.")),
        ALIGNED=aligned,
        num_warps=tile.warps,
    )
    return out


def tile_of(m: int, n: int, multiprocessors: int, one_chain: bool) -> Tile:
    """Choose the tile of a product of m rows and n columns on a GPU."""
    if not one_chain:
        return COMMON
    for least, tile in TILES:
        tiles = triton.cdiv(m, tile.rows) * triton.cdiv(n, tile.columns)
        if (tile.rows == 64 or m > 64) and tiles >= least * multiprocessors:
            return tile
    return COMMON


@functools.cache
def of_one_chain(device: torch.device) -> bool:
    """Whether the device is known to be of `ONE_CHAIN`; so are CPUs, where the interpreter runs."""
    if device.type != "cuda":
        return True
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor) in ONE_CHAIN
