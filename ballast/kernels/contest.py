"""Measure our linear kernel against oneDNN's on one matrix, with the same bytes.

Used by `choices` only. Both run as in a pass over a model (`ballast.models.fused.passes`): ours as
an operation of a program; oneDNN's after narrowing of its inputs to the weights' dtype and before
storing or gating by the program. Each call uses weights that are in no cache, like the next layer's
weights; the two kernels alternate, so that other load on the machine affects both alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ballast.core.errors import BrokenPromise
from ballast.core.units import MiB, ceil_div
from ballast.kernels import layer, layer_code, linear, linear_code, onednn, team
from ballast.kernels.linear_code import PANEL
from ballast.kernels.workspace import Workspace
from ballast.memory.tensor import tensor_at

Array = np.ndarray[Any, Any]
Call = Callable[[], object]
Timer = Callable[[Call], float]
"""Function that runs a call and returns its seconds."""

COLD_BYTES = 128 * MiB
"""Bytes of weights over which the calls of a contest cycle."""
_LAYERS = 64
"""Bound of the matrices over which they cycle: a model smaller than the caches stays in them."""
_MOST_PRODUCTS = 1 << 27
"""Bound of the multiplications of a call: of a larger matrix only a part is measured."""
_PANELS_PER_THREAD = 4
"""Minimum of panels per thread in such a part, to keep all threads busy."""
_ROUNDS = 5, 40
_SECONDS = 2.0
"""Time for measuring a shape, unless the minimum number of rounds takes longer."""
_WITNESSES, _NEAR = 2, 1.2
"""A minimum time is accepted when _WITNESSES other times of the same call are within the factor
_NEAR of it; until then more rounds are run."""


@dataclass(frozen=True, slots=True)
class MatrixShape:
    """Shape of a matrix: n outputs as stored, k inputs. `gated`: gate and up rows interleaved by
    half panels."""

    n: int
    k: int
    dtype: torch.dtype
    gated: bool = False


def seconds(call: Call) -> float:
    """Wall time of one call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def ratios(shape: MatrixShape, rows: Sequence[int], timer: Timer = seconds) -> dict[int, float]:
    """Return oneDNN's time over ours for each number of rows, by the minimum over rounds, since
    other load on the machine can only add time.

    Numbers of rows alternate, so that a disturbance affects one round of each. Numbers without a
    reliable minimum (`_settled`) are left out. Uses up to `COLD_BYTES` of memory. Raises
    BrokenPromise if oneDNN does not accept our panels of this shape, and RuntimeError if it fails.
    """
    one = max(linear.packed_bytes(_part(shape, n)[0], shape.k, shape.dtype) for n in rows)
    memory = Workspace(max(one, min(COLD_BYTES, _LAYERS * one)))
    # Small numbers: what has never been written is one page of zeros, however long it is.
    flat = tensor_at(memory.address, (memory.n_bytes // shape.dtype.itemsize,), shape.dtype)
    with torch.inference_mode():
        flat.fill_(1 / 64)
        sides = {n: _Sides(shape, n, memory) for n in rows}
        took = _rounds([call for s in sides.values() for call in (s.ours, s.onednn)], timer)
    found = {}
    for n, s in sides.items():
        ours, theirs = took[s.ours], took[s.onednn]
        if _settled(ours) and _settled(theirs):
            found[n] = min(theirs) / min(ours)
    return found


def _rounds(calls: Sequence[Call], timer: Timer) -> dict[Call, list[float]]:
    """Return the seconds of each call in every round; every other round runs in reverse order."""
    for call in calls:
        call()  # compiles, and fills what is filled once
    took: dict[Call, list[float]] = {call: [] for call in calls}
    least, most = _ROUNDS
    spent = 0.0
    for done in range(most):
        if done >= least and (spent >= _SECONDS or all(map(_settled, took.values()))):
            break
        for call in calls if done % 2 == 0 else reversed(calls):
            took[call].append(timer(call))
            spent += took[call][-1]
    return took


def _settled(took: Sequence[float]) -> bool:
    """Return whether the minimum is reliable: other times were hardly longer."""
    return sorted(took)[_WITNESSES] <= _NEAR * min(took)


class _Sides:
    """Both kernels, which multiply `rows` rows by the next of many equal matrices, into `out`."""

    def __init__(self, shape: MatrixShape, rows: int, memory: Workspace) -> None:
        dtype, k = shape.dtype, shape.k
        self.rows = rows
        n, described = _part(shape, rows)
        self._n = n
        each = linear.packed_bytes(n, k, dtype)
        count = min(_LAYERS, memory.n_bytes // each)
        addresses = memory.address + np.arange(count) * each
        self._matrices = [onednn.view(int(a), n, k, dtype, described) for a in addresses]
        width = n // 2 if shape.gated else n
        self._x, self.out = torch.linspace(-1, 1, rows * k).view(rows, k), torch.empty(rows, width)
        self._inputs = self._x.to(dtype)
        x, out = (self._x.data_ptr(), k), (self.out.data_ptr(), width)
        mode = linear.GATED if shape.gated else linear.STORE
        self._tables = linear.tables(addresses, n, k, mode=mode)
        linear.place(self._tables, rows, x, out)
        kernel, step = linear.kernel(dtype), self._tables.strides[0]
        first = self._tables.ctypes.data
        self._ours = [
            team.Program(np.array([(kernel, first + i * step)], np.int64)) for i in range(count)
        ]
        self._after = self._operations_after(shape, rows, x, out)
        self._next = 0

    def _operations_after(
        self, shape: MatrixShape, rows: int, x: tuple[int, int], out: tuple[int, int]
    ) -> team.Program:
        """The product stored or gated; the inputs of the next call narrowed."""
        item_rows = ceil_div(rows, 4 * torch.get_num_threads())
        self._gate = linear.gate_tables(1, self.out.shape[1], interleaved=True)
        linear.place(self._gate, rows, (0, self._n), out)
        common = {"rows": rows, "item_rows": item_rows}
        self._store = layer.tables(
            1, width=self._n, source_row=self._n, target=out[0], target_row=out[1], **common
        )
        narrowed = self._inputs.data_ptr()
        self._narrow = layer.tables(
            1, width=shape.k, source=x[0], source_row=x[1], target=narrowed, **common
        )
        self._narrow[:, layer_code.TARGET_ROW] = shape.k
        kernel, table = layer.kernel("store", shape.dtype), self._store.ctypes.data
        if shape.gated:
            kernel, table = linear.gate_kernel(shape.dtype), self._gate.ctypes.data
        operations = [(kernel, table)]
        if shape.dtype != torch.float32:
            narrow = layer.kernel("narrow", shape.dtype)
            operations.append((narrow, self._narrow.ctypes.data))
        return team.Program(np.array(operations, np.int64))

    def ours(self) -> None:
        i = self._advance()
        self._tables[i, linear_code.NEXT] = 0
        self._ours[i].run(torch.get_num_threads())

    def onednn(self) -> None:
        product = onednn.multiply(self._inputs, self._matrices[self._advance()])
        self._gate[0, linear_code.NEXT] = 0
        self._store[0, layer_code.NEXT] = self._narrow[0, layer_code.NEXT] = 0
        self._gate[0, linear_code.X] = product.data_ptr()
        self._store[0, layer_code.SOURCE] = product.data_ptr()
        self._after.run(torch.get_num_threads())

    def _advance(self) -> int:
        self._next = (self._next + 1) % len(self._matrices)
        return self._next


def _part(shape: MatrixShape, rows: int) -> tuple[int, onednn.Descriptor]:
    """Outputs of the part of a matrix that is multiplied, all or whole panels, and how it lies."""
    quick = _MOST_PRODUCTS // (rows * shape.k * PANEL)
    busy = _PANELS_PER_THREAD * torch.get_num_threads()
    fitting = COLD_BYTES // linear.packed_bytes(PANEL, shape.k, shape.dtype)
    part = min(shape.n, min(max(quick, busy), fitting) * PANEL)
    for n in (part, shape.n):  # of some numbers of outputs oneDNN makes other blocks
        described = onednn.describe(n, shape.k, shape.dtype)
        if described is not None and described.panels:
            return n, described
    raise BrokenPromise(f"oneDNN does not take our panels of {shape}")
