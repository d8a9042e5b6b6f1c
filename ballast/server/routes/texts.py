"""Add the routes that generate no text: tokenize, detokenize, count tokens, embed, score."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from fastapi import FastAPI, Request
from starlette.responses import Response

from ballast.core.errors import InvalidRequest
from ballast.server.generate.parameters import check_tokens
from ballast.server.http.json_response import answered
from ballast.server.http.off_loop import off_loop
from ballast.server.http.request_context import context_of
from ballast.server.http.sliced_response import SlicedResponse
from ballast.server.http.sse import ClientGone, unless_gone
from ballast.server.messages_api.records import InputTokens
from ballast.server.messages_api.request import CountRequest, check_version
from ballast.server.openai.records import (
    Detokenized,
    EmbeddingList,
    EmbeddingUsage,
    PairScore,
    RerankedDocument,
    RerankedText,
    Reranking,
    ScoreList,
    Tokenized,
)
from ballast.server.openai.text_request import (
    DetokenizeRequest,
    EmbeddedTexts,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    TokenizeRequest,
)
from ballast.server.routes.openapi_document import MESSAGES_ERRORS, responses_of
from ballast.server.service import Service
from ballast.server.text.tokenizer import LONG_TEXT

MOST_DETOKENIZED = 65_536
"""Most tokens in a request to detokenize, unless the model's context is longer."""


def add_text_routes(app: FastAPI, service: Service) -> None:
    """Add `/tokenize`, `/detokenize`, `/v1/messages/count_tokens`, `/v1/embeddings`, `/v1/rerank`
    and `/v1/score`."""
    _add_token_routes(app, service)
    _add_embedding_route(app, service)
    _add_score_routes(app, service)


def _add_token_routes(app: FastAPI, service: Service) -> None:
    """Add the routes that tokenize texts and conversations, and that decode tokens."""

    @app.post("/tokenize", responses=responses_of(Tokenized))
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        context = context_of(request.scope)
        spec = await service.models.arrived(body.model, context.caller)
        tokenizer = service.models.tokenizer(spec.name)
        service.check_fields(body)
        body.check()
        context.left_out = body.left_out
        if body.prompt is None:
            tokens = await service.prompts.encode_conversation(body, spec, tokenizer, context)
        else:
            special = body.add_special_tokens is not False
            [tokens] = await service.prompts.encode_texts(
                [body.prompt], spec, tokenizer, "prompt", special=special
            )
        shown = None
        if body.return_token_strs:
            shown = await off_loop(len(tokens) > LONG_TEXT, lambda: tokenizer.spelled(tokens))
        tokenized = Tokenized(
            count=len(tokens), max_model_len=spec.max_model_len, tokens=tokens, token_strs=shown
        )
        return answered(tokenized)

    @app.post("/detokenize", responses=responses_of(Detokenized))
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        spec = await service.models.arrived(body.model, context_of(request.scope).caller)
        service.check_fields(body)
        most = max(spec.max_model_len, MOST_DETOKENIZED)
        if len(body.tokens) > most:
            raise InvalidRequest(f"tokens: at most {most}, not {len(body.tokens)}", "tokens")
        check_tokens(body.tokens, spec, "tokens")
        tokenizer = service.models.tokenizer(spec.name)
        text = await off_loop(len(body.tokens) > LONG_TEXT, lambda: tokenizer.decode(body.tokens))
        return answered(Detokenized(text))

    @app.post("/v1/messages/count_tokens", responses=MESSAGES_ERRORS | responses_of(InputTokens))
    async def count_tokens(body: CountRequest, request: Request) -> Response:
        check_version(request.headers)
        context = context_of(request.scope)
        spec = await service.models.arrived(body.model, context.caller)
        service.check_fields(body)
        chat = await off_loop(context.large_body, body.chat)
        context.left_out = chat.left_out
        with body.names():
            tokens = await service.prompts.encode_conversation(
                chat, spec, service.models.tokenizer(spec.name), context
            )
        return answered(InputTokens(len(tokens)))


def _add_embedding_route(app: FastAPI, service: Service) -> None:
    """Add `/v1/embeddings`."""

    @app.post("/v1/embeddings", responses=responses_of(EmbeddingList))
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        context = context_of(request.scope)
        embedding = await service.embed(body, f"embd-{secrets.token_hex(12)}", context)
        try:
            encoding = body.encoding_format or "float"
            whole = embedding.whole(encoding, body.model)
            return SlicedResponse(await unless_gone(request.receive, whole))
        except ClientGone:
            return Response(status_code=499)  # nobody reads it
        finally:
            embedding.close()


def _add_score_routes(app: FastAPI, service: Service) -> None:
    """Add `/v1/rerank` and `/v1/score`: cosines of embeddings, or a cross encoder's scores."""

    async def scored(
        body: EmbeddedTexts,
        request: Request,
        answer_id: str,
        pairs: Callable[[], Sequence[tuple[int, int]]],
        form: Callable[[list[float], EmbeddingUsage], Reranking | ScoreList],
    ) -> Response:
        embedding = await service.embed(body, answer_id, context_of(request.scope), pairs)
        try:
            scores = embedding.scores() if embedding.of_pairs else embedding.similarities(pairs())
            found = await unless_gone(request.receive, scores)
            count = embedding.usage.prompt_tokens
            return answered(form(found, EmbeddingUsage(prompt_tokens=count, total_tokens=count)))
        except ClientGone:
            return Response(status_code=499)  # nobody reads it
        finally:
            embedding.close()

    @app.post("/v1/rerank", responses=responses_of(Reranking))
    async def rerank(body: RerankRequest, request: Request) -> Response:
        answer_id = f"rerank-{secrets.token_hex(12)}"

        def form(scores: list[float], usage: EmbeddingUsage) -> Reranking:
            best = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: body.top_n]
            whole = body.return_documents is not False
            texts = [RerankedText(body.documents[i]) if whole else None for i in best]
            found = [RerankedDocument(i, scores[i], t) for i, t in zip(best, texts, strict=True)]
            return Reranking(id=answer_id, model=body.model, usage=usage, results=found)

        def pairs() -> list[tuple[int, int]]:
            return [(0, 1 + i) for i in range(len(body.documents))]

        return await scored(body, request, answer_id, pairs, form)

    @app.post("/v1/score", responses=responses_of(ScoreList))
    async def score(body: ScoreRequest, request: Request) -> Response:
        answer_id = f"score-{secrets.token_hex(12)}"

        def form(scores: list[float], usage: EmbeddingUsage) -> ScoreList:
            data = [PairScore(i, score) for i, score in enumerate(scores)]
            now = int(service.wall.now())
            return ScoreList(id=answer_id, created=now, model=body.model, data=data, usage=usage)

        return await scored(body, request, answer_id, lambda: body.pairs, form)
