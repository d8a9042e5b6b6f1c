"""KV that comes from another host: as it is there, or not at all; nothing stays open at either end.

Hosts are exchanges of this process; what they exchange is encrypted, over loopback. A device is a
memory file and the socket at which its process exports it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import queue
import random
import threading
from collections.abc import AsyncIterator, Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ballast.cluster.hosts import kv_exchange, kv_transfer
from ballast.cluster.hosts.kv_exchange import KvExchange
from ballast.cluster.hosts.kv_paths import KvPaths
from ballast.core.event import Event
from ballast.core.migration import KvReadEvent, Piece, at_host
from ballast.memory.peer_reader import PeerReader
from ballast.memory.vm import Exported
from ballast.transport import kv_door
from ballast.transport.host_messages import (
    HostListensMsg,
    KvReport,
    OfferKvMsg,
    ReachHostMsg,
    WantHostMsg,
)
from ballast.transport.kv_door import read_kv
from ballast.transport.kv_messages import LONGEST_TO_RECEIVER, KvChunkMsg
from ballast.transport.page_descriptors import PagesSocket, serve_pages
from ballast.transport.sockets import LoopSocket
from tests.cluster.test_devices import until
from tests.cluster.worker.test_worker import DEADLINE

CHUNK = 1 << 14
MEMORY = 40 * CHUNK
PIECES = ((5, 3 * CHUNK), (20 * CHUNK, 7), (9 * CHUNK + 1, 8 * CHUNK))
SIZE = sum(n for _, n in PIECES)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (kv_transfer, kv_door):
        monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(kv_transfer, "FIRST_SECONDS", DEADLINE)
    monkeypatch.setattr(kv_door, "SILENT_SECONDS", DEADLINE)
    monkeypatch.setattr(kv_exchange, "AHEAD_SECONDS", DEADLINE)


class Source:
    """A device of a host."""

    def __init__(self) -> None:
        self.content = random.Random(1).randbytes(MEMORY)
        self._fd = os.memfd_create("kv-of-a-device")
        os.pwrite(self._fd, self.content, 0)
        self._pages = PagesSocket()
        self.address = self._pages.address
        asyncio.get_running_loop().add_reader(self._pages.fileno(), self._serve)

    def _serve(self) -> None:
        for connection in self._pages.accept():
            asked = (connection, self._export, lambda *_: ())
            threading.Thread(target=serve_pages, args=asked, daemon=True).start()

    def _export(self, pages: tuple[int, ...]) -> Exported:
        return Exported((1, 1), 4096, MEMORY // 4096, (), self._fd)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pages.fileno())
        self._pages.close()
        os.close(self._fd)


class Target:
    """A worker of a host that imports KV."""

    def __init__(self, door: str, from_host: Callable[..., Any] | None = None) -> None:
        self._posted: queue.SimpleQueue[Event] = queue.SimpleQueue()
        read = partial(read_kv, door) if from_host is None else partial(from_host, door)
        self.reader = PeerReader(_no_neighbour, self._posted.put, read)
        self.here = bytearray(SIZE + 100)
        self._at = ctypes.addressof((ctypes.c_char * len(self.here)).from_buffer(self.here))

    def start(self, source: str, pieces: tuple[Piece, ...] = PIECES) -> None:
        n = sum(size for _, size in pieces)
        first = n // 3
        self.reader.start(
            "r", source, pieces, [(self._at, first), (self._at + first, n - first)], 1
        )

    async def read(self, source: str, pieces: tuple[Piece, ...] = PIECES) -> str | None:
        self.start(source, pieces)
        event = await asyncio.to_thread(self._posted.get, timeout=DEADLINE)
        assert isinstance(event, KvReadEvent)
        return event.error


def _no_neighbour(address: str) -> Exported:
    raise AssertionError("its source is on another host")


class Hosts:
    """Some hosts, and a server that introduces them to each other; `a` has a device."""

    def __init__(self, *names: str) -> None:
        self.paths = KvPaths()
        self.exchanges: dict[str, KvExchange] = {}
        self.reports: list[KvReport] = []
        self._tickets = 0
        for name in names:
            self.exchanges[name] = KvExchange(partial(self._report, name))
            self.paths.join(name, "127.0.0.1")
        self.device = Source()

    def _report(self, name: str, report: KvReport) -> None:
        self.reports.append(report)
        for to, order in self.paths.handle(name, report):
            asyncio.get_running_loop().call_soon(self.exchanges[to].handle, order)

    def offer(self, to: str, pieces: tuple[Piece, ...] = PIECES, address: str | None = None) -> str:
        self._tickets += 1
        ticket = f"ticket {self._tickets}"
        address = self.device.address if address is None else address
        self.exchanges["a"].handle(OfferKvMsg(ticket, to, address, pieces))
        return at_host("a", ticket)

    def arrived(self, target: Target) -> bool:
        content, at = self.device.content, 0
        for offset, n in PIECES:
            if target.here[at : at + n] != content[offset : offset + n]:
                return False
            at += n
        return target.here[at:] == bytes(100)

    @property
    def idle(self) -> bool:
        """Whether no read is under way, and no memory of the device open but its own."""
        senders = self.exchanges["a"]._senders
        return not any(s._sending for s in senders) and opened() == 1


def opened() -> int:
    """Descriptors of the device's memory in this process."""
    found = 0
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found += "kv-of-a-device" in str(fd.readlink())
    return found


