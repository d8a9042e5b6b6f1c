"""Check at the start that a model's tokenizer and chat template fit its weights; log what does not.

Clients would meet each of these faults one request at a time: templates that never end or do not
parse, tokens without an embedding, and answers that no token ends.
"""

from __future__ import annotations

import logging

from ballast.core.errors import InvalidRequest, Unavailable
from ballast.core.model import ModelSpec
from ballast.server.text.chat_template import (
    TemplateBroken,
    TemplateRenderer,
    TemplateTooCostly,
)
from ballast.server.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_ANSWER, _NEXT = "The-first-answer", "The-next-question"
_SAMPLE_TURNS = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": _ANSWER},
    {"role": "user", "content": _NEXT},
]
_MOST_NAMED = 5
"""Most tokens that a warning names."""


async def check_tokenizer(
    tokenizer: Tokenizer, model: str, spec: ModelSpec | None, renderer: TemplateRenderer
) -> None:
    """Log the faults of a model's tokenizer and chat template; one that cannot be used is noted in
    `tokenizer.chat.fault`. `spec`: None if the model does not serve now."""
    if spec is not None and (beyond := tokenizer.tokens_beyond(spec.vocab)):
        named = ", ".join(map(repr, beyond[:_MOST_NAMED]))
        text = "%s: its tokenizer has %d tokens beyond its embedding of %d rows; requests with one "
        log.warning(text + "are refused: %s", model, len(beyond), spec.vocab, named)
    if not tokenizer.chat.text:
        return
    await _try_template(tokenizer, model, renderer)
    if spec is not None and not tokenizer.chat.fault:
        await _check_ends(tokenizer, spec, renderer)


async def _try_template(tokenizer: Tokenizer, model: str, renderer: TemplateRenderer) -> None:
    """Render sample conversations. A template may refuse them, and still be sound."""
    for tools in (False, True):
        try:
            await tokenizer.chat.traits(renderer, tokenizer.dialect, tools=tools)
        except (TemplateTooCostly, TemplateBroken) as error:
            tokenizer.chat.fault = str(error)
            log.warning("%s answers no conversations: %s", model, error)
            return
        except Unavailable as error:
            log.warning("the chat template of %s is not tried: %s", model, error)


async def _check_ends(tokenizer: Tokenizer, spec: ModelSpec, renderer: TemplateRenderer) -> None:
    """Warn if no end token of a model is what its chat template ends an answer with."""
    try:
        text = await renderer.render(tokenizer.chat.job(_SAMPLE_TURNS, answer=False))
    except (InvalidRequest, Unavailable):
        return  # it takes other conversations
    between = text.partition(_ANSWER)[2].partition(_NEXT)[0]
    if _NEXT not in text or not between:
        return
    after = tokenizer.encode(between, special=False)
    ends = tokenizer.chat_ends(spec)
    if not ends or set(after).isdisjoint(ends):
        mark = next((token for token in after if token in tokenizer.special_ids), None)
        shown = repr(between) if mark is None else tokenizer.decode([mark])
        known = ", ".join(tokenizer.spelled(ends)) or "none"
        log.warning(
            "%s: its chat template ends an answer with %s, its end tokens are %s: conversations "
            "may go on until max_tokens; is it a base model, or does eos_token_id in "
            "generation_config.json lack a token?",
            spec.name,
            shown,
            known,
        )
