"""Follows each HTTP request to its end, and tells metrics, traces and logs of it."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ballast.core.clock import Clock
from ballast.server.http import request_context
from ballast.server.http.request_context import RequestContext
from ballast.server.observe.metrics import Metrics

HEADER = b"x-request-id"
MESSAGES_HEADER = b"request-id"
"""The same for clients of the Messages API."""
_SANE = re.compile(rb"[\x21-\x7e]{1,128}")

Listener = Callable[[RequestContext], None]
"""Told of each request once it is over. It must neither wait nor raise."""


class Watch:
    """ASGI middleware, outermost: every response carries the request's id, and is told of."""

    def __init__(
        self, app: ASGIApp, metrics: Metrics, clock: Clock, listeners: Sequence[Listener] = ()
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._clock = clock
        self._listeners = tuple(listeners)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        made = RequestContext(
            scope["method"],
            scope["path"],
            Headers(scope=scope),
            self._clock.now(),
            request_id=request_id(dict(scope["headers"]).get(HEADER)),
        )
        request_context.begin(made)
        complete = False

        async def watched(message: Message) -> None:
            nonlocal complete
            if message["type"] == "http.response.start":
                self._begun(made, message)
            elif not message.get("more_body", False):
                complete = True
            await send(message)

        async def watching() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect" and not complete:
                made.gone = True
            return message

        try:
            await self._app(scope, watching, watched)
        finally:
            self._over(made, scope)

    def _begun(self, made: RequestContext, message: Message) -> None:
        made.status = message["status"]
        headers = [*message.get("headers", ())]
        if dict(headers).get(b"content-type", b"").startswith(b"text/event-stream"):
            made.streamed = True
            self._metrics.open_streams.inc()
        headers.append((HEADER, made.request_id.encode()))
        if made.speaks_messages:
            headers.append((MESSAGES_HEADER, made.request_id.encode()))
        message["headers"] = headers

    def _over(self, made: RequestContext, scope: Scope) -> None:
        made.ended = self._clock.now()
        made.route = getattr(scope.get("route"), "path", None)
        if made.streamed:
            self._metrics.open_streams.dec()
        code = made.code if made.status >= 400 else None
        seconds = made.ended - made.began
        self._metrics.answered(made.route, made.method, made.status, code, seconds)
        for listener in self._listeners:
            listener(made)


def request_id(told: bytes | None) -> str:
    """The client's, if it can stand in a header and a log line; else a new one."""
    if told is not None and _SANE.fullmatch(told):
        return told.decode()
    return f"req-{secrets.token_hex(12)}"
