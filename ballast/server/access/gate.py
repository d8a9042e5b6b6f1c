"""Bound the open requests, and the length, memory, arrival time and number of values of their
bodies.

`Gate` is the ASGI middleware directly around the application: it reads each body whole before any
route runs, and refuses requests beyond a bound (408, 413, 429) and compressed bodies (415). While
the server drains, it refuses new generating requests (503).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ballast.core.settings import ServerSettings
from ballast.server.access.fair_shares import FairShares
from ballast.server.access.keys import FREE
from ballast.server.access.quotas import KeyQuotas
from ballast.server.http.bodies import MOST_WEIGHT, SMALL_BYTES, WEIGHT_BYTES, replayed, weigh
from ballast.server.http.faults import Fault
from ballast.server.http.request_context import Caller, context_of
from ballast.server.http.route_match import pattern_of

BODY_SECONDS = 60.0
"""Seconds in which a request's body must arrive; a slower client is refused (408)."""
BODIES_HELD = 32
"""Bound of the memory for all bodies of open requests, in multiples of the longest body. The first
`SMALL_BYTES` of each do not count: `most_open` bounds these, and so no large body shuts out a small
one."""
LINGER_SECONDS = 2.0
"""Seconds in which the server still reads from a refused client that is sending: closing at once
would reset the connection, and lose the response."""
_WITH_BODY = ("POST", "PATCH")


