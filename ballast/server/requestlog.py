"""Request ids, and one line in the log for each request at its end."""

from __future__ import annotations

import logging
import re
import secrets
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ballast.core.clock import Clock
from ballast.server import visit
from ballast.server.keys import FREE
from ballast.server.visit import Visit

log = logging.getLogger("ballast.request")

HEADER = b"x-request-id"
_SANE = re.compile(rb"[\x21-\x7e]{1,128}")
_QUIET = (*FREE, "/metrics")
"""Asked for every few seconds by machines: logged only when debugging."""


class RequestLog:
    """ASGI middleware, outermost: every response carries the request's id, and is told of.

    A line never holds a prompt, an output or a key.
    """

    def __init__(self, app: ASGIApp, clock: Clock) -> None:
        self._app = app
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived = self._clock.now()
        made = Visit(request_id(dict(scope["headers"]).get(HEADER)))
        visit.begin(made)
        status, complete, gone = 0, False, False
        header = (HEADER, made.request_id.encode())

        async def noting(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), header]}
            elif not message.get("more_body", False):
                complete = True
            await send(message)

        async def watching() -> Message:
            nonlocal gone
            message = await receive()
            gone = gone or (message["type"] == "http.disconnect" and not complete)
            return message

        try:
            await self._app(scope, watching, noting)
        finally:
            level = logging.DEBUG if scope["path"] in _QUIET and status < 500 else logging.INFO
            if log.isEnabledFor(level):
                fields = {
                    "request_id": made.request_id,
                    "method": scope["method"],
                    "path": scope["path"][:200],
                    "status": status or 500,
                    "seconds": round(self._clock.now() - arrived, 4),
                    **_learnt(made, arrived),
                    **({"client_gone": True} if gone else {}),
                }
                log.log(level, "%s", _text(fields), extra={"fields": fields})


def request_id(told: bytes | None) -> str:
    """The client's, if it can stand in a header and a log line; else a new one."""
    if told is not None and _SANE.fullmatch(told):
        return told.decode()
    return f"req-{secrets.token_hex(12)}"


def _learnt(made: Visit, arrived: float) -> dict[str, Any]:
    """What was found out on the way; leaves out what there is not."""
    fields: dict[str, Any] = {}
    if made.caller.name:
        fields["key"] = made.caller.name
    if made.meter is not None:
        fields |= made.meter.fields(arrived)
    if made.error:
        fields["error"] = made.error
    return fields


def _text(fields: dict[str, Any]) -> str:
    """As `key=value`; a value that is not one word is quoted."""
    return " ".join(f"{k}={_word(v)}" for k, v in fields.items())


def _word(value: Any) -> str:
    text = str(value)
    return text if text.isascii() and text.isprintable() and " " not in text else ascii(text)
