"""Form one model's next job: decodes first, then prefill chunks, then new admissions."""

from __future__ import annotations

from ballast.core.actions import Short
from ballast.core.job import SequenceWork
from ballast.core.request import Request, State
from ballast.core.settings import DeviceSettings
from ballast.core.view import Shortage
from ballast.engine.state import ModelState


class _Plan:
    """The work of one job while it is put together, bounded in tokens and in sampled positions."""

    def __init__(self, m: ModelState, settings: DeviceSettings) -> None:
        self.model = m
        self.tokens = settings.step_tokens
        self.logits = settings.step_logits
        self.work: list[SequenceWork] = []

    @property
    def full(self) -> bool:
        return self.tokens <= 0 or self.logits <= 0

    def add(self, r: Request) -> None:
        """As much of `r` as fits; nothing where it lacks pages."""
        m = self.model
        n = min(len(r.tokens) - r.computed, self.tokens)
        end = r.computed + n
        if end > len(r.blocks) * m.spec.block_tokens:
            short = m.kv.grow(r.blocks, end)
            m.view = None
            if short is not None:
                self.lacks(r, short)
                return
        samples = end == len(r.tokens)
        tokens = r.tokens[r.computed : end]
        sampling = r.submission.sampling if samples else None
        history = r.tokens if samples and r.shaped else None
        self.work.append(
            SequenceWork(
                r.id, tokens, r.computed, r.blocks, sampling, r.adapter, history, r.prompt_tokens
            )
        )
        self.tokens -= n
        self.logits -= samples

    def lacks(self, r: Request, short: Short) -> None:
        """Note that `r` cannot go on; this does not stop the others."""
        m = self.model
        m.shortages.append(
            Shortage(m.spec.name, r.id, short.pages, m.kv.limited(short), short.blocks)
        )


def plan(m: ModelState, settings: DeviceSettings, now: float, freed: int) -> list[SequenceWork]:
    """The work of `m`'s next job: empty if it has none. Renews `m.shortages`.

    Waiting requests are admitted first come first served, and only if their whole prompt (after a
    preemption: and the output so far) finds pages: one that could not end its prefill would only
    be preempted again.
    """
    p = _Plan(m, settings)
    known, m.shortages = m.shortages, []
    for r in [r for r in m.running if r.decoding] + [r for r in m.running if not r.decoding]:
        if p.full:
            break
        p.add(r)
    while m.waiting and not m.held and not p.full and len(m.running) < m.spec.max_running:
        r = m.waiting[0]
        if m.blocked == (r.id, freed):
            m.shortages += [s for s in known if s.request_id == r.id]
            break
        short = _admit(m, r, now)
        if short is not None:
            m.blocked = (r.id, freed)
            p.lacks(r, short)
            break
        p.add(r)
    return p.work


def _admit(m: ModelState, r: Request, now: float) -> Short | None:
    """Take a waiting request into the batch, on top of the prefix that is cached."""
    blocks = m.kv.match(r.tokens, r.salt)
    cached = len(blocks) * m.spec.block_tokens
    short = m.kv.grow(blocks, len(r.tokens))
    m.view = None
    if short is not None:
        m.kv.free(blocks)
        return short
    m.waiting.pop(0)
    r.blocks = blocks
    r.computed = cached
    if r.admitted_at is None:
        r.admitted_at = now
        r.cached_tokens = cached
    r.to(State.RUNNING)
    m.admit(r)
    return None
