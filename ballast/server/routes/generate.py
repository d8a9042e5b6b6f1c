"""Add the routes that generate text, and answer with a whole response or a stream of events.

Each API's request becomes one `GenerateRequest`, and each API has a form that writes the pieces of
output. All else is the same for all APIs.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack

from fastapi import FastAPI, Request
from starlette.responses import Response

from ballast.core.errors import BallastError
from ballast.server.generate.generation import Generation
from ballast.server.http.faults import Fault
from ballast.server.http.json_response import encode
from ballast.server.http.off_loop import off_loop
from ballast.server.http.request_context import RequestContext, context_of
from ballast.server.http.sliced_response import SLICE_BYTES, SlicedResponse, slices
from ballast.server.http.sse import ClientGone, EventStream, unless_gone
from ballast.server.messages_api.form import MessageForm
from ballast.server.messages_api.records import Message
from ballast.server.messages_api.request import MessagesRequest, check_version
from ballast.server.openai.forms import ChatForm, Form, Head, TextForm
from ballast.server.openai.records import ChatCompletion, TextCompletion
from ballast.server.openai.request import ChatRequest, CompletionRequest, GenerateRequest
from ballast.server.responses_api.form import ResponseForm
from ballast.server.responses_api.records import ResponseRecord
from ballast.server.responses_api.request import ResponsesRequest
from ballast.server.routes.openapi_document import MESSAGES_ERRORS, responses_of
from ballast.server.service import Service
from ballast.server.text.pieces import OutputPiece


def add_generating_routes(app: FastAPI, service: Service) -> None:
    """Add `/v1/chat/completions`, `/v1/completions`, `/v1/messages` and `/v1/responses`."""

    @app.post("/v1/chat/completions", responses=responses_of(ChatCompletion, streams=True))
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await _answer(service, body, request, "chatcmpl-", lambda h: ChatForm(h, body))

    @app.post("/v1/completions", responses=responses_of(TextCompletion, streams=True))
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await _answer(service, body, request, "cmpl-", lambda h: TextForm(h, body))

    @app.post("/v1/messages", responses=MESSAGES_ERRORS | responses_of(Message, streams=True))
    async def messages(body: MessagesRequest, request: Request) -> Response:
        check_version(request.headers)
        service.check_fields(body)
        context = context_of(request.scope)
        chat = await off_loop(context.large_body, body.chat)
        body.messages = []  # as `encode_conversation` drops those of `chat`
        with body.names():
            return await _answer(service, chat, request, "msg_", lambda h: MessageForm(h, body))

    @app.post("/v1/responses", responses=responses_of(ResponseRecord, streams=True))
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        service.check_fields(body)
        context = context_of(request.scope)
        defaults = service.models.find(body.model, context.caller).sampling
        chat, repeated = await off_loop(
            context.large_body, lambda: (body.chat(), body.repeated(defaults))
        )
        body.input = []  # as `encode_conversation` drops the messages of `chat`
        with body.names():
            return await _answer(
                service, chat, request, "resp_", lambda h: ResponseForm(h, chat, repeated)
            )


async def _answer(
    service: Service,
    asked: GenerateRequest,
    request: Request,
    prefix: str,
    form_of: Callable[[Head], Form],
) -> Response:
    """Answer a request in the form of its API; `prefix`: of the answer's id."""
    context = context_of(request.scope)
    if isinstance(asked, ChatRequest):
        context.left_out = asked.left_out
    answer_id = f"{prefix}{secrets.token_hex(12)}"
    spec = service.models.find(asked.model, context.caller)
    generation = await service.generate(asked, spec, answer_id, context)
    handed_on = False
    try:
        form = form_of(
            Head(
                context.request_id,
                answer_id,
                asked.model,
                f"ballast-{spec.fingerprint[:12]}",
                service.models.tokenizer(spec.name),
                service.wall,
                int(service.wall.now()),
            )
        )
        if not asked.stream:
            with ExitStack() as holding:
                hold = holding.enter_context(service.answers.holding(context.caller.name))
                await unless_gone(request.receive, _collect(form, generation, hold))
                body = encode(form.whole((), generation.size, generation.usage))
                return SlicedResponse(slices(body), len(body), holding.pop_all().close)
        # Wait a while for the first token before sending the status: it can still be an error.
        batches = generation.batches(service.settings.ping_seconds)
        first = await unless_gone(request.receive, anext(batches))
        handed_on = True
        return EventStream(_events(form, generation, first, batches, context), generation.close)
    except ClientGone:
        return Response(status_code=499)  # nobody reads it
    finally:
        if not handed_on:
            generation.close()


async def _collect(form: Form, generation: Generation, hold: Callable[[int], None]) -> None:
    """Add all pieces to the form as they arrive. Raises Fault."""
    async for batch in generation.batches():
        form.add(batch)
        hold(form.held)


async def _events(
    form: Form,
    generation: Generation,
    first: list[OutputPiece],
    batches: AsyncIterator[list[OutputPiece]],
    context: RequestContext,
) -> AsyncIterator[bytes]:
    """Yield the events of a stream; those of tokens that came together are one chunk.

    A silence (an empty batch) is filled, so that clients do not take it for the end.
    """
    opening = form.opening(generation.size, generation.usage)
    yield opening + (form.events(first) if first else form.silence)
    try:
        async for batch in batches:
            for events in form.parts(batch) if batch else (form.silence,):
                if events:
                    yield events
                if len(events) >= SLICE_BYTES:
                    await asyncio.sleep(0)
    except (Fault, BallastError) as error:
        fault = Fault.of(error)
        context.code = fault.code
        yield form.failed(fault)
        return
    yield form.closing(generation.usage)
