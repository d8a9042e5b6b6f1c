"""What the matrices of a decode step and the machine's memory allow: the yardsticks of a speed.

`Gemms`: one decode step's matrix products alone, by each known kernel. `Reader`: bytes per second
of reading memory, by the best of a few readers.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ballast.kernels import linear, team
from ballast.kernels.linear_code import NEXT

Product = Callable[[], object]
"""Computes x W^T once."""
Kernel = Callable[[Tensor, Tensor], Product]
"""Prepares the product of its own copy of W (out, in) and x (rows, in), both bfloat16."""
READ_BYTES = 640 * 2**20
"""Many times any cache."""


@dataclass(frozen=True)
class Matrix:
    """One kind of matrix of a decode step: `count` of them, each (outputs, inputs)."""

    name: str
    outputs: int
    inputs: int
    count: int
    rows: int | None = None
    """That each is multiplied with; None: as many as there are streams."""

    @property
    def parameters(self) -> int:
        return self.count * self.outputs * self.inputs


def plain(weight: Tensor, x: Tensor) -> Product:
    """PyTorch's linear on the row-major matrix."""
    own = weight.clone()
    return lambda: functional.linear(x, own)


@functools.cache
def onednn_packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs matrices of `dtype` on this CPU; it refuses where it lacks the
    instructions."""
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.zeros(64, 64, dtype=dtype), 1)
    except (RuntimeError, AttributeError):
        return False
    return True


def packed(weight: Tensor, x: Tensor) -> Product:
    """oneDNN's on a matrix in the layout that oneDNN chooses for this many rows.

    Raises RuntimeError where `onednn_packs` is false for the weights' dtype.
    """
    own = torch.ops.mkldnn._reorder_linear_weight(weight, len(x))
    call = torch.ops.mkldnn._linear_pointwise
    return lambda: call(x, own, None, "none", [], "")


def panels(weight: Tensor, x: Tensor) -> Product:
    """Ours, from and to float32 as the fast path runs it."""
    n, k = weight.shape
    own, wide, out = linear.pack(weight), x.float(), torch.empty(len(x), n)
    table = linear.tables(np.array([own.data_ptr()]), n, k)
    address = linear.kernel(weight.dtype)
    threads = torch.get_num_threads()

    rows, to = (wide.data_ptr(), wide.stride(0)), (out.data_ptr(), out.stride(0))
    linear.place(table, len(wide), rows, to)

    def product() -> Tensor:
        table[0, NEXT] = 0  # nothing else, as a mixture has a thousand products in a step
        team.run(address, table.ctypes.data, threads)
        # Named here so that they live as long as the table that holds their addresses.
        assert own.data_ptr()
        assert wide.data_ptr()
        return out

    return product


def kernels() -> dict[str, Kernel]:
    """The kernels that multiply bfloat16 on this CPU, by name."""
    found: dict[str, Kernel] = {"plain": plain, "packed": packed, "panels": panels}
    if not onednn_packs(torch.bfloat16):
        del found["packed"]
    return found


class Gemms:
    """The products of one decode step of `rows` streams, on weights that no cache holds.

    Every layer has its own copy of the weights, and a sweep goes through them in the order of a
    real step. `measured`: kernels; None: all that run on this CPU.
    """

    def __init__(
        self,
        matrices: Sequence[Matrix],
        rows: int,
        measured: Mapping[str, Kernel] | None = None,
    ) -> None:
        measured = kernels() if measured is None else measured
        self.matrices = tuple(matrices)
        inputs = {m.name: torch.randn(m.rows or rows, m.inputs).bfloat16() for m in matrices}
        layers = max(m.count for m in matrices)
        order = [m for i in range(layers) for m in matrices if i < m.count and m.count > 1]
        order += [m for m in matrices if m.count == 1]
        values = {m.name: torch.randn(m.outputs, m.inputs).bfloat16() for m in matrices}
        self._steps = {
            name: [(m.name, prepare(values[m.name], inputs[m.name])) for m in order]
            for name, prepare in measured.items()
        }
        self.times: dict[str, dict[str, list[float]]] = {
            name: {m.name: [] for m in matrices} for name in measured
        }
        """Kernel, matrix: seconds of all its products in one step, one value per `measure`."""
        for name in measured:
            self._sweep(name)

    def measure(self, least_seconds: float = 0.15) -> None:
        """Every kernel in turn, for so long, at least one step."""
        for name, times in self.times.items():
            sums: dict[str, float] = defaultdict(float)
            n = 0
            end = time.perf_counter() + least_seconds
            while n == 0 or time.perf_counter() < end:
                for matrix, seconds in self._sweep(name).items():
                    sums[matrix] += seconds
                n += 1
            for matrix, seconds in sums.items():
                times[matrix].append(seconds / n)

    def fastest(self) -> dict[str, str]:
        """Per matrix, the kernel with the least median."""
        some = next(iter(self.times.values()))
        return {
            matrix: min(self.times, key=lambda k: statistics.median(self.times[k][matrix]))
            for matrix in some
        }

    def sums(self) -> list[float]:
        """Seconds of one step with each matrix by its fastest kernel, one value per `measure`."""
        chosen = self.fastest()
        rounds = zip(*(self.times[k][matrix] for matrix, k in chosen.items()), strict=True)
        return [sum(values) for values in rounds]

    def _sweep(self, name: str) -> dict[str, float]:
        seconds: dict[str, float] = defaultdict(float)
        with torch.inference_mode():
            for matrix, product in self._steps[name]:
                begin = time.perf_counter()
                product()
                seconds[matrix] += time.perf_counter() - begin
        return seconds


class Reader:
    """Read bandwidth in bytes per second, of `READ_BYTES` at a time."""

    def __init__(self) -> None:
        integers = torch.ones(READ_BYTES // 8, dtype=torch.int64)
        floats = integers.view(torch.float32)
        self._readers: dict[str, Callable[[], object]] = {
            "torch int64 sum": integers.sum,
            "torch float32 sum": floats.sum,
            "torch float32 dot": lambda: torch.dot(floats, floats),
        }
        self.rates: dict[str, list[float]] = {name: [] for name in self._readers}
        for read in self._readers.values():
            read()

    def measure(self) -> None:
        for name, read in self._readers.items():
            begin = time.perf_counter()
            read()
            self.rates[name].append(READ_BYTES / (time.perf_counter() - begin))

    def best(self) -> str:
        """The reader with the highest median."""
        return max(self.rates, key=lambda name: statistics.median(self.rates[name]))
