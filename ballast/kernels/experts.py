"""Build the operation tables of mixture-of-experts layers on CPU.

Used by `models` and for packing of weights. A layer has two tables of the linear kernel for each
expert (`Experts`), and one of its own, whose fields are those of `experts_code`. `Routing` holds
the model's parameters: experts per row, and whether their shares are normalised. Where a module of
`transformers` routes and gates, `StackedMatrices` are the products alone.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ballast.core.errors import BrokenPromise
from ballast.kernels import experts_code as code
from ballast.kernels import linear, linear_code, quantised, team
from ballast.kernels.linear_code import N_FIELDS as LINEAR_FIELDS

Array = np.ndarray[Any, Any]

OPERATIONS = ("route", "gate_up", "down", "combine")
"""Operations of a layer, in order; a barrier has to stand between them."""
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_compiling = threading.Lock()


@dataclass(frozen=True, slots=True)
class Routing:
    """Parameters of routing: a row's experts are the `top_k` largest of a softmax over all."""

    top_k: int
    normalised: bool
    """Whether the shares of a row's experts are divided by their sum."""


@dataclass(frozen=True, slots=True)
class ExpertBuffers:
    """Addresses of buffers for a job's rows, shared by all layers; `pairs` = rows * top_k."""

    x: int
    """float32 (rows, width): input of router and experts."""
    out: int
    """float32 (rows, width): output, to which results are added."""
    gated: int
    """float32 (pairs, inner)"""
    made: int
    """float32 (pairs, width)"""
    chosen: int
    """int64 (pairs,), as `slot_rows` and `slot_pairs`."""
    slot_rows: int
    slot_pairs: int
    shares: int
    """float32 (pairs,)"""


def sizes(rows: int, top_k: int, width: int, inner: int) -> tuple[int, ...]:
    """Bytes of each of `ExpertBuffers`, from `gated` on."""
    pairs = rows * top_k
    return (
        4 * pairs * inner,
        4 * pairs * width,
        8 * pairs,
        8 * pairs,
        8 * pairs,
        4 * pairs,
    )


class Experts:
    """Tables of layers that are alike but for their weights. One job at a time."""

    def __init__(
        self,
        routers: Array,
        gate_ups: Array,
        downs: Array,
        width: int,
        inner: int,
        routing: Routing,
        dtype: torch.dtype,
        buffers: ExpertBuffers,
        most_rows: int,
        forms: tuple[str, str] = ("", ""),
    ) -> None:
        """Addresses int64: `routers` (layers,), of (experts, width); `gate_ups` (layers, experts),
        of panels as mode GATED takes them (2 * inner, width); `downs` likewise, (width, inner).
        `most_rows` of a job. `forms`: of gates and ups, and of downs, if both are quantised.

        Compiles the kernels, unless Numba's cache has them (seconds).
        """
        layers, n = gate_ups.shape
        b, pairs_row = buffers, (buffers.gated, inner)
        self._linears = np.zeros((2, layers, n, LINEAR_FIELDS), np.int64)
        for made, weights, (outputs, inputs), form, mode in (
            (self._linears[0], gate_ups, (2 * inner, width), forms[0], linear.GATED),
            (self._linears[1], downs, (width, inner), forms[1], linear.STORE),
        ):
            of = (weights.reshape(-1), outputs, inputs)
            tables = (
                quantised.tables(*of, form, mode=mode) if form else linear.tables(*of, mode=mode)
            )
            made[:] = tables.reshape(made.shape)
        linear.place(self._linears[0], 0, (b.x, width), pairs_row)
        linear.place(self._linears[1], 0, pairs_row, (b.made, width))
        self._scores = np.zeros((most_rows, n), np.float32)
        self.counts = np.zeros((layers, n), np.int64)
        """Rows that each expert of each layer had in the last job."""
        self.tables = np.zeros((layers, code.N_FIELDS), np.int64)
        fields = {
            code.WIDTH: width,
            code.X: b.x,
            code.OUT: b.out,
            code.ROUTER: routers,
            code.EXPERTS: n,
            code.TOP_K: routing.top_k,
            code.NORMALISED: int(routing.normalised),
            code.SCORES: self._scores.ctypes.data,
            code.CHOSEN: b.chosen,
            code.SHARES: b.shares,
            code.SLOT_ROWS: b.slot_rows,
            code.SLOT_PAIRS: b.slot_pairs,
            code.COUNTS: team.rows_of(self.counts),
            code.GATED: b.gated,
            code.INNER: inner,
            code.MADE: b.made,
            code.LINEAR: quantised.kernel(forms[0]) if all(forms) else linear.kernel(dtype),
            code.GATE_UPS: team.rows_of(self._linears[0]),
            code.DOWNS: team.rows_of(self._linears[1]),
        }
        for field, value in fields.items():
            self.tables[:, field] = value

    def fill(self, rows: int, item_rows: int) -> None:
        """Set the number of rows, and of rows per item, before each job."""
        self.tables[:, (code.ROUTED, code.COMBINED, code.DONE)] = 0
        self.tables[:, code.ROWS] = rows
        self.tables[:, code.ITEM_ROWS] = item_rows


class StackedMatrices:
    """Matrices of one shape in quantised panels, each of which multiplies rows of its own: those of
    a layer's experts where another than `Experts` computes the rest. One product at a time."""

    def __init__(self, weights: Array, n: int, k: int, form: str) -> None:
        """`weights`: int64 (matrices,), addresses of the panels of n outputs and k inputs. Compiles
        the kernels, unless Numba's cache has them (seconds)."""
        self.count = len(weights)
        self._linears = quantised.tables(weights, n, k, form)
        self._shape = n, k
        self._table = np.zeros(code.N_FIELDS, np.int64)
        self._table[code.EXPERTS] = self.count
        self._table[code.LINEAR] = quantised.kernel(form)
        self._table[code.GATE_UPS] = self._linears.ctypes.data
        with _compiling:
            self._kernel = code.address_of("gate_up")

    def multiply(self, x: Tensor, counts: Array, index: Array | None = None) -> Tensor:
        """Return (slots, n), float32: the products of slots, of which each matrix has `counts` in
        turn, int64 (matrices,). One without slots is not read.

        x: float32 (rows, k), contiguous. `index`: int64 (slots,), the row of each slot; None: slot
        i has row i.
        """
        (n, k), tables = self._shape, self._linears
        firsts, slots = counts.cumsum() - counts, int(counts.sum())
        if x.dtype != torch.float32 or x.shape[1:] != (k,) or not x.is_contiguous():
            raise BrokenPromise(f"{x.dtype} {tuple(x.shape)} are not rows of {k} float32")
        if len(counts) != self.count or slots != len(x if index is None else index):
            raise BrokenPromise(f"{len(counts)} counts of {slots} slots do not fit the matrices")
        out = torch.empty(slots, n)
        linear.place(tables, 0, (x.data_ptr(), k), (out.data_ptr(), n))
        tables[:, linear_code.ROWS] = counts
        tables[:, linear_code.OUT] += 4 * n * firsts
        if index is None:
            tables[:, linear_code.X] += 4 * k * firsts
        else:
            tables[:, linear_code.X_INDEX] = index.ctypes.data + 8 * firsts
        team.run(self._kernel, self._table.ctypes.data, torch.get_num_threads())
        return out


def kernels(dtype: torch.dtype) -> tuple[int, ...]:
    """Addresses of `OPERATIONS` for weights of `dtype`; compiles what is new."""
    names = (f"route_{_NAMES[dtype]}", *OPERATIONS[1:])
    with _compiling:
        return tuple(code.address_of(name) for name in names)
