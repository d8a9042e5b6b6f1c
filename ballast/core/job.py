"""Define jobs (prefill chunks and a decode step of one model, run at once) and their results.

Formed by the engine's plan, run by a lane's executor; a job is frozen and does not own its blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ballast.core.request import Sampling


@dataclass(frozen=True, slots=True)
class Scoring:
    """Prompt tokens whose log-probabilities are requested: `targets`, from position `start` on.

    Their logits are outputs of the positions before them, `start - 1 ..`, all within one job's
    work.
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
    """The request's tokens so far, prompt and output, if `sample` depends on them; unchanged while
    the job runs."""
    prompt_tokens: int = 0
    """Number of prompt tokens in `history`."""
    scoring: Scoring | None = None
    embed: bool = False
    """Whether the embedding of the last of `tokens` is requested; of an encoder, that of all."""
    second_text: int = 0
    """As of `Submission`."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def wanted(self) -> list[int]:
        """Indices into `tokens` of positions whose output is needed: those whose logits score the
        prompt, and the last one if it is sampled or embedded."""
        rows: list[int] = []
        if self.scoring is not None:
            first = self.scoring.start - 1 - self.start
            rows += range(first, first + len(self.scoring.targets))
        if self.sample is not None or self.embed:
            rows.append(len(self.tokens) - 1)
        return rows


class JobLoad(NamedTuple):
    """Sizes that determine a job's cost (`StepCosts.of`)."""

    prefill_tokens: int
    prefill_chunks: int
    prefill_pairs: int
    """Query-key pairs of prefill attention."""
    decode_sequences: int
    decode_context: int
    """KV tokens read by the decoding sequences."""


def chunk_pairs(tokens: int, start: int) -> int:
    """Return the query-key pairs, under a causal mask, of a chunk after `start` tokens."""
    return tokens * start + tokens * (tokens + 1) // 2


@dataclass(frozen=True, slots=True)
class Job:
    """One batch of work of one model for one lane."""

    id: int
    lane: int
    model: str
    work: tuple[SequenceWork, ...]
    parts: int | None = None
    """Parts of the device's compute that it uses (`DeviceSettings.parts`); None: all, on a device
    of one lane."""

    @property
    def prefills(self) -> bool:
        """Whether it has prefill chunks, as `load` counts them."""
        return any(len(w.tokens) > 1 for w in self.work)

    @property
    def load(self) -> JobLoad:
        """Sizes of the job; a sequence with several tokens is a prefill chunk, else a decode."""
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
    """The likeliest tokens and their log-probabilities, likeliest first, as many as requested."""
    ends: bool = False
    """Whether the output's grammar is complete with it: no token may follow."""
