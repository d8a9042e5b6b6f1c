"""The host's KV store over sockets: long chains, workers that die, a server that ends."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from types import SimpleNamespace
from typing import TypeVar, cast

import pytest

from ballast.cluster import kv_broker
from ballast.cluster.device import RemoteDevice
from ballast.cluster.device_set import DeviceSet
from ballast.cluster.kept_kv import KeptKv
from ballast.cluster.kv_broker import KvBroker
from ballast.cluster.kv_client import KvClient
from ballast.core.command import Remove
from ballast.core.settings import KeySettings, ServerSettings
from ballast.kv.directory import Tier
from ballast.kv.host_store import Slot
from ballast.kv.tier_shelf import KvBlock
from ballast.memory.cell_book import CELL_BYTES, Runs
from ballast.memory.host_cells import HostCells
from tests.kv.test_directory import MODEL, chain, found, memory_only, names, put
from tests.policy import worlds

T = TypeVar("T")
BLOCKS = 700
"""More than fit one message."""


def answer_of(ask: Callable[[Callable[[T], object]], object]) -> T:
    """Ask, and wait for the answer."""
    answers: SimpleQueue[T] = SimpleQueue()
    ask(answers.put)
    return answers.get(timeout=240)


def reserved(client: KvClient, blocks: Sequence[KvBlock]) -> Sequence[Runs | None]:
    found: list[Runs | None] = []
    for at in range(0, len(blocks), 64):
        found += answer_of(partial(client.reserve, blocks[at : at + 64]))
    return found


def looked_up(client: KvClient, blocks: Sequence[KvBlock]) -> str:
    found: str = answer_of(partial(client.look_up, MODEL, names(list(blocks))))
    return found


def fetched(client: KvClient, blocks: Sequence[KvBlock]) -> Sequence[Slot]:
    return answer_of(partial(client.fetch, MODEL, names(list(blocks))))


def test_workers_share_what_they_stored_and_leave_nothing_locked() -> None:
    blocks, others = chain("a", BLOCKS), chain("b", 3)
    store = memory_only(BLOCKS * CELL_BYTES)

    def work(broken: KvClient, client: KvClient) -> None:
        cells = reserved(broken, blocks)
        assert len(cells) == BLOCKS
        assert None not in cells
        assert isinstance(cells[9], tuple)
        first = cells[9][0][0] * CELL_BYTES
        broken.memory[first : first + 4] = b"here"
        broken.land([(b.name, i) for i, b in enumerate(blocks[:600])])
        assert looked_up(broken, blocks) == "h" * 600
        assert None in reserved(client, chain("c", BLOCKS))
        assert len(fetched(broken, blocks)) == 600
        broken.close()
        slots = fetched(client, blocks)
        assert [s.checksum for s in slots] == list(range(600))
        at = slots[9].runs[0][0] * CELL_BYTES
        assert bytes(client.memory[at : at + 4]) == b"here"
        client.release(names(blocks[:600]))
        assert None not in reserved(client, others)

    async def serve() -> None:
        broker = KvBroker(store)
        clients = [KvClient(broker.open()[1].detach()) for _ in range(2)]
        await asyncio.to_thread(work, *clients)
        store.validate()
        broker.shut()
        # The server has ended: everything is answered, with nothing.
        assert await asyncio.to_thread(looked_up, clients[1], blocks) == ""
        assert await asyncio.to_thread(reserved, clients[1], blocks[:1]) == []
        clients[1].close()

    asyncio.run(serve())


def test_what_workers_stage_counts_in_the_hosts_bytes_until_they_end() -> None:
    """Kept blocks make way, and their memory is given back; a cell that is used again has its own.

    32 cells are kept; two workers stage as much as 24 of them."""
    blocks = chain("a", 32)
    store = memory_only(32 * CELL_BYTES)

    def memory() -> int:
        assert isinstance(store.cells, HostCells)
        return os.fstat(store.cells.fd).st_blocks * 512

    def work(first: KvClient, second: KvClient) -> None:
        assert None not in reserved(first, blocks)
        first.land([(b.name, 0) for b in blocks])
        first.occupy(16 * CELL_BYTES)
        assert len(looked_up(first, blocks)) == 16
        second.occupy(4 * CELL_BYTES)
        second.occupy(8 * CELL_BYTES)
        # Asked by the one that has said it: what two workers say has no order.
        assert len(looked_up(second, blocks)) == 8
        assert len(looked_up(first, blocks)) == 8
        assert memory() == 8 * CELL_BYTES
        first.close()

    def again(client: KvClient) -> None:
        others = chain("b", 12)
        runs = [r for r in reserved(client, others) if r is not None]
        assert len(runs) == 12
        client.memory[runs[-1][0][0] * CELL_BYTES] = 1
        assert memory() == (8 + 12) * CELL_BYTES
        client.close()

    async def serve() -> None:
        broker = KvBroker(store)
        first, second = (KvClient(broker.open()[1].detach()) for _ in range(2))
        await asyncio.to_thread(work, first, second)
        await asyncio.to_thread(again, second)
        while broker.store.directory.shelves[Tier.HOST].capacity < 32 * CELL_BYTES:
            await asyncio.sleep(0)
        store.validate()
        broker.shut()

    asyncio.run(asyncio.wait_for(serve(), 240))


def test_a_disk_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    store, blocks = memory_only(8 * CELL_BYTES), chain("a", 4)
    put(store, blocks[:2])
    monkeypatch.setattr(kv_broker, "LONGEST_STAGE", 0.02)
    monkeypatch.setattr(store, "stage", lambda model, names, ended: None)
    given_up: list[str] = []
    monkeypatch.setattr(store, "give_up_disk", given_up.append)

    async def serve() -> None:
        broker = KvBroker(store)
        client = KvClient(broker.open()[1].detach())
        assert len(await asyncio.to_thread(fetched, client, blocks)) == 2
        broker.shut()
        client.close()

    asyncio.run(serve())
    assert len(given_up) == 1


def test_kv_of_models_and_keys_that_have_gone_is_scrubbed_and_stored_no_more() -> None:
    devices = DeviceSet()
    spec = replace(worlds.spec("m"), fingerprint="finger")
    twin = replace(worlds.spec("twin"), fingerprint="other")

    async def serve() -> None:
        store = memory_only(40 * CELL_BYTES)
        kept = KeptKv(devices, KvBroker(store))
        device = cast("RemoteDevice", SimpleNamespace(specs={"m": spec, "twin": twin}))
        kept.worker_ready(device)
        put(store, chain("a", 3, "me"))
        put(store, chain("b", 3, "they", "other:x:"))
        kept.command_done(device, Remove("m", 0.0))
        assert found(store, chain("a", 3)) == 0
        assert put(store, chain("late", 1, "me")) == 0, "its last requests were storing"
        assert put(store, chain("c", 1, "they", "other:x:")) == 1
        old = ServerSettings(keys=tuple(KeySettings(name=n, key="k" * 16) for n in ("me", "they")))
        kept.configure(old, replace(old, keys=old.keys[:1]))
        report = kept.report()
        assert report is not None
        assert [t.blocks for t in report.tiers] == [0]
        assert put(store, chain("d", 1, "they", "other:x:")) == 0
        kept.configure(replace(old, keys=()), old)
        kept.worker_ready(device)  # the model was added again
        assert put(store, chain("d", 2, "they")) == 2
        assert await kept.scrub("m", "they") == 2
        store.validate()

    asyncio.run(serve())
