"""Define and validate requests of Ollama's API, and translate them to OpenAI requests.

What decides on memory (`keep_alive`, `num_ctx`, `num_gpu`) has no effect: here the fleet's
memory policy decides, for all clients together, and an operator may pin a model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StrictInt

from ballast.server.conversation import MOST_MESSAGES, Message
from ballast.server.http.fields import FINITE, MOST_INPUTS, Body, Penalty, Stop, Text, at_most
from ballast.server.openai.request import ChatRequest, CompletionRequest
from ballast.server.openai.text_request import EmbeddingRequest
from ballast.server.openai.translation import OwnFieldNames, json_schema, refuse, tool_call, turn
from ballast.server.tools.request import MOST_FUNCTIONS

LATEST = ":latest"
"""Tag that Ollama's clients append to a name without one."""
MOST_CALLS = 128
"""Most calls in one earlier message."""
KeepAlive = Annotated[str, Field(max_length=40)] | float | None


class OllamaOptions(BaseModel):
    """OllamaOptions that have an effect; others are ignored, as by Ollama."""

    model_config = ConfigDict(extra="allow")

    temperature: Annotated[float, FINITE, Field(ge=0, le=2)] | None = None
    top_k: Annotated[StrictInt, Field(ge=-1, lt=2**31)] | None = None
    top_p: Annotated[float, FINITE, Field(gt=0, le=1)] | None = None
    min_p: Annotated[float, FINITE, Field(ge=0, le=1)] | None = None
    repeat_penalty: Annotated[float, FINITE, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)] | None = None
    num_predict: StrictInt | None = None
    """Most tokens of the answer; negative: as many as the context allows."""
    stop: Stop = None

    @property
    def sampled(self) -> dict[str, Any]:
        """Return the options as fields of an OpenAI request."""
        most = self.num_predict
        return {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repetition_penalty": self.repeat_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "seed": self.seed,
            "max_tokens": None if most is None or most < 0 else most,
            "stop": self.stop,
        }


class GenerationRequest(Body, OwnFieldNames):
    """What requests that generate have in common."""

    NAMES: ClassVar[Sequence[tuple[str, str]]] = (
        (r"max_tokens$", "options.num_predict"),
        (r"repetition_penalty$", "options.repeat_penalty"),
        (
            r"(temperature|top_k|top_p|min_p|presence_penalty|frequency_penalty|seed|stop)$",
            r"options.\1",
        ),
        (r"response_format.*", "format"),
    )

    options: OllamaOptions = OllamaOptions()
    stream: StrictBool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    keep_alive: KeepAlive = None
    think: StrictBool | Literal["low", "medium", "high"] | None = None

    @property
    def streams(self) -> bool:
        """Whether the answer is a stream of lines, as it is by default."""
        return self.stream is not False

    @property
    def left_out(self) -> list[str]:
        """Parts of the request that have no effect here."""
        return [] if self.keep_alive is None else ["keep_alive"]

    @property
    def _fields(self) -> dict[str, Any]:
        """Fields of the OpenAI request."""
        wanted: dict[str, Any] | None = None
        if self.format == "json":
            wanted = {"type": "json_object"}
        elif isinstance(self.format, dict):
            wanted = json_schema(self.format, "answer", strict=True)
        return {
            **self.options.sampled,
            "model": self.model,
            "stream": self.streams,
            "response_format": wanted,
        }

    @property
    def _template(self) -> dict[str, Any]:
        if self.think is None:
            return {}
        effort = {"reasoning_effort": self.think} if isinstance(self.think, str) else {}
        return {"chat_template_kwargs": {"enable_thinking": bool(self.think), **effort}}


class OllamaTurn(BaseModel):
    """A message of a conversation."""

    role: Annotated[Text, Field(min_length=1)]
    content: Text | None = None
    images: list[Any] | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(max_length=MOST_CALLS)] | None = None
    tool_name: Text | None = None


