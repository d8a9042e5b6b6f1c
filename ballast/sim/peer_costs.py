"""Costs of what goes on between the devices of one server, and the starts of workers.

Measured by `ballast profile` (`bench.measure_peers`); where a profile has none, assumptions. Used
by `sim.lending`, `sim.migration` and `sim.controller`. Links between devices have rates of their
own (`sim.topology`): rates here are those of devices that are joined by memory alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from ballast.control.spares import PrepareSpare, SparePreparedEvent, Spares, SpareWantedEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerCosts:
    """Costs between devices, in seconds and bytes per second."""

    message: float = 3e-4
    """Seconds of a message from device to device, by way of the controller. Assumed: half of a
    recall as measured live, which has a message each way and the unmapping between them."""
    start: float = 2.0
    """Seconds from the end of a worker until its successor serves where a spare process waits; the
    weights are in host memory still. Assumed."""
    cold_start: float = 5.0
    """The same where none waits. Assumed."""
    prepare: float = 5.0
    """Seconds until a spare process waits. Assumed."""
    read: float | None = None
    """Rate at which KV of a request that moves is read from another device's memory; None: as it
    comes over the device's link."""
    home: float = inf
    """Rate at which KV is copied from or to borrowed pages. Without a measurement it costs
    nothing."""
    borrow: float | None = None
    """Seconds of the loop to map a borrowed page; None: as for a page of weights."""
    give_back: float | None = None
    """Seconds of the loop to unmap one; None: as for a page of weights."""


ASSUMED = PeerCosts()


def slowest(each: Iterable[PeerCosts]) -> PeerCosts:
    """Return the costs that the messages, and the workers, of several devices have."""
    return max(each, key=lambda costs: (costs.message, costs.start))


class WorkerStarts:
    """How long the successors of a host's workers take to start: by the server's machine of
    spares, whose spare neither hangs nor dies here."""

    def __init__(self, costs: PeerCosts) -> None:
        self._costs = costs
        self._spares = Spares(inf, inf)
        self._preparing = (0, inf)
        """The spare that is being prepared, and when it waits."""
        self.served(0.0)

    def seconds(self, now: float) -> float:
        """Return how long a worker takes that is started now; it takes the spare, if one waits."""
        number, at = self._preparing
        if at <= now:
            self._spares.handle(at, SparePreparedEvent(number))
        return self._costs.cold_start if self._spares.take() is None else self._costs.start

    def served(self, now: float) -> None:
        """Note that a worker serves: a spare is prepared, unless there is one."""
        for instruction in self._spares.handle(now, SpareWantedEvent()):
            if isinstance(instruction, PrepareSpare):
                self._preparing = instruction.number, now + self._costs.prepare
