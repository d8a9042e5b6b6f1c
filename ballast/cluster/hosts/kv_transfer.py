"""Send KV from one host to another, and receive it: chunks with checksums, as many as are wanted.

Used by `KvExchange`. One connection joins each pair of hosts, on which reads are told apart by
their numbers. The sender reads the memory of a device's process while that goes on: the blocks of
an export stay as they are, or the source says so when the request departs
(`core.migration.DepartedAnswer.intact`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ballast.core.errors import BallastError, DeviceError, Unavailable
from ballast.core.migration import Piece
from ballast.memory.vm import Exported
from ballast.transport.curve import CurveClient, CurveLink, CurveServer
from ballast.transport.kv_messages import (
    CHUNK_BYTES,
    LONGEST_TO_RECEIVER,
    LONGEST_TO_SENDER,
    KvChunkMsg,
    KvFailedMsg,
    MoreKvMsg,
    ReadKvMsg,
    StopKvMsg,
    ToKvReceiver,
    ToKvSender,
    decode_to_kv_receiver,
    decode_to_kv_sender,
)
from ballast.transport.sockets import LoopSocket

log = logging.getLogger(__name__)

WINDOW = 8
"""Chunks of a read that are on their way, or wait for the worker."""
MOST_READS = 16
"""Reads of one host that another serves at a time."""
FIRST_SECONDS = 5.0
"""Time for the other host to connect, and for each chunk to come."""


@dataclass(frozen=True, slots=True)
class OfferedKv:
    """Pieces of a device's memory that a host may read once."""

    node: str
    """The host."""
    address: str
    """Where the device's process exports its memory."""
    pieces: tuple[Piece, ...]


TakeOffer = Callable[[str, str], Awaitable[OfferedKv]]
"""Takes the offer of (ticket, node). Raises Unavailable: there is none."""
Fetch = Callable[[str], Exported]
"""As of `memory.peer_reader`."""


@dataclass(slots=True)
class _Sending:
    credit: asyncio.Semaphore
    task: asyncio.Task[None] | None = None


