"""Models that come from another host: as they were there, or not at all.

Hosts are segment brokers of this process; what they exchange is encrypted, over loopback.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ballast.cluster.hosts import model_transfer
from ballast.cluster.hosts.model_copies import ModelCopies
from ballast.cluster.hosts.model_exchange import ModelExchange
from ballast.cluster.segment_broker import SegmentBroker
from ballast.transport.host_messages import ModelReport
from ballast.transport.sockets import LoopSocket
from ballast.transport.weight_messages import ChunkMsg
from ballast.weights.checkpoint import load_host_model
from ballast.weights.host import HostModel, HostTier
from ballast.weights.sealed_model import brought
from benchmarks.adapters import random_adapter
from tests.cluster.test_segment_broker import tier
from tests.models.tiny import llama
from tests.weights.test_host import allocated, only_its_own  # noqa: F401 - a fixture
from tests.weights.test_sealed_model import asked, contents


class Hosts:
    """Some hosts, and a server that has them send models to each other."""

    def __init__(self, *names: str) -> None:
        self.copies = ModelCopies()
        self.brokers = {name: SegmentBroker() for name in names}
        self.exchanges: dict[str, ModelExchange] = {}
        self.reports: list[ModelReport] = []
        for name, broker in self.brokers.items():
            exchange = ModelExchange(broker, False, partial(self._report, name))
            broker.others = self.exchanges[name] = exchange
            self.copies.join(name, "127.0.0.1", "of one kind")

    def _report(self, name: str, report: ModelReport) -> None:
        self.reports.append(report)
        for to, order in self.copies.handle(name, report):
            asyncio.get_running_loop().call_soon(self.exchanges[to].handle, order)

    async def on(self, name: str, step: Callable[[HostTier], HostModel | None]) -> None:
        """Run a step in a worker of a host, which then dies."""
        with tier(self.brokers[name]) as (one, _):
            host = await asyncio.to_thread(step, one)
            if host is not None:
                host.close()


@contextlib.asynccontextmanager
async def hosts(*names: str) -> AsyncIterator[Hosts]:
    made = Hosts(*names)
    try:
        yield made
    finally:
        for exchange in made.exchanges.values():
            await exchange.close()
        for broker in made.brokers.values():
            broker.forget("m")
            assert len(broker) == 0
    assert allocated() == 0


@pytest.fixture
def model(tmp_path: Path) -> tuple[Path, Path]:
    path, lora = tmp_path / "m", tmp_path / "lora"
    random_adapter(llama(path), lora, seed=1)
    return path, lora


def test_hosts_without_files_serve_what_another_has_loaded(model: tuple[Path, Path]) -> None:
    path, lora = model
    seen: list[object] = []

    def load(one: HostTier) -> HostModel:
        host = load_host_model(asked(path, lora), one)
        seen.append((host.spec, contents(host)))
        return host

    def load_brought(one: HostTier) -> HostModel:
        assert brought(asked(path, lora), one)
        return load(one)

    async def scenario() -> None:
        async with hosts("a", "b", "c", "d") as of:
            await of.on("a", load)
            await of.on("d", lambda one: None if not brought(asked(path, lora), one) else load(one))
            assert len(seen) == 1, "its files are the same: it reads them"
            shutil.rmtree(path)
            shutil.rmtree(lora)
            await asyncio.gather(of.on("b", load_brought), of.on("c", load_brought))
            assert seen[1:] == seen[:1] * 2
            # As if it had died: others have it by now.
            of.copies.leave("a")
            await of.on("b", load_brought)
            await of.on("d", load_brought)
            assert seen[3:] == seen[:1] * 2

    asyncio.run(scenario())


class Damaging(LoopSocket[Any]):
    """Has one bit of the second chunk fall over on its way."""

    sent = 0

    def send(self, message: msgspec.Struct) -> None:
        if isinstance(message, ChunkMsg):
            Damaging.sent += 1
            if Damaging.sent == 2:
                message = ChunkMsg(bytes([message.data[0] ^ 1]) + message.data[1:])
        super().send(message)


def test_what_is_not_as_its_digest_says_is_thrown_away(
    model: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, lora = model
    seen: list[object] = []
    monkeypatch.setattr(model_transfer, "LoopSocket", Damaging)
    monkeypatch.setattr(Damaging, "sent", 0)

    def load(one: HostTier) -> HostModel:
        host = load_host_model(asked(path, lora), one)
        seen.append((host.spec, contents(host)))
        return host

    def load_if_brought(one: HostTier) -> HostModel | None:
        return load(one) if brought(asked(path, lora), one) else None

    async def scenario() -> None:
        async with hosts("a", "b", "c", "d") as of:
            await of.on("a", load)
            shutil.rmtree(path)
            await of.on("b", load_if_brought)
            assert len(seen) == 1, "it came damaged, and no other host has it"
            chunks, Damaging.sent = Damaging.sent, 2
            await of.on("c", load_if_brought)
            assert (seen[1], Damaging.sent) == (seen[0], 2 + chunks)
            Damaging.sent = 0  # it comes damaged again, and there is another host that has it
            await of.on("d", load_if_brought)
            assert (seen[2], Damaging.sent) == (seen[0], chunks + 1), "that segment alone again"

    asyncio.run(scenario())
