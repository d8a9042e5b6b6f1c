"""Add the routes of Ollama's API (`/api/...`), for clients that speak no other.

They generate and describe. What would change the fleet is an operator's: `pull` succeeds for models
that are served, or that the operator lets clients pull, and there are no other such routes. Where
keys are asked for, these routes ask for one as well; Ollama's own client sends it as a header.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

from fastapi import FastAPI, Request
from starlette.responses import Response

from ballast import __version__
from ballast.core.errors import BallastError, UnknownModel
from ballast.core.model import ModelSpec
from ballast.server.admin.pulls import Pulls
from ballast.server.generate.embedding import numbers_of
from ballast.server.http.faults import Fault
from ballast.server.http.json_response import answered
from ballast.server.http.off_loop import off_loop
from ballast.server.http.request_context import Caller, RequestContext, context_of
from ballast.server.http.sse import ClientGone, LineStream, unless_gone
from ballast.server.ollama_api.catalogue import NEVER, details, family_of, shown, tagged
from ballast.server.ollama_api.form import AnswerWriter, OllamaForm, line, line_failed, stamp
from ballast.server.ollama_api.records import (
    ChatAnswer,
    EmbedAnswer,
    GenerateAnswer,
    LoadedModel,
    LoadedModels,
    ModelTags,
    OneEmbedding,
    PullStatus,
    ShownModel,
)
from ballast.server.ollama_api.request import (
    LATEST,
    EmbeddingsRequest,
    EmbedRequest,
    GenerationRequest,
    NamedRequest,
    OllamaChatRequest,
    OllamaGenerateRequest,
)
from ballast.server.openai.records import Version
from ballast.server.openai.request import GenerateRequest
from ballast.server.routes.answering import Asked, answer_request
from ballast.server.routes.catalogue import resident
from ballast.server.routes.openapi_document import OLLAMA_ERRORS, responses_of
from ballast.server.service import Service


def add_ollama_routes(app: FastAPI, service: Service, pulls: Pulls) -> None:
    """Add the routes below `/api`."""
    _add_generating(app, service)
    _add_embedding(app, service)
    _add_listing(app, service)
    _add_pull(app, service, pulls)


def _named(service: Service, name: str) -> str:
    """Return a model's name without the tag that Ollama's clients append, unless it has that."""
    return name if service.models.knows(name) else name.removesuffix(LATEST)


def _add_generating(app: FastAPI, service: Service) -> None:
    """Add `/api/chat` and `/api/generate`."""

    @app.post("/api/chat", responses=OLLAMA_ERRORS | responses_of(ChatAnswer, lines=True))
    async def chat(body: OllamaChatRequest, request: Request) -> Response:
        context = context_of(request.scope)
        writer = _writer(service, body, context, chats=True)
        if body.loads_only:
            return await _loaded(service, body, writer, request)
        wanted = await off_loop(context.large_body, body.chat)
        body.messages = []  # as `encode_conversation` drops those of `wanted`
        return await _answer(service, body, wanted, writer, request)

    @app.post("/api/generate", responses=OLLAMA_ERRORS | responses_of(GenerateAnswer, lines=True))
    async def generate(body: OllamaGenerateRequest, request: Request) -> Response:
        context = context_of(request.scope)
        writer = _writer(service, body, context, chats=False)
        if body.loads_only:
            return await _loaded(service, body, writer, request)
        spec = await _arrived(service, body.model, request)
        if spec is None:
            return Response(status_code=499)  # nobody reads it
        conversational = bool(service.models.tokenizer(spec.name).chat.text)
        wanted = body.generate(conversational=conversational)
        return await _answer(service, body, wanted, writer, request)


def _writer(
    service: Service, body: GenerationRequest, context: RequestContext, *, chats: bool
) -> AnswerWriter:
    """Check fields, and make what writes the answer, by the name that the client has used."""
    service.check_fields(body)
    named = body.model
    body.model = _named(service, named)
    context.left_out = body.left_out
    return AnswerWriter(named, service.clock, service.wall, service.clock.now(), chats=chats)


async def _answer(
    service: Service,
    body: GenerationRequest,
    wanted: GenerateRequest,
    writer: AnswerWriter,
    request: Request,
) -> Response:
    asked = Asked(
        wanted,
        "ollama-",
        lambda head: OllamaForm(head, writer),
        line_failed,
        body.names,
        lambda words: line(writer.answer()),
        LineStream,
    )
    return await answer_request(service, asked, request)


async def _arrived(service: Service, name: str, request: Request) -> ModelSpec | None:
    """Wait until a model has been loaded; None: the client has left."""
    caller = context_of(request.scope).caller
    try:
        return await unless_gone(request.receive, service.models.arrived(name, caller))
    except ClientGone:
        return None


async def _loaded(
    service: Service, body: GenerationRequest, writer: AnswerWriter, request: Request
) -> Response:
    """Answer a request without a prompt, by which Ollama's clients load a model, or unload it with
    a `keep_alive` of 0."""
    unload = body.keep_alive in (0, "0", "0s", "0m", "0h")
    if await _arrived(service, body.model, request) is None:
        return Response(status_code=499)  # nobody reads it
    answer = writer.loaded(unload=unload)
    if not body.streams:
        return answered(answer)
    return Response(line(answer), media_type=LineStream.media_type)


def _add_embedding(app: FastAPI, service: Service) -> None:
    """Add `/api/embed`, and `/api/embeddings` of earlier clients."""

    @app.post("/api/embed", responses=OLLAMA_ERRORS | responses_of(EmbedAnswer))
    async def embed(body: EmbedRequest, request: Request) -> Response:
        began = service.clock.now()
        service.check_fields(body)
        found = await _embedded(service, body, request)
        if found is None:
            return Response(status_code=499)  # nobody reads it
        vectors, tokens = found
        taken = round((service.clock.now() - began) * 1e9)
        return answered(EmbedAnswer(body.model, vectors, taken, 0, tokens))

    @app.post("/api/embeddings", responses=OLLAMA_ERRORS | responses_of(OneEmbedding))
    async def embeddings(body: EmbeddingsRequest, request: Request) -> Response:
        service.check_fields(body)
        found = await _embedded(service, body, request)
        if found is None:
            return Response(status_code=499)  # nobody reads it
        return answered(OneEmbedding(found[0][0]))


async def _embedded(
    service: Service, body: EmbedRequest | EmbeddingsRequest, request: Request
) -> tuple[list[list[float]], int] | None:
    """Return the embeddings of a request's texts, and the number of their tokens; None: the client
    has left."""
    context = context_of(request.scope)
    wanted = body.embedding()
    wanted.model = _named(service, body.model)
    embedding = await service.embed(wanted, f"ollama-{secrets.token_hex(12)}", context)
    try:
        values = await unless_gone(request.receive, embedding.vectors())
        return [numbers_of(v) for v in values], embedding.usage.prompt_tokens
    except ClientGone:
        return None
    finally:
        embedding.close()


def _add_listing(app: FastAPI, service: Service) -> None:
    """Add the routes that describe models and the server."""

    @app.get("/api/tags", responses=OLLAMA_ERRORS | responses_of(ModelTags))
    async def tags(request: Request) -> Response:
        caller = context_of(request.scope).caller
        return answered(await asyncio.to_thread(_tags, service, caller))

    @app.post("/api/show", responses=OLLAMA_ERRORS | responses_of(ShownModel))
    async def show(body: NamedRequest, request: Request) -> Response:
        caller = context_of(request.scope).caller
        spec = await _arrived(service, _named(service, body.wanted), request)
        if spec is None:
            return Response(status_code=499)  # nobody reads it
        tokenizer = service.models.tokenizer(spec.name)
        service.models.find(spec.name, caller)
        family = await asyncio.to_thread(_family, service, spec)
        return answered(shown(spec, family, tokenizer, stamp(service.started)))

    @app.get("/api/ps", responses=OLLAMA_ERRORS | responses_of(LoadedModels))
    async def ps(request: Request) -> Response:
        caller = context_of(request.scope).caller
        return answered(await asyncio.to_thread(_loaded_models, service, caller))

    @app.get("/api/version", responses=OLLAMA_ERRORS | responses_of(Version))
    async def version() -> Response:
        return answered(Version(version=__version__))


def _family(service: Service, spec: ModelSpec) -> str:
    return family_of(service.controller.devices.fleet, spec.base or spec.name)


def _tags(service: Service, caller: Caller) -> ModelTags:
    aliases, at = service.controller.devices.fleet.aliases, stamp(service.started)
    return ModelTags(
        [
            tagged(spec, _family(service, spec), name, at)
            for spec in service.models.visible_to(caller).values()
            for name in (spec.name, *aliases.get(spec.name, ()))
        ]
    )


def _loaded_models(service: Service, caller: Caller) -> LoadedModels:
    models, now = service.models.visible_to(caller), datetime.now(UTC)
    found: list[LoadedModel] = []
    for running in resident(service, caller):
        spec = models[running.model]
        ends = now + timedelta(seconds=running.ttl) if running.ttl else None
        found.append(
            LoadedModel(
                name=spec.name,
                model=spec.name,
                size=sum(spec.segment_bytes),
                digest=spec.fingerprint,
                details=details(spec, _family(service, spec)),
                expires_at=NEVER if ends is None else stamp(ends.timestamp()),
                size_vram=running.memory,
                context_length=spec.max_model_len,
            )
        )
    return LoadedModels(found)


def _add_pull(app: FastAPI, service: Service, pulls: Pulls) -> None:
    """Add `/api/pull`: for models that are served, and others that the operator allows."""

    @app.post("/api/pull", responses=OLLAMA_ERRORS | responses_of(PullStatus, lines=True))
    async def pull(body: NamedRequest, request: Request) -> Response:
        caller = context_of(request.scope).caller
        name = _named(service, body.wanted)
        try:
            if service.models.awaited(name, caller) is None:
                service.models.find(name, caller)
        except UnknownModel as error:
            restricted = caller.key is not None and caller.key.models is not None
            if restricted or service.models.knows(name) or not pulls.allows(name):
                why = f"{error}; an operator adds models (POST /admin/models, or the fleet file), "
                why += "or allows clients to pull them (`server.pull`)"
                raise Fault(403, why, "forbidden", "model") from error
            steps = _downloaded(pulls, name)
        else:
            steps = _pulled(service, name, caller)
        if body.stream is not False:
            return LineStream(_lines(steps), lambda: None)
        try:
            await unless_gone(request.receive, _last(steps))
        except ClientGone:
            return Response(status_code=499)  # nobody reads it
        return answered(PullStatus("success"))


async def _lines(steps: AsyncIterator[PullStatus]) -> AsyncIterator[bytes]:
    """Yield steps as lines; an error is the last."""
    try:
        async for step in steps:
            yield line(step)
    except (Fault, BallastError) as error:
        yield line_failed(Fault.of(error))


async def _last(steps: AsyncIterator[PullStatus]) -> None:
    async for _ in steps:
        pass


async def _downloaded(pulls: Pulls, name: str) -> AsyncIterator[PullStatus]:
    """Yield how far a model is downloaded, until it serves. Raises Fault, Unavailable or
    NotKept."""
    yield PullStatus(f"pulling {name}")
    async for step in pulls.pull(name):
        yield PullStatus(f"pulling {name}", step.total, step.completed)
    yield PullStatus("success")


async def _pulled(service: Service, name: str, caller: Caller) -> AsyncIterator[PullStatus]:
    """Yield how far a model is loaded, until it serves. Raises UnknownModel where that fails."""
    load = service.models.awaited(name, caller)
    while load is not None and not await service.loads.wait(load, 0.0):
        yield PullStatus(service.loads.described(load))
        await service.loads.wait(load, service.settings.ping_seconds)
    service.models.find(name, caller)
    yield PullStatus("success")
