"""Who may lend pages to whom now: pairs of workers that know each other, and what they say.

::

    serving ─MeetPeerMsg─> both ─PeerMetReport─>   acquainted, in an epoch of their own
    LeaseMsg                         passed on, in order, while the epoch lasts
    PeerOverdueReport                the borrower is killed
    died, buried ─PeerEndedMsg─> the other ─PeerReleasedReport─>
                                     only then is the dead one's successor started
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ballast.core.capability import Capability
from ballast.core.lease import PagesReturnedEvent
from ballast.transport.worker_messages.codec import ToWorker
from ballast.transport.worker_messages.lending_messages import (
    LeaseMsg,
    MeetPeerMsg,
    PeerEndedMsg,
    PeerReportMsg,
)

log = logging.getLogger(__name__)

LET_GO_SECONDS = 30.0
"""A worker that uses a dead one's memory for longer is killed, so that a successor can start."""


class Peer(Protocol):
    """A device; `ballast.cluster.device.RemoteDevice` is one."""

    name: str

    @property
    def down(self) -> str | None: ...

    def tell(self, message: ToWorker) -> None:
        """To its present worker."""

    def kill(self, why: str) -> None:
        """End its present worker."""


@dataclass(slots=True)
class _Pair:
    epoch: int
    met: set[str] = field(default_factory=set)


class Acquaintances:
    """Of the devices of one server."""

    def __init__(self, devices: Mapping[str, Peer]) -> None:
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

    def serving(self, device: Peer, address: str, able: Iterable[Capability]) -> None:
        """A worker serves, and gives its memory at `address` (empty: it does not)."""
        if not address:
            return
        self._addresses[device.name] = address
        for c in able:
            pair = frozenset((c.lender, c.borrower))
            if c.means and device.name in pair and pair <= self._addresses.keys():
                self._introduce(pair)

    def said(self, device: Peer, message: LeaseMsg | PeerReportMsg) -> None:
        """A worker has said something of, or to, another one."""
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

    def died(self, device: Peer) -> None:
        """Its worker says nothing any more; what it used of others it uses no more."""
        self._addresses.pop(device.name, None)
        for dead in list(self._holders):
            self._let_go(dead, device.name)

    async def buried(self, device: Peer) -> None:
        """Its worker has been reaped: what it had borrowed is free. Returns when nobody uses its
        memory any more."""
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

    def _pass_on(self, device: Peer, message: LeaseMsg) -> None:
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
