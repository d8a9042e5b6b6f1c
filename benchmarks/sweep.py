"""One runner for benchmarks that sweep: a grid of runs, in processes of their own.

A benchmark states its axes and a function of a point of them; `Sweep` measures all points and keeps
their order. Virtual time: what a run finds does not depend on how many processes there are.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from dataclasses import asdict, is_dataclass
from types import TracebackType
from typing import Any, Self


def add_processes(parser: argparse.ArgumentParser) -> None:
    """Add the option `processes`."""
    parser.add_argument("--processes", type=int, default=2)


class Sweep:
    """Processes that measure points, until its context is left."""

    def __init__(self, processes: int, pool: Executor | None = None) -> None:
        """`pool`: instead of processes."""
        spawn = multiprocessing.get_context("spawn")
        self.pool = pool or ProcessPoolExecutor(processes, spawn)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.pool.shutdown(cancel_futures=kind is not None)

    def over(self, axes: Iterable[Iterable[Any]], measure: Callable[..., Any]) -> Any:
        """Call `measure` with each point of the axes; returns its results as one mapping in another
        for each axis, in the axes' order."""
        return _results(self._submit(tuple(map(tuple, axes)), measure, ()))

    def _submit(
        self, axes: tuple[tuple[Any, ...], ...], measure: Callable[..., Any], point: tuple[Any, ...]
    ) -> Any:
        if not axes:
            return self.pool.submit(measure, *point)
        return {at: self._submit(axes[1:], measure, (*point, at)) for at in axes[0]}


def _results(coming: Any) -> Any:
    if isinstance(coming, Future):
        return coming.result()
    return {at: _results(found) for at, found in coming.items()}


def plain(results: Any) -> Any:
    """Results of a sweep as JSON has them: numbers of axes as texts, records as mappings."""
    if isinstance(results, Mapping):
        return {f"{at:g}" if isinstance(at, float) else at: plain(r) for at, r in results.items()}
    if isinstance(results, list | tuple):
        return [plain(r) for r in results]
    return asdict(results) if is_dataclass(results) and not isinstance(results, type) else results
