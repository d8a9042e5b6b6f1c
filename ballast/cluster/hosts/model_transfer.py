"""Send a model from one host to another, and receive it: segments in chunks, checked by content.

Used by `ModelExchange`. What is received is hashed by its layout, as its first loader has hashed
what it read: a segment is what its digest says, or is thrown away.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from ballast.core.errors import Unavailable
from ballast.transport.curve import CurveClient, CurveLink, CurveServer
from ballast.transport.sockets import LoopSocket
from ballast.transport.weight_messages import (
    CHUNK_BYTES,
    ChunkMsg,
    GetChunkMsg,
    GetRecordMsg,
    RecordMsg,
    ToReceiver,
    ToSender,
    decode_to_receiver,
    decode_to_sender,
)
from ballast.weights.sealed import check_available, digest_of, seal
from ballast.weights.segment import Segment, whole_pages

WINDOW = 16
"""Chunks that a receiver has asked for and not received."""
FIRST_SECONDS = 15.0
"""Time for the other host to connect and to answer once."""


class ModelHere(Protocol):
    """A model that this host keeps, or is receiving itself."""

    async def record(self) -> bytes:
        """Return its record, once it is here. Raises Unavailable."""

    async def segment(self, digest: str) -> int:
        """Return the descriptor, which stays the owner's, of a segment, once it is here. Raises
        Unavailable."""


class ModelSender:
    """Sends a model to one host, which connects by its key."""

    def __init__(self, here: ModelHere, ip: str, receiver: str) -> None:
        self._here = here
        self._end = CurveServer(ip, receiver)
        self._socket: LoopSocket[ToSender] = LoopSocket(self._end, decode_to_sender)

    @property
    def address(self) -> str:
        return self._end.address

    @property
    def key(self) -> str:
        return self._end.keys.public

    async def run(self) -> None:
        """Answer until the receiver has closed the connection. Raises Unavailable and OSError."""
        try:
            await _next(self._socket, FIRST_SECONDS)
            while not self._socket.lost:
                while self._socket.has_message:
                    await self._answer(self._socket.take())
                if not self._socket.lost:
                    await self._socket.change()
        finally:
            self._socket.close()

    async def _answer(self, asked: ToSender) -> None:
        match asked:
            case GetRecordMsg():
                self._socket.send(RecordMsg(await self._here.record()))
            case GetChunkMsg():
                fd = await self._here.segment(asked.digest)
                size = min(asked.size, CHUNK_BYTES)
                self._socket.send(ChunkMsg(os.pread(fd, size, asked.offset)))


async def _next(socket: LoopSocket[ToSender] | LoopSocket[ToReceiver], seconds: float) -> None:
    """Wait for the first message. Raises Unavailable."""
    try:
        async with asyncio.timeout(seconds):
            while not socket.has_message and not socket.lost:
                await socket.change()
    except TimeoutError:
        raise Unavailable(f"no answer within {seconds:g} s") from None


@dataclass(slots=True)
class _Arriving:
    """A segment whose chunks arrive."""

    segment: Segment
    fd: int
    missing: int


class ModelReceiver:
    """Receives a model from one host."""

    def __init__(self, link: CurveLink) -> None:
        self._socket: LoopSocket[ToReceiver] = LoopSocket(CurveClient(link), decode_to_receiver)

    async def record(self) -> bytes:
        """Return the model's record. Raises Unavailable and MalformedMessage."""
        self._socket.send(GetRecordMsg())
        await _next(self._socket, FIRST_SECONDS)
        match await self._take():
            case RecordMsg(record):
                return record
            case _:
                raise Unavailable("the other host answers something else")

    async def segments(
        self,
        wanted: Mapping[str, Segment],
        writable: bool,
        arrived: Callable[[str, int], object],
    ) -> None:
        """Receive segments, by digest. `arrived`: called with the digest and a sealed memfd, which
        it takes over, of each, once its content has been checked. Raises DeviceError, Unavailable,
        MalformedMessage, OSError, and ValueError for a layout that makes no sense."""
        arriving: dict[str, _Arriving] = {}
        checking = set[asyncio.Task[None]]()
        chunks = _chunks(wanted)
        asked: deque[GetChunkMsg] = deque()

        async def check(digest: str, one: _Arriving) -> None:
            try:
                if await asyncio.to_thread(digest_of, one.fd, one.segment) != digest:
                    raise Unavailable(f"{one.segment.name} is not what its digest says")
                seal(one.fd, writable)
            except BaseException:
                os.close(one.fd)
                raise
            arrived(digest, one.fd)

        try:
            while True:
                while len(asked) < WINDOW and (chunk := next(chunks, None)) is not None:
                    asked.append(chunk)
                    self._socket.send(chunk)
                if not asked:
                    break
                message, chunk = await self._take(), asked.popleft()
                if not isinstance(message, ChunkMsg) or len(message.data) != chunk.size:
                    raise Unavailable("the other host sends something else")
                if chunk.offset == 0:
                    arriving[chunk.digest] = _allocated(wanted[chunk.digest])
                one = arriving[chunk.digest]
                os.pwrite(one.fd, message.data, chunk.offset)
                one.missing -= chunk.size
                if not one.missing:
                    del arriving[chunk.digest]
                    checking.add(asyncio.create_task(check(chunk.digest, one)))
            await asyncio.gather(*checking)
        finally:
            await asyncio.gather(*checking, return_exceptions=True)
            for one in arriving.values():
                os.close(one.fd)

    async def _take(self) -> ToReceiver:
        while not self._socket.has_message:
            if self._socket.lost:
                raise Unavailable("the connection to it was lost")
            await self._socket.change()
        return self._socket.take()

    def close(self) -> None:
        self._socket.close()


def _chunks(wanted: Mapping[str, Segment]) -> Iterator[GetChunkMsg]:
    for digest, segment in wanted.items():
        if segment.n_bytes <= 0:
            raise ValueError("a segment without bytes")
        for offset in range(0, segment.n_bytes, CHUNK_BYTES):
            yield GetChunkMsg(digest, offset, min(CHUNK_BYTES, segment.n_bytes - offset))


def _allocated(segment: Segment) -> _Arriving:
    check_available("a model", segment.name, segment.n_bytes)
    fd = os.memfd_create("ballast-received", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, whole_pages(segment))
    except BaseException:
        os.close(fd)
        raise
    return _Arriving(segment, fd, segment.n_bytes)
