"""Add the schemas of responses to `/openapi.json`.

FastAPI derives the schemas of requests from the routes' types; responses are msgspec records, which
it does not know.
"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.responses import Response

from ballast.server.http.json_response import (
    ErrorBody,
    MessagesErrorBody,
    OllamaErrorBody,
    encode,
)
from ballast.server.messages_api.records import InputTokens, Message
from ballast.server.observe.memory_history import History
from ballast.server.observe.recent_requests import RequestList
from ballast.server.observe.server_state import ServerNow
from ballast.server.ollama_api.records import (
    ChatAnswer,
    EmbedAnswer,
    GenerateAnswer,
    LoadedModels,
    ModelTags,
    OneEmbedding,
    PullStatus,
    ShownModel,
)
from ballast.server.openai.records import (
    ChatCompletion,
    Detokenized,
    EmbeddingList,
    Model,
    ModelList,
    Reranking,
    RunningList,
    ScoreList,
    TextCompletion,
    Tokenized,
    Version,
)
from ballast.server.responses_api.records import ResponseRecord

Responses = dict[int | str, dict[str, Any]]
"""Type of the argument `responses` of FastAPI's routes."""

_ANSWERS = (
    ChatCompletion,
    TextCompletion,
    Message,
    InputTokens,
    ResponseRecord,
    EmbeddingList,
    Reranking,
    ScoreList,
    Tokenized,
    Detokenized,
    Model,
    ModelList,
    RunningList,
    Version,
    RequestList,
    History,
    ServerNow,
    ErrorBody,
    MessagesErrorBody,
    OllamaErrorBody,
    ChatAnswer,
    GenerateAnswer,
    EmbedAnswer,
    OneEmbedding,
    LoadedModels,
    ModelTags,
    PullStatus,
    ShownModel,
)
_REFERENCES, _COMPONENTS = msgspec.json.schema_components(
    _ANSWERS, ref_template="#/components/schemas/{name}"
)
_SCHEMAS = dict(zip(_ANSWERS, _REFERENCES, strict=True))
_EVENTS: dict[str, Any] = {"text/event-stream": {}}
"""Stream of events, without a schema: some readers take it for that of the whole text, some for
that of each event."""

_LINES: dict[str, Any] = {"application/x-ndjson": {}}
"""Stream of lines, each a JSON object."""


def _json(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {"application/json": {"schema": _SCHEMAS[kind]}}


def _errors(kind: type[msgspec.Struct]) -> Responses:
    return {
        "4XX": {"description": "The request cannot be served", "content": _json(kind)},
        "5XX": {"description": "The server failed, or cannot serve now", "content": _json(kind)},
    }


STREAM: Responses = {200: {"content": _EVENTS}}
"""Response of a route that answers with a stream of events alone."""
ERRORS = _errors(ErrorBody)
"""Error responses of every route, unless it has its own."""
MESSAGES_ERRORS = _errors(MessagesErrorBody)
"""Error responses of the Messages API."""
OLLAMA_ERRORS = _errors(OllamaErrorBody)
"""Error responses of Ollama's API."""


def responses_of(
    kind: type[msgspec.Struct], *, streams: bool = False, lines: bool = False
) -> Responses:
    """Describe the responses of a route that answers with a `kind`, or, with `streams`, also with a
    stream of events; with `lines`, of lines."""
    more = (_EVENTS if streams else {}) | (_LINES if lines else {})
    return {200: {"content": _json(kind) | more}}


def document(app: FastAPI) -> None:
    """Add the application's OpenAPI document, with the schemas that routes refer to, as
    `/openapi.json`."""
    made = app.openapi

    def openapi() -> dict[str, Any]:
        found = made()
        found["components"]["schemas"] |= _COMPONENTS
        return found

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI's documentation has it

    # Not a coroutine: FastAPI runs it on a thread, since making the document takes 0.3 s.
    @app.get("/openapi.json", include_in_schema=False)
    def schema() -> Response:
        return Response(encode(app.openapi()), media_type="application/json")
