"""Bounds what is open and held: requests, their bodies, and the time that a body takes to come."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ballast.core.settings import ServerSettings
from ballast.server import visit
from ballast.server.faults import Fault
from ballast.server.quotas import Quotas

_GENERATES = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings")
BODY_SECONDS = 60.0
"""For a request's body to arrive; a slower client is sent away (408)."""
BODIES_HELD = 8
"""All bodies of open requests together may be so many times as long as the longest one."""
LINGER_SECONDS = 2.0
"""A client that is refused while it still sends is listened to for so long: closing at once
would reset the connection, and with it the answer that is on its way."""


class Gate:
    """ASGI middleware. Requests that generate also pass the server's and their key's limits."""

    def __init__(
        self,
        app: ASGIApp,
        settings: Callable[[], ServerSettings],
        quotas: Quotas,
        body_seconds: float = BODY_SECONDS,
    ) -> None:
        self._app = app
        self._settings = settings
        self._quotas = quotas
        self._body_seconds = body_seconds
        self._held = 0
        """Bytes of bodies."""
        self.crowded: Callable[[], bool] = lambda: False
        """Whether there are more connections than there may be."""
        self.open = 0
        """Generating requests whose response is not complete."""
        self.draining = False
        self.idle = asyncio.Event()
        """Set while none is open."""
        self.idle.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not generates(scope):
            await self._bounded(scope, receive, send)
            return
        key = visit.current().caller.key
        send = self._telling(send)
        try:
            self._check()
            with self._quotas.request(key):
                self.open += 1
                self.idle.clear()
                try:
                    await self._bounded(scope, receive, send)
                finally:
                    self.open -= 1
                    if self.open == 0:
                        self.idle.set()
        except Fault as fault:  # of this gate: the routes answer theirs
            await _send_away(fault, scope, receive, send)

    def _check(self) -> None:
        if self.draining:
            why = "the server is draining; it takes no new requests"
            raise Fault(503, why, "unavailable")
        if self.open >= self._settings().most_open:
            raise Fault(429, f"{self.open} requests are open, the most there may be", "overloaded")
        if self.crowded():
            raise Fault(429, "more connections are open than there may be", "overloaded")

    async def _bounded(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reads the body, within bounds, and hands it on whole."""
        body = bytearray()
        held = 0
        try:
            try:
                async with asyncio.timeout(self._body_seconds):
                    more = self._refuse_long(_announced(scope))
                    while more:
                        message = await receive()
                        if message["type"] == "http.disconnect":
                            return
                        body += message.get("body", b"")
                        self._held += len(body) - held
                        held = len(body)
                        self._refuse_long(held)
                        more = message.get("more_body", False)
            except TimeoutError:
                why = f"the body did not arrive within {self._body_seconds:g} seconds"
                await _send_away(Fault(408, why, "request_timeout"), scope, receive, send)
                return
            except Fault as fault:
                await _send_away(fault, scope, receive, send)
                return
            await self._app(scope, _replayed(bytes(body), receive), send)
        finally:
            self._held -= held

    def _refuse_long(self, size: int) -> bool:
        """True, if a body of `size` bytes may be taken; raises Fault if not."""
        most = self._settings().most_body_bytes
        if size > most:
            raise Fault(413, f"the body is longer than {most} bytes", "body_too_large")
        if self._held > BODIES_HELD * most:
            raise Fault(429, "the open requests' bodies are as long as may be", "overloaded")
        return True

    def _telling(self, send: Send) -> Send:
        """`send` that also says what is left of the key's quota."""
        key = visit.current().caller.key
        if key is None:
            return send

        async def telling(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), *self._quotas.headers(key)]
                message = {**message, "headers": headers}
            await send(message)

        return telling


def generates(scope: Scope) -> bool:
    """Whether a request makes models or tokenizers work."""
    path = scope["path"]
    return scope["method"] == "POST" and path != "/admin" and not path.startswith("/admin/")


def _announced(scope: Scope) -> int:
    """Bytes of the body, as far as the client said."""
    told = dict(scope["headers"]).get(b"content-length", b"")
    return int(told) if told.isdigit() else 0


def _replayed(body: bytes, receive: Receive) -> Receive:
    """`receive` that says the whole body first."""
    told: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return told.pop() if told else await receive()

    return replayed


async def _send_away(fault: Fault, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers a client that may still be sending, and has it leave."""
    response = fault.response()
    response.headers["connection"] = "close"

    async def unfinished(message: Message) -> None:
        is_body = message["type"] == "http.response.body"
        await send({**message, "more_body": True} if is_body else message)

    await response(scope, receive, unfinished)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            while (message := await receive())["type"] == "http.request":
                if not message.get("more_body", False):
                    break
    await send({"type": "http.response.body", "body": b"", "more_body": False})
