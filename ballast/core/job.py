"""Jobs: one prefill chunk batch and/or decode step of one model, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ballast.core.request import Sampling


@dataclass(frozen=True, slots=True)
class Scoring:
    """Prompt tokens whose log-probabilities are asked for: `targets`, from position `start` on.

    Their logits are those of the positions before them, `start - 1 ..`, all within one job's work.
    """

    start: int
    targets: Sequence[int]
    top: int
    """How many of the likeliest tokens to tell at each."""


@dataclass(frozen=True, slots=True)
class SequenceWork:
    """The part of one request in a job: compute KV for `tokens` at positions `start ..`.

    `blocks` is the request's block table, in order, covering `start + len(tokens)` tokens. The
    engine does not change the table, move its blocks or unmap their pages while the job runs.
    """

    request_id: str
    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    sample: Sampling | None
    """None: nothing is sampled (a prefill chunk that does not reach the prompt's end)."""
    adapter: int | None = None
    """Index into `ModelSpec.adapters`; None: the model as it is."""
    history: Sequence[int] | None = None
    """The request's tokens so far, prompt and output, where `sample` depends on them. They do not
    change while the job runs."""
    prompt_tokens: int = 0
    """How many of `history` are the prompt's."""
    scoring: Scoring | None = None
    embed: bool = False
    """The embedding of the last of `tokens` is wanted."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def wanted(self) -> list[int]:
        """Which of `tokens`, by index, the model's output is wanted of: those whose logits score
        the prompt, and the last where it samples or is embedded."""
        rows: list[int] = []
        if self.scoring is not None:
            first = self.scoring.start - 1 - self.start
            rows += range(first, first + len(self.scoring.targets))
        if self.sample is not None or self.embed:
            rows.append(len(self.tokens) - 1)
        return rows


@dataclass(frozen=True, slots=True)
class Job:
    """Work for one lane."""

    id: int
    lane: int
    model: str
    work: tuple[SequenceWork, ...]

    @property
    def prefill_tokens(self) -> int:
        return sum(len(w.tokens) for w in self.work if len(w.tokens) > 1)

    @property
    def prefill_chunks(self) -> int:
        """Sequences that compute more than one token."""
        return sum(1 for w in self.work if len(w.tokens) > 1)

    @property
    def prefill_pairs(self) -> int:
        """Query-key pairs of prefill attention: sum over chunks of rows x context."""
        return sum(
            len(w.tokens) * w.start + len(w.tokens) * (len(w.tokens) + 1) // 2
            for w in self.work
            if len(w.tokens) > 1
        )

    @property
    def decode_sequences(self) -> int:
        return sum(1 for w in self.work if len(w.tokens) == 1)

    @property
    def decode_context(self) -> int:
        """KV tokens read by the decoding sequences."""
        return sum(w.end for w in self.work if len(w.tokens) == 1)


@dataclass(frozen=True, slots=True)
class Sampled:
    """One new token of one request."""

    request_id: str
    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens and their log-probabilities, likeliest first, as many as asked for."""
    ends: bool = False
    """The output's grammar is complete with it: nothing may follow."""
