"""Connections within bounds, over an app without models."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ballast.core.clock import VirtualClock
from ballast.core.settings import KeySettings, ServerSettings
from ballast.server.access.keys import ApiKeys, Guard
from ballast.server.http.connection import protocol
from ballast.server.http.connection_limits import (
    LEAST_READ,
    STRANGER_SECONDS,
    Connections,
    client_address,
    limited,
)
from ballast.server.http.file_limit import OTHER_FILES, SPARE
from ballast.server.http_server import HttpServer
from ballast.server.observe.request_watch import Watch
from tests.server.observe.test_metrics import Scraped

REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
ASKED = REQUEST.replace(b"/ ", b"/v1/models ", 1)
"""Of a route for those with a key."""


def hello(until: asyncio.Event | None = None) -> ASGIApp:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if until is not None:
            await until.wait()
        await Response("hello")(scope, receive, send)

    return answer


class Heard:
    """What a server has read of its clients, and how many have come."""

    n_bytes = n_clients = 0


class Hearing(asyncio.Protocol):
    """Counts what comes to uvicorn's protocol."""

    heard: Heard

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.heard.n_clients += 1

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.heard.n_bytes += len(data)


class Client:
    """A connection to this machine, the only one of its server if `is_heard` is to be asked."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, heard: Heard
    ) -> None:
        self._reader, self._writer, self._heard = reader, writer, heard
        self._said = 0

    def stop_reading(self) -> None:
        self._writer.transport.pause_reading()  # type: ignore[attr-defined]

    async def ask(self) -> bytes:
        self.say(REQUEST)
        return await self._reader.readuntil(b"hello")

    async def read_past(self, text: bytes) -> None:
        await asyncio.wait_for(self._reader.readuntil(text), 240)

    def say(self, data: bytes) -> None:
        self._said += len(data)
        self._writer.write(data)

    async def is_heard(self) -> None:
        """Returns when the server, on the same loop, has read what was said."""
        while self._heard.n_clients == 0 or self._heard.n_bytes < self._said:
            await asyncio.sleep(0)

    async def closed(self) -> bool:
        """Waits for the server to close it; whether it did so without a word."""
        try:
            return await asyncio.wait_for(self._reader.read(), 240) == b""
        except ConnectionResetError:
            return True

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


Connect = Callable[[], Awaitable[Client]]


@asynccontextmanager
async def serving(
    connections: Connections,
    head_seconds: float = 60.0,
    base: type[asyncio.Protocol] | None = None,
    app: ASGIApp | None = None,
    send_seconds: float = 60.0,
) -> AsyncIterator[Connect]:
    """An HTTP server, of `hello` if nothing else is said: how to connect to it."""
    heard = Heard()
    within = limited(base or protocol(), connections, head_seconds, lambda: send_seconds)
    config = uvicorn.Config(
        app or hello(),
        http=type("Heard", (Hearing, within), {"heard": heard}),
        log_config=None,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=1,
        timeout_keep_alive=600,
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        http = HttpServer(config)
        running = asyncio.ensure_future(http.serve(sockets=[listener]))
        await http.up.wait()
        clients: list[Client] = []

        async def connect() -> Client:
            port = listener.getsockname()[1]
            clients.append(Client(*await asyncio.open_connection("127.0.0.1", port), heard))
            return clients[-1]

        yield connect
        for client in clients:
            await client.close()
        http.should_exit = True
        await running


@pytest.mark.parametrize("base", [H11Protocol, protocol()])
@pytest.mark.parametrize("said", [b"", b"GE", REQUEST + b"GET / HT"])
def test_a_head_that_does_not_end_ends_its_connection(
    said: bytes, base: type[asyncio.Protocol]
) -> None:
    async def scenario() -> None:
        connections = Connections(lambda: 10)
        loop, late = asyncio.get_running_loop(), 0.0
        real = loop.time
        loop.time = lambda: real() + late  # type: ignore[method-assign]
        async with serving(connections, head_seconds=300.0, base=base) as connect:
            client = await connect()
            if said.startswith(REQUEST):
                assert await client.ask()
            client.say(said.removeprefix(REQUEST))
            await client.is_heard()
            late = 300.0
            assert await client.closed()
        assert connections.open == 0

    asyncio.run(scenario())


def test_beyond_the_most_connections_are_closed_once_they_have_their_answer() -> None:
    async def scenario() -> None:
        connections = Connections(lambda: 1)
        async with serving(connections) as connect:
            first, second = await connect(), await connect()
            assert await second.ask()
            assert await second.closed()
            for _ in range(2):
                assert await first.ask()
            assert not connections.full

    asyncio.run(scenario())


def test_far_beyond_the_most_who_is_idle_makes_room() -> None:
    async def scenario() -> None:
        connections = Connections(lambda: 1)
        async with serving(connections) as connect:
            clients = [await connect() for _ in range(1 + SPARE)]
            late = await connect()
            assert await clients[0].closed()
            assert await late.ask()
            assert connections.open <= 1 + SPARE
            assert await clients[1].ask(), "no more was closed than needed"

    asyncio.run(scenario())


def test_where_nobody_is_idle_a_newcomer_is_not_heard() -> None:
    async def scenario() -> None:
        connections = Connections(lambda: 1)
        release = asyncio.Event()
        async with serving(connections, app=hello(release)) as connect:
            clients = [await connect() for _ in range(1 + SPARE)]
            for client in clients:
                client.say(REQUEST)
            while connections.open < len(clients) or connections.idle:
                await asyncio.sleep(0)
            late = await connect()
            late.say(REQUEST)
            assert await late.closed()
            release.set()
            assert await clients[0].ask()

    asyncio.run(scenario())


def test_no_more_connections_than_files() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert Connections(lambda: 10).most == 10
    assert Connections(lambda: 1 << 40).most == hard - OTHER_FILES - SPARE
    assert Connections(lambda: 1 << 40, lambda: 300).most == hard - 300 - SPARE
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard


class Written:
    """uvicorn's side of a connection, with a transport that holds so many bytes, and a loop whose
    time passes when a test says so."""

    def __init__(self) -> None:
        self.held, self.aborted = 0, False
        self.transport = self.loop = self
        self.due: list[tuple[float, Callable[[], None]]] = []

    def get_write_buffer_size(self) -> int:
        return self.held

    def abort(self) -> None:
        self.aborted = True

    def call_later(self, seconds: float, call: Callable[[], None]) -> Written:
        self.due.append((seconds, call))
        return self

    def cancel(self) -> None:
        self.due.clear()

    def pass_time(self) -> None:
        [(seconds, call)] = self.due
        assert seconds == 7.0
        self.due.clear()
        call()

    def pause_writing(self) -> None:
        """uvicorn's own."""

    def resume_writing(self) -> None:
        """uvicorn's own."""


