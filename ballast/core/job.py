"""Jobs: prefill chunks and a decode step of one model, run at once, and their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ballast.core.request import Sampling


@dataclass(frozen=True, slots=True)
class Scoring:
    """Prompt tokens whose log-probabilities are asked for: `targets`, from position `start` on.

    Their logits are those of the positions before them, `start - 1 ..`, all within one job's work.
    """

    start: int
    targets: Sequence[int]
    top: int
    """Number of likeliest tokens to report at each position."""


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
        """Indices into `tokens` of the positions whose output is needed: those whose logits score
        the prompt, and the last one where it is sampled or embedded."""
        rows: list[int] = []
        if self.scoring is not None:
            first = self.scoring.start - 1 - self.start
            rows += range(first, first + len(self.scoring.targets))
        if self.sample is not None or self.embed:
            rows.append(len(self.tokens) - 1)
        return rows


class JobLoad(NamedTuple):
    """What a job's cost depends on."""

    prefill_tokens: int
    prefill_chunks: int
    prefill_pairs: int
    """Query-key pairs of prefill attention."""
    decode_sequences: int
    decode_context: int
    """KV tokens read by the decoding sequences."""


def chunk_pairs(tokens: int, start: int) -> int:
    """Query-key pairs, under a causal mask, of a chunk that comes after `start` tokens."""
    return tokens * start + tokens * (tokens + 1) // 2


@dataclass(frozen=True, slots=True)
class Job:
    """Work for one lane."""

    id: int
    lane: int
    model: str
    work: tuple[SequenceWork, ...]
    parts: int | None = None
    """Of the device's compute (`DeviceSettings.parts`); None: all, on a device of one lane."""

    @property
    def prefills(self) -> bool:
        """Whether prompts are in it, as `load` counts them."""
        return any(len(w.tokens) > 1 for w in self.work)

    @property
    def load(self) -> JobLoad:
        """A sequence that computes more than one token is a prefill chunk, else it decodes."""
        tokens = chunks = pairs = sequences = context = 0
        for w in self.work:
            n = len(w.tokens)
            if n > 1:
                tokens += n
                chunks += 1
                pairs += chunk_pairs(n, w.start)
            elif n:
                sequences += 1
                context += w.end
        return JobLoad(tokens, chunks, pairs, sequences, context)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One new token of one request."""

    request_id: str
    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens and their log-probabilities, likeliest first, as many as asked for."""
    ends: bool = False
    """The output's grammar is complete with it: nothing may follow."""
