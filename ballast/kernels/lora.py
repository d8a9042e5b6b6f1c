"""Compute batched LoRA on CPU: y[row] += scale * (x[row] A^T) B^T, with one adapter per row.

Used by `models.adapters` and `models.fused.adapters`. A `LoraGroup` holds the adapters' matrices
for linear modules that share their input, such as queries, keys and values: built once per model,
as its matrices never move. `AdapterRows` maps one job's rows to adapters. `LoraGroup.add` runs both
kernels; `LoraGroup.tables` and `AdapterRows.place` build their tables for a program of kernels.
Of adapters that change a module by a whole matrix in few bits, `add` adds these as well.

Matrices are those of `weights/adapter.py`: A (rank, inputs), B transposed (rank, outputs), float32
or bfloat16. Activations have their dtype, or float32. Sums are float32.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ballast.core.errors import BrokenPromise
from ballast.core.units import ceil_div
from ballast.kernels import lora_code as code
from ballast.kernels import team
from ballast.kernels.packed_delta import PackedMatrix, PackedProducts

Array = np.ndarray[Any, Any]

TILE_ROWS = 32
"""Rows of one adapter in a tile."""
ALONE = 1 << 17
"""Multiplications up to which the calling thread computes alone: waking others would cost more."""

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_compiling = threading.Lock()


@dataclass(frozen=True, slots=True)
class LoraMatrices:
    """An adapter's matrices for one linear module. `a` and `b`: addresses."""

    a: int
    b: int
    rank: int
    scale: float


@dataclass(frozen=True, slots=True)
class LoraTarget:
    """One linear module with the matrices of each adapter that changes it.

    Its outputs are columns `column ..` of y: all side by side, or `block` of them every
    `block_step` columns, for a multiple of 32.
    """

    outputs: int
    adapters: tuple[LoraMatrices | None, ...]
    column: int = 0
    block: int | None = None
    block_step: int = 0
    packed: tuple[PackedMatrix | None, ...] = ()
    """Differences in few bits, by adapter: on CPUs alone."""

    @property
    def end(self) -> int:
        """Column of y after its last one."""
        last = self.outputs - 1
        if self.block is not None:
            last = last // self.block * self.block_step + last % self.block
        return self.column + last + 1

    @property
    def columns(self) -> Tensor:
        """int64 (outputs,): column of y of each output."""
        at = torch.arange(self.outputs)
        if self.block is not None:
            at = at // self.block * self.block_step + at % self.block
        return at + self.column


def tiled(adapters: Sequence[int] | Array, most: int) -> tuple[Array, list[tuple[int, int, int]]]:
    """Rows that have an adapter, int64, sorted by it; and tiles of up to `most` of one adapter.

    A tile: its first row among those, how many, the adapter. `adapters[i]`: of row i, -1: none.
    """
    index = np.asarray(adapters, np.int64)
    order = np.argsort(index, kind="stable")
    order = np.ascontiguousarray(order[np.searchsorted(index[order], 0) :], np.int64)
    tiles: list[tuple[int, int, int]] = []
    found, starts, counts = np.unique(index[order], return_index=True, return_counts=True)
    for adapter, start, count in zip(found.tolist(), starts.tolist(), counts.tolist(), strict=True):
        for i in range(0, count, most):
            tiles.append((start + i, min(most, count - i), adapter))
    return order, tiles


class AdapterRows:
    """Mapping of one job's rows to adapters, in tiles of one adapter each."""

    def __init__(self, adapters: Sequence[int], x_rows: Array | None = None) -> None:
        """`adapters[i]`: index of the adapter of row i of y; -1: none.

        Row i of y is made from row `x_rows[i]` of x, or from row i.
        """
        self.n_rows = len(adapters)
        order, tiles = tiled(adapters, TILE_ROWS)
        self._y_rows = order
        self._x_rows = order if x_rows is None else np.asarray(x_rows, np.int64)[order]
        self._tiles = np.array(tiles, np.int64).reshape(-1, 3)
        self.adapters = list(dict.fromkeys(adapter for _, _, adapter in tiles))
        """Adapters that the rows use, each once."""
        self._fields = np.zeros(code.JOB_FIELDS, np.int64)
        self._fields[code.TILES] = len(tiles)
        self._fields[code.TILES_AT] = self._tiles.ctypes.data
        self._fields[code.POSITIONS] = self.positions
        self._fields[code.X_ROWS] = self._x_rows.ctypes.data
        self._fields[code.Y_ROWS] = self._y_rows.ctypes.data
        self._scratch, self._scratch_at = torch.empty(0, dtype=torch.float32), 0

    @property
    def positions(self) -> int:
        """Number of rows that have an adapter."""
        return len(self._y_rows)

    def by_adapter(self) -> Iterator[tuple[int, Array, Array]]:
        """Yield each adapter with its rows of x, and of y: int64."""
        for adapter in self.adapters:
            own = self._tiles[self._tiles[:, 2] == adapter]
            part = slice(own[0, 0], own[-1, 0] + own[-1, 1])
            yield adapter, self._x_rows[part], self._y_rows[part]

    def place(self, made: Array, x: tuple[int, int], y: tuple[int, int], t: int) -> None:
        """Fill this job into tables (..., fields), and that they have not been run.

        `x` and `y`: address, and elements from a row to the next. `t`: address of
        `LoraGroup.scratch` float32, which shrink and expand of a group share, and which groups that
        do not run at the same time may share. All of it, and this, has to outlive the run.
        """
        fields = self._fields
        fields[code.X], fields[code.X_STRIDE] = x
        fields[code.Y], fields[code.Y_STRIDE] = y
        fields[code.T] = t
        made[..., : code.JOB_FIELDS] = fields

    def scratch(self, n: int) -> int:
        """Address of n float32, until the next call."""
        if len(self._scratch) < n:
            # PyTorch's, so that a profile run counts it (`ballast.models.profile_run`).
            self._scratch = torch.empty(n, dtype=torch.float32)
            self._scratch_at = self._scratch.data_ptr()
        return self._scratch_at


