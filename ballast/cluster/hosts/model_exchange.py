"""Bring models that other hosts keep to this host, and send them those that this one keeps.

Used by `HostAgent`, on its event loop, as the segment broker's `OtherHosts`. The server decides who
sends to whom (`ModelCopies`); the bytes go from agent to agent.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import platform
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from ballast.cluster.hosts.model_copies import Kept
from ballast.cluster.hosts.model_transfer import ModelReceiver, ModelSender
from ballast.cluster.kept_models import SealedLayout
from ballast.cluster.segment_broker import SegmentBroker
from ballast.core.errors import BallastError, Unavailable
from ballast.transport.curve import CurveKeys, CurveLink
from ballast.transport.host_messages import (
    ModelDroppedMsg,
    ModelFailedMsg,
    ModelKeptMsg,
    ModelOrder,
    ModelReport,
    ReadFilesMsg,
    ReceiveModelMsg,
    SenderReadyMsg,
    SendModelMsg,
    WantModelMsg,
)
from ballast.weights.sealed import seal

log = logging.getLogger(__name__)

_FAULTS = (BallastError, OSError, ValueError, ArithmeticError, msgspec.MsgspecError)
"""What other hosts and their data may cause."""


class _Reception:
    """A model that is coming here; holds the segments that have arrived."""

    def __init__(self) -> None:
        self.own = CurveKeys.new()
        self.orders: asyncio.Queue[ReceiveModelMsg | ReadFilesMsg] = asyncio.Queue()
        self.record: bytes | None = None
        self.ended = False
        self._step = asyncio.Event()

    async def step(self) -> None:
        """Wait until more of it has arrived, or it has ended."""
        await self._step.wait()

    def advance(self) -> None:
        self._step.set()
        self._step = asyncio.Event()


class ModelExchange:
    """One host's end of all transfers of models."""

    def __init__(
        self, broker: SegmentBroker, writable: bool, send: Callable[[ModelReport], object]
    ) -> None:
        """`writable`: as of the broker; `send`: sends a report to the server."""
        self._broker, self._writable, self._send = broker, writable, send
        self._receptions: dict[Kept, _Reception] = {}
        self._tasks: dict[_Reception | ModelSender, asyncio.Task[None]] = {}

    # -- the broker's `OtherHosts` ---------------------------------------------------------------

    async def bring(self, model: str, kind: str, listing: str) -> None:
        kept = model, kind
        reception = self._receptions.get(kept)
        if reception is None:
            reception = self._receptions[kept] = _Reception()
            self._begin(reception, self._receive(kept, reception))
            self._send(WantModelMsg(model, kind, listing, reception.own.public))
        while not reception.ended:
            await reception.step()

    def changed(self, model: str, kind: str, kept: bool) -> None:
        if not kept:
            self._send(ModelDroppedMsg(model, kind))
        elif (layout := SealedLayout.decode(self._record(model, kind) or b"")).digests:
            self._send(ModelKeptMsg(model, kind, layout.listing))

    # -- orders of the server --------------------------------------------------------------------

    def handle(self, order: ModelOrder) -> None:
        """Carry out an order."""
        if isinstance(order, SendModelMsg):
            self._send_model(order)
        elif (reception := self._receptions.get((order.model, order.kind))) is not None:
            reception.orders.put_nowait(order)

    def _send_model(self, order: SendModelMsg) -> None:
        try:
            sender = ModelSender(_Here(self, order), order.ip, order.receiver)
        except Unavailable as error:
            log.warning("a model is not sent: %s", error)
            self._send(SenderReadyMsg(order.id, "", ""))  # its receiver asks another host
            return
        self._begin(sender, self._answer(sender))
        self._send(SenderReadyMsg(order.id, sender.address, sender.key))

    def server_gone(self) -> None:
        """Have files read of models for which a host was asked: the answer does not come. What is
        coming goes on."""
        for (model, kind), reception in self._receptions.items():
            reception.orders.put_nowait(ReadFilesMsg(model, kind))

    async def close(self) -> None:
        """End all transfers."""
        tasks = [*self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- a model's parts, as they are here -------------------------------------------------------

    async def record_of(self, kept: Kept) -> bytes:
        """Return a model's record once it is here. Raises Unavailable."""
        while (record := self._record(*kept)) is None:
            reception = self._coming(kept)
            if reception.record is not None:
                return reception.record
            await reception.step()
        return record

    async def segment(self, kept: Kept, digest: str) -> int:
        """Return the descriptor of a segment once it is here. Raises Unavailable."""
        while (fd := self._broker.segment(digest)) is None:
            await self._coming(kept).step()
        return fd

    def _coming(self, kept: Kept) -> _Reception:
        if (reception := self._receptions.get(kept)) is None:
            raise Unavailable("the model is not kept here any more")
        return reception

    def _record(self, model: str, kind: str) -> bytes | None:
        fd = self._broker.record_of(model, kind)
        return None if fd is None else os.pread(fd, os.fstat(fd).st_size, 0)

    # -- transfers -------------------------------------------------------------------------------

    def _begin(self, what: _Reception | ModelSender, work: Coroutine[Any, Any, None]) -> None:
        self._tasks[what] = task = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._tasks.pop(what, None))

    async def _answer(self, sender: ModelSender) -> None:
        try:
            await sender.run()
        except _FAULTS as error:
            log.warning("a model is not sent: %s", error)

    async def _receive(self, kept: Kept, reception: _Reception) -> None:
        """Receive a model from one host after the other, until it is here or none sends it."""
        try:
            while isinstance(order := await reception.orders.get(), ReceiveModelMsg):
                try:
                    await self._receive_from(order, kept, reception)
                    return
                except _FAULTS as error:
                    log.warning("a model did not come from %s: %s", order.address, error)
                    self._send(ModelFailedMsg(*kept, str(error)))
        finally:
            self._broker.let_go(reception)
            del self._receptions[kept]
            reception.ended = True
            reception.advance()

    async def _receive_from(
        self, order: ReceiveModelMsg, kept: Kept, reception: _Reception
    ) -> None:
        def arrived(digest: str, fd: int) -> None:
            self._broker.hold(digest, fd, reception)
            reception.advance()

        if not order.address:
            raise Unavailable("the host that has it cannot listen")
        receiver = ModelReceiver(CurveLink(order.address, order.sender, reception.own))
        try:
            record = await receiver.record()
            layout = SealedLayout.decode(record)
            reception.record = record
            reception.advance()
            wanted = layout.segments()
            for digest in [d for d in wanted if self._broker.segment(d) is not None]:
                self._broker.hold(digest, None, reception)
                del wanted[digest]
            await receiver.segments(wanted, self._writable, arrived)
        finally:
            receiver.close()
        fd = os.memfd_create("ballast record", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.write(fd, record)
        seal(fd, writable=False)
        if not self._broker.keep_brought(*kept, layout.files, fd):
            raise Unavailable("the model has been loaded here from other files")
        log.info("a model of %d segments has come from another host", len(layout.digests))


class _Here:
    """A model of this host, as `ModelHere`."""

    def __init__(self, exchange: ModelExchange, order: SendModelMsg) -> None:
        self._exchange, self._kept = exchange, (order.model, order.kind)
        self._segments: frozenset[str] | None = None

    async def record(self) -> bytes:
        record = await self._exchange.record_of(self._kept)
        self._segments = frozenset(SealedLayout.decode(record).digests)
        return record

    async def segment(self, digest: str) -> int:
        if self._segments is None or digest not in self._segments:
            raise Unavailable("it asks for a segment of something else")
        return await self._exchange.segment(self._kept, digest)


def machine() -> str:
    """Return a digest of this machine's kind of CPU."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    lines = [line for line in text.splitlines() if line.lower().startswith(("flags", "features"))]
    facts = platform.machine(), platform.python_version(), "".join(lines[:1])
    return hashlib.sha256(repr(facts).encode()).hexdigest()
