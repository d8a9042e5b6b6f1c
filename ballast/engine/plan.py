"""Form one model's next job: decodes first, then prefill chunks, then new admissions.

Used by the dispatcher: the scheduler's batching with chunked prefill. Allocates blocks and records
shortages; never preempts or evicts, which is for the memory policy to decide.

A request that was in a failed job with others (`Request.isolated`) has its next job to itself.
"""

from __future__ import annotations

from collections.abc import Iterable

from ballast.core.actions import Short
from ballast.core.compute import ComputeDecision, Phase
from ballast.core.job import Scoring, SequenceWork
from ballast.core.kv_tiers import PEER
from ballast.core.request import Request, RequestState
from ballast.core.settings import DeviceSettings
from ballast.core.view import Shortage
from ballast.engine import staging
from ballast.engine.model import ModelState


class _Plan:
    """The work of one job under construction, bounded in tokens and in sampled positions."""

    def __init__(
        self, m: ModelState, settings: DeviceSettings, prompt_tokens: int | None = None
    ) -> None:
        self.model = m
        self.tokens = settings.step_tokens
        self.prompt_tokens = self.tokens if prompt_tokens is None else prompt_tokens
        self.logits = settings.step_logits
        self.work: list[SequenceWork] = []

    @property
    def full(self) -> bool:
        return self.tokens <= 0 or self.logits <= 0

    @property
    def closed(self) -> bool:
        """Whether no further prompt tokens fit."""
        return self.full or self.prompt_tokens <= 0

    def add(self, r: Request) -> None:
        """Add as much of `r` as fits; nothing, and a shortage, if it lacks pages."""
        m = self.model
        left = len(r.tokens) - r.computed
        if not r.decoding:
            left = min(left, self.prompt_tokens)
        end = r.computed + min(left, self.tokens)
        if not r.scored:
            # The logits of position p - 1 score position p.
            end = min(end, r.unscored - 1 + self.logits)
        end = staging.chunk_end(m, r, end)
        if m.spec.pooling and end < len(r.tokens):  # an encoder computes a text whole
            if self.work:
                return
            end = len(r.tokens)
        if m.spec.kv_windows or end > len(r.blocks) * m.spec.block_tokens:
            short = m.kv.grow(r.blocks, end, r.computed)
            if short is not None:
                self.lacks(r, short)
                return
        s = r.submission
        last = end == len(r.tokens)
        samples = last and s.max_tokens > 0
        work = SequenceWork(
            r.id,
            r.tokens[r.computed : end],
            r.computed,
            r.blocks,
            s.sampling if samples else None,
            r.adapter,
            r.tokens if samples and r.shaped else None,
            r.prompt_tokens,
            None if r.scored else _scoring(r, end),
            last and s.embed,
            s.second_text,
        )
        self.work.append(work)
        self.tokens -= end - r.computed
        if not r.decoding:
            self.prompt_tokens -= end - r.computed
        self.logits -= last if work.scoring is None else len(work.wanted)

    def decode(self, requests: Iterable[Request]) -> None:
        """Add a decode step of each request, as far as they fit."""
        for r in requests:
            if self.full:
                break
            if not r.isolated:
                self.add(r)

    def lacks(self, r: Request, short: Short) -> None:
        """Record a shortage: `r` lacks pages. Other requests go on."""
        m = self.model
        wanted = short.blocks + m.kv.counts.at_hand
        limited = m.kv.counts.limited(short)
        lack = Shortage(m.spec.name, r.id, short.pages, limited, short.blocks, wanted)
        m.shortages = (*m.shortages, lack)


def _scoring(r: Request, end: int) -> Scoring | None:
    """Return the part of a prompt whose log probabilities work up to `end` can compute."""
    targets = r.tokens[r.unscored : min(end + 1, r.prompt_tokens)]
    if not targets:
        return None
    return Scoring(r.unscored, targets, r.submission.prompt_logprobs or 0)


def plan(
    m: ModelState,
    settings: DeviceSettings,
    now: float,
    freed: int,
    chosen: ComputeDecision | None = None,
) -> list[SequenceWork]:
    """Return the work of `m`'s next job, empty if it has none. Renews `m.shortages`.

    `chosen`: the compute policy's bounds on phase and prompt tokens; None: no bounds.
    Waiting requests are admitted in order of the queue, and only if their whole prompt (after a
    preemption: with the output so far) finds pages: one that could not end its prefill would only
    be preempted again. A frozen model has no work, and its known shortages stay.
    """
    if m.frozen:
        return []
    phase = Phase.MIXED if chosen is None else chosen.phase
    prompt_tokens = None if chosen is None else chosen.prompt_tokens
    p = _Plan(m, settings, 0 if phase is Phase.DECODE else prompt_tokens)
    known, m.shortages = m.shortages, ()
    decoding, prefilling = m.phases()
    for r in decoding + prefilling:
        if r.isolated:  # whatever order there is: it has a job to itself
            alone = _Plan(m, settings)
            alone.add(r)
            if alone.work:
                return alone.work
    if phase is not Phase.PREFILL:
        p.decode(decoding)
    for r in prefilling:
        if p.closed:
            break
        if not r.isolated:
            p.add(r)
    while m.waiting and not m.held and len(m.running) < m.spec.max_running:
        r = m.waiting.first
        if m.tiers is not None and m.tiers.is_searching(r):
            break
        if m.blocked == (r.id, freed) or p.closed:
            m.shortages += tuple(s for s in known if s.request_id == r.id)
            break
        short = _admit(m, r, now)
        if short is not None:
            m.blocked = (r.id, freed)
            p.lacks(r, short)
            break
        if r.fetching:
            continue
        if not r.isolated:
            p.add(r)
        elif not p.work:
            p.add(r)
            break
        # else it has the next job to itself
    if phase is Phase.PREFILL and not p.work:
        p.decode(decoding)
    return p.work


def _admit(m: ModelState, r: Request, now: float) -> Short | None:
    """Admit a waiting request to the batch, with its longest cached prefix."""
    found = m.kv.admit(0 if r.streams else len(r.tokens), *r.prefix)
    if isinstance(found, Short):
        return found
    blocks, cached = found
    m.waiting.admit(r)
    r.blocks = blocks
    r.computed = cached
    if r.admitted_at is None:
        r.admitted_at = now
        r.cached_tokens = cached
        borrowed = len(m.kv.borrowed.among(blocks[: cached // m.spec.block_tokens]))
        r.fetched = ((PEER, borrowed * m.spec.block_tokens),) if borrowed else ()
    elif r.kept and len(r.tokens) - cached > m.spec.block_tokens:
        m.lost_kv(r)  # it had stayed when the request was preempted
    r.kept = False
    r.to(RequestState.RUNNING)
    m.running.add(r)
    if m.tiers is not None:
        m.tiers.fetch(m, r)
    return None
