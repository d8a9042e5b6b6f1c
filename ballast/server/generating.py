"""Routes that generate: check, ask the service, and answer whole or as a stream."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator

from fastapi import FastAPI, Request
from starlette.responses import Response

from ballast.core.errors import BallastError
from ballast.server.answers import ChatForm, Form, TextForm
from ballast.server.document import told
from ballast.server.faults import Fault
from ballast.server.generation import Generation
from ballast.server.openai import ChatRequest, CompletionRequest, GenerateRequest
from ballast.server.pieces import Piece
from ballast.server.responses import ChatCompletion, TextCompletion, answered, encode
from ballast.server.service import Service
from ballast.server.sse import DONE, PING, ClientGone, EventStream, event, unless_gone


def add_generating(app: FastAPI, service: Service) -> None:
    """`/v1/chat/completions` and `/v1/completions`."""

    @app.post("/v1/chat/completions", responses=told(ChatCompletion, streams=True))
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await _answer(service, body, request)

    @app.post("/v1/completions", responses=told(TextCompletion, streams=True))
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await _answer(service, body, request)


async def _answer(service: Service, body: GenerateRequest, request: Request) -> Response:
    chat = isinstance(body, ChatRequest)
    answer_id = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
    spec = service.model(body.model)
    generation = await service.generate(body, spec, answer_id)
    form = (ChatForm if chat else TextForm)(
        answer_id,
        int(service.wall.now()),
        spec.name,
        f"ballast-{spec.fingerprint[:12]}",
        service.tokenizer(spec.name),
        tells_usage=bool(body.stream) and body.include_usage,
        logprobs=body.told_logprobs,
    )
    handed_on = False
    try:
        if not body.stream:
            pieces = await unless_gone(request.receive, generation.whole())
            return answered(form.whole(pieces, generation.size, generation.usage))
        # The status waits a while for the first token: until then, an error can be told by it.
        batches = generation.batches(service.settings.ping_seconds)
        first = await unless_gone(request.receive, anext(batches))
        handed_on = True
        chunks = _chunks(form, generation, first, batches, usage=body.include_usage)
        return EventStream(chunks, generation.close)
    except ClientGone:
        return Response(status_code=499)  # nobody reads it
    finally:
        if not handed_on:
            generation.close()


async def _chunks(
    form: Form,
    generation: Generation,
    first: list[Piece],
    batches: AsyncIterator[list[Piece]],
    *,
    usage: bool,
) -> AsyncIterator[bytes]:
    """The events of a stream; one chunk per token, those that came together sent together.

    A silence (an empty batch) is filled with a comment, so that nobody takes it for the end.
    """
    opening = form.opening(generation.size)
    yield b"".join(event(encode(chunk)) for chunk in opening) + _told(form, first)
    try:
        async for batch in batches:
            yield _told(form, batch)
    except (Fault, BallastError) as error:
        yield event(Fault.of(error).body()) + DONE
        return
    if usage:
        yield event(encode(form.closing(generation.usage)))
    yield DONE


def _told(form: Form, batch: list[Piece]) -> bytes:
    return b"".join(event(form.encoded(piece)) for piece in batch) or PING
