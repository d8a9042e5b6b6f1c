"""Define `Fault`, the exception that ends a request, and encode errors as status code and body.

All other exceptions become faults here (`Fault.of`). Bodies follow OpenAI's APIs, or the Messages
API for its clients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from ballast.core.errors import (
    BallastError,
    NotKept,
    RequestError,
    TokenizerFailed,
    Unavailable,
    UnknownModel,
)
from ballast.core.event import FailedOutput
from ballast.fleet.faults import fault_of
from ballast.fleet.key_hints import place_of
from ballast.fleet.schema import Keys
from ballast.server.http.json_response import (
    Error,
    ErrorBody,
    MessagesError,
    MessagesErrorBody,
    OllamaErrorBody,
    encode,
)
from ballast.server.http.request_context import RequestContext

_STATUS = {
    "invalid_request": 400,
    "context_length_exceeded": 400,
    "insufficient_memory": 400,
    "model_not_found": 404,
    "not_finite": 422,
    "tokenizer_failed": 422,
    "queue_full": 429,
    "queue_timeout": 429,
    "model_changed": 503,
    "model_failed": 503,
    "out_of_memory": 503,
    "unavailable": 503,
}
"""HTTP status by code of `FailedOutput` or `RequestError`; any other code is 500."""


_MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    422: "api_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Error types of the Messages API, by HTTP status."""

_LONGEST, _LONGEST_FIELD = 4096, 200
"""Most characters of a message, and of a field's name: they may quote a client's texts."""


class Fault(Exception):
    """Exception that ends the handling of a request with an error response.

    `retry_after`: seconds after which a retry may succeed; sent with 429 and 503 only.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        param: str | None = None,
        retry_after: float = 1.0,
    ) -> None:
        if len(message) > _LONGEST:
            message = f"{message[:_LONGEST]}..."
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.retry_after = retry_after

    @classmethod
    def of(cls, error: Exception) -> Fault:
        """Convert any exception; of one that is not Ballast's own, clients see only the class
        name."""
        if isinstance(error, Fault):
            return error
        if isinstance(error, RequestError):
            param = "model" if isinstance(error, UnknownModel) else error.param
            return cls(_STATUS.get(error.code, 400), str(error), error.code, param)
        if isinstance(error, TokenizerFailed):
            return cls(_STATUS[error.code], str(error), error.code)
        if isinstance(error, Unavailable):
            return cls(503, str(error), "unavailable")
        if isinstance(error, NotKept):
            return cls(507, str(error), "not_kept")
        if isinstance(error, BallastError):
            return cls(500, str(error), "internal_error")
        return cls(500, f"internal error ({type(error).__name__})", "internal_error")

    @classmethod
    def of_failed(cls, failed: FailedOutput, retry_after: float = 1.0) -> Fault:
        """Convert a failure that the worker reported."""
        status = _STATUS.get(failed.code, 500)
        return cls(status, failed.reason, failed.code, retry_after=retry_after)

    @classmethod
    def of_validation(cls, errors: Sequence[Any], form: Any = None, body: Any = None) -> Fault:
        """Convert pydantic's list of errors: the first field at fault, and the reason.

        `form`: type of the body; errors in settings are worded as those of the fleet file are.
        `body`: the decoded body, in which the path of the value at fault is looked up.
        """
        first = errors[0]
        if first["type"] == "string_type" and isinstance(first.get("input"), list) and errors[1:]:
            first = errors[1]  # a text or a list: of the list it is said what is wrong within it
        # ("body", field, index or branch of a union ...): clients know the field;
        # and so it does for ("query", parameter) or ("path", parameter).
        path = [str(part)[:_LONGEST_FIELD] for part in first["loc"][1:]]
        if first["type"] == "json_invalid":
            why = first.get("ctx", {}).get("error") or first["msg"]
            return cls(400, f"the body is not JSON: {why}", "invalid_request")
        if not path:
            return cls(400, _of_body(first), "invalid_request")
        param = path[0]
        if isinstance(form, type) and issubclass(form, Keys) and first["loc"][0] == "body":
            wrong = {**first, "loc": tuple(first["loc"][1:])}
            return cls(400, str(fault_of(wrong, form, pointer=place_of)), "invalid_request", param)
        reason = _reason(first)
        where = "" if reason.startswith(f"{param}[") else f"{_place(first, body)}: "
        return cls(400, where + reason, "invalid_request", param)

    @property
    def text(self) -> str:
        """The message as valid Unicode: it may quote a client's text that is not."""
        return _valid(self.message)

    @property
    def _text_with_field(self) -> str:
        """The message, which names the field at fault."""
        message = self.text
        if self.param is not None and not message.startswith(self.param):
            message = f"{_valid(self.param)}: {message}"
        return message

    def openai_body(self) -> bytes:
        """Encode the fault as JSON in the envelope of OpenAI's APIs."""
        kind = {
            422: "server_error",
            429: "rate_limit_error",
            500: "server_error",
            503: "server_error",
            507: "server_error",
        }
        default = "invalid_request_error"
        param = None if self.param is None else _valid(self.param)
        return encode(ErrorBody(Error(self.text, kind.get(self.status, default), param, self.code)))

    def messages_body(self, request_id: str) -> bytes:
        """Encode the fault as JSON in the envelope of the Messages API, which has no place for the
        field at fault."""
        message = self._text_with_field
        default = "api_error" if self.status >= 500 else "invalid_request_error"
        kind = _MESSAGES_TYPES.get(self.status, default)
        return encode(MessagesErrorBody(MessagesError(kind, message), request_id))

    def ollama_body(self) -> bytes:
        """Encode the fault as JSON in the envelope of Ollama's API."""
        return encode(OllamaErrorBody(self._text_with_field))

    def response(self, context: RequestContext) -> Response:
        """Build the error response, in the envelope of the client's API, and record the code in
        `context` for metrics, traces and the log. Sets `Retry-After` where a retry may help."""
        context.code = self.code
        if context.speaks_messages:
            body = self.messages_body(context.request_id)
        elif context.speaks_ollama:
            body = self.ollama_body()
        else:
            body = self.openai_body()
        headers = {}
        if self.status in (429, 503):
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after)))
        elif self.code == "unsupported_encoding":
            headers["accept-encoding"] = "identity"
        elif self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return Response(body, self.status, headers, "application/json")


