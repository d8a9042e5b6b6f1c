"""HTTP on each host, answered by a server elsewhere: relays are processes (`relay_hosts`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import uvicorn

from ballast.cluster.hosts import http_relays
from ballast.cluster.hosts.http_relays import HttpRelays, RelayProvider
from ballast.server.http.connection import protocol
from ballast.server.http.connection_limits import Connections, limited
from ballast.server.http_server import HttpServer
from ballast.transport import curve
from ballast.transport.relay_messages import WINDOW_BYTES
from tests.cluster.hosts.relay_hosts import RelayHosts
from tests.cluster.worker.test_worker import DEADLINE


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `relay_hosts.PATIENT`; relays that are gone are looked for at once."""
    monkeypatch.setattr(curve, "LOST_SECONDS", 240.0)
    monkeypatch.setattr(http_relays, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(http_relays, "MEET_SECONDS", DEADLINE)


class App:
    """An application whose answers are the test's."""

    def __init__(self, name: str = "") -> None:
        self._name = name
        self.go, self.left = asyncio.Event(), asyncio.Event()
        self.clients = list[Any]()
        self.received = 0
        """Bytes of bodies."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.clients.append(scope["client"])
        parts, more = [], True
        while more:
            message = await receive()
            parts.append(message.get("body", b""))
            self.received += len(parts[-1])
            more = message.get("more_body", False)
            if scope["path"] == "/held":
                await self.go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})

        async def answer(body: bytes, more: bool = False) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": more})

        if scope["path"] == "/stream":
            await answer(b"begun", more=True)
            going = asyncio.ensure_future(self.go.wait())
            leaving = asyncio.ensure_future(receive())
            await asyncio.wait({going, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if leaving.done():
                self.left.set()
                going.cancel()
                return
            leaving.cancel()
            await answer(b" over")
        elif scope["path"] == "/echo":
            await answer(b"".join(parts))
        else:
            await answer(self._name.encode())


@asynccontextmanager
async def server(hosts: RelayProvider, app: App, port: int = 0) -> AsyncIterator[None]:
    """A server that listens nowhere itself, and answers by all relays."""
    http = limited(protocol(), Connections(lambda: 100, lambda: 0, lambda: 100))
    config = uvicorn.Config(app, http=http, log_config=None, lifespan="off", ws="none")
    answering = HttpServer(config)
    running = asyncio.ensure_future(answering.serve(sockets=[]))
    await answering.up.wait()
    relays = HttpRelays(hosts, port)
    relays.answer(answering.accept)
    try:
        yield
    finally:
        answering.should_exit = True
        await running
        await relays.close()


async def answered(client: httpx.AsyncClient, url: str, body: str) -> None:
    """Wait until a relay's server answers so."""
    while True:
        try:
            answer = await client.get(url)
        except httpx.TransportError:
            continue  # its connection was closed with the server
        if answer.status_code == 200:
            assert answer.text == body
            return
        assert_away(answer)
        await asyncio.sleep(0.02)


def assert_away(answer: httpx.Response) -> None:
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "5"
    assert answer.json()["error"]["code"] == "unavailable"


@asynccontextmanager
async def two_hosts() -> AsyncIterator[tuple[RelayHosts, httpx.AsyncClient]]:
    hosts = RelayHosts("x", "y")
    limits = httpx.AsyncHTTPTransport(retries=0)
    async with (
        asyncio.timeout(DEADLINE),
        httpx.AsyncClient(timeout=DEADLINE, transport=limits) as client,
    ):
        try:
            yield hosts, client
        finally:
            await hosts.close()


async def until(what: Callable[[], bool]) -> None:
    while not what():
        await asyncio.sleep(0.01)


def test_every_host_answers_for_the_server() -> None:
    async def scenario() -> None:
        async with two_hosts() as (hosts, client):
            app = App("one")
            async with server(hosts, app):
                await until(lambda: hosts.started.keys() == {"x", "y"})
                for node in ("x", "y"):
                    await answered(client, hosts.url(node), "one")
                    body = bytes(range(256)) * (3 * WINDOW_BYTES // 256)
                    echo = await client.post(f"{hosts.url(node)}/echo", content=body)
                    assert echo.content == body
                assert {host for host, _ in app.clients} == {"127.0.0.1"}
                # Connections were kept.
                ports = [port for _, port in app.clients]
                assert len(set(ports[-4:])) == 2

    asyncio.run(scenario())


def test_a_stream_goes_on_and_a_client_that_leaves_is_noticed() -> None:
    async def scenario() -> None:
        async with two_hosts() as (hosts, client):
            app = App()
            async with server(hosts, app):
                await until(lambda: hosts.started.keys() == {"x", "y"})
                for node in ("x", "y"):
                    await answered(client, hosts.url(node), "")
                async with client.stream("GET", f"{hosts.url('x')}/stream") as leaving:
                    assert await anext(leaving.aiter_bytes()) == b"begun"
                await app.left.wait()
                async with client.stream("GET", f"{hosts.url('y')}/stream") as stream:
                    parts = stream.aiter_bytes()
                    assert await anext(parts) == b"begun"
                    app.go.set()
                    assert await anext(parts) == b" over"
                    assert [part async for part in parts] == []

    asyncio.run(scenario())


def test_a_body_that_the_server_does_not_take_waits_at_the_client() -> None:
    async def scenario() -> None:
        async with two_hosts() as (hosts, client):
            app = App("held")
            async with server(hosts, app):
                await until(lambda: "x" in hosts.started)
                await answered(client, hosts.url("x"), "held")
                sent = 0

                async def body() -> AsyncIterator[bytes]:
                    nonlocal sent
                    for _ in range(1000):
                        yield bytes(1 << 20)
                        sent += 1 << 20

                url = f"{hosts.url('x')}/held"
                posting = asyncio.ensure_future(client.post(url, content=body()))
                await until(lambda: app.received > 0)
                before = -1
                while sent != before:  # what kernels and windows take is taken
                    before = sent
                    await asyncio.sleep(0.5)
                assert sent < 100 << 20
                posting.cancel()
                await asyncio.wait({posting})
                app.go.set()

    asyncio.run(scenario())


def test_hosts_refuse_until_the_next_server_has_found_them() -> None:
    async def scenario() -> None:
        async with two_hosts() as (hosts, client):
            async with server(hosts, App("one")):
                await until(lambda: hosts.started.keys() == {"x", "y"})
                for node in ("x", "y"):
                    await answered(client, hosts.url(node), "one")
            for node in ("x", "y"):
                while True:  # the connection that was kept is closed at first
                    try:
                        away = await client.post(hosts.url(node), content=bytes(1 << 20))
                    except httpx.TransportError:
                        continue
                    break
                assert_away(away)
                head = await client.head(hosts.url(node))
                assert head.status_code == 503
            kept = dict(hosts.started)
            async with server(hosts, App("two")):  # at other addresses
                for node in ("x", "y"):
                    await answered(client, hosts.url(node), "two")
            assert hosts.started == kept

    asyncio.run(scenario())


def test_a_relay_that_dies_is_started_again() -> None:
    async def scenario() -> None:
        async with two_hosts() as (hosts, client), server(hosts, App("one")):
            await until(lambda: "x" in hosts.started)
            await answered(client, hosts.url("x"), "one")
            first = hosts.processes["x"]
            first.kill()
            await until(lambda: hosts.processes["x"] is not first)
            while True:
                try:
                    await answered(client, hosts.url("x"), "one")
                    break
                except httpx.TransportError:
                    await asyncio.sleep(0.02)

    asyncio.run(scenario())
