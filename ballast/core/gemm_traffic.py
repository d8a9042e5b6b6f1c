"""Model the bytes that a GEMM moves over the host link and through device memory, by its dataflow.

For a product x W^T whose weights stay in host memory, as in C2CServe's HybridGEMM (section 5.2):
`os_share` of the output columns are computed output-stationary, which reads weights once per tile
of rows; the other columns weight-stationary, which reads weights once and passes partial sums
through a float32 workspace in device memory. Used by `kernels.triton.hybrid_gemm` and benchmarks.

What caches save: activations that programs running at the same time read together count once;
weights are never found in a cache, as the paper's figure 4b has it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ballast.core.units import ceil_div

WORKSPACE_ITEM = 4
"""Bytes of a partial sum."""
SUMS_REACH = 0.4
"""Part of the bandwidth of plain reads that partial sums reach: by C2CServe's figure 4, 5.18 GB in
4.0 ms, where plain reads have 3.2 TB/s; our own kernel reaches less. With it, weight-stationary
products are faster than output-stationary ones on a whole GH200, about equal on three slices, and
slower on seven, as there."""


@dataclass(frozen=True, slots=True)
class GemmShape:
    """Sizes of x (m, k) times W^T, for W (n, k); `item`: bytes of an element."""

    m: int
    n: int
    k: int
    item: int = 2

    @property
    def weight_bytes(self) -> int:
        return self.n * self.k * self.item

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k


@dataclass(frozen=True, slots=True)
class GemmTile:
    """Rows and columns of an output tile; `depth`: elements of K that are multiplied at once
    (output-stationary), or held while all rows pass (weight-stationary)."""

    rows: int
    columns: int
    depth: int


@dataclass(frozen=True, slots=True)
class GemmTraffic:
    """Bytes over the host link and through device memory."""

    link: float
    device: float
    sums: float = 0.0
    """Part of `device` that adds up partial sums."""

    def __add__(self, other: GemmTraffic) -> GemmTraffic:
        return GemmTraffic(
            self.link + other.link, self.device + other.device, self.sums + other.sums
        )

    def times(self, n: float) -> GemmTraffic:
        """Return the traffic of `n` such products."""
        return GemmTraffic(n * self.link, n * self.device, n * self.sums)

    def memory_seconds(self, rate: float) -> float:
        """Return the seconds of device memory, of which other traffic reaches `rate`."""
        return (self.device + self.sums * (1 / SUMS_REACH - 1)) / rate

    def seconds(self, link_rate: float, device_rate: float) -> float:
        """Return the lower bound by traffic; rates in bytes per second."""
        return max(self.link / link_rate, self.memory_seconds(device_rate))


def output_stationary_columns(n: int, os_share: float, tile_columns: int) -> int:
    """Return how many of `n` columns are computed output-stationary: whole tiles, or all.

    Raises ValueError unless 0 <= os_share <= 1.
    """
    if not 0.0 <= os_share <= 1.0:
        raise ValueError(f"os_share is {os_share}; it is a share of the columns, from 0 to 1")
    if os_share == 1.0:
        return n
    return min(n, round(os_share * n / tile_columns) * tile_columns)


def output_stationary(
    shape: GemmShape, tile: GemmTile, programs: int, together: int = 1
) -> GemmTraffic:
    """Traffic of an output-stationary GEMM of which `programs` tiles run at the same time, in an
    order in which these lie in at least `together` columns of tiles."""
    row_tiles, column_tiles = ceil_div(shape.m, tile.rows), ceil_div(shape.n, tile.columns)
    passes = max(1.0, min(column_tiles / together, row_tiles * column_tiles / programs))
    activations = shape.m * shape.k * shape.item * passes
    return GemmTraffic(
        link=row_tiles * shape.weight_bytes,
        device=activations + shape.m * shape.n * shape.item,
    )


def weight_stationary(shape: GemmShape, tile: GemmTile, programs: int) -> GemmTraffic:
    """Traffic of a weight-stationary GEMM of which `programs` strips of columns run at the same
    time. The first step writes the workspace, the last reads it and writes the output."""
    strips, steps = ceil_div(shape.n, tile.columns), ceil_div(shape.k, tile.depth)
    activations = shape.m * shape.k * shape.item * max(1.0, strips / programs)
    workspace = 2 * (steps - 1) * shape.m * shape.n * WORKSPACE_ITEM
    return GemmTraffic(
        link=shape.weight_bytes,
        device=activations + workspace + shape.m * shape.n * shape.item,
        sums=workspace,
    )


def hybrid(
    shape: GemmShape,
    os_tile: GemmTile,
    ws_tile: GemmTile,
    os_share: float,
    programs: int,
    together: int = 1,
) -> GemmTraffic:
    """Traffic of a HybridGEMM whose two parts divide `programs` as they divide the columns;
    `together`: as of `output_stationary`."""
    total = GemmTraffic(0, 0)
    first = output_stationary_columns(shape.n, os_share, os_tile.columns)
    parts = ((True, os_tile, first), (False, ws_tile, shape.n - first))
    for stationary_output, tile, columns in parts:
        if not columns:
            continue
        part = GemmShape(shape.m, columns, shape.k, shape.item)
        running = max(1, round(programs * columns / shape.n))
        if stationary_output:
            total += output_stationary(part, tile, running, together)
        else:
            total += weight_stationary(part, tile, running)
    return total