@pytest.mark.parametrize(
    ("held", "aborted"),
    [
        ([100_000], True),
        ([100_000 - LEAST_READ + 1], True),
        ([100_000 - LEAST_READ, 100_000 - LEAST_READ], True),
        ([100_000 - LEAST_READ, 100_000 - 2 * LEAST_READ, 100_000 - 3 * LEAST_READ], False),
    ],
)
def test_who_reads_next_to_nothing_is_disconnected(held: list[int], aborted: bool) -> None:
    made: Any = limited(Written, Connections(lambda: 1), send_seconds=lambda: 7.0)()
    made.held = 100_000
    made.pause_writing()
    for n in held:
        assert not made.aborted
        made.held = n
        made.pass_time()
    assert made.aborted == aborted
    made.resume_writing()
    assert made.due == []


@pytest.mark.parametrize("base", [H11Protocol, protocol()])
def test_an_answer_that_nobody_reads_ends_its_connection(base: type[asyncio.Protocol]) -> None:
    async def scenario() -> None:
        connections, gone = Connections(lambda: 10), asyncio.Event()

        async def endless(scope: Scope, receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while not gone.is_set():  # uvicorn lets those that write to nobody go on
                body = {"type": "http.response.body", "body": bytes(1 << 18), "more_body": True}
                await send(body)
                if connections.open == 0:
                    gone.set()

        async with serving(connections, base=base, app=endless, send_seconds=0.2) as connect:
            client = await connect()
            client.stop_reading()
            client.say(REQUEST)
            await asyncio.wait_for(gone.wait(), 240)
        assert connections.open == 0

    asyncio.run(scenario())


# -- whose connections make room ------------------------------------------------------------------


class Fake:
    """A connection, as `Connections` sees it."""

    def __init__(self, clock: list[float], *, admitted: bool = False) -> None:
        self.admitted, self.closed = admitted, False
        self.transport = self.loop = self
        self._clock = clock

    def time(self) -> float:
        return self._clock[0]

    def abort(self) -> None:
        self.closed = True


def test_strangers_make_room_for_an_admitted_request_longest_idle_first() -> None:
    clock = [0.0]
    connections = Connections(lambda: 4)
    known = Fake(clock, admitted=True)
    strangers = [Fake(clock) for _ in range(4)]
    for each in (known, *strangers):
        assert connections.begins(each, "192.0.2.1")
        connections.idles(each)
    assert connections.full
    assert not connections.crowded()  # an admitted request is not refused: a stranger goes
    assert [s.closed for s in strangers] == [True, False, False, False]
    assert (connections.open, connections.full) == (4, False)
    assert not connections.crowded()
    assert sum(s.closed for s in strangers) == 1, "no more is closed than needed"
    connections.works(strangers[1])
    connections.idles(strangers[1])  # it has been heard since
    closed = [connections.make_room() and [s.closed for s in strangers] for _ in range(3)]
    assert closed[-1] == [True] * 4
    assert closed[0] == [True, False, True, False]
    assert connections.make_room()
    assert known.closed, "an idle one of an admitted client is the last"
    assert not connections.make_room()


def test_a_request_that_is_answered_makes_no_room_unless_it_is_a_slow_strangers() -> None:
    clock = [0.0]
    connections = Connections(lambda: 2)
    fakes = [Fake(clock, admitted=True), Fake(clock), Fake(clock)]
    for each in fakes:
        connections.begins(each, "192.0.2.1")
        connections.idles(each)
        connections.works(each)
    clock[0] = STRANGER_SECONDS / 2
    assert connections.crowded()
    clock[0] = STRANGER_SECONDS
    assert not connections.crowded()
    assert [f.closed for f in fakes] == [False, True, False]
    for each in fakes:
        connections.ends(each)
    assert (connections.open, connections.idle) == (0, 0)


def test_one_address_has_its_share() -> None:
    clock = [0.0]
    for each, room in ((None, 5), (3, 3), (100, 10)):
        connections = Connections(lambda: 10, most_each=lambda each=each: each)  # type: ignore[misc]
        flood = [Fake(clock) for _ in range(10)]
        for fake in flood:
            assert connections.begins(fake, "192.0.2.1")
            connections.idles(fake)
        assert connections.open == room
        assert [f.closed for f in flood] == [True] * (10 - room) + [False] * room
        other = Fake(clock)
        assert connections.begins(other, "192.0.2.2")
        assert sum(f.closed for f in flood) == 10 - room
        for fake in flood:
            connections.works(fake)
        late = Fake(clock)
        assert connections.begins(late, "192.0.2.1") == (each == 100)


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        (("192.0.2.7", 1), "192.0.2.7"),
        (("::ffff:192.0.2.7", 1, 0, 0), "192.0.2.7"),
        (("2001:db8:1:2:3::1", 1, 0, 0), "2001:db8:1:2::/64"),
        (("2001:db8:1:2:ffff::", 1, 0, 0), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 1, 0, 2), "fe80::/64"),
        ("", ""),
        (None, ""),
    ],
)
def test_addresses_are_counted_by_who_has_them(peer: Any, address: str) -> None:
    class Transport:
        def get_extra_info(self, name: str) -> Any:
            assert name == "peername"
            return peer

    assert client_address(Transport()) == address


@pytest.mark.parametrize("base", [H11Protocol, protocol()])
def test_a_connection_is_an_admitted_clients_from_its_first_such_request(
    base: type[asyncio.Protocol],
) -> None:
    """Silent strangers fill a server; the client with a key keeps its connection."""
    keys = ApiKeys(ServerSettings(keys=(KeySettings(name="a", key="sk-a"),)))

    async def scenario() -> None:
        connections = Connections(lambda: 2)
        app = Watch(Guard(hello(), keys), Scraped().metrics, VirtualClock(0.0))
        async with serving(connections, base=base, app=app) as connect:
            known = await connect()
            known.say(ASKED.replace(b"host: x", b"host: x\r\nauthorization: Bearer sk-a"))
            await known.read_past(b"hello")
            strangers = []
            for _ in range(SPARE + 20):
                strangers.append(await connect())
            assert await strangers[0].closed()
            late = await connect()
            late.say(ASKED)
            await late.read_past(b"invalid_api_key")
            known.say(ASKED.replace(b"host: x", b"host: x\r\nauthorization: Bearer sk-a"))
            await known.read_past(b"hello")

    asyncio.run(scenario())
