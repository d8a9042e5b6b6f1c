"""What `/openapi.json` says of answers: requests it knows from the routes' own types."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI

from ballast.server.responses import (
    ChatCompletion,
    Detokenized,
    EmbeddingList,
    ErrorBody,
    Model,
    ModelList,
    TextCompletion,
    Tokenized,
)
from ballast.server.state import ServerNow

Responses = dict[int | str, dict[str, Any]]
"""As routes of FastAPI take them."""

_ANSWERS = (
    ChatCompletion,
    TextCompletion,
    EmbeddingList,
    Tokenized,
    Detokenized,
    Model,
    ModelList,
    ServerNow,
    ErrorBody,
)
_REFERENCES, _COMPONENTS = msgspec.json.schema_components(
    _ANSWERS, ref_template="#/components/schemas/{name}"
)
_SCHEMAS = dict(zip(_ANSWERS, _REFERENCES, strict=True))
_EVENTS: dict[str, Any] = {"text/event-stream": {}}
"""Without a schema: some readers take it for one of the whole text, some for one of each event."""


def _json(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {"application/json": {"schema": _SCHEMAS[kind]}}


ERRORS: Responses = {
    "4XX": {"description": "The request cannot be served", "content": _json(ErrorBody)},
    "5XX": {"description": "The server failed, or cannot serve now", "content": _json(ErrorBody)},
}
"""Of every route."""


def told(kind: type[msgspec.Struct], *, streams: bool = False) -> Responses:
    """Of a route that answers with a `kind`, or, if the request says so, with a stream."""
    return {200: {"content": _json(kind) | (_EVENTS if streams else {})}}


def document(app: FastAPI) -> None:
    """Have the application's document hold what routes refer to."""
    made = app.openapi

    def openapi() -> dict[str, Any]:
        found = made()
        found["components"]["schemas"] |= _COMPONENTS
        return found

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI's documentation has it
