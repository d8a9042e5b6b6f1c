"""Seconds to bring a model to several hosts at once, over links of a given bandwidth.

Hosts are segment brokers of this process that exchange models as agents do: encrypted, in chunks,
each segment checked by its digest. What a host sends passes a relay that paces it; the paces of
different hosts are apart, as those of network cards are.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import msgspec

from ballast.cluster.hosts.model_copies import ModelCopies
from ballast.cluster.hosts.model_exchange import ModelExchange
from ballast.cluster.segment_broker import SegmentBroker
from ballast.core.units import MiB
from ballast.transport.host_messages import ModelOrder, ModelReport, ReceiveModelMsg
from ballast.weights.sealed import digest_of, seal
from ballast.weights.segment import PLAIN, PackedTensor, Segment, pack, whole_pages

NAME = "m"
MODEL = hashlib.sha256(NAME.encode()).hexdigest(), "1" * 64
PIECE = 256 << 10
"""Bytes that a relay passes on at once."""
BURST_SECONDS = 0.2
"""Time of a link that was idle, or whose relay did not get to run, which it catches up on."""


class PacedHosts:
    """Hosts, the server that has them send models to each other, and their links."""

    def __init__(self, names: Sequence[str], bytes_per_second: float) -> None:
        self._pace = bytes_per_second
        self._copies = ModelCopies()
        self._free_at = dict.fromkeys(names, 0.0)
        """Time at which each host's link has sent what it was given."""
        self._relays: list[asyncio.Server] = []
        self.brokers = {name: SegmentBroker() for name in names}
        self.exchanges: dict[str, ModelExchange] = {}
        self._tasks = set[asyncio.Future[None]]()
        for name, broker in self.brokers.items():
            report = partial(self._report, name)
            broker.others = self.exchanges[name] = ModelExchange(broker, False, report)
            self._copies.join(name, "127.0.0.1", "of one kind")
        self._sender_at: dict[str, str] = {}

    def _report(self, name: str, report: ModelReport) -> None:
        if address := getattr(report, "address", ""):
            self._sender_at[address] = name
        for to, order in self._copies.handle(name, report):
            task = asyncio.ensure_future(self._order(to, order))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _order(self, to: str, order: ModelOrder) -> None:
        if isinstance(order, ReceiveModelMsg):
            order = msgspec.structs.replace(order, address=await self._relay(order.address))
        self.exchanges[to].handle(order)

    async def _relay(self, address: str) -> str:
        """Return an address at which what listens at another one is reached, over its link."""
        sender = self._sender_at[address]
        host, _, port = address.removeprefix("tcp://").rpartition(":")

        async def connected(inner: asyncio.StreamReader, outer: asyncio.StreamWriter) -> None:
            theirs, to_them = await asyncio.open_connection(host, int(port))
            await asyncio.gather(
                _pass(inner, to_them, None), _pass(theirs, outer, partial(self._wait, sender))
            )

        relay = await asyncio.start_server(connected, "127.0.0.1", 0)
        self._relays.append(relay)
        return f"tcp://127.0.0.1:{relay.sockets[0].getsockname()[1]}"

    async def _wait(self, sender: str, n_bytes: int) -> None:
        """Wait until a host's link has carried so many more bytes."""
        now = time.perf_counter()
        begin = max(now - BURST_SECONDS, self._free_at[sender])
        free = self._free_at[sender] = begin + n_bytes / self._pace
        await asyncio.sleep(max(0.0, free - now))

    async def close(self) -> None:
        for exchange in self.exchanges.values():
            await exchange.close()
        for relay in self._relays:
            relay.close()


async def _pass(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    wait: Callable[[int], Awaitable[None]] | None,
) -> None:
    try:
        while data := await reader.read(PIECE):
            if wait is not None:
                await wait(len(data))
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


def made_model(broker: SegmentBroker, n_bytes: int, segments: int) -> None:
    """Have a host keep a model of so many bytes, of noise."""
    each = n_bytes // segments // 64 * 64
    found: list[Segment] = []
    digests: list[str] = []
    for i in range(segments):
        tensor = PackedTensor((f"{i}",), (each,), "uint8", 0, each, PLAIN, ())
        segment = pack(f"layer {i}", [tensor])
        fd = os.memfd_create("segment", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, whole_pages(segment))
        for at in range(0, each, MiB):
            os.pwrite(fd, os.urandom(min(MiB, each - at)), at)
        digest = digest_of(fd, segment)
        seal(fd, writable=False)
        broker.hold(digest, fd, broker)
        found.append(segment)
        digests.append(digest)
    record = {
        "digests": digests,
        "files": "files",
        "listing": "listing",
        "manifest": {"segments": found},
        "adapters": [],
    }
    fd = os.memfd_create("record", os.MFD_CLOEXEC)
    os.write(fd, msgspec.msgpack.encode(record))
    assert broker.keep_brought(*MODEL, "files", fd)


async def copy_seconds(hosts: int, n_bytes: int, segments: int, pace: float) -> float:
    """Seconds until so many hosts, which ask at once, have a model that another one has."""
    names = [f"{i}" for i in range(hosts + 1)]
    of = PacedHosts(names, pace)
    try:
        made_model(of.brokers[names[0]], n_bytes, segments)
        began = time.perf_counter()
        await asyncio.gather(*(of.exchanges[name].bring(*MODEL, "") for name in names[1:]))
        seconds = time.perf_counter() - began
        for name in names[1:]:
            assert of.brokers[name].record_of(*MODEL) is not None, "it has not come"
        return seconds
    finally:
        await of.close()
        for broker in of.brokers.values():
            broker.let_go(broker)
            broker.forget(NAME)
