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
    """Interface of a device of a world: `sim.device.SimDevice`."""

    @property
    def over(self) -> bool:
        """Whether the device will not turn again."""

    @property
    def due(self) -> float:
        """Time of the next turn, as far as known; inf if it will not turn again, or nothing is
        due."""

    def turn(self, until: float) -> None:
        """Turn, and leap at most up to `until` and within `World.bounds`."""


class Reaching(Protocol):
    """Messages by which devices of a world affect each other, besides shared links:
    `sim.lending.SimLeases` and `sim.migration.SimMigrations`."""

    def horizon(self, now: float, near: float) -> float:
        """Time before which no message that has not been sent by `now` can reach a device; `near`:
        the earliest next turn of any other device."""


class World:
    """Order the events and changes of several devices in virtual time."""

    def __init__(self) -> None:
        self.agenda = ChangeQueue()
        self.fluid = Fluid(self.agenda)
        """All bytes that move between these devices and their host; of several hosts, those that
        move between hosts."""
        self.reaching: list[Reaching] = []
        """Sources of messages between devices."""
        self._devices: list[Turning] = []

    def add(self, device: Turning) -> None:
        """Add a device."""
        self._devices.append(device)

    def advance(self, until: float) -> None:
        """Process everything that is due before `until`."""
        while self._step(until):
            pass

    def finish(self, device: Turning) -> None:
        """Process events in order until `device` is over."""
        while not device.over:
            if not self._step(inf):
                raise BrokenPromise("a device waits, and nothing will ever happen")

    def bounds(self, device: Turning, now: float, until: float) -> tuple[float, float]:
        """Return the times up to which a device that has just turned may leap: one for leaps in
        which bytes move, one for all."""
        if len(self._devices) == 1:
            return inf, until
        near = min(other.due for other in self._devices if other is not device)
        soonest = min(near, self.agenda.next)
        return near, min([until, *(reach.horizon(now, soonest) for reach in self.reaching)])

    def _step(self, until: float) -> bool:
        """Process the next event or change before `until`; returns False if there is none."""
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
