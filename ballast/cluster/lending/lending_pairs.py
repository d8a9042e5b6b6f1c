"""Introduce workers that may lend pages to each other, and forward their messages about leases.

Runs in the server, composed by the controller; `FleetCommands` checks by it whether two devices can
lend now. It decides about no lease and maps no memory.

::

    both serve     ─MeetPeerMsg─> both ─PeerReportMsg "met"─>   paired, in an epoch of their own
    LeaseMsg       passed on, in order, while the epoch lasts
    "overdue"      the borrower is killed
    one has died   ─PeerEndedMsg─> the other ─"released"─>      then its successor is started
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Collection
from dataclasses import dataclass, field

from ballast.cluster.device import RemoteDevice
from ballast.cluster.device_set import DeviceSet
from ballast.control.device_observer import DeviceObserver
from ballast.core.lease import PagesReturnedEvent
from ballast.transport.worker_messages.lending_messages import (
    LeaseMsg,
    MeetPeerMsg,
    PeerEndedMsg,
    PeerReportMsg,
)

log = logging.getLogger(__name__)

RELEASE_SECONDS = 30.0
"""Time for borrowers to unmap a dead worker's memory; then they are killed, so that its successor
can start."""


@dataclass(slots=True)
class _Pair:
    epoch: int
    met: set[str] = field(default_factory=set)


class LendingPairs(DeviceObserver[RemoteDevice]):
    """Tracks the lending pairs among one server's devices. All calls on its event loop."""

    def __init__(self, devices: DeviceSet) -> None:
        self._devices = devices
        self._epochs = itertools.count(1)
        self._pairs: dict[frozenset[str], _Pair] = {}
        self._addresses: dict[str, str] = {}
        """Address of the memory of each device whose worker serves and may lend."""
        self._users: dict[str, set[str]] = {}
        """By device whose worker has died: the devices that may still use its memory."""
        self._released = asyncio.Event()
        """Set whenever `_users` shrinks."""

    def can_lend(self, a: str, b: str) -> bool:
        """Return whether pages can be lent between two devices now."""
        pair = self._pairs.get(frozenset((a, b)))
        return pair is not None and pair.met == {a, b}

    def worker_ready(self, device: RemoteDevice) -> None:
        """Introduce a worker that can lend its memory, at address `device.pages`, to all workers
        that it can lend to or borrow from."""
        if not device.pages:
            return
        self._addresses[device.name] = device.pages
        for c in self._devices.lending:
            pair = frozenset((c.lender, c.borrower))
            if c.means and device.name in pair and pair <= self._addresses.keys():
                self._introduce(pair)

    def lending_message(self, device: RemoteDevice, message: LeaseMsg | PeerReportMsg) -> None:
        """Handle a worker's message to a peer, or its report about a peer."""
        if isinstance(message, LeaseMsg):
            self._pass_on(device, message)
            return
        pair = self._pairs.get(frozenset((device.name, message.peer)))
        if message.kind == "released":
            self._release(message.peer, device.name)
        elif pair is None or pair.epoch != message.epoch:
            return
        elif message.kind == "met":
            pair.met.add(device.name)
        else:
            self._devices[message.peer].kill(f"{device.name} waits in vain for pages it has lent")

    def worker_died(self, device: RemoteDevice, in_flight: Collection[str]) -> None:
        """Note that a worker has ended, and with it its mappings of other workers' memory."""
        self._addresses.pop(device.name, None)
        for dead in list(self._users):
            self._release(dead, device.name)

    async def worker_reaped(self, device: RemoteDevice) -> None:
        """End the pairs of a worker that has been reaped; pages that it had borrowed are free.

        Returns when no other worker uses its memory any more.
        """
        users = set()
        for names in [names for names in self._pairs if device.name in names]:
            pair = self._pairs.pop(names)
            (name,) = names - {device.name}
            other = self._devices[name]
            if other.down is None:
                other.tell(PeerEndedMsg(device.name, pair.epoch))
                users.add(name)
        self._users[device.name] = users
        try:
            async with asyncio.timeout(RELEASE_SECONDS):
                await self._until_released(device.name)
        except TimeoutError:
            for name in list(self._users[device.name]):
                self._devices[name].kill(f"it uses the memory of {device.name}, which has ended")
            await self._until_released(device.name)
        finally:
            del self._users[device.name]

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
        sender, receiver = lease.lender, lease.borrower
        if isinstance(message.event, PagesReturnedEvent):
            sender, receiver = receiver, sender
        pair = self._pairs.get(frozenset((sender, receiver)))
        if sender == device.name and pair is not None and pair.epoch == lease.epoch:
            other = self._devices[receiver]
            if other.down is None:
                other.tell(message)

    def _release(self, dead: str, user: str) -> None:
        self._users.get(dead, set()).discard(user)
        self._released.set()

    async def _until_released(self, dead: str) -> None:
        while self._users[dead]:
            self._released.clear()
            await self._released.wait()
