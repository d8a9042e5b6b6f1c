"""Bound the values of one answer before anything is computed.

A value is a token of the answer, or an alternative that comes with its log-probability: a choice
with 20 alternatives has 21 values a token. Prompts that the answer repeats (`echo`) count too. The
bound is the model's, or less for the caller's key.
"""

from __future__ import annotations

from collections.abc import Sequence

from ballast.core.errors import AnswerTooLarge
from ballast.core.model import ModelSpec
from ballast.core.settings import KeySettings
from ballast.server.openai.request import GenerateRequest

MOST_VALUES = 1 << 18
"""Most values of an answer where nothing else is configured: some 20 MB of JSON. A single choice
may fill the context in any case."""


def values_of(request: GenerateRequest) -> int:
    """Values of one token of the answer."""
    return 1 + (request.requested_logprobs or 0)


def tokens_that_fit(
    request: GenerateRequest,
    spec: ModelSpec,
    key: KeySettings | None,
    prompts: Sequence[int],
) -> int:
    """Return the most output tokens that each choice may have; `prompts`: tokens of each prompt, 0
    where they are not counted yet.

    Raises AnswerTooLarge where the request asks for more.
    """
    most, where = spec.max_answer or max(MOST_VALUES, spec.max_model_len), "limits.answer"
    if key is not None and key.max_answer is not None and key.max_answer < most:
        most, where = key.max_answer, f"answer of the key {key.name!r}"
    choices, values = len(prompts) * request.choices, values_of(request)
    repeated = request.choices * sum(prompts) if request.echoes else 0
    fitting = (most // values - repeated) // choices
    asked = request.most_tokens
    if fitting >= (asked or 1) or (fitting >= 1 and (asked is None or request.shortens_output)):
        return fitting
    echoed = f"{repeated} tokens of repeated prompts and " if repeated else ""
    each = f", with {values} values a token (logprobs)" if values > 1 else ""
    raise AnswerTooLarge(
        f"max_tokens: the answer may have {echoed}{choices} choices of {asked or 1} tokens{each}, "
        f"{values * (repeated + choices * (asked or 1))} values; at most {most} ({where}): ask for "
        "fewer tokens, choices, prompts or log-probabilities",
        "max_tokens",
    )
