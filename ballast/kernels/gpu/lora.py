"""Build the tables of batched LoRA on a GPU: a job's rows by adapter, and the adapters' matrices.

Used by `GpuBatch` and `models.gpu`. Computes as `kernels/lora.py` on a CPU: y[row] += scale *
(x[row] A^T) B^T. The host sorts rows by adapter and cuts them into tiles of one adapter each; tiles
and addresses of matrices are in tensors at stable addresses, so that one CUDA graph serves any rows
and any adapters. A job without adapters has a bucket without tiles, and launches no LoRA kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from ballast.core.errors import BrokenPromise
from ballast.kernels.gpu.attention_plan import Bucket
from ballast.kernels.gpu.staging import Sizes, put
from ballast.kernels.lora import LoraMatrices, LoraTarget, tiled

Array = np.ndarray[Any, Any]

TILE_FIELDS = 3
"""Fields of a tile: first of the rows sorted by adapter, number of rows, adapter. A tile without
rows has no effect."""
SPLIT = 512
"""Inputs of a decode's row that one program sums: with few rows, unsplit inputs would leave most
multiprocessors idle. A guess: other values were not tried."""
CHUNK_SPLITS, CHUNK_FLOATS = 4, 256
"""Bounds, for longer chunks: parts into which inputs are cut, and sums of a row in all parts."""
_NAMES = ("adapted", "adapted_wanted")
_TILES = "_tiles"


@dataclass(slots=True)
class GpuAdaptedRows:
    """Tables of the rows that use adapters, among all rows or among the head's rows."""

    name: str
    """Prefix of its tensors' names in the batch's buffer."""
    order: Tensor
    """int32 (rows of the bucket,): rows with an adapter, sorted by adapter."""
    tiles: Tensor
    """int32 (most tiles, TILE_FIELDS)."""
    decodes: bool
    job: list[tuple[int, int, int]] = field(default_factory=list)
    """The tiles of the job."""
    n: int = 0
    """Rows of the job, with and without an adapter."""

    @property
    def programs(self) -> int:
        """Number of tiles to launch; constant for decodes, since a CUDA graph may record it."""
        return len(self.tiles) if self.decodes else len(self.job)

    @staticmethod
    def sizes(bucket: Bucket) -> Sizes:
        """Sizes of the tensors of a batch, all rows' and the wanted ones'."""
        made: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        if bucket.adapters:
            for name, rows in zip(_NAMES, (bucket.tokens, bucket.wanted), strict=True):
                made[name] = (rows,), torch.int32
                made[name + _TILES] = (bucket.adapted_tiles(rows), TILE_FIELDS), torch.int32
        return made

    @classmethod
    def both(
        cls, views: Mapping[str, Tensor], bucket: Bucket
    ) -> tuple[GpuAdaptedRows, GpuAdaptedRows] | None:
        """Tables of all rows, and of the wanted ones; None: no row of the job has an adapter."""
        if not bucket.adapters:
            return None
        of, wanted = (cls(n, views[n], views[n + _TILES], bucket.decodes) for n in _NAMES)
        return of, wanted

    def fill(self, host: Mapping[str, Array], adapters: Array, most: int) -> None:
        """Into what is to be sent. `adapters`: of each row, -1: none; `most`: rows of a tile."""
        self.n = len(adapters)
        order, self.job = tiled(adapters, most)
        put(host[self.name], order)
        tiles = host[self.name + _TILES]
        tiles[:] = 0
        if self.job:
            tiles[: len(self.job)] = self.job


@dataclass(frozen=True, slots=True)
class GpuLoraGroup:
    """Linear modules that share their input, with their adapters' matrices."""

    inputs: int
    targets: tuple[LoraTarget, ...]

    def __post_init__(self) -> None:
        if any(t.block is not None for t in self.targets):
            raise BrokenPromise("on a GPU a module's outputs lie side by side")

    @property
    def width(self) -> int:
        """Number of columns of y, up to the last of any module."""
        return max(t.end for t in self.targets)

    @property
    def rank(self) -> int:
        """Largest rank of any adapter."""
        return max(m.rank for t in self.targets for m in t.adapters if m is not None)

    def check(self, rows: GpuAdaptedRows, x: Tensor, y: Tensor, dtype: torch.dtype) -> None:
        """Raise BrokenPromise for tensors that the kernels would misread."""
        fits = rows.n <= len(x) == len(y) and x.dtype == y.dtype == dtype
        fits = fits and x.shape[1] == self.inputs and y.shape[1] >= self.width
        apart = len(x) < 2 or (x.stride(0) >= x.shape[1] and y.stride(0) >= y.shape[1])
        if not (fits and apart and x.stride(1) == y.stride(1) == 1):
            described = [f"{z.dtype} {tuple(z.shape)} with strides {z.stride()}" for z in (x, y)]
            raise BrokenPromise(
                f"adapters of {rows.n} rows got {described[0]} and {described[1]}; "
                f"they are {dtype}, from {self.inputs} to {self.width} columns"
            )


class Lora(Protocol):
    """Adds the adapters' outputs of one model, group by group. One job at a time."""

    replayable: ClassVar[bool]
    """Whether `add` launches the same work for every job of a bucket of decodes."""

    def add(self, group: int, rows: GpuAdaptedRows, x: Tensor, y: Tensor) -> None:
        """Add the adapters' outputs for x (rows, inputs) to y (rows, outputs, from column 0 on).

        Of the model's dtype, and of at least the job's rows; elements of a row lie side by side.
        Raises BrokenPromise for others.
        """


def splits(inputs: int, rank: int, decodes: bool) -> int:
    """Return the number of parts into which a row's inputs are cut, independent of other rows."""
    whole = -(-inputs // SPLIT)
    return whole if decodes else max(1, min(whole, CHUNK_SPLITS, CHUNK_FLOATS // rank))


def tables(group: GpuLoraGroup) -> tuple[Array, Array, Array]:
    """int64 (targets, adapters, 3): A, B, rank; float32 (targets, adapters): scale; int32
    (targets, 2): outputs, first column."""
    none = LoraMatrices(0, 0, 0, 0.0)
    entries = [[m or none for m in t.adapters] for t in group.targets]
    return (
        np.array([[(m.a, m.b, m.rank) for m in of] for of in entries], np.int64),
        np.array([[m.scale for m in of] for of in entries], np.float32),
        np.array([(t.outputs, t.column) for t in group.targets], np.int32),
    )
