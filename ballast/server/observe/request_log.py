"""Log one line for each HTTP request when it ends; never a prompt, an output or a key."""

from __future__ import annotations

import logging
from typing import Any

from ballast.server.access.keys import FREE
from ballast.server.http.request_context import RequestContext

log = logging.getLogger("ballast.request")

_QUIET = (*FREE, "/metrics", "/admin/state", "/admin/requests")
"""Routes that machines and the page poll every few seconds: logged only when debugging."""


def log_request(context: RequestContext) -> None:
    """Log a finished request, in a line that never holds a prompt, an output or a key."""
    quiet = (context.route or context.path) in _QUIET and context.status < 500
    level = logging.DEBUG if quiet else logging.INFO
    if log.isEnabledFor(level):
        fields = _fields(context)
        log.log(level, "%s", _text(fields), extra={"fields": fields})


def _fields(context: RequestContext) -> dict[str, Any]:
    """Collect the fields of the log line; leaves out those without a value."""
    assert context.ended is not None  # called at the end only
    fields: dict[str, Any] = {
        "request_id": context.request_id,
        "method": context.method,
        "path": context.path[:200],
        "status": context.status,
        "seconds": round(context.ended - context.began, 4),
    }
    if context.caller.name:
        fields["key"] = context.caller.name
    if context.answer is not None:
        fields |= context.answer.log_fields(context.began)
    if context.code is not None:
        fields["error"] = context.code
    if context.gone:
        fields["client_gone"] = True
    return fields


def _text(fields: dict[str, Any]) -> str:
    """Format fields as `key=value`; a value that is not one word is quoted."""
    return " ".join(f"{k}={_word(v)}" for k, v in fields.items())


def _word(value: Any) -> str:
    text = str(value)
    return text if text.isascii() and text.isprintable() and " " not in text else ascii(text)