def _valid(text: str) -> str:
    """Replace halves of surrogate pairs, which no client could decode."""
    return text.encode(errors="replace").decode()


def _of_body(error: Any) -> str:
    """Describe the error in a body as a whole."""
    if error["type"] == "missing":
        return "the body is empty: send a JSON object"
    if error["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return "the body must be a JSON object"
    return _in_words(error)


_WORDS = {
    "missing": "it is required",
    "list_type": "it should be a list",
    "dict_type": "it should be an object",
    "model_type": "it should be an object",
    "model_attributes_type": "it should be an object",
    "string_type": "it should be a text",
    "string_too_short": "it should not be empty",
    "bool_type": "it should be true or false",
    "bool_parsing": "it should be true or false",
    "int_type": "it should be a whole number",
    "int_parsing": "it should be a whole number",
    "int_from_float": "it should be a whole number",
    "float_type": "it should be a number",
    "float_parsing": "it should be a number",
    "union_tag_not_found": "its type should be a text",
    "union_tag_invalid": "its type should be a text",
}
"""Pydantic's types of errors, in JSON's words instead of Python's."""


def _in_words(error: Any) -> str:
    """Rephrase pydantic's message as the continuation of a sentence."""
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    if error["type"] in ("too_long", "too_short"):
        most = error["type"] == "too_long"
        bound = error["ctx"]["max_length" if most else "min_length"]
        found = error["ctx"].get("actual_length")
        more = "" if found is None else f", not {found}"
        return f"{'at most' if most else 'at least'} {bound}{more}"
    message = str(error["msg"]).replace("Input should", "it should")
    return _WORDS.get(error["type"], message[:1].lower() + message[1:])


def _place(error: Any, body: Any) -> str:
    """Write the path of the value at fault, as `messages[0].content`. Of pydantic's path, only keys
    and indices of the body count: between them it has its own names for the forms of a value."""
    path, value, steps = "", body, error["loc"][1:]
    for i, step in enumerate(steps):
        inner = isinstance(value, list) and isinstance(step, int) and step < len(value)
        if inner or (isinstance(value, dict) and step in value):
            value = value[step]
        elif i > 0 and not (error["type"] == "missing" and i == len(steps) - 1):
            continue
        path += f"[{step}]" if isinstance(step, int) else f".{step:.80}"
    return path.removeprefix(".")


def _reason(error: Any) -> str:
    value = error.get("input")
    if isinstance(value, str):
        value = value[:80]  # before it is escaped: it may have megabytes
    shown = (
        "" if isinstance(value, dict | list) or value in (None, "") else f"; it was {value!r:.80}"
    )
    return f"{_in_words(error)}{shown}"
