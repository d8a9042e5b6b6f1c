"""Devices in virtual time that hear each other, each word after a while, and may lend pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial

from ballast.core.actions import LoopCommand
from ballast.core.event import CommandEvent, Event
from ballast.core.lease import (
    LendingMessage,
    PeerGoneEvent,
    PeerMetEvent,
    PeerMetReport,
    PeerOverdueReport,
    PeerReleasedReport,
)
from ballast.sim.device import SimDevice

WAY = 0.01
"""Seconds from one device to the other."""
STEP = 0.005
"""Seconds by which they go on in turn: less than a word takes."""


class Neighbours:
    """One device, or two."""

    def __init__(self, sims: Mapping[str, SimDevice]) -> None:
        self.sims = dict(sims)
        self.now, self.epoch = 0.0, 0
        self.seen: Counter[str] = Counter()
        """Words by kind, orders, and `late`: the devices that did not return pages in time."""
        for name, sim in self.sims.items():
            sim.state.lending.send = partial(self._hear, name)

    def other(self, name: str) -> str:
        """The device beside the one of that name."""
        (found,) = set(self.sims) - {name}
        return found

    def post(self, name: str, event: Event) -> None:
        """Let an event of that device come, a word's way from now."""
        sim = self.sims[name]
        sim._heap.schedule(max(self.now, sim.clock.now()) + WAY, event)

    def order(self, name: str, operation: LoopCommand) -> None:
        """Let an operator order something of that device."""
        self.seen["orders"] += 1
        self.post(name, CommandEvent(f"order-{self.seen['orders']}", operation))

    def meet(self) -> None:
        """Let each know that the other is there."""
        self.epoch += 1
        for name, sim in self.sims.items():
            other = self.other(name)
            exported = self.sims[other].state.pool.vm.export(())
            sim.state.lending.exports[other, self.epoch] = exported
            self.post(name, PeerMetEvent(other, self.epoch, exported.n_pages))

    def part(self) -> None:
        """As if the process of the other had died, seen from either."""
        for name in self.sims:
            self.post(name, PeerGoneEvent(self.other(name), self.epoch))
        self.epoch += 1  # what is on its way is void

    def go(self, seconds: float) -> None:
        """Let time pass."""
        end = self.now + seconds
        step = STEP if len(self.sims) > 1 else seconds
        while self.now < end:
            self.now += step
            for sim in self.sims.values():
                sim.advance(self.now)

    def _hear(self, name: str, word: LendingMessage) -> None:
        self.seen[type(word).__name__] += 1
        if isinstance(word, PeerOverdueReport):
            self.seen["late"] += 1
        elif (
            not isinstance(word, PeerMetReport | PeerReleasedReport)
            and word.lease.epoch == self.epoch
        ):
            self.post(self.other(name), word)
