"""Encode records as JSON responses, and define the error envelopes of each API."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response


class Error(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct):
    error: Error


class MessagesError(msgspec.Struct):
    type: str
    message: str


class MessagesErrorBody(msgspec.Struct, tag_field="type", tag="error"):
    """An error in the envelope of the Messages API."""

    error: MessagesError
    request_id: str


class OllamaErrorBody(msgspec.Struct):
    """An error in the envelope of Ollama's API."""

    error: str


encode = msgspec.json.Encoder().encode


def answered(content: msgspec.Struct | dict[str, Any], status: int = 200) -> Response:
    """Encode a record as a whole HTTP response."""
    return Response(encode(content), status, media_type="application/json")
