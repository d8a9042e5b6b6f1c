"""Cut a forward pass into programs of our own kernels, with stops between them for other work.

::

    program            stop        program            stop       program
    [embed norm narrow][q/k/v of ][store rotary at- ][output    ][add norm narrow][gate/up ...
                       [a library][tention narrow   ][projection]

Without a library, adapters, ranks and rotating layers, a pass is one program. Used by the fast path
on CPU.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from ballast.kernels import team

Array = np.ndarray[Any, Any]


class Due(enum.Enum):
    """Kinds of work for which a pass stops."""

    LIBRARY = enum.auto()
    """A library multiplies a matrix."""
    ADAPTERS = enum.auto()
    """Adapters add to a matrix's product."""
    SUM = enum.auto()
    """Ranks add up their parts of the hidden states."""
    WAIT = enum.auto()
    """Wait for a rotating or loading layer."""
    USED = enum.auto()
    """A rotating or loading layer has been used."""


class End(enum.Enum):
    """Points at which a run of a pass may end."""

    KV = enum.auto()
    """After the last layer's KV: nothing is sampled."""
    NORM = enum.auto()
    """After the norm before the head."""
    HEAD = enum.auto()


@dataclass(frozen=True, slots=True)
class PassStop:
    """A stop for `due` before the next operation: for the matrix `role` of a layer, or for the
    layer."""

    due: Due
    layer: int
    role: str = ""


_ATTENDED_LATER = (0, 0)
_Step = tuple[team.Program | None, PassStop | None]


class PlannedPass:
    """Operations and stops in order: described once, then run any number of times.

    The tables of operations have to outlive it.
    """

    def __init__(self) -> None:
        self._described: list[tuple[int, int]] = []
        self._stops: list[tuple[int, PassStop]] = []
        """Stops, each with the number of operations before it."""
        self._attention: list[int] = []
        self._ends: dict[End, tuple[int, int]] = {}
        """Number of the operations and of the stops before each end."""
        self._operations: Array | None = None
        self._programs: dict[tuple[int, int], team.Program] = {}
        self._steps: dict[End, list[_Step]] = {}

    # -- its description --------------------------------------------------------------------------

    def operation(self, kernel: int, tables: Array, i: int) -> None:
        """Add the kernel at an address, on table i of `tables`."""
        self._described.append((kernel, int(tables.ctypes.data + i * tables.strides[0])))

    def attention(self) -> None:
        """Add attention of the next layer, whose tables are set for every job (`set_attention`)."""
        self._attention.append(len(self._described))
        self._described.append(_ATTENDED_LATER)

    def stop(self, due: Due, layer: int, role: str = "") -> None:
        """Add a stop. Runs make `WAIT` and `USED` only at the layers that they name."""
        self._stops.append((len(self._described), PassStop(due, layer, role)))

    def end(self, end: End) -> None:
        """Let runs up to `end` consist of the operations and stops so far."""
        self._ends[end] = len(self._described), len(self._stops)

    # -- running it -------------------------------------------------------------------------------

    def set_attention(self, kernel: int, tables: Array) -> None:
        """Set attention's kernel and its tables (layers, fields), which the caller keeps, for the
        next run."""
        operations = self._laid_out()
        operations[self._attention, 0] = kernel
        steps = np.arange(len(tables)) * tables.strides[0]
        operations[self._attention, 1] = tables.ctypes.data + steps

    def run(
        self, end: End, threads: int, heeded: Collection[int], meet: Callable[[PassStop], None]
    ) -> None:
        """Run everything up to `end` by at most `threads` threads, calling `meet` at each stop.

        `heeded`: layers with barriers. If a run ends within one of them, as it samples nothing, a
        `USED` stop for it is added at the end.
        """
        steps = self._steps.get(end)
        if heeded or steps is None:
            steps = self._cut(end, frozenset(heeded))
            if not heeded:
                self._steps[end] = steps
        for program, stop in steps:
            if program is not None:
                program.run(threads)
            if stop is not None:
                meet(stop)

    def _cut(self, end: End, heeded: Collection[int]) -> list[_Step]:
        until, n_stops = self._ends[end]
        steps: list[_Step] = []
        at = 0
        begun = None
        for place, stop in self._stops[:n_stops]:
            if stop.due in (Due.WAIT, Due.USED):
                if stop.layer not in heeded:
                    continue
                begun = stop.layer if stop.due is Due.WAIT else None
            steps.append((self._program(at, place), stop))
            at = place
        last = None if begun is None else PassStop(Due.USED, begun)
        if at < until or last is not None:
            steps.append((self._program(at, until), last))
        return steps

    def _program(self, at: int, until: int) -> team.Program | None:
        if at == until:
            return None
        program = self._programs.get((at, until))
        if program is None:
            program = team.Program(self._laid_out()[at:until])
            self._programs[at, until] = program
        return program

    def _laid_out(self) -> Array:
        if self._operations is None:
            self._operations = np.array(self._described, np.int64)
        return self._operations
