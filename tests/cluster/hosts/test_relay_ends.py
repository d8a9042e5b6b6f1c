"""The two ends of an HTTP relay, each by itself: what clients and other versions do to them."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from ballast.cluster.hosts import http_relay, relay_connection
from ballast.cluster.hosts.http_relay import HttpRelay, RelayedClient
from ballast.cluster.hosts.relay_connection import OtherVersion, RelayConnection
from ballast.cluster.hosts.relay_process import RelayStarted
from ballast.transport.curve import CurveKeys
from ballast.transport.decoding import MalformedMessage
from ballast.transport.relay_messages import BytesTakenMsg
from tests.cluster.worker.test_worker import DEADLINE


class FakeSocket:
    """A relay that has always sent something more."""

    has_message, lost = True, False

    def __init__(self, taken: Callable[[], Any]) -> None:
        self.take, self.n_sent = taken, 0

    def send(self, message: Any) -> None:
        self.n_sent += 1

    def close(self) -> None:
        self.lost = True


def connection(taken: Callable[[], Any]) -> RelayConnection:
    made = RelayConnection("127.0.0.1", CurveKeys.new().public, asyncio.Protocol)
    made._socket.close()
    made._socket = cast(Any, FakeSocket(taken))
    return made


def test_a_flood_of_a_relays_clients_leaves_others_their_turn() -> None:
    async def scenario() -> None:
        n = 0

        def taken() -> BytesTakenMsg:
            nonlocal n
            n += 1
            if n > 100 * relay_connection.TURN_MESSAGES:
                raise MalformedMessage("nothing else had a turn")
            return BytesTakenMsg(7, 1)  # of a client that has left

        flooded = connection(taken)
        running = asyncio.ensure_future(flooded.run())
        for turns in range(1, 20):
            await asyncio.sleep(0)
            assert n <= turns * relay_connection.TURN_MESSAGES
        assert n > relay_connection.TURN_MESSAGES
        flooded.close()
        await running

    asyncio.run(scenario())


def test_a_relay_that_cannot_be_understood_is_of_another_version() -> None:
    async def scenario() -> None:
        def taken() -> None:
            raise MalformedMessage("malformed message: ...")

        strange = connection(taken)
        with pytest.raises(OtherVersion, match="cannot be understood"):
            await strange.meet(DEADLINE)
        strange.close()

    asyncio.run(scenario())


class FakeRelay:
    """Notes what a client's connection reports."""

    def __init__(self) -> None:
        self.taken = 0
        self.gone = asyncio.Event()

    def came(self, client: RelayedClient, host: str, port: int) -> int:
        return 1

    def left(self, id: int) -> None:
        self.gone.set()

    def send(self, message: Any) -> None:
        self.taken += message.count


def test_what_a_slow_client_has_read_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_relay, "LOOK_SECONDS", 0.01)

    async def scenario() -> None:
        relay, clients = FakeRelay(), list[RelayedClient]()

        def accept() -> RelayedClient:
            clients.append(RelayedClient(cast(HttpRelay, relay)))
            return clients[-1]

        loop = asyncio.get_running_loop()
        listener = await loop.create_server(accept, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 10)
        while not clients:
            await asyncio.sleep(0.01)
        n, transport = 64 << 20, clients[0]._transport  # far more than kernels take
        assert transport is not None
        clients[0].write(bytes(n))
        before, read = relay.taken, 0
        assert before < n
        while relay.taken == before:
            read += len(await reader.read(1 << 16))
        # Neither has it been read to the end, nor is anything waiting reported.
        assert relay.taken < n
        assert relay.taken + transport.get_write_buffer_size() <= n
        while read < n:
            read += len(await reader.read(1 << 20))
        while relay.taken < n:
            await asyncio.sleep(0.01)
        assert relay.taken == n
        writer.close()
        await relay.gone.wait()
        listener.close()

    async def bounded() -> None:
        await asyncio.wait_for(scenario(), DEADLINE)

    asyncio.run(bounded())


class FakeRay(ModuleType):
    """Of Ray what `ray_relays` uses: named actors, each with a relay that says what it is told."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.named: dict[str, Any] = {}
        self.started = RelayStarted()
        self.killed: list[Any] = []

    def get_actor(self, name: str) -> Any:
        if name not in self.named:
            raise ValueError(f"Failed to look up actor {name}")
        return self.named[name]

    def kill(self, actor: Any, *, no_restart: bool) -> None:
        self.killed.append(actor)
        self.named = {name: kept for name, kept in self.named.items() if kept is not actor}

    def remote(self, kind: type) -> Any:
        def options(name: str, **_: Any) -> Any:
            def start(ip: str, port: int) -> Any:
                line = msgspec.json.encode(self.started)
                actor = SimpleNamespace(started=SimpleNamespace(remote=lambda: line))
                return self.named.setdefault(name, actor)

            return SimpleNamespace(remote=start)

        return SimpleNamespace(options=options)

    def get(self, result: Any, timeout: float) -> Any:
        return result


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRay]:
    fake = FakeRay()
    scheduling = ModuleType("ray.util.scheduling_strategies")
    scheduling.NodeAffinitySchedulingStrategy = lambda node, soft: node  # type: ignore[attr-defined]
    for name, module in {
        "ray": fake,
        "ray.util": ModuleType("ray.util"),
        "ray.util.scheduling_strategies": scheduling,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    own = [f"ballast.cluster.hosts.{name}" for name in ("ray_children", "ray_relays")]
    for name in own:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield fake
    for name in own:
        sys.modules.pop(name, None)


def test_a_relay_is_replaced_although_it_has_gone(ray: FakeRay) -> None:
    relays = importlib.import_module("ballast.cluster.hosts.ray_relays").RayRelays("fleet")
    ray.started = RelayStarted(8080, "of another version")
    assert relays.open("x", "127.0.0.1", 8080, False) == "of another version"
    ray.started = RelayStarted(error="the port is taken")
    for _ in range(2):  # the second finds no actor
        with pytest.raises(ValueError, match="the port is taken"):
            relays.open("x", "127.0.0.1", 8080, True)
    assert (len(ray.killed), ray.named) == (3, {})
    ray.started = RelayStarted(8080, "own")
    assert relays.open("x", "127.0.0.1", 8080, True) == "own"
