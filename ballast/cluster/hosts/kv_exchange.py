"""Bring KV of requests that come from other hosts, and send that of those that go there.

Used by `HostAgent`, on its event loop. The server tells the source's agent which pieces of memory
the target's host may read (`OfferKvMsg`), under a ticket that is good once, and the target's worker
has the ticket (`core.migration.at_host`).

::

    target's worker ── KvDoor ──> target's agent ── KvLink (CURVE) ──> source's agent: KvSender
                                                                        │ reads its pages
                                                                       source's worker

The server also introduces agents to each other; their connection stays. What does not come is
computed again: the request is at its source until all of it is here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from ballast.cluster.hosts.kv_transfer import FIRST_SECONDS, KvLink, KvSender, OfferedKv
from ballast.core.errors import BallastError, DeviceError, Unavailable
from ballast.transport.curve import CurveKeys, CurveLink
from ballast.transport.host_messages import (
    HostListensMsg,
    KvOrder,
    KvReport,
    ListenKvMsg,
    OfferKvMsg,
    ReachHostMsg,
    WantHostMsg,
)
from ballast.transport.kv_door import KvDoor
from ballast.transport.page_descriptors import fetch_pages

log = logging.getLogger(__name__)

OFFER_SECONDS = 15.0
"""Time for which an offer is good: longer than a step of a migration may take
(`control.migrations.ANSWER_SECONDS`)."""
AHEAD_SECONDS = 2.0
"""Time by which a request for what is offered may be here before the offer, which comes another
way."""


class _Offers:
    """What may be read here, by ticket."""

    def __init__(self) -> None:
        self._offers: dict[str, OfferedKv] = {}
        self._changed = asyncio.Event()

    def add(self, order: OfferKvMsg) -> None:
        self._offers[order.ticket] = OfferedKv(order.node, order.address, order.pieces)
        loop = asyncio.get_running_loop()
        loop.call_later(OFFER_SECONDS, self._offers.pop, order.ticket, None)
        self._changed.set()
        self._changed = asyncio.Event()

    async def take(self, ticket: str, node: str) -> OfferedKv:
        """Return an offer to a host, which nobody can take again. Raises Unavailable."""
        try:
            async with asyncio.timeout(AHEAD_SECONDS):
                while ticket not in self._offers:
                    await self._changed.wait()
        except TimeoutError:
            raise Unavailable("nothing is offered under that ticket") from None
        offer = self._offers[ticket]
        if offer.node != node:
            raise Unavailable("that is offered to another host")
        return self._offers.pop(ticket)


class KvExchange:
    """One host's end of all reads of KV between hosts."""

    def __init__(self, send: Callable[[KvReport], object]) -> None:
        """`send`: sends a report to the server."""
        self._send = send
        self._offers = _Offers()
        self._senders: dict[KvSender, asyncio.Task[None]] = {}
        self._links: dict[str, KvLink] = {}
        """By host."""
        self._reaching: dict[str, asyncio.Lock] = {}
        self._introduced: dict[str, asyncio.Future[ReachHostMsg]] = {}
        self._door: KvDoor | None = None
        try:
            self._door = KvDoor(self._receive)
        except DeviceError as error:
            log.warning("no KV comes from other hosts: %s", error)

    @property
    def door(self) -> str:
        """Address at which workers read; empty: they cannot."""
        return "" if self._door is None else self._door.address

    def handle(self, order: KvOrder) -> None:
        """Carry out an order of the server."""
        match order:
            case OfferKvMsg():
                self._offers.add(order)
            case ListenKvMsg():
                self._listen(order)
            case ReachHostMsg():
                introduced = self._introduced.get(order.node)
                if introduced is not None and not introduced.done():
                    introduced.set_result(order)

    async def close(self) -> None:
        """End all reads."""
        if self._door is not None:
            await self._door.close()
        tasks = [*self._senders.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *(link.close() for link in self._links.values()))

    # -- the source's host -----------------------------------------------------------------------

    def _listen(self, order: ListenKvMsg) -> None:
        try:
            sender = KvSender(order.node, order.ip, order.receiver, self._offers.take, fetch_pages)
        except Unavailable as error:
            log.warning("no KV is sent to another host: %s", error)
            self._send(HostListensMsg(order.id, "", ""))
            return
        task = self._senders[sender] = asyncio.ensure_future(self._serve(sender))
        task.add_done_callback(lambda _: self._senders.pop(sender, None))
        self._send(HostListensMsg(order.id, sender.address, sender.key))

    @staticmethod
    async def _serve(sender: KvSender) -> None:
        try:
            await sender.run()
        except asyncio.CancelledError:
            pass  # this host ends
        except BallastError as error:
            log.warning("no KV is sent to another host: %s", error)

    # -- the target's host -----------------------------------------------------------------------

    async def _receive(
        self, host: str, ticket: str, n_bytes: int
    ) -> AsyncGenerator[tuple[bytes, int], None]:
        link = await self._reach(host)
        async with aclosing(link.receive(ticket, n_bytes)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _reach(self, host: str) -> KvLink:
        """Return the connection to a host, made where there is none. Raises Unavailable."""
        async with self._reaching.setdefault(host, asyncio.Lock()):
            link = self._links.get(host)
            if link is not None and not link.lost:
                return link
            own = CurveKeys.new()
            introduced = asyncio.get_running_loop().create_future()
            self._introduced[host] = introduced
            self._send(WantHostMsg(host, own.public))
            try:
                async with asyncio.timeout(FIRST_SECONDS):
                    answer = await introduced
            except TimeoutError:
                raise Unavailable(f"host {host} is not introduced") from None
            finally:
                del self._introduced[host]
            if not answer.address:
                raise Unavailable(f"host {host} cannot be reached")
            link = self._links[host] = KvLink(CurveLink(answer.address, answer.key, own))
            return link
