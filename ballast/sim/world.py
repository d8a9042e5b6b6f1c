"""Run several simulated devices that can affect each other, in one order of time.

Devices of one world share links or exchange messages. Their events, and the changes in their common
queue, happen in order of time (at equal times changes first, then devices in the order in which
they were added), so there is one clock. Only a leap takes a device's own clock ahead of it, over
steps that neither affect other devices nor are affected by them. Devices of different worlds meet
only in the controller, at moments that are known beforehand: each world is advanced to them by
itself (`World.advance`), with the same result as one order for all.
"""

from __future__ import annotations

from math import inf
from typing import Protocol

from ballast.core.errors import BrokenPromise
from ballast.sim.change_queue import ChangeQueue
from ballast.sim.fluid import Fluid


class Turning(Protocol):
    """A device of a world: `sim.device.SimDevice`."""

    @property
    def over(self) -> bool:
        """Whether it turns no more."""

    @property
    def due(self) -> float:
        """When it turns next, as far as is known; inf if it turns no more, or nothing is due."""

    def turn(self, until: float) -> None:
        """Turn, and leap before `until`, as far as `World.bounds` says."""


class Reaching(Protocol):
    """How devices of a world reach each other but by links: `sim.lending.Lenders`, and
    `sim.migration.Movers`."""

    def horizon(self, now: float, near: float) -> float:
        """Before when no device is reached by anything that does not happen by `now`; `near`: when
        the next of the others turns, at the earliest."""


class World:
    """Implements the order of events of several devices."""

    def __init__(self) -> None:
        self.agenda = ChangeQueue()
        self.fluid = Fluid(self.agenda)
        """All bytes that move between these devices and their hosts."""
        self.reaching: list[Reaching] = []
        """Beside links."""
        self._devices: list[Turning] = []

    def add(self, device: Turning) -> None:
        """A device more."""
        self._devices.append(device)

    def advance(self, until: float) -> None:
        """Let everything happen that is due before `until`."""
        while self._step(until):
            pass

    def finish(self, device: Turning) -> None:
        """Let everything happen until `device` is over."""
        while not device.over:
            if not self._step(inf):
                raise BrokenPromise("a device waits, and nothing will ever happen")

    def bounds(self, device: Turning, now: float, until: float) -> tuple[float, float]:
        """How far a device may leap that has just turned: where bytes move, and where none do."""
        if len(self._devices) == 1:
            return inf, until
        near = min(other.due for other in self._devices if other is not device)
        soonest = min(near, self.agenda.next)
        return near, min([until, *(reach.horizon(now, soonest) for reach in self.reaching)])

    def _step(self, until: float) -> bool:
        """Do what happens next before `until`; False if nothing does."""
        first: Turning | None = None
        due = until
        for device in self._devices:
            at = device.due
            if at < due:
                first, due = device, at
        if self.agenda.next <= due and self.agenda.next < until:
            self.agenda.run(due, until)
            return True
        if first is None:
            return False
        first.turn(until)
        return True
