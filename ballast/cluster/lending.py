"""Who may lend pages to whom now: pairs of workers that know each other, and what they say.

::

    serving ─MeetPeerMsg─> both ─HasMet─>   acquainted, in an epoch of their own
    LeaseMsg                         passed on, in order, while the epoch lasts
    Condemned                        the borrower is killed
    died, buried ─PeerEndedMsg─> the other ─LetGo─>   only then is the dead one's successor started
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Collection
from dataclasses import dataclass, field

from ballast.cluster.device import DeviceObserver, RemoteDevice
from ballast.cluster.device_set import DeviceSet
from ballast.core.lease import PagesReturnedEvent
from ballast.transport.worker_messages.lending_messages import (
    LeaseMsg,
    MeetPeerMsg,
    PeerEndedMsg,
    PeerReportMsg,
)

log = logging.getLogger(__name__)

LET_GO_SECONDS = 30.0
"""A worker that uses a dead one's memory for longer is killed, so that a successor can start."""


@dataclass(slots=True)
class _Pair:
    epoch: int
    met: set[str] = field(default_factory=set)


class Acquaintances(DeviceObserver):
    """Introduces the workers of one server's devices to each other, and passes their messages."""

    def __init__(self, devices: DeviceSet) -> None:
        self._devices = devices
        self._epochs = itertools.count(1)
        self._pairs: dict[frozenset[str], _Pair] = {}
        self._addresses: dict[str, str] = {}
        """Of workers that serve."""
        self._holders: dict[str, set[str]] = {}
        """By dead worker, those that may still use its memory."""
        self._changed = asyncio.Event()

    def acquainted(self, a: str, b: str) -> bool:
        """Whether pages can be lent between them now."""
        pair = self._pairs.get(frozenset((a, b)))
        return pair is not None and pair.met == {a, b}

    def worker_ready(self, device: RemoteDevice) -> None:
        """Introduce a worker that serves its memory (at `device.pages`) to those that may lend to
        it or borrow from it."""
        if not device.pages:
            return
        self._addresses[device.name] = device.pages
        for c in self._devices.lending:
            pair = frozenset((c.lender, c.borrower))
            if c.means and device.name in pair and pair <= self._addresses.keys():
                self._introduce(pair)

    def lending_message(self, device: RemoteDevice, message: LeaseMsg | PeerReportMsg) -> None:
        """Act on a worker's message about another worker, or pass it on to that one."""
        if isinstance(message, LeaseMsg):
            self._pass_on(device, message)
            return
        pair = self._pairs.get(frozenset((device.name, message.peer)))
        if message.kind == "released":
            self._let_go(message.peer, device.name)
        elif pair is None or pair.epoch != message.epoch:
            return
        elif message.kind == "met":
            pair.met.add(device.name)
        else:
            self._devices[message.peer].kill(f"{device.name} waits in vain for pages it has lent")

    def worker_died(self, device: RemoteDevice, in_flight: Collection[str]) -> None:
        """Note that a dead worker uses nothing of others any more."""
        self._addresses.pop(device.name, None)
        for dead in list(self._holders):
            self._let_go(dead, device.name)

    async def worker_reaped(self, device: RemoteDevice) -> None:
        """Free what a dead worker had borrowed. Returns when nobody uses its memory any more."""
        holders = set()
        for names in [names for names in self._pairs if device.name in names]:
            pair = self._pairs.pop(names)
            (name,) = names - {device.name}
            other = self._devices[name]
            if other.down is None:
                other.tell(PeerEndedMsg(device.name, pair.epoch))
                holders.add(name)
        self._holders[device.name] = holders
        try:
            async with asyncio.timeout(LET_GO_SECONDS):
                await self._until_let_go(device.name)
        except TimeoutError:
            for name in list(self._holders[device.name]):
                self._devices[name].kill(f"it uses the memory of {device.name}, which has ended")
            await self._until_let_go(device.name)
        finally:
            del self._holders[device.name]

    def _introduce(self, names: frozenset[str]) -> None:
        if names in self._pairs:
            return
        epoch = next(self._epochs)
        self._pairs[names] = _Pair(epoch)
        for name in names:
            (peer,) = names - {name}
            self._devices[name].tell(MeetPeerMsg(peer, epoch, self._addresses[peer]))

    def _pass_on(self, device: RemoteDevice, message: LeaseMsg) -> None:
        lease = message.lease
        by, to = lease.lender, lease.borrower
        if isinstance(message.event, PagesReturnedEvent):
            by, to = to, by
        pair = self._pairs.get(frozenset((by, to)))
        if by == device.name and pair is not None and pair.epoch == lease.epoch:
            other = self._devices[to]
            if other.down is None:
                other.tell(message)

    def _let_go(self, dead: str, holder: str) -> None:
        self._holders.get(dead, set()).discard(holder)
        self._changed.set()

    async def _until_let_go(self, dead: str) -> None:
        while self._holders[dead]:
            self._changed.clear()
            await self._changed.wait()
