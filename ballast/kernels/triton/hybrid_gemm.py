"""Launch HybridGEMM: multiply by weights in host memory, trading link for device traffic.

As C2CServe (section 5.2) has it, in one launch: `os_share` of the output columns are computed
output-stationary, the others weight-stationary, by programs of their own. The output is bit-equal
for every share (`triton/gemm_code.py`), so a share may change between two passes.
`core/gemm_traffic.py` says what each part moves. With TRITON_INTERPRET=1 it runs on CPU tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from ballast.core.gemm_traffic import GemmTile, output_stationary_columns
from ballast.kernels.triton.attention import LOADED, multiprocessors, widened
from ballast.kernels.triton.gemm_code import HELD, hybrid_gemm_code

DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class HybridTiles:
    """Tile shapes of both parts, and the launch. `depth`: step of K, the same in both parts, of
    which a weight-stationary program holds four."""

    os_rows: int = 128
    os_columns: int = 128
    ws_rows: int = 128
    ws_columns: int = 32
    depth: int = 64
    os_stages: int = 3
    ws_stages: int = 2
    warps: int = 8
    programs: int = 1
    """Programs per multiprocessor."""

    @property
    def output_stationary(self) -> GemmTile:
        return GemmTile(self.os_rows, self.os_columns, self.depth)

    @property
    def weight_stationary(self) -> GemmTile:
        return GemmTile(self.ws_rows, self.ws_columns, self.depth * HELD.value)


TILES = HybridTiles()


def hybrid_gemm(
    x: Tensor,
    address: int,
    n: int,
    os_share: float,
    tiles: HybridTiles = TILES,
    programs: tuple[int, int] | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """Return x W^T (m, n) of `x` (m, k) and the matrix W (n, k) at `address`, of x's dtype.

    `address`: of device memory, or of pinned host memory that is mapped into the device.
    `programs`: how many compute each part; by default in proportion to their columns.
    `workspace` float32: at least m times the weight-stationary columns, of any content; made if not
    given. Raises ValueError for other dtypes, strides, shares or too small a workspace.
    """
    if x.dtype not in DTYPES or x.ndim != 2 or x.stride(1) != 1:
        raise ValueError(
            f"x is {x.dtype} {tuple(x.shape)} {x.stride()}; 16-bit rows are multiplied"
        )
    m, k = x.shape
    boundary = output_stationary_columns(n, os_share, tiles.os_columns)
    out = x.new_empty(m, n)
    if not out.numel():
        return out
    if workspace is None:
        workspace = torch.empty(m * (n - boundary), dtype=torch.float32, device=x.device)
    if workspace.dtype is not torch.float32 or workspace.numel() < m * (n - boundary):
        raise ValueError(f"a workspace of {m * (n - boundary)} float32 values is needed")
    first, rest = programs or _divided(x.device, tiles, boundary, n)
    aligned = LOADED if address % LOADED == 0 and k % 8 == 0 else x.dtype.itemsize
    hybrid_gemm_code[(first + rest,)](
        x,
        address,
        out,
        workspace,
        m,
        n,
        k,
        boundary,
        first,
        x.stride(0),
        OS_M=tiles.os_rows,
        OS_N=tiles.os_columns,
        WS_M=tiles.ws_rows,
        WS_N=tiles.ws_columns,
        K=tiles.depth,
        OS_STAGES=tiles.os_stages,
        WS_STAGES=tiles.ws_stages,
        EVEN=k % tiles.weight_stationary.depth == 0,
        WIDEN=widened(x.dtype, x.device),
        DTYPE=getattr(tl, str(x.dtype).removeprefix("torch.")),
        ALIGNED=aligned,
        num_warps=tiles.warps,
    )
    return out


def _divided(device: torch.device, tiles: HybridTiles, boundary: int, n: int) -> tuple[int, int]:
    """Divide the programs that run at the same time between the parts, by their columns."""
    total = max(2, tiles.programs * multiprocessors(device))
    if boundary in (0, n):
        return (total, 0) if boundary else (0, total)
    first = min(max(1, round(total * boundary / n)), total - 1)
    return first, total - first
