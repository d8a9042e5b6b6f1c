"""Follow each HTTP request to its end, then pass its context to metrics and listeners (log,
traces).

`Watch` is the outermost ASGI middleware: it creates the `RequestContext` and the request id.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ballast.core.clock import Clock
from ballast.server.http.request_context import LEFT_OUT, RequestContext, attach_context
from ballast.server.observe.metrics import Metrics

HEADER = b"x-request-id"
MESSAGES_HEADER = b"request-id"
"""Header of the request id for clients of the Messages API."""
_SANE = re.compile(rb"[\x21-\x7e]{1,128}")

Listener = Callable[[RequestContext], None]
"""Called with the context of a finished request. It must neither wait nor raise."""


class Watch:
    """Outermost ASGI middleware: adds the request id to every response, and reports each request
    when it is over."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        clock: Clock,
        listeners: Sequence[Listener] = (),
        arrived: Listener = lambda context: None,
    ) -> None:
        """`arrived`: called with the context of each request that arrives."""
        self._app = app
        self._metrics = metrics
        self._clock = clock
        self._listeners = tuple(listeners)
        self._arrived = arrived

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context = RequestContext(
            scope["method"],
            scope["path"],
            Headers(scope=scope),
            self._clock.now(),
            request_id=request_id(dict(scope["headers"]).get(HEADER)),
        )
        attach_context(scope, context)
        self._arrived(context)
        complete = False

        async def watched(message: Message) -> None:
            nonlocal complete
            if message["type"] == "http.response.start":
                self._begun(context, message)
            elif not message.get("more_body", False):
                complete = True
            await send(message)

        async def watching() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect" and not complete:
                context.gone = True
            return message

        try:
            await self._app(scope, watching, watched)
        finally:
            self._over(context, scope)

    def _begun(self, context: RequestContext, message: Message) -> None:
        context.status = message["status"]
        headers = [*message.get("headers", ())]
        if dict(headers).get(b"content-type", b"").startswith(b"text/event-stream"):
            context.streamed = True
            self._metrics.open_streams.inc()
        headers.append((HEADER, context.request_id.encode()))
        if context.speaks_messages:
            headers.append((MESSAGES_HEADER, context.request_id.encode()))
        if context.left_out:
            headers.append((LEFT_OUT, context.left_out_header))
        message["headers"] = headers

    def _over(self, context: RequestContext, scope: Scope) -> None:
        context.ended = self._clock.now()
        context.route = getattr(scope.get("route"), "path", None)
        if context.streamed:
            self._metrics.open_streams.dec()
        code = context.code if context.status >= 400 else None
        seconds = context.ended - context.began
        self._metrics.answered(context.route, context.method, context.status, code, seconds)
        for listener in self._listeners:
            listener(context)


def request_id(given: bytes | None) -> str:
    """Return the client's id, if it is safe in a header and a log line; else a new one."""
    if given is not None and _SANE.fullmatch(given):
        return given.decode()
    return f"req-{secrets.token_hex(12)}"