@contextlib.asynccontextmanager
async def hosts(*names: str) -> AsyncIterator[Hosts]:
    async with asyncio.timeout(DEADLINE):
        made = Hosts(*names)
        try:
            yield made
            await until(lambda: made.idle)
        finally:
            for exchange in made.exchanges.values():
                await exchange.close()
            made.device.close()
    assert opened() == 0


@contextlib.contextmanager
def target(of: Hosts, name: str, from_host: Callable[..., Any] | None = None):  # type: ignore[no-untyped-def]
    made = Target(of.exchanges[name].door, from_host)
    try:
        yield made
    finally:
        made.reader.close()


def test_kv_comes_as_it_is_over_one_connection() -> None:
    async def scenario() -> None:
        async with hosts("a", "b", "c") as of:
            with target(of, "b") as one, target(of, "b") as two, target(of, "c") as three:
                reads = [
                    one.read(of.offer("b")),
                    two.read(of.offer("b")),
                    three.read(of.offer("c")),
                ]
                assert await asyncio.gather(*reads) == [None] * 3
                assert all(of.arrived(each) for each in (one, two, three))
                assert await one.read(of.offer("b")) is None
                assert len(of.reports) == 4, "b and c were introduced to a, once each"

    asyncio.run(scenario())


def test_an_offer_may_come_later_than_the_request_for_it() -> None:
    async def scenario() -> None:
        async with hosts("a", "b") as of:
            with target(of, "b") as one:
                reading = asyncio.ensure_future(one.read(at_host("a", "ticket 1")))
                await until(lambda: any(s._sending for s in of.exchanges["a"]._senders))
                of.offer("b")
                assert await reading is None
                assert of.arrived(one)

    asyncio.run(scenario())


def test_only_what_was_offered_is_sent_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_exchange, "AHEAD_SECONDS", 0.0)
    beyond = ((MEMORY - 5, 10),)
    negative = ((-5, 10),)

    async def scenario() -> None:
        async with hosts("a", "b", "c") as of:
            with target(of, "b") as one:
                bad = [
                    (of.offer("c"), PIECES),  # to another host
                    (at_host("a", "none"), PIECES),
                    (at_host("nowhere", "none"), PIECES),
                    (at_host("b", "none"), PIECES),
                    (of.offer("b"), PIECES[:1]),  # of another size
                    (of.offer("b", beyond), beyond),
                    (of.offer("b", negative), negative),
                    (of.offer("b", address="ballast-pages-of-nobody"), PIECES),
                ]
                for source, pieces in bad:
                    assert await one.read(source, pieces) is not None
                assert one.here == bytes(len(one.here))
                source = of.offer("b")
                assert await one.read(source) is None
                assert await one.read(source) is not None

    asyncio.run(scenario())


def _flipped(message: KvChunkMsg) -> KvChunkMsg:
    data = bytes([message.data[0] ^ 1]) + message.data[1:]
    return KvChunkMsg(message.id, data, message.checksum)