class KvSender:
    """Sends one other host, which connects by its key, what has been offered to it."""

    def __init__(self, node: str, ip: str, receiver: str, take: TakeOffer, fetch: Fetch) -> None:
        """`node`: the other host; `ip`: address of this one. Raises Unavailable."""
        self.node = node
        self._take, self._fetch = take, fetch
        self._end = CurveServer(ip, receiver, longest=LONGEST_TO_SENDER)
        self._socket: LoopSocket[ToKvSender] = LoopSocket(self._end, decode_to_kv_sender)
        self._sending: dict[int, _Sending] = {}

    @property
    def address(self) -> str:
        return self._end.address

    @property
    def key(self) -> str:
        return self._end.keys.public

    async def run(self) -> None:
        """Answer until the other host has closed the connection. Raises BallastError."""
        socket = self._socket
        try:
            async with asyncio.timeout(FIRST_SECONDS):
                while not socket.has_message and not socket.lost:
                    await socket.change()
            while not socket.lost:
                while socket.has_message:
                    self._handle(socket.take())
                if not socket.lost:
                    await socket.change()
        except TimeoutError:
            raise Unavailable("the other host has not connected") from None
        finally:
            tasks = [one.task for one in self._sending.values() if one.task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            socket.close()

    def _handle(self, message: ToKvSender) -> None:
        sending = self._sending.get(message.id)
        match message:
            case ReadKvMsg():
                if sending is not None or len(self._sending) >= MOST_READS:
                    raise Unavailable("the other host reads too much at a time")
                made = self._sending[message.id] = _Sending(
                    asyncio.Semaphore(max(0, min(message.window, WINDOW)))
                )
                made.task = asyncio.ensure_future(self._send(message, made.credit))
                made.task.add_done_callback(lambda _: self._sending.pop(message.id, None))
            case MoreKvMsg():
                if sending is not None:
                    sending.credit.release()
            case StopKvMsg():
                if sending is not None and sending.task is not None:
                    sending.task.cancel()

    async def _send(self, asked: ReadKvMsg, credit: asyncio.Semaphore) -> None:
        try:
            offer = await self._take(asked.ticket, self.node)
            if sum(n for _, n in offer.pieces) != asked.n_bytes:
                raise Unavailable("it asks for another number of bytes than were offered")
            exported = await self._memory(offer.address)
            try:
                fd = _readable(exported, offer.pieces)
                for chunk in _chunks(offer.pieces):
                    await credit.acquire()
                    data, checksum = _read(fd, chunk)
                    self._socket.send(KvChunkMsg(asked.id, data, checksum))
            finally:
                exported.discard()
        except (BallastError, OSError) as error:
            log.warning("KV is not sent to another host: %s", error)
            self._socket.send(KvFailedMsg(asked.id, str(error)))

    async def _memory(self, address: str) -> Exported:
        """Return a device's memory, whose process may take a moment to answer. Raises
        DeviceError."""
        fetching = asyncio.ensure_future(asyncio.to_thread(self._fetch, address))
        try:
            return await asyncio.shield(fetching)
        except asyncio.CancelledError:
            fetching.add_done_callback(_discard)
            raise


def _discard(fetched: asyncio.Future[Exported]) -> None:
    if not fetched.cancelled() and fetched.exception() is None:
        fetched.result().discard()


def _readable(exported: Exported, pieces: Sequence[Piece]) -> int:
    """Return the descriptor of a memory that has all of `pieces`. Raises DeviceError."""
    if exported.fd is None:
        raise DeviceError("pread", "that device's memory is no file")
    size = os.fstat(exported.fd).st_size
    if any(offset < 0 or n <= 0 or offset + n > size for offset, n in pieces):
        raise DeviceError("pread", f"pieces beyond a memory of {size} bytes")
    return exported.fd


def _chunks(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Yield the pieces of each chunk: of CHUNK_BYTES, but for the last one."""
    chunk: list[Piece] = []
    room = CHUNK_BYTES
    for start, n_bytes in pieces:
        offset, left = start, n_bytes
        while left:
            n = min(left, room)
            chunk.append((offset, n))
            offset, left, room = offset + n, left - n, room - n
            if not room:
                yield chunk
                chunk, room = [], CHUNK_BYTES
    if chunk:
        yield chunk


def _read(fd: int, chunk: Sequence[Piece]) -> tuple[bytes, int]:
    """Return a chunk with its checksum. Raises DeviceError and OSError."""
    data = b"".join(os.pread(fd, n, offset) for offset, n in chunk)
    if len(data) != sum(n for _, n in chunk):
        raise DeviceError("pread", "the memory has ended")
    return data, zlib.crc32(data)


@dataclass(slots=True)
class _Coming:
    n_bytes: int
    """That have not come."""
    chunks: asyncio.Queue[KvChunkMsg | KvFailedMsg | None] = field(
        default_factory=lambda: asyncio.Queue(WINDOW + 1)
    )
    """None: the connection is lost."""


class KvLink:
    """Receives from one other host, until the connection is lost."""

    def __init__(self, link: CurveLink) -> None:
        """Raises Unavailable."""
        end = CurveClient(link, longest=LONGEST_TO_RECEIVER)
        self._socket: LoopSocket[ToKvReceiver] = LoopSocket(end, decode_to_kv_receiver)
        self._coming: dict[int, _Coming] = {}
        self._numbers = itertools.count(1)
        self._reading = asyncio.ensure_future(self._read())

    @property
    def lost(self) -> bool:
        return self._reading.done()

    async def receive(self, ticket: str, n_bytes: int) -> AsyncGenerator[tuple[bytes, int], None]:
        """Yield the bytes offered under a ticket, in chunks with checksums, which the reader is to
        compare. Raises Unavailable."""
        id = next(self._numbers)
        coming = self._coming[id] = _Coming(n_bytes)
        self._send(ReadKvMsg(id, ticket, n_bytes, WINDOW))
        try:
            while n_bytes:
                message = await _within(FIRST_SECONDS, coming.chunks.get())
                if not isinstance(message, KvChunkMsg):
                    raise Unavailable("the connection is lost" if message is None else message.why)
                n_bytes -= len(message.data)
                yield message.data, message.checksum
                self._send(MoreKvMsg(id))
        finally:
            del self._coming[id]
            if n_bytes:
                self._send(StopKvMsg(id))

    def _send(self, message: ToKvSender) -> None:
        if not self.lost:
            self._socket.send(message)

    async def _read(self) -> None:
        socket = self._socket
        try:
            while not socket.lost:
                while socket.has_message:
                    self._handle(socket.take())
                if not socket.lost:
                    await socket.change()
        except (BallastError, asyncio.QueueFull) as error:
            log.warning("another host's agent cannot be understood: %s", error)
        finally:
            socket.close()
            for coming in self._coming.values():
                while coming.chunks.full():
                    coming.chunks.get_nowait()
                coming.chunks.put_nowait(None)

    def _handle(self, message: ToKvReceiver) -> None:
        coming = self._coming.get(message.id)
        if coming is None:
            return  # nobody reads it any more
        if isinstance(message, KvChunkMsg):
            if len(message.data) != min(coming.n_bytes, CHUNK_BYTES) or not message.data:
                raise Unavailable(f"a chunk of {len(message.data)} bytes")
            coming.n_bytes -= len(message.data)
        coming.chunks.put_nowait(message)

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)


async def _within(
    seconds: float, message: Awaitable[KvChunkMsg | KvFailedMsg | None]
) -> KvChunkMsg | KvFailedMsg | None:
    try:
        async with asyncio.timeout(seconds):
            return await message
    except TimeoutError:
        raise Unavailable(f"nothing came for {seconds:g} s") from None