class OllamaChatRequest(GenerationRequest):
    """`POST /api/chat`."""

    messages: Annotated[list[OllamaTurn], Field(fail_fast=True), at_most(MOST_MESSAGES)] = Field(
        default_factory=list
    )
    tools: (
        Annotated[list[dict[str, Any]], Field(max_length=MOST_FUNCTIONS, fail_fast=True)] | None
    ) = None

    @property
    def loads_only(self) -> bool:
        """Whether nothing is to be generated."""
        return not self.messages

    def chat(self) -> ChatRequest:
        """Convert to a chat request. Raises InvalidRequest."""
        chat = _Chat.model_construct(
            messages=list(self._turns()), tools=self.tools, **self._template, **self._fields
        )
        chat.leave_out(self.left_out)
        return chat

    def _turns(self) -> Iterator[Message]:
        """Yield the messages; answers of tools are those of the calls before, in order."""
        open_calls: list[str] = []
        for i, message in enumerate(self.messages):
            if message.images:
                raise refuse(f"messages.{i}.images", "models are served for text alone")
            calls = []
            for j, call in enumerate(message.tool_calls or ()):
                calls.append(_earlier_call(call, f"messages.{i}.tool_calls.{j}", f"call_{i}_{j}"))
                open_calls.append(calls[-1]["id"])
            more: dict[str, Any] = {"tool_calls": calls} if calls else {}
            if message.role == "tool":
                more["tool_call_id"] = open_calls.pop(0) if open_calls else f"call_{i}"
                if message.tool_name:
                    more["name"] = message.tool_name
            yield turn(message.role, message.content or "", **more)


def _earlier_call(call: dict[str, Any], field: str, id: str) -> dict[str, Any]:
    function = call.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str):
        raise refuse(f"{field}.function", "is an object with the name and arguments of a call")
    arguments = function.get("arguments") or {}
    if not isinstance(arguments, dict):
        raise refuse(f"{field}.function.arguments", "is an object")
    return tool_call(id, name, json.dumps(arguments))


class OllamaGenerateRequest(GenerationRequest):
    """`POST /api/generate`."""

    prompt: Text = ""
    system: Text | None = None
    suffix: Text | None = None
    template: Text | None = None
    raw: StrictBool | None = None
    images: list[Any] | None = None

    @property
    def loads_only(self) -> bool:
        """Whether nothing is to be generated."""
        return not self.prompt

    def generate(self, *, conversational: bool) -> ChatRequest | CompletionRequest:
        """Convert to a request of a conversation, or of the prompt alone where it is `raw` or the
        model has no chat template (`conversational` False). Raises InvalidRequest."""
        for field in ("suffix", "template", "images"):
            if getattr(self, field):
                raise refuse(field, "is not supported here")
        if self.raw or not conversational:
            return _Completion.model_construct(prompt=self.prompt, **self._fields)
        messages = [turn("system", self.system)] if self.system else []
        messages.append(turn("user", self.prompt))
        chat = _Chat.model_construct(messages=messages, **self._template, **self._fields)
        chat.leave_out(self.left_out)
        return chat


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


class EmbedRequest(Body):
    """`POST /api/embed`."""

    input: Annotated[
        list[Text],
        Field(min_length=1, max_length=MOST_INPUTS, fail_fast=True),
        BeforeValidator(_listed),
    ]
    truncate: StrictBool | None = None
    dimensions: Annotated[StrictInt, Field(ge=1)] | None = None
    keep_alive: KeepAlive = None
    options: dict[str, Any] | None = None

    def embedding(self) -> EmbeddingRequest:
        return EmbeddingRequest.model_construct(
            model=self.model, input=self.input, dimensions=self.dimensions
        )


class EmbeddingsRequest(Body):
    """`POST /api/embeddings`, which `/api/embed` has replaced."""

    prompt: Text
    keep_alive: KeepAlive = None
    options: dict[str, Any] | None = None

    def embedding(self) -> EmbeddingRequest:
        return EmbeddingRequest.model_construct(model=self.model, input=[self.prompt])


class NamedRequest(BaseModel):
    """A request about a model: `POST /api/show`, `/api/pull`."""

    model_config = ConfigDict(extra="ignore")

    model: Text | None = None
    name: Text | None = None
    """What `model` was called before."""
    stream: StrictBool | None = None

    @property
    def wanted(self) -> str:
        """The model's name. Raises InvalidRequest."""
        if not (found := self.model or self.name):
            raise refuse("model", "is required")
        return found


class _Chat(ChatRequest):
    @property
    def shortens_output(self) -> bool:
        return True


class _Completion(CompletionRequest):
    @property
    def shortens_output(self) -> bool:
        return True
