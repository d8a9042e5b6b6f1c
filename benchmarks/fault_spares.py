"""Spare workers of `benchmarks.fault_world`, prepared by the server's state machine.

Some hang while they are prepared: they do nothing more, compute for ever, or are ready after they
have been given up. Some die, also while they wait.
"""

from __future__ import annotations

import random
from functools import partial
from math import inf

from ballast.control.spares import (
    EndSpare,
    PrepareSpare,
    SpareActiveEvent,
    SpareDueEvent,
    SpareEndedEvent,
    SpareEvent,
    SparePreparedEvent,
    Spares,
    SpareWantedEvent,
)
from ballast.control.timers import Alarm, Timers

IDLE_SECONDS, BUSY_SECONDS = 3.0, 6.0
"""As of `Spares`; in these worlds time is short."""
FAILS = 0.2
"""Part of the spares that are never prepared, or too late."""


class FaultSpares:
    """The spare of a world's host."""

    def __init__(self, timers: Timers, rng: random.Random) -> None:
        self._timers, self._rng = timers, rng
        self._machine = Spares(IDLE_SECONDS, BUSY_SECONDS)
        self._alarm = Alarm(timers, lambda: self._handle(SpareDueEvent()))
        self._alive: set[int] = set()
        self.hung = 0
        """Spares that were killed because their preparation hung."""
        self.wrong = 0
        """Spares that were taken though they had ended."""

    @property
    def ready(self) -> bool:
        """Whether one waits."""
        return self._machine.ready is not None

    @property
    def coming(self) -> bool:
        """Whether one waits, is prepared, or is to be started."""
        return self.ready or self._machine.due < inf

    def want(self) -> None:
        """Keep one from now on."""
        self._handle(SpareWantedEvent())

    def take(self) -> None:
        """Take the one that waits, if there is one."""
        taken = self._machine.take()
        self.wrong += taken is not None and taken not in self._alive
        self._alarm.set(self._machine.due)

    def _handle(self, event: SpareEvent) -> None:
        for instruction in self._machine.handle(self._timers.now(), event):
            match instruction:
                case PrepareSpare(number):
                    self._alive.add(number)
                    self._prepare(number)
                case EndSpare(number):
                    self.hung += 1
                    self._alive.discard(number)
        self._alarm.set(self._machine.due)

    def _prepare(self, number: int) -> None:
        rng, later = self._rng, self._timers.call_later
        prepared = partial(self._handle, SparePreparedEvent(number))
        if rng.random() > FAILS:
            later(rng.uniform(0.2, 0.9 * IDLE_SECONDS), prepared)
            if rng.random() < 0.1:
                later(rng.uniform(0.2, 10.0), partial(self._die, number))
            return
        match rng.randrange(4):
            case 0:
                later(rng.uniform(0.1, 2.0), partial(self._die, number))
            case 1:
                later(rng.uniform(0.1, 2.0), partial(self._compute, number, 0.5))
            case 2:
                later(rng.uniform(1.1, 3.0) * IDLE_SECONDS, prepared)
            case 3:
                pass

    def _compute(self, number: int, used: float) -> None:
        """Compute for ever."""
        if number in self._alive:
            self._handle(SpareActiveEvent(number, used))
            self._timers.call_later(0.5, partial(self._compute, number, used + 0.5))

    def _die(self, number: int) -> None:
        self._alive.discard(number)
        self._handle(SpareEndedEvent(number, "killed"))
