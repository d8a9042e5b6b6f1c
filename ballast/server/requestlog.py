"""One line in the log for each request at its end."""

from __future__ import annotations

import logging
from typing import Any

from ballast.server.keys import FREE
from ballast.server.visit import Visit

log = logging.getLogger("ballast.request")

_QUIET = (*FREE, "/metrics")
"""Asked for every few seconds by machines: logged only when debugging."""


def log_request(visit: Visit) -> None:
    """A line never holds a prompt, an output or a key."""
    level = logging.DEBUG if visit.path in _QUIET and visit.status < 500 else logging.INFO
    if log.isEnabledFor(level):
        fields = _fields(visit)
        log.log(level, "%s", _text(fields), extra={"fields": fields})


def _fields(visit: Visit) -> dict[str, Any]:
    """What was found out on the way; leaves out what there is not."""
    assert visit.ended is not None  # told of at the end only
    fields: dict[str, Any] = {
        "request_id": visit.request_id,
        "method": visit.method,
        "path": visit.path[:200],
        "status": visit.status,
        "seconds": round(visit.ended - visit.began, 4),
    }
    if visit.caller.name:
        fields["key"] = visit.caller.name
    if visit.meter is not None:
        fields |= visit.meter.fields(visit.began)
    if visit.code is not None:
        fields["error"] = visit.code
    if visit.gone:
        fields["client_gone"] = True
    return fields


def _text(fields: dict[str, Any]) -> str:
    """As `key=value`; a value that is not one word is quoted."""
    return " ".join(f"{k}={_word(v)}" for k, v in fields.items())


def _word(value: Any) -> str:
    text = str(value)
    return text if text.isascii() and text.isprintable() and " " not in text else ascii(text)
