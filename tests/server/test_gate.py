"""The gate's bounds, over an app without models."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ballast.core.clock import VirtualClock
from ballast.core.settings import ServerSettings
from ballast.server.gate import Gate
from ballast.server.quotas import Quotas

WHOLE: Message = {"type": "http.request", "body": b"{}", "more_body": False}
PART: Message = {"type": "http.request", "body": b"{", "more_body": True}
GONE: Message = {"type": "http.disconnect"}


class Behind:
    """A gate, and an app that answers when it is told to."""

    def __init__(self, **settings: Any) -> None:
        self.may_answer = asyncio.Event()
        self.asked = asyncio.Event()
        self.gate = Gate(
            self.app,
            lambda: ServerSettings(**settings),
            Quotas(VirtualClock()),
            body_seconds=0.05,
        )

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        self.asked.set()
        await self.may_answer.wait()
        await Response("done")(scope, receive, send)

    async def ask(self, *said: Message, path: str = "/v1/completions") -> list[Message]:
        """What is sent to a client that says this, and then nothing more."""
        to_say, sent = list(said), list[Message]()

        async def receive() -> Message:
            if not to_say:
                await asyncio.Event().wait()
            return to_say.pop(0)

        async def send(message: Message) -> None:
            sent.append(message)

        method = "POST" if path.startswith("/v1") else "GET"
        scope = {"type": "http", "method": method, "path": path, "headers": []}
        await self.gate(scope, receive, send)
        return sent


def error(sent: list[Message]) -> tuple[int, str, dict[bytes, bytes]]:
    """Status, code and headers of an error response."""
    body = b"".join(m["body"] for m in sent if m["type"] == "http.response.body")
    assert not sent[-1].get("more_body")
    return sent[0]["status"], json.loads(body)["error"]["code"], dict(sent[0]["headers"])


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


def test_bodies_are_bounded_together() -> None:
    async def scenario() -> None:
        behind = Behind(most_body_bytes=2)
        held = [asyncio.ensure_future(behind.ask(WHOLE)) for _ in range(8)]
        await behind.asked.wait()
        status, code, _ = error(await behind.ask(WHOLE))
        assert (status, code) == (429, "overloaded")
        behind.may_answer.set()
        assert [sent[0]["status"] for sent in await asyncio.gather(*held)] == [200] * 8
        assert (await behind.ask(WHOLE))[0]["status"] == 200

    asyncio.run(scenario())
