"""Encode prompts and conversations as token ids, by tokenizer and chat template, off the event
loop.

Used by `Service` and by the routes for tokenizing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from ballast.core.errors import ContextLengthExceeded, InvalidRequest
from ballast.core.model import ModelSpec
from ballast.server.conversation import Conversation
from ballast.server.generate.parameters import check_tokens
from ballast.server.http.off_loop import off_loop
from ballast.server.http.request_context import RequestContext
from ballast.server.openai.request import ChatRequest, GenerateRequest
from ballast.server.text.chat_template import TemplateRenderer
from ballast.server.text.template_messages import EncodedJob
from ballast.server.text.tokenizer import HUGE_TEXT, LONG_TEXT, Tokenizer, TooManyTokens
from ballast.server.text.turns import fitted
from ballast.server.tools.dialect import check_arguments

R = TypeVar("R")


async def _bounded(encode: Callable[[], R], size: int, spec: ModelSpec, field: str) -> R:
    """Encode texts of `size` characters, on a thread if they are long. Raises
    ContextLengthExceeded in place of TooManyTokens."""
    try:
        return await off_loop(size > LONG_TEXT, encode, huge=size > HUGE_TEXT)
    except TooManyTokens as error:
        found = "more" if error.found is None else error.found
        most, why = spec.max_model_len, f"{found} tokens in {error.characters} characters"
        raise ContextLengthExceeded(
            f"{field}: the context of {spec.name!r} is {most} tokens; there are {why}", field
        ) from None


def _check_vocabulary(
    encoded: Sequence[Sequence[int]], spec: ModelSpec, tokenizer: Tokenizer, field: str
) -> None:
    """Raise InvalidRequest for a token without an embedding."""
    for ids in encoded:
        if ids and max(ids) >= spec.vocab:
            [token] = tokenizer.spelled([max(ids)])
            why = f"the token {token!r} is beyond the embedding of {spec.name!r}"
            raise InvalidRequest(f"{field}: {why}, which has {spec.vocab} rows", field)


class PromptEncoder:
    """Encodes prompts and conversations as token ids, on threads where it takes long."""

    def __init__(self, templates: TemplateRenderer) -> None:
        self._templates = templates

    async def encode_request(
        self,
        request: GenerateRequest,
        spec: ModelSpec,
        tokenizer: Tokenizer,
        context: RequestContext,
    ) -> list[tuple[str | None, list[int]]]:
        """Encode each prompt of a request; returns the client's text (None for token ids and
        conversations) and the token ids of each. Raises InvalidRequest, ContextLengthExceeded, and
        Unavailable."""
        if isinstance(request, ChatRequest):
            return [(None, await self.encode_conversation(request, spec, tokenizer, context))]
        prompts = request.prompts
        tokens = await self.encode_prompts(prompts, spec, tokenizer, "prompt")
        texts = (prompt if isinstance(prompt, str) else None for prompt in prompts)
        return list(zip(texts, tokens, strict=True))

    async def encode_prompts(
        self,
        prompts: Sequence[str | list[int]],
        spec: ModelSpec,
        tokenizer: Tokenizer,
        field: str,
    ) -> list[list[int]]:
        """Encode prompts, each a text or a list of token ids. Raises InvalidRequest for an empty
        prompt or an id beyond the vocabulary, and ContextLengthExceeded; both name `field`."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        encoded = iter(await self.encode_texts(texts, spec, tokenizer, field, special=True))
        tokens = [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]
        for prompt, ids in zip(prompts, tokens, strict=True):
            if not isinstance(prompt, str):
                check_tokens(ids, spec, field)
            if not ids:
                raise InvalidRequest(f"{field}: it is empty", field)
        return tokens

    async def encode_texts(
        self,
        texts: Sequence[str],
        spec: ModelSpec,
        tokenizer: Tokenizer,
        field: str,
        *,
        special: bool,
    ) -> list[list[int]]:
        """Encode texts; `special`: add the tokenizer's special tokens around each.

        Raises InvalidRequest for a token without an embedding, and ContextLengthExceeded, before
        tokenizing where the length of the text suffices to know.
        """

        def encode() -> list[list[int]]:
            most = spec.max_model_len
            encoded = [tokenizer.encode(text, special=special, most=most) for text in texts]
            _check_vocabulary(encoded, spec, tokenizer, field)
            return encoded

        return await _bounded(encode, sum(map(len, texts)), spec, field)

    async def encode_pairs(
        self,
        texts: Sequence[str | list[int]],
        pairs: Sequence[tuple[int, int]],
        spec: ModelSpec,
        tokenizer: Tokenizer,
        field: str,
    ) -> tuple[list[list[int]], list[int]]:
        """Encode pairs of texts, by their places; returns token ids, and the first position of each
        second text. Raises as `encode_texts`."""

        def encode() -> tuple[list[list[int]], list[int]]:
            encoded = [
                tokenizer.encode_pair(str(texts[a]), str(texts[b]), spec.max_model_len)
                for a, b in pairs
            ]
            prompts = [ids for ids, _ in encoded]
            _check_vocabulary(prompts, spec, tokenizer, field)
            return prompts, [second for _, second in encoded]

        size = sum(len(texts[a]) + len(texts[b]) for a, b in pairs)
        return await _bounded(encode, size, spec, field)

    async def encode_conversation(
        self,
        request: Conversation,
        spec: ModelSpec,
        tokenizer: Tokenizer,
        context: RequestContext,
    ) -> list[int]:
        """Encode a conversation by the model's chat template, and drop its messages: the objects of
        thousands of messages cost every garbage collection while the request is open. Raises
        InvalidRequest, ContextLengthExceeded, and Unavailable."""

        tools, dialect = request.shown_tools, tokenizer.dialect
        traits = await tokenizer.chat.traits(self._templates, dialect, tools=bool(tools))

        def prepare() -> EncodedJob:
            messages = [m.for_template() for m in request.messages or ()]
            check_arguments(messages)
            preface = "" if dialect is None else dialect.description(tools)
            messages = fitted(messages, traits, dialect, preface)
            if dialect is not None:
                messages = dialect.conversation(messages, tools)
            return tokenizer.chat.job(
                messages,
                tools=None if preface else tools,
                answer=request.add_generation_prompt is not False,
                continued=bool(request.continue_final_message),
                more=request.template_variables,
            )

        job = await off_loop(context.large_body, prepare)
        request.messages = []
        text = await self._templates.render(job, context.caller.name)
        special = bool(request.add_special_tokens)
        [tokens] = await self.encode_texts([text], spec, tokenizer, "messages", special=special)
        if not tokens:
            raise InvalidRequest("messages: the chat template makes nothing of them", "messages")
        return tokens
