"""Apply LoRA adapters in a model that `transformers` runs: linear modules add each row's adapter.

A linear module gets no argument but its input, so the adapter of each row of the job is kept in
`AdaptedModules` while the job runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from ballast.core.errors import BrokenPromise
from ballast.core.job import SequenceWork
from ballast.kernels.lora import AdapterRows, LoraGroup, LoraMatrices, LoraTarget, kernels
from ballast.kernels.packed_delta import PackedMatrix
from ballast.weights.host import HostAdapter

Rows = TypeVar("Rows")
"""Tables of rows by adapter, for kernels: `AdapterRows`, or their counterpart on GPUs."""


def groups_of(
    adapters: Sequence[HostAdapter], addresses: Sequence[int], dtype: torch.dtype
) -> dict[str, LoraGroup]:
    """Collect the adapters' matrices by module path. `addresses`: of the adapters' segments.

    Compiles the kernels, unless Numba's cache has them (seconds).
    """
    if adapters:
        kernels(dtype, dtype)
    return {
        module: LoraGroup(inputs, [target], dtype)
        for module, (inputs, target) in targets_of(adapters, addresses).items()
    }


def targets_of(
    adapters: Sequence[HostAdapter], addresses: Sequence[int]
) -> dict[str, tuple[int, LoraTarget]]:
    """Return, by module path, its inputs and the matrices that the adapters add. `addresses`: of
    the adapters' segments."""
    sizes: dict[str, tuple[int, int]] = {}
    for adapter in adapters:
        sizes |= {d.module: (d.outputs, d.inputs) for d in adapter.deltas}
        sizes |= {d.module: (d.weight.shape[0], d.weight.shape[1]) for d in adapter.packed}
    return {
        module: (sizes[module][1], found.target(sizes[module][0]))
        for module, found in matrices_of(adapters, addresses).items()
    }


@dataclass(frozen=True, slots=True)
class ModuleMatrices:
    """What each adapter has for one module: of low rank, or in few bits."""

    low_rank: list[LoraMatrices | None]
    packed: list[PackedMatrix | None]

    def target(
        self, outputs: int, column: int = 0, block: int | None = None, block_step: int = 0
    ) -> LoraTarget:
        """Return them for outputs that lie in y as of `LoraTarget`."""
        where = (column, block, block_step)
        return LoraTarget(outputs, tuple(self.low_rank), *where, packed=tuple(self.packed))


def matrices_of(
    adapters: Sequence[HostAdapter], addresses: Sequence[int]
) -> dict[str, ModuleMatrices]:
    """Return each adapter's matrices by module path. `addresses`: of the adapters' segments."""
    found: dict[str, ModuleMatrices] = {}

    def of(module: str) -> ModuleMatrices:
        n = len(adapters)
        return found.setdefault(module, ModuleMatrices([None] * n, [None] * n))

    for i, (adapter, base) in enumerate(zip(adapters, addresses, strict=True)):
        for d in adapter.deltas:
            a, b = base + d.a.offset, base + d.b.offset
            of(d.module).low_rank[i] = LoraMatrices(a, b, d.rank, d.scale)
        for p in adapter.packed:
            of(p.module).packed[i] = PackedMatrix(base + p.weight.offset, p.weight.form)
    return found


def adapters_of(work: Sequence[SequenceWork]) -> list[int]:
    """Return the adapter of each sequence; -1: none."""
    return [-1 if w.adapter is None else w.adapter for w in work]


def rows_of(work: Sequence[SequenceWork]) -> tuple[AdapterRows, AdapterRows] | None:
    """Return the adapters of all rows of a job, and of the rows that the head computes; None if no
    row has one."""
    adapters = adapters_of(work)
    if all(a < 0 for a in adapters):
        return None
    rows = [a for a, w in zip(adapters, work, strict=True) for _ in w.tokens]
    wanted = [a for a, w in zip(adapters, work, strict=True) for _ in w.wanted]
    return AdapterRows(rows), AdapterRows(wanted)


class AdaptedModules(Generic[Rows]):
    """The linear modules of one model that any of its adapters changes. One job at a time."""

    def __init__(
        self, module: nn.Module, adds: Mapping[str, Callable[[Rows, Tensor, Tensor], None]]
    ) -> None:
        """Replace the `forward` of these modules of `module`.

        `adds`: by module path, a function that adds the adapters' products of x (rows, inputs) to y
        (rows, outputs).
        """
        head = module.get_output_embeddings()  # type: ignore[operator]
        self._rows: tuple[Rows, Rows] | None = None
        self._done = 0
        self._modules = [module.get_submodule(path) for path in adds]
        self._has_head = any(linear is head for linear in self._modules)
        for linear, add in zip(self._modules, adds.values(), strict=True):
            linear.forward = self._adapted(linear.forward, add, linear is head)

    @contextmanager
    def job(self, rows: tuple[Rows, Rows] | None, *, head: bool = True) -> Iterator[None]:
        """Apply adapters while the module is called within. `rows`: all rows of the job, and those
        that the head computes.

        `head`: whether the head is called. Raises BrokenPromise at the end unless every module here
        was called exactly once.
        """
        if rows is None:
            yield
            return
        self._rows, self._done = rows, 0
        try:
            yield
        finally:
            self._rows = None
        n = len(self._modules) - (self._has_head and not head)
        if self._done != n:
            raise BrokenPromise(f"{self._done} of {n} adapted modules were called")

    def _adapted(
        self,
        plain: Callable[[Tensor], Tensor],
        add: Callable[[Rows, Tensor, Tensor], None],
        is_head: bool,
    ) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            y = plain(x)
            if self._rows is not None:
                add(self._rows[is_head], x.flatten(0, -2), y.flatten(0, -2))
                self._done += 1
            return y

        return forward
