"""Define the records of Ollama's API, as its clients decode them."""

from __future__ import annotations

from typing import Any

import msgspec


class OllamaFunction(msgspec.Struct):
    name: str
    arguments: dict[str, Any]


class OllamaCall(msgspec.Struct):
    function: OllamaFunction


class OllamaMessage(msgspec.Struct, omit_defaults=True):
    role: str
    content: str
    tool_calls: list[OllamaCall] = []
    thinking: str = ""


class OllamaTimings(msgspec.Struct, omit_defaults=True):
    """The last part of every answer. Durations are nanoseconds."""

    total_duration: int = 0
    load_duration: int = 0
    """Time until the model had been loaded."""
    prompt_eval_count: int = 0
    prompt_eval_duration: int = 0
    """Time until the first token."""
    eval_count: int = 0
    eval_duration: int = 0


class ChatAnswer(OllamaTimings, kw_only=True, omit_defaults=True):
    """Answer of `/api/chat`, or a line of its stream."""

    model: str
    created_at: str
    message: OllamaMessage
    done: bool | None = None
    done_reason: str | None = None


class GenerateAnswer(OllamaTimings, kw_only=True, omit_defaults=True):
    """Answer of `/api/generate`, or a line of its stream."""

    model: str
    created_at: str
    response: str | None = None
    thinking: str = ""
    done: bool | None = None
    done_reason: str | None = None


class EmbedAnswer(msgspec.Struct):
    """Answer of `/api/embed`."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OneEmbedding(msgspec.Struct):
    """Answer of `/api/embeddings`."""

    embedding: list[float]


class ModelDetails(msgspec.Struct):
    parent_model: str
    """Base of an adapter; empty for other models."""
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class TaggedModel(msgspec.Struct):
    """A model of `/api/tags`."""

    name: str
    model: str
    modified_at: str
    size: int
    """Bytes of its weights as they are served."""
    digest: str
    details: ModelDetails


class ModelTags(msgspec.Struct):
    models: list[TaggedModel]


class LoadedModel(msgspec.Struct):
    """A model of `/api/ps`: its weights are on a device, or on their way."""

    name: str
    model: str
    size: int
    digest: str
    details: ModelDetails
    expires_at: str
    """When it goes if nobody asks for it (`ttl`); far away where memory alone decides."""
    size_vram: int
    """Bytes of its weights and KV cache on devices."""
    context_length: int


class LoadedModels(msgspec.Struct):
    models: list[LoadedModel]


class ShownModel(msgspec.Struct):
    """Answer of `/api/show`."""

    modelfile: str
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class PullStatus(msgspec.Struct, omit_defaults=True):
    """Answer of `/api/pull`, or a line of its stream."""

    status: str
    total: int = 0
    """Bytes of a download."""
    completed: int = 0