class Gate:
    """ASGI middleware that bounds requests, bodies and, for generating requests, quotas.

    `most_weight`: bound of one body's weight (`bodies.weight`). Where there are several keys, each
    has a fair share of the requests that may be open, and of the memory for bodies.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: Callable[[], ServerSettings],
        quotas: KeyQuotas,
        body_seconds: float = BODY_SECONDS,
        most_weight: Callable[[], int] = lambda: MOST_WEIGHT,
    ) -> None:
        self._app = app
        self._settings = settings
        self._quotas = quotas
        self._body_seconds = body_seconds
        self._most_weight = most_weight
        self._bodies = FairShares()
        """Bytes of memory that bodies take, by key."""
        self._open = FairShares()
        """Generating requests whose response is not complete, by key."""
        self.routes: Sequence[BaseRoute] = ()
        """Routes of the application."""
        self.crowded: Callable[[], bool] = lambda: False
        """Whether more connections are open than allowed."""
        self.draining = False
        self.idle = asyncio.Event()
        """Set while no generating request is open."""
        self.idle.set()

    @property
    def open(self) -> int:
        """Generating requests whose response is not complete."""
        return self._open.total

    @property
    def held(self) -> Mapping[str, int]:
        """Bytes of memory that bodies of open requests take, by key."""
        return self._bodies.held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if pattern_of(scope) in FREE or scope["method"] not in _WITH_BODY:
            # A body that the client may send is not read: it takes neither memory nor time.
            await self._app(scope, replayed(b"", receive), send)
            return
        if not generates(scope):
            await self._bounded(scope, receive, send)
            return
        caller = context_of(scope).caller
        send = self._with_quota_headers(caller, send)
        try:
            with self._admitted(caller) as end:
                await self._bounded(scope, receive, _ending(send, end))
        except Fault as fault:  # raised by this gate: routes answer their own
            await _send_away(fault, scope, receive, send)

    @contextlib.contextmanager
    def _admitted(self, caller: Caller) -> Iterator[Callable[[], None]]:
        """Count a generating request while it is open; yields what frees its key's place sooner.
        Raises Fault where a limit is reached."""
        if self.draining:
            why = "the server is draining; it takes no new requests"
            raise Fault(503, why, "unavailable")
        if not self._open.fits(caller.name, 1, self._settings().most_open, divided=self._divided):
            raise Fault(429, f"{self.open} requests are open, {self._share_of_all}", "overloaded")
        if self.crowded():
            raise Fault(429, "more connections are open than there may be", "overloaded")
        with self._quotas.request(caller.key) as end:
            self._open.hold(caller.name, 1)
            self.idle.clear()
            try:
                yield end
            finally:
                self._open.hold(caller.name, -1)
                if self.open == 0:
                    self.idle.set()

    async def _bounded(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, within bounds, and pass it on whole."""
        context = context_of(scope)
        refused: Fault | None = None
        with self._holding(context.caller.name) as hold:
            try:
                _check_encoding(scope)
                body = await self._read(_announced(scope), receive, hold)
            except Fault as fault:
                refused = fault
            else:
                if body is not None:
                    context.body_bytes = len(body)
                    await self._app(scope, replayed(body, receive), send)
        if refused is not None:
            await _send_away(refused, scope, receive, send)

    async def _read(
        self, announced: int, receive: Receive, hold: Callable[[int], None]
    ) -> bytes | None:
        """Read the body; None if the client leaves. Raises Fault where it is too long, too slow or
        has too many values."""
        body = bytearray()
        try:
            async with asyncio.timeout(self._body_seconds):
                self._check_length(announced)
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    self._check_length(len(body))
                    hold(len(body))
                    more = message.get("more_body", False)
        except TimeoutError:
            why = f"the body did not arrive within {self._body_seconds:g} seconds"
            raise Fault(408, why, "request_timeout") from None
        whole, most = bytes(body), self._most_weight()
        found = await weigh(whole, most)
        if found > most:
            raise Fault(413, "the body has more values than any request needs", "body_too_large")
        hold(len(whole) + WEIGHT_BYTES * found)
        return whole

    def _check_length(self, size: int) -> None:
        """Raise Fault (413) if a body of `size` bytes is too long."""
        most = self._settings().most_body_bytes
        if size > most:
            raise Fault(413, f"the body is longer than {most} bytes", "body_too_large")

    @contextlib.contextmanager
    def _holding(self, name: str) -> Iterator[Callable[[int], None]]:
        """Yield a function that reserves memory for one body of a caller, given the bytes that the
        body needs so far; it raises Fault where there is no room. All is released at the end."""
        held = 0

        def hold(needed: int) -> None:
            nonlocal held
            more = max(0, needed - SMALL_BYTES) - held
            capacity = BODIES_HELD * self._settings().most_body_bytes
            if more > 0 and not self._bodies.fits(name, more, capacity, divided=self._divided):
                why = f"the open requests' bodies are as long as may be, {self._share_of_all}"
                raise Fault(429, why, "overloaded")
            self._bodies.hold(name, more)
            held += more

        try:
            yield hold
        finally:
            self._bodies.hold(name, -held)

    @property
    def _divided(self) -> bool:
        return self._settings().several_keys

    @property
    def _share_of_all(self) -> str:
        return "or this key's share of them" if self._divided else "the most there may be"

    def _with_quota_headers(self, caller: Caller, send: Send) -> Send:
        """Wrap `send` to add headers with the rest of the key's quota."""
        key = caller.key
        if key is None:
            return send

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), *self._quotas.headers(key)]
                message = {**message, "headers": headers}
            await send(message)

        return sending


def generates(scope: Scope) -> bool:
    """Whether a request makes models or tokenizers work: every POST outside `/admin`."""
    path = pattern_of(scope)
    return scope["method"] == "POST" and path != "/admin" and not path.startswith("/admin/")


def _ending(send: Send, end: Callable[[], None]) -> Send:
    """Wrap `send` to call `end` before a response's last part is sent."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            end()
        await send(message)

    return sending


def _check_encoding(scope: Scope) -> None:
    """Raise Fault (415) for a compressed body: its length says nothing of the memory it takes."""
    coding = dict(scope["headers"]).get(b"content-encoding", b"").strip().lower()
    if coding not in (b"", b"identity"):
        named = coding[:40].decode("latin-1")
        why = f"the body has the Content-Encoding {named!r}; send it uncompressed, without it"
        raise Fault(415, why, "unsupported_encoding")


def _announced(scope: Scope) -> int:
    """Length of the body in bytes by the Content-Length header; 0 without one."""
    length = dict(scope["headers"]).get(b"content-length", b"")
    return int(length) if length.isdigit() else 0


async def _send_away(fault: Fault, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a client that may still be sending, and close its connection."""
    response = fault.response(context_of(scope))
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
