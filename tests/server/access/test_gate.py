"""The gate's bounds, over an app without models."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ballast.core.clock import VirtualClock
from ballast.core.settings import KeySettings, ServerSettings
from ballast.server.access.gate import BODIES_HELD, Gate
from ballast.server.access.quotas import KeyQuotas
from ballast.server.http.bodies import SMALL_BYTES, WEIGHT_BYTES
from ballast.server.http.request_context import Caller, RequestContext, attach_context
from ballast.server.http.sliced_response import SLICE_BYTES, SlicedResponse, slices

WHOLE: Message = {"type": "http.request", "body": b"{}", "more_body": False}
PART: Message = {"type": "http.request", "body": b"{", "more_body": True}
GONE: Message = {"type": "http.disconnect"}
LARGE = 3 * SMALL_BYTES
COUNTED = LARGE - SMALL_BYTES + 2 * WEIGHT_BYTES
"""Of a large body, a single text."""


def large() -> Message:
    return {"type": "http.request", "body": b'"' + b"x" * (LARGE - 2) + b'"', "more_body": False}


class Behind:
    """A gate, and an app that answers when it is told to."""

    def __init__(self, **settings: Any) -> None:
        self.may_answer = asyncio.Event()
        self.asked = asyncio.Event()
        self.read = b""
        """The body that the app was given last."""
        self.gate = Gate(
            self.app,
            lambda: ServerSettings(**settings),
            KeyQuotas(VirtualClock()),
            body_seconds=0.05,
        )

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.read = (await receive())["body"]
        self.asked.set()
        await self.may_answer.wait()
        await Response("done")(scope, receive, send)

    async def ask(
        self,
        *said: Message,
        path: str = "/v1/completions",
        method: str | None = None,
        key: KeySettings | None = None,
        then: Callable[[], Awaitable[object]] | None = None,
    ) -> list[Message]:
        """What is sent to a client that says this, and then nothing more; at the end of the answer
        it does what `then` does."""
        to_say, sent = list(said), list[Message]()

        async def receive() -> Message:
            if not to_say:
                await asyncio.Event().wait()
            return to_say.pop(0)

        async def send(message: Message) -> None:
            sent.append(message)
            if then is not None and message["type"] == "http.response.body":
                await then()

        method = method or ("POST" if path.startswith("/v1") else "GET")
        scope = {"type": "http", "method": method, "path": path, "headers": []}
        attach_context(scope, RequestContext(caller=Caller(key)))
        await self.gate(scope, receive, send)
        return sent


def error(sent: list[Message]) -> tuple[int, str, dict[bytes, bytes]]:
    """Status, code and headers of an error response."""
    body = b"".join(m["body"] for m in sent if m["type"] == "http.response.body")
    assert not sent[-1].get("more_body")
    return sent[0]["status"], json.loads(body)["error"]["code"], dict(sent[0]["headers"])


def test_a_key_asks_again_as_soon_as_it_has_the_end_of_an_answer() -> None:
    """As a client does with a key of one request at a time, while the server still ends the first
    one."""

    async def scenario() -> None:
        key = KeySettings(name="k", key="s" * 16, concurrent=1)
        behind, again = Behind(), list[Message]()
        behind.may_answer.set()

        async def ask_again() -> None:
            again.extend(await behind.ask(WHOLE, key=key))

        first = await behind.ask(WHOLE, key=key, then=ask_again)
        assert [sent[0]["status"] for sent in (first, again)] == [200, 200]
        assert behind.gate.open == 0

    asyncio.run(scenario())


def test_a_body_that_does_not_end_is_not_waited_for() -> None:
    async def scenario() -> None:
        behind = Behind()
        status, code, headers = error(await behind.ask(PART))
        assert (status, code, headers[b"connection"]) == (408, "request_timeout", b"close")
        assert behind.gate.open == 0
        assert behind.gate.idle.is_set()
        assert not behind.asked.is_set()

    asyncio.run(scenario())


def test_a_client_that_leaves_within_its_body_is_told_nothing() -> None:
    async def scenario() -> None:
        behind = Behind()
        assert await behind.ask(PART, GONE) == []
        assert behind.gate.open == 0

    asyncio.run(scenario())


def test_no_more_requests_are_open_than_may_be() -> None:
    async def scenario() -> None:
        behind = Behind(most_open=1)
        first = asyncio.ensure_future(behind.ask(WHOLE))
        await behind.asked.wait()
        status, code, headers = error(await behind.ask(WHOLE))
        assert (status, code, headers[b"retry-after"]) == (429, "overloaded", b"1")
        behind.may_answer.set()
        assert (await first)[0]["status"] == 200
        assert (await behind.ask(WHOLE))[0]["status"] == 200

    asyncio.run(scenario())


def test_where_connections_are_too_many_only_what_generates_is_refused() -> None:
    async def scenario() -> None:
        behind = Behind()
        behind.may_answer.set()
        behind.gate.crowded = lambda: True
        status, code, headers = error(await behind.ask(WHOLE))
        assert (status, code, headers[b"connection"]) == (429, "overloaded", b"close")
        assert (await behind.ask(WHOLE, path="/health"))[0]["status"] == 200

    asyncio.run(scenario())


def test_bodies_are_bounded_together_and_small_ones_always_taken() -> None:
    async def scenario() -> None:
        behind = Behind(most_body_bytes=LARGE)
        held = []
        for n in range(1, BODIES_HELD * LARGE // COUNTED + 1):
            held.append(asyncio.ensure_future(behind.ask(large())))
            while sum(behind.gate.held.values()) < n * COUNTED:
                await asyncio.sleep(0)
        assert error(await behind.ask(large()))[:2] == (429, "overloaded")
        held.append(asyncio.ensure_future(behind.ask(WHOLE)))
        behind.may_answer.set()
        assert {sent[0]["status"] for sent in await asyncio.gather(*held)} == {200}
        assert behind.gate.held == {}
        assert (await behind.ask(large()))[0]["status"] == 200

    asyncio.run(scenario())


def test_a_body_of_many_values_is_refused_before_any_is_made() -> None:
    async def scenario() -> None:
        behind = Behind()
        many = b'{"messages": [' + b"{}," * 10**6 + b"{}]}"
        sent = await behind.ask({"type": "http.request", "body": many, "more_body": False})
        assert error(sent)[:2] == (413, "body_too_large")
        assert not behind.asked.is_set()

    asyncio.run(scenario())


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PATCH"])
@pytest.mark.parametrize("path", ["/live", "/health"])
def test_a_free_path_waits_for_no_body_and_is_never_refused(path: str, method: str) -> None:
    async def scenario() -> None:
        behind = Behind(most_open=1, most_body_bytes=LARGE)
        behind.gate.crowded = lambda: True
        behind.gate.draining = True
        behind.may_answer.set()
        sent = await behind.ask(PART, path=path, method=method)
        assert sent[0]["status"] == 200
        assert behind.read == b""

    asyncio.run(scenario())


def test_without_a_body_nothing_is_waited_for() -> None:
    async def scenario() -> None:
        behind = Behind()
        behind.may_answer.set()
        for method in ("GET", "DELETE", "PUT", "OPTIONS"):
            assert (await behind.ask(PART, path="/v1/models", method=method))[0]["status"] == 200

    asyncio.run(scenario())


def test_a_key_leaves_others_their_share_of_open_requests() -> None:
    async def scenario() -> None:
        keys = tuple(KeySettings(name=n, key=f"sk-{n}") for n in ("flood", "other"))
        behind = Behind(most_open=10, keys=keys)
        flood = [asyncio.ensure_future(behind.ask(WHOLE, key=keys[0])) for _ in range(20)]
        await behind.asked.wait()
        other = asyncio.ensure_future(behind.ask(WHOLE, key=keys[1]))
        while behind.gate.open < 6:
            await asyncio.sleep(0)
        behind.may_answer.set()
        assert (await other)[0]["status"] == 200
        statuses = [sent[0]["status"] for sent in await asyncio.gather(*flood)]
        assert statuses == [200] * 5 + [429] * 15
        assert behind.gate.open == 0

    asyncio.run(scenario())


def test_a_single_key_may_have_everything() -> None:
    async def scenario() -> None:
        key = KeySettings(name="one", key="sk-one-of-the-tests")
        behind = Behind(most_open=10, keys=(key,))
        asked = [asyncio.ensure_future(behind.ask(WHOLE, key=key)) for _ in range(10)]
        await behind.asked.wait()
        behind.may_answer.set()
        assert {sent[0]["status"] for sent in await asyncio.gather(*asked)} == {200}

    asyncio.run(scenario())


@pytest.mark.parametrize("length", [3, SLICE_BYTES, 2 * SLICE_BYTES + 3])
def test_who_has_a_whole_answer_may_ask_again_at_once(length: int) -> None:
    key = KeySettings(name="k", key="sk-k-of-the-tests", concurrent=1)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await SlicedResponse(slices(b"x" * length), length)(scope, receive, send)

    async def scenario() -> None:
        gate = Gate(answer, lambda: ServerSettings(), KeyQuotas(VirtualClock()))
        statuses, following = list[int](), list[asyncio.Task[None]]()

        async def ask(again: bool) -> None:
            to_say, left = [WHOLE], length

            async def receive() -> Message:
                if not to_say:
                    await asyncio.Event().wait()
                return to_say.pop(0)

            async def send(message: Message) -> None:
                nonlocal left
                if message["type"] == "http.response.start":
                    statuses.append(message["status"])
                    return
                left -= len(message["body"])
                if left == 0 and again and not following:
                    following.append(asyncio.create_task(ask(again=False)))

            headers: list[tuple[bytes, bytes]] = []
            scope = {"type": "http", "method": "POST", "path": "/v1/x", "headers": headers}
            attach_context(scope, RequestContext(caller=Caller(key)))
            await gate(scope, receive, send)

        await ask(again=True)
        await following[0]
        assert statuses == [200, 200]
        assert (gate.open, gate.idle.is_set()) == (0, True)

    asyncio.run(scenario())
