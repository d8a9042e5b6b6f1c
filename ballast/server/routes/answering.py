"""Answer a request that generates: as a whole response, or as a stream.

Each API's request becomes one `GenerateRequest`, and each API has a form that writes the pieces of
output. All else is the same for all APIs. Used by the routes of all APIs.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass

from fastapi import Request
from starlette.responses import Response

from ballast.core.errors import BallastError
from ballast.server.generate.generation import Generation
from ballast.server.http.faults import Fault
from ballast.server.http.json_response import encode
from ballast.server.http.request_context import RequestContext, context_of
from ballast.server.http.sliced_response import SLICE_BYTES, SlicedResponse, slices
from ballast.server.http.sse import ClientGone, EventStream, comment, unless_gone
from ballast.server.model_loads import PendingLoad
from ballast.server.openai.forms import Form, Head, stream_failed
from ballast.server.openai.request import ChatRequest, GenerateRequest
from ballast.server.service import Service
from ballast.server.text.pieces import OutputPiece


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, and how its API answers."""

    request: GenerateRequest
    prefix: str
    """Of the answer's id."""
    form_of: Callable[[Head], Form]
    failed: Callable[[Fault, str], bytes] = stream_failed
    """Encodes the end of a stream that has not begun; the text is the request's id."""
    names: Callable[[], AbstractContextManager[None]] = nullcontext
    """Makes a context in which errors name the API's own fields."""
    waiting: Callable[[str], bytes] = comment
    """Encodes a part of a stream that says in words how far its model is loaded."""
    stream: type[EventStream] = EventStream


async def answer_request(service: Service, asked: Asked, request: Request) -> Response:
    """Answer a request in the form of its API."""
    context = context_of(request.scope)
    context.model = asked.request.model
    if isinstance(asked.request, ChatRequest):
        context.left_out = asked.request.left_out
    generation = None
    try:
        load = service.models.awaited(asked.request.model, context.caller)
        if load is not None:
            # As for the first token: after a while without its model a stream begins.
            patience = service.settings.ping_seconds if asked.request.stream else None
            if not await unless_gone(request.receive, service.loads.wait(load, patience)):
                return asked.stream(_after_load(service, asked, load, context), lambda: None)
        form, generation = await _begin(service, asked, context)
        if not asked.request.stream:
            with ExitStack() as holding:
                hold = holding.enter_context(service.answers.holding(context.caller.name))
                await unless_gone(request.receive, _collect(form, generation, hold))
                body = encode(form.whole((), generation.size, generation.usage))
                return SlicedResponse(slices(body), len(body), holding.pop_all().close)
        # Wait a while for the first token before sending the status: it can still be an error.
        batches = generation.batches(service.settings.ping_seconds)
        first = await unless_gone(request.receive, anext(batches))
        events = _events(form, generation, first, batches, context)
        closing, generation = generation.close, None  # the stream's from here on
        return asked.stream(events, closing)
    except ClientGone:
        return Response(status_code=499)  # nobody reads it
    finally:
        if generation is not None:
            generation.close()


async def _begin(
    service: Service, asked: Asked, context: RequestContext
) -> tuple[Form, Generation]:
    """Submit a request whose model has been loaded. Raises RequestError, Fault or Unavailable."""
    answer_id = f"{asked.prefix}{secrets.token_hex(12)}"
    model = asked.request.model
    with asked.names():
        spec = service.models.find(model, context.caller)
        generation = await service.generate(asked.request, spec, answer_id, context)
    try:
        head = Head(
            context.request_id,
            answer_id,
            model,
            f"ballast-{spec.fingerprint[:12]}",
            service.models.tokenizer(spec.name),
            service.wall,
            int(service.wall.now()),
            spec.sampling,
        )
        return asked.form_of(head), generation
    except BaseException:
        generation.close()
        raise


async def _after_load(
    service: Service, asked: Asked, load: PendingLoad, context: RequestContext
) -> AsyncIterator[bytes]:
    """Yield comments until the model has been loaded, and then the events of the stream."""
    while not await service.loads.wait(load, 0.0):
        yield asked.waiting(service.loads.described(load))
        await service.loads.wait(load, service.settings.ping_seconds)
    try:
        form, generation = await _begin(service, asked, context)
    except (Fault, BallastError) as error:
        fault = Fault.of(error)
        context.code = fault.code
        yield asked.failed(fault, context.request_id)
        return
    try:
        batches = generation.batches(service.settings.ping_seconds)
        async for events in _events(form, generation, [], batches, context):
            yield events
    finally:
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
