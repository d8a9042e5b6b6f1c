"""The routes. Each checks, asks the service, and says the answer in the API's words."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ballast.core.errors import BallastError
from ballast.core.model import ModelSpec
from ballast.server.answers import ChatForm, Form, TextForm
from ballast.server.choice import Piece
from ballast.server.faults import Fault
from ballast.server.gate import Gate
from ballast.server.generation import Generation
from ballast.server.openai import ChatRequest, CompletionRequest, GenerateRequest
from ballast.server.reading import add_reading
from ballast.server.responses import Model, ModelList, encode
from ballast.server.service import Service
from ballast.server.sse import DONE, ClientGone, EventStream, event, unless_gone


def create_app(service: Service) -> Gate:
    """The application, behind its gate."""
    app = FastAPI(title="Ballast", docs_url=None, redoc_url=None)
    gate = Gate(app)
    _add_faults(app)
    _add_reading(app, service, gate)
    add_reading(app, service)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await _answer(service, body, request)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await _answer(service, body, request)

    return gate


def _add_reading(app: FastAPI, service: Service, gate: Gate) -> None:
    """Routes that change nothing."""

    @app.get("/v1/models")
    async def models() -> Response:
        made = [_model(service, spec) for spec in service.models.values()]
        return _json(ModelList(data=made))

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return _json(_model(service, service.model(name)))

    @app.get("/health")
    async def health() -> Response:
        failed = dict(service.controller.failed)
        if service.controller.lost is not None:
            why = service.controller.lost
            return _json({"status": "lost", "reason": why, "failed": failed}, 503)
        if gate.draining:
            return _json({"status": "draining", "failed": failed}, 503)
        return _json({"status": "ok", "failed": failed})


def _add_faults(app: FastAPI) -> None:
    """Every error leaves as OpenAI's error object."""

    async def ours(request: Request, error: Exception) -> Response:
        return Fault.of(error).response()

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return Fault.of_validation(error.errors()).response()

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
        what = f"{request.method} {request.url.path}: {error.detail}"
        return Fault(error.status_code, what, code).response()

    for kind in (Fault, BallastError):
        app.add_exception_handler(kind, ours)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, ours)


async def _answer(service: Service, body: GenerateRequest, request: Request) -> Response:
    """Generate, and answer whole or as a stream."""
    chat = isinstance(body, ChatRequest)
    answer_id = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
    generation = await service.generate(body, answer_id)
    spec = service.model(body.model)
    form = (ChatForm if chat else TextForm)(
        answer_id,
        int(service.wall.now()),
        spec.name,
        f"ballast-{spec.fingerprint[:12]}",
        service.tokenizer(spec.name),
        tells_usage=bool(body.stream) and body.include_usage,
        logprobs=body.wants_logprobs,
    )
    batches = generation.batches()
    handed_on = False
    try:
        if not body.stream:
            pieces = await unless_gone(request.receive, _all(batches))
            return _json(form.whole(pieces, generation.size, generation.usage))
        # The status waits for the first token: until then, an error can still be told by it.
        first = await unless_gone(request.receive, anext(batches))
        handed_on = True
        usage = body.include_usage
        chunks = _chunks(form, generation, first, batches, usage=usage)
        return EventStream(chunks, generation.close)
    except ClientGone:
        return Response(status_code=499)  # nobody reads it
    finally:
        if not handed_on:
            generation.close()


async def _all(batches: AsyncIterator[list[Piece]]) -> list[Piece]:
    return [piece async for batch in batches for piece in batch]


async def _chunks(
    form: Form,
    generation: Generation,
    first: list[Piece],
    batches: AsyncIterator[list[Piece]],
    *,
    usage: bool,
) -> AsyncIterator[bytes]:
    """The events of a stream; one chunk per token, those that came together sent together."""
    opening = form.opening(generation.size)
    yield b"".join(event(encode(c)) for c in [*opening, *map(form.chunk, first)])
    try:
        async for batch in batches:
            yield b"".join(event(encode(form.chunk(piece))) for piece in batch)
    except (Fault, BallastError) as error:
        yield event(Fault.of(error).body()) + DONE
        return
    if usage:
        yield event(encode(form.closing(generation.usage)))
    yield DONE


def _model(service: Service, spec: ModelSpec) -> Model:
    return Model(
        id=spec.name,
        created=service.started,
        root=spec.base or spec.name,
        parent=spec.base,
        max_model_len=spec.max_model_len,
    )


def _json(content: msgspec.Struct | dict[str, Any], status: int = 200) -> Response:
    return Response(encode(content), status, media_type="application/json")
