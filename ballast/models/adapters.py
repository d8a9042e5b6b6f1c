"""The adapters of a model that `transformers` runs: its linear modules add what each row asks for.

A linear module is called with its input and nothing else, so a job's rows wait here while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ballast.core.errors import BrokenPromise
from ballast.core.job import SequenceWork
from ballast.kernels.lora import AdapterRows, LoraGroup, Matrices, Target, kernels
from ballast.weights.host import Delta, HostAdapter


def groups_of(
    adapters: Sequence[HostAdapter], addresses: Sequence[int], dtype: torch.dtype
) -> dict[str, LoraGroup]:
    """What the adapters add to each module, by its path. `addresses`: of their segments.

    Compiles the kernels, unless Numba's cache has them (seconds).
    """
    if adapters:
        kernels(dtype, dtype)
    sizes: dict[str, Delta] = {d.module: d for adapter in adapters for d in adapter.deltas}
    return {
        module: LoraGroup(
            sizes[module].inputs, [Target(sizes[module].outputs, tuple(entries))], dtype
        )
        for module, entries in matrices_of(adapters, addresses).items()
    }


def matrices_of(
    adapters: Sequence[HostAdapter], addresses: Sequence[int]
) -> dict[str, list[Matrices | None]]:
    """By path of a module: what each adapter has for it. `addresses`: of their segments."""
    found: dict[str, list[Matrices | None]] = {}
    for i, (adapter, base) in enumerate(zip(adapters, addresses, strict=True)):
        for d in adapter.deltas:
            entries = found.setdefault(d.module, [None] * len(adapters))
            entries[i] = Matrices(base + d.a.offset, base + d.b.offset, d.rank, d.scale)
    return found


class AdaptedModules:
    """The linear modules of one model that any of its adapters changes. One job at a time."""

    def __init__(self, module: nn.Module, groups: dict[str, LoraGroup]) -> None:
        """Changes the `forward` of these modules of `module`."""
        head = module.get_output_embeddings()  # type: ignore[operator]
        self._n = len(groups)
        self._rows: AdapterRows | None = None
        self._sampled: AdapterRows | None = None
        self._done = 0
        for path, group in groups.items():
            linear = module.get_submodule(path)
            linear.forward = self._adapted(linear.forward, group, linear is head)

    @contextmanager
    def job(self, work: Sequence[SequenceWork]) -> Iterator[None]:
        """Around the call of the module that computes `work`, its tokens one after the other.

        The head sees the last position of each sequence that samples, and no others. Raises
        BrokenPromise at the end unless every module here was called just once.
        """
        adapters = [-1 if w.adapter is None else w.adapter for w in work]
        if all(a < 0 for a in adapters):
            yield
            return
        counts = [len(w.tokens) for w in work]
        self._rows = AdapterRows(
            [a for a, n in zip(adapters, counts, strict=True) for _ in range(n)]
        )
        sampled = [a for a, w in zip(adapters, work, strict=True) if w.sample is not None]
        self._sampled = AdapterRows(sampled)
        self._done = 0
        try:
            yield
        finally:
            self._rows = self._sampled = None
        if self._done != self._n:
            raise BrokenPromise(f"{self._done} of {self._n} adapted modules were called")

    def _adapted(
        self, plain: Callable[[Tensor], Tensor], group: LoraGroup, is_head: bool
    ) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            y = plain(x)
            rows = self._sampled if is_head else self._rows
            if rows is not None:
                group.add(rows, x.flatten(0, -2), y.flatten(0, -2))
                self._done += 1
            return y

        return forward
