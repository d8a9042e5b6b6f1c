"""Translate requests of other APIs to OpenAI chat requests: the parts that these APIs share.

`messages_api` and `responses_api` build on it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from ballast.core.errors import InvalidRequest, RequestError
from ballast.server.conversation import Message
from ballast.server.http.faults import Fault
from ballast.server.openai.request import ChatRequest, SampledRequest


class OwnFieldNames:
    """A request whose errors name the fields of its own API."""

    NAMES: ClassVar[Sequence[tuple[str, str]]] = ()
    """Regular expressions for fields of chat requests, and the fields of this API that they come
    from. The first match counts."""

    @contextmanager
    def names(self) -> Iterator[None]:
        """Convert errors raised in the `with` block so that they name this API's field, not that of
        the chat request."""
        try:
            yield
        except RequestError as error:
            fault = Fault.of(error)
            ours = self._name(fault.param)
            message = fault.message
            if message.startswith(f"{fault.param}: "):
                message = f"{ours}: {message.removeprefix(f'{fault.param}: ')}"
            raise Fault(fault.status, message, fault.code, ours) from error

    def _name(self, field: str | None) -> str | None:
        for pattern, ours in self.NAMES:
            if field is not None and re.match(pattern, field):
                return re.sub(pattern, ours, field, count=1)
        return field


class TranslatedRequest(SampledRequest, OwnFieldNames):
    """A request of another API. Fields for sampling are spelled as in chat completions."""

    NAMES: ClassVar[Sequence[tuple[str, str]]] = ()
    chat_template_kwargs: dict[str, Any] | None = None

    def chat(self) -> ChatRequest:
        """Convert to a chat request. Raises InvalidRequest, naming fields of this API."""
        raise NotImplementedError

    def translated(self, kind: type[ChatRequest], **fields: Any) -> ChatRequest:
        """Build a chat request of this `kind` from the fields that are spelled alike, and `fields`.

        Nothing is validated again: all values have been checked as part of this request.
        """
        alike = {name: getattr(self, name) for name in TranslatedRequest.model_fields}
        return kind.model_construct(**alike, **fields)


def turn(role: str, content: str, **more: Any) -> Message:
    """Build a message of the conversation; `more` reaches the chat template."""
    return Message.model_construct(role=role, content=content, **more)


def tool_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Build an earlier tool call, as messages of chat requests have it. `arguments`: JSON."""
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def function_tool(tool: Mapping[str, Any], schema: str) -> dict[str, Any]:
    """Convert a function to a tool of a chat request. `schema`: key of its JSON schema in
    `tool`."""
    renamed = {"name": "name", "description": "description", schema: "parameters"}
    found = {theirs: tool[ours] for ours, theirs in renamed.items() if tool.get(ours) is not None}
    if tool.get("strict"):
        found["strict"] = True
    return {"type": "function", "function": found}


def json_schema(schema: object, name: str, *, strict: bool) -> dict[str, Any]:
    """Build a `response_format` of chat requests."""
    return {
        "type": "json_schema",
        "json_schema": {"name": name, "schema": schema, "strict": strict},
    }


def readable(part: object, kinds: Sequence[str], what: str) -> object:
    """Return `part`, or raise ValueError (for pydantic) for a type of content that is not
    supported."""
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind not in kinds:
        known = ", ".join(kinds)
        why = f"{what} of type {kind[:80]!r} cannot be read here, only {known}"
        raise ValueError(f"{why}: models are served for text alone")
    return part


def refuse(field: str, why: str) -> InvalidRequest:
    """Build the error for a field that is known but not supported."""
    return InvalidRequest(f"{field}: {why}", field)
