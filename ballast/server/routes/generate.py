"""Add the routes that generate text, and answer with a whole response or a stream of events.

Each API's request becomes one `GenerateRequest`, and each API has a form that writes the pieces of
output. All else is the same for all APIs.
"""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import Response

from ballast.server.http.off_loop import off_loop
from ballast.server.http.request_context import context_of
from ballast.server.messages_api.form import MessageForm, message_failed
from ballast.server.messages_api.records import Message
from ballast.server.messages_api.request import MessagesRequest, check_version
from ballast.server.openai.forms import ChatForm, Form, Head, TextForm
from ballast.server.openai.records import ChatCompletion, TextCompletion
from ballast.server.openai.request import ChatRequest, CompletionRequest
from ballast.server.responses_api.form import ResponseForm, response_failed
from ballast.server.responses_api.records import ResponseRecord
from ballast.server.responses_api.request import ResponsesRequest
from ballast.server.routes.answering import Asked, answer_request
from ballast.server.routes.openapi_document import MESSAGES_ERRORS, responses_of
from ballast.server.service import Service


def add_generating_routes(app: FastAPI, service: Service) -> None:
    """Add `/v1/chat/completions`, `/v1/completions`, `/v1/messages` and `/v1/responses`."""

    @app.post("/v1/chat/completions", responses=responses_of(ChatCompletion, streams=True))
    async def chat(body: ChatRequest, request: Request) -> Response:
        asked = Asked(body, "chatcmpl-", lambda h: ChatForm(h, body))
        return await answer_request(service, asked, request)

    @app.post("/v1/completions", responses=responses_of(TextCompletion, streams=True))
    async def completions(body: CompletionRequest, request: Request) -> Response:
        asked = Asked(body, "cmpl-", lambda h: TextForm(h, body))
        return await answer_request(service, asked, request)

    @app.post("/v1/messages", responses=MESSAGES_ERRORS | responses_of(Message, streams=True))
    async def messages(body: MessagesRequest, request: Request) -> Response:
        check_version(request.headers)
        service.check_fields(body)
        context = context_of(request.scope)
        chat = await off_loop(context.large_body, body.chat)
        body.messages = []  # as `encode_conversation` drops those of `chat`
        asked = Asked(chat, "msg_", lambda h: MessageForm(h, body), message_failed, body.names)
        return await answer_request(service, asked, request)

    @app.post("/v1/responses", responses=responses_of(ResponseRecord, streams=True))
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        service.check_fields(body)
        context = context_of(request.scope)
        chat, repeated = await off_loop(context.large_body, lambda: (body.chat(), body.repeated()))
        body.input = []  # as `encode_conversation` drops the messages of `chat`

        def form(head: Head) -> Form:
            return ResponseForm(head, chat, {**repeated, **body.sampled(head.sampling)})

        asked = Asked(chat, "resp_", form, response_failed, body.names)
        return await answer_request(service, asked, request)