def _short(message: KvChunkMsg) -> KvChunkMsg:
    return KvChunkMsg(message.id, message.data[:-1], message.checksum)


def _long(message: KvChunkMsg) -> KvChunkMsg:
    return KvChunkMsg(message.id, message.data + b"x", message.checksum)


def _far_too_long(message: KvChunkMsg) -> KvChunkMsg:
    return KvChunkMsg(message.id, bytes(2 * LONGEST_TO_RECEIVER), message.checksum)


class Changing(LoopSocket[Any]):
    """Changes the third chunk that is sent."""

    sent = 0
    damage: Callable[[KvChunkMsg], KvChunkMsg]

    def send(self, message: msgspec.Struct) -> None:
        if isinstance(message, KvChunkMsg):
            Changing.sent += 1
            if Changing.sent == 3:
                message = Changing.damage(message)
        super().send(message)


@pytest.mark.parametrize("damage", [_flipped, _short, _long, _far_too_long])
def test_what_is_not_as_it_was_read_is_not_imported(
    damage: Callable[[KvChunkMsg], KvChunkMsg], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_transfer, "LoopSocket", Changing)
    monkeypatch.setattr(Changing, "sent", 0)
    monkeypatch.setattr(Changing, "damage", staticmethod(damage), raising=False)

    async def scenario() -> None:
        async with hosts("a", "b") as of:
            with target(of, "b") as one:
                assert await one.read(of.offer("b")) is not None
                assert await one.read(of.offer("b")) is None
                assert of.arrived(one)

    asyncio.run(scenario())


class Cutting(LoopSocket[Any]):
    """Has the third chunk that is sent be the last: the connection ends."""

    sent = 0
    cut: Callable[[], object]

    def send(self, message: msgspec.Struct) -> None:
        super().send(message)
        if isinstance(message, KvChunkMsg):
            Cutting.sent += 1
            if Cutting.sent == 3:
                Cutting.cut()


@pytest.mark.parametrize("end", ["source", "target"])
def test_a_connection_that_is_cut_amid_a_read_is_made_anew(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_transfer, "LoopSocket", Cutting)
    monkeypatch.setattr(Cutting, "sent", 0)

    async def scenario() -> None:
        async with hosts("a", "b") as of:

            def cut() -> None:
                [sender] = of.exchanges["a"]._senders.values()
                [link] = of.exchanges["b"]._links.values()
                (sender if end == "source" else link._reading).cancel()

            monkeypatch.setattr(Cutting, "cut", staticmethod(cut), raising=False)
            with target(of, "b") as one:
                assert await one.read(of.offer("b")) is not None
                assert await one.read(of.offer("b")) is None
                assert of.arrived(one)

    asyncio.run(scenario())


def test_an_import_that_is_dropped_is_not_sent_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target has dropped it, or died, with one chunk written; then nothing more is."""
    amid, go_on = threading.Event(), threading.Event()
    seen: list[bytes] = []

    def held(
        door: str, source: str, n_bytes: int, wanted: Callable[[], bool]
    ) -> Generator[bytearray, None, None]:
        chunks = read_kv(door, source, n_bytes, wanted)
        with contextlib.closing(chunks):
            yield next(chunks)
            amid.set()
            assert go_on.wait(DEADLINE)
            yield from chunks

    async def scenario() -> None:
        async with hosts("a", "b") as of:
            with target(of, "b", held) as one:
                one.start(of.offer("b"))
                assert await asyncio.to_thread(amid.wait, DEADLINE)
                one.reader.stop("r")
                seen.append(bytes(one.here))
                go_on.set()
                await until(lambda: of.idle)
            assert one.here == seen[0]
            with target(of, "b") as two:
                assert await two.read(of.offer("b")) is None

    asyncio.run(scenario())


def test_a_host_that_leaves_before_it_listens_is_not_waited_for() -> None:
    paths = KvPaths()
    for name in "abc":
        paths.join(name, name)
    [(to, _)] = paths.handle("b", WantHostMsg("a", "key"))
    assert to == "a"
    assert paths.leave("c") == []
    assert paths.leave("a") == [("b", ReachHostMsg("a", "", ""))]
    assert paths.handle("a", HostListensMsg(1, "address", "key")) == []
