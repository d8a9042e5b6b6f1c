"""Check requests that arrive, and decide when a request's output ends.

Used by the handling of events (fit or refuse an arrival) and of ended jobs (finish reason).
Allocates no blocks: `plan` admits waiting requests.
"""

from __future__ import annotations

from dataclasses import replace

from ballast.core.request import Request, Submission
from ballast.core.units import format_bytes
from ballast.core.view import Residency
from ballast.engine.model import ModelState


def fitted(s: Submission, m: ModelState, room: int, longest: int = 0) -> Submission:
    """Return a submission with `max_tokens` bounded: for an open-ended request by the KV that
    `room` pages hold, or, where its prompt is longer, by the `longest` staged context; for an
    embedding by 0."""
    if s.embed:
        return replace(s, max_tokens=0)
    if not s.open_ended:
        return s
    layout = m.kv.layout
    blocks = room // layout.slab_pages * layout.blocks_per_slab
    tokens = m.spec.tokens_in(blocks)
    most = (tokens if len(s.prompt) <= tokens else longest) + 1 - len(s.prompt)
    return replace(s, max_tokens=max(1, min(s.max_tokens, most)))


def refusal(
    s: Submission, m: ModelState, adapter: int | None, room: int, longest: int = 0
) -> tuple[str, str] | None:
    """Return (code, reason) if a request must be refused; None: it is accepted.

    `room`: pages of KV that one request could have alone on the device; `longest`: tokens of the
    longest context that could be staged there.
    """
    if m.residency is Residency.FAILED:
        return "model_failed", f"the weights of {s.model!r} could not be brought in"
    if s.model in m.quarantine.reasons:
        return "model_failed", m.quarantine.reasons[s.model]
    if not s.prompt or s.max_tokens < 0:
        return "invalid_request", "a request needs a prompt, and generates no less than nothing"
    if s.embed and not m.spec.embeds:
        return "invalid_request", f"{s.model!r} is not an embedding model"
    if len(s.prompt) + s.max_tokens > m.spec.max_model_len:
        return (
            "context_length_exceeded",
            f"prompt ({len(s.prompt)}) and output ({s.max_tokens}) exceed the context of "
            f"{m.spec.max_model_len} tokens",
        )
    wrong = _unknown_token(s, m.spec.vocab)
    if wrong is not None:
        return "invalid_request", f"there is no token {wrong}: {s.model!r} has {m.spec.vocab}"
    if s.resumed is None:
        paused = _paused_in_queue(m)
        queued = len(m.waiting) + len(paused)
        if queued >= m.spec.max_waiting:
            return "queue_full", f"{m.spec.max_waiting} requests of {m.spec.name!r} wait already"
        if adapter is not None:
            most = m.spec.adapters[adapter].max_waiting
            there = (*m.waiting, *paused) if queued >= most else ()
            if queued >= most and sum(r.adapter == adapter for r in there) >= most:
                return "queue_full", f"{most} requests of {s.model!r} wait already"
    tokens = len(s.prompt) + max(0, s.max_tokens - 1)
    pages = m.kv.layout.pages(m.spec.blocks_of(tokens))
    if pages > room and tokens > longest:
        page = m.kv.layout.page_bytes
        left = f"at most {format_bytes(room * page)}" if room > 0 else "none"
        return (
            "insufficient_memory",
            f"{tokens} tokens need {format_bytes(pages * page)} of KV cache; beside weights that "
            f"stay and activations {s.model!r} can have {left} here",
        )
    return None


def finish_reason(m: ModelState, s: Submission, last: int, generated: int) -> str | None:
    """Return the reason why an output of `generated` tokens ends with `last`; None: it goes on."""
    if last in s.stop_token_ids or (not s.ignore_eos and last in m.spec.eos_token_ids):
        return "stop"
    return "length" if generated >= s.max_tokens else None


def _paused_in_queue(m: ModelState) -> list[Request]:
    """Return paused requests that count as queued: those that have never been admitted. Requests
    paused later, because their client does not read, do not count."""
    return [r for r in m.paused.values() if r.admitted_at is None]


def _unknown_token(s: Submission, vocab: int) -> int | None:
    """Return a token id of a request that is outside the vocabulary; None: there is none."""
    biased = (token for token, _ in s.sampling.logit_bias)
    for tokens in (s.prompt, s.resumed or (), s.sampling.banned, tuple(biased)):
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocab:
            return min(tokens) if min(tokens) < 0 else max(tokens)
    return None