class LoraGroup:
    """Linear modules of one input, and what adapters of one dtype add to them.

    `width`: columns of y, up to the last that any of them has.
    """

    def __init__(self, inputs: int, targets: Sequence[LoraTarget], dtype: torch.dtype) -> None:
        self.inputs = inputs
        self.targets = tuple(targets)
        self.dtype = dtype
        if any(t.block is not None and t.block % code.COLUMN_TILE for t in targets):
            raise BrokenPromise(f"blocks of columns are multiples of {code.COLUMN_TILE}")
        self.width = max(t.end for t in targets)
        self._adapters = [_adapters(target) for target in targets]
        self._targets = np.array(
            [
                (
                    adapters.ctypes.data,
                    target.outputs,
                    target.column,
                    target.block or target.outputs,
                    target.block_step,
                )
                for target, adapters in zip(targets, self._adapters, strict=True)
            ],
            np.int64,
        )
        ranks = np.array([adapters[:, 2] for adapters in self._adapters])
        self._ranks: list[int] = ranks.max(0).tolist()
        """Largest rank over the targets, by adapter."""
        self.rank: int = max(self._ranks)
        self.outputs = max(target.outputs for target in targets)
        self._packed = [
            PackedProducts(inputs, t.columns, t.packed) for t in targets if any(t.packed)
        ]
        self._tables = self.tables()
        self._address = self._tables.ctypes.data
        self._step = self._tables.strides[0]

    def tables(self) -> Array:
        """int64 (2, fields): tables for shrink and expand; `AdapterRows.place` completes them.

        This group has to outlive them.
        """
        made = np.zeros((2, code.N_FIELDS), np.int64)
        made[:, code.K] = self.inputs
        made[:, code.TARGETS] = len(self.targets)
        made[:, code.TARGETS_AT] = self._targets.ctypes.data
        made[:, code.T_STRIDE] = self.rank
        made[:, code.CHUNKS] = ceil_div(self.rank, code.RANKS), ceil_div(self.outputs, code.COLUMNS)
        return made

    def scratch(self, positions: int) -> int:
        """float32 that a job with adapters at so many rows needs between the two kernels."""
        return len(self.targets) * positions * self.rank

    def add(self, rows: AdapterRows, x: Tensor, y: Tensor) -> None:
        """Add to y (rows, outputs, from column 0 on) what the adapters make of x (rows, inputs).

        Of one dtype; elements of a row lie side by side. Raises BrokenPromise for what the kernels
        would misread.
        """
        n = rows.n_rows
        self._check(x, n, self.inputs, "input")
        self._check(y, n, self.width, "output")
        most = max((self._ranks[a] for a in rows.adapters), default=0)
        for products in self._packed:
            products.add(rows.by_adapter(), x, y)
        if most == 0:
            return
        t = rows.scratch(self.scratch(rows.positions))
        rows.place(self._tables, (x.data_ptr(), x.stride(0)), (y.data_ptr(), y.stride(0)), t)
        shrink, expand = kernels(x.dtype, self.dtype)
        work = rows.positions * most * len(self.targets)
        for kernel, address, size in (
            (shrink, self._address, self.inputs),
            (expand, self._address + self._step, self.outputs),
        ):
            team.run(kernel, address, 1 if work * size <= ALONE else 1 << 16)

    def _check(self, given: Tensor, rows: int, columns: int, name: str) -> None:
        kinds = (torch.float32, self.dtype)
        if given.shape != (rows, columns) or given.stride(1) != 1 or given.dtype not in kinds:
            raise BrokenPromise(
                f"an adapter's {name} is {given.dtype} {tuple(given.shape)} with strides "
                f"{given.stride()}, not ({rows}, {columns})"
            )


def kernels(activations: torch.dtype, weights: torch.dtype) -> tuple[int, int]:
    """Addresses of `void (int64 *table)`, shrink and expand; compiles them if they are new.

    Activations and adapters are of one dtype, or float32 and bfloat16.
    """
    kinds = f"{_NAMES[activations]}_{_NAMES[weights]}"
    with _compiling:
        return code.address_of(f"shrink_{kinds}"), code.address_of(f"expand_{kinds}")


def _adapters(target: LoraTarget) -> Array:
    """int64 (adapters, 4), as the kernels read them."""
    made = np.zeros((len(target.adapters), 4), np.int64)
    for row, m in zip(made, target.adapters, strict=True):
        if m is not None:
            row[:] = m.a, m.b, m.rank, int(np.float32(m.scale).view(np.uint32))
    return made
