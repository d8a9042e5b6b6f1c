"""Advance a batch of pure decode steps of one model, without running the loop for each step.

Used by `sim.leap` and `sim.leap_lanes` for steps that give each request one token and do nothing
else. For speed, tokens are written into a request's books only when something reads them, all
pending ones at once, and blocks are looked at when they are full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import inf

from ballast.core.event import TokenOutput
from ballast.core.job import JobLoad
from ballast.core.request import Request
from ballast.core.view import Residency
from ballast.engine.model import ModelState
from ballast.engine.state import DeviceState
from ballast.memory.pool import Pool
from ballast.sim.runner import SimRunner


class DecodeBatch:
    """The running requests of one model, all of which decode."""

    def __init__(self, m: ModelState, pool: Pool, ends: Mapping[str, int]) -> None:
        """`ends`: as of `SimRunner`."""
        self.m = m
        self.rows = [_Row(r, ends.get(r.id)) for r in m.running]
        self.context = sum(row.start for row in self.rows)
        """KV tokens that its next step, or that in flight, reads."""
        self.ends: list[float] = []
        """When each of its steps ended, in order."""
        self._pool = pool
        self._written = 0
        """Steps that are in the model's books."""
        self._left = min((row.left for row in self.rows), default=0)
        """Steps until the first of them has its last token."""
        self._stopping = [row for row in self.rows if row.stops]
        size = m.spec.block_tokens
        self._fills: list[list[_Row]] = [[] for _ in range(size)]
        """Those with a block that is full after a step, by the step's number modulo `size`."""
        for row in self.rows:
            self._fills[(1 - row.start) % size].append(row)
        self._pending = self.rows
        """Those that may lack a block for their last token."""
        self._seconds = m.lane_seconds
        self._last = 0.0
        """Seconds of its last step, without those in which it waited for layers."""

    @property
    def ids(self) -> list[str]:
        """Ids of its requests."""
        return [row.request.id for row in self.rows]

    def goes_on(self, runner: SimRunner) -> bool:
        """Whether all requests go on after the step in flight."""
        steps = len(self.ends)
        if self._left - steps <= 1:
            return False
        for row in self._stopping:
            if runner.token(self.m.spec, row.request.id, row.start + steps) in row.stops:
                return False
        return True

    def blocks(self, more: int) -> int:
        """Number of blocks that the batch takes with `more` (0 or 1) further tokens per request."""
        size, tokens = self.m.spec.block_tokens, len(self.ends) + more
        rows = self._pending or (self._fills[tokens % size] if more else ())
        return sum(row.start + tokens > len(row.request.blocks) * size for row in rows)

    def begin_step(self) -> None:
        """Allocate room for one token of each request."""
        if not self._pending:
            return
        kv, steps = self.m.kv, len(self.ends)
        for row in self._pending:
            short = kv.grow(row.request.blocks, row.start + steps)
            assert short is None, "it was looked whether they `fit`"
        self._pending = []

    def end_step(self, at: float, seconds: float, stall: float, share: float) -> None:
        """End a step: each request has one token more. The step had `share` of the device for its
        seconds, of which it waited `stall`."""
        self.ends.append(at)
        m, steps = self.m, len(self.ends)
        full = self._fills[steps % m.spec.block_tokens]
        for row in full:
            row.write(m, self.ends)
            r = row.request
            m.kv.remember(r.tokens, r.blocks, r.computed, r.salt, r.submission.tenant)
        self._pending = full
        self._seconds += seconds * share
        self._last = seconds - stall
        self.context += len(self.rows)
        m.last_run = at

    def run_on(
        self, pace: Callable[[int], float], overhead: float, at: float, seconds: float, until: float
    ) -> tuple[float, float]:
        """End consecutive steps before `until`, as long as no block is full after one and no
        request has its last token; the step in flight ends at `at` and takes `seconds`. Returns the
        end and the seconds of the first step that is left.

        `pace`, `overhead`: as of `SimRunner.decodes_on`.
        """
        ends, spent, context, n = self.ends, self._seconds, self.context, len(self.rows)
        most = self._quiet()
        while most > 0 and at < until:
            ends.append(at)
            spent += seconds
            self._last = seconds
            context += n
            seconds = pace(context)
            at = at + seconds + overhead
            most -= 1
        self._seconds, self.context = spent, context
        self.m.last_run = ends[-1]
        return at, seconds

    def _quiet(self) -> int:
        """Steps that can end one after another without anything but a token for each."""
        if self._stopping or self._pending:
            return 0
        steps, fills = len(self.ends), self._fills
        most = min(self._left - steps - 1, len(fills) - 1)
        return next((n for n in range(most) if fills[(steps + n + 1) % len(fills)]), max(0, most))

    def write(self) -> None:
        """Bring the books of the model and its requests to where its last step ended."""
        steps = len(self.ends)
        if steps == self._written:
            return
        m, rows = self.m, self.rows
        for row in rows:
            row.write(m, self.ends)
        # Setting `last_used` counts the requests' new tokens as a change, too.
        m.last_used = self.ends[-1]
        m.lane_seconds = self._seconds
        m.took(self._last, JobLoad(0, 0, 0, len(rows), self.context), steps - self._written)
        self._written = steps


class _Row:
    """One request of a batch."""

    __slots__ = ("left", "request", "start", "stops", "written")

    def __init__(self, r: Request, end: int | None) -> None:
        """`end`: position of its last token, if that comes before its bound."""
        self.request = r
        self.start = len(r.tokens)
        """Tokens that it has had before."""
        self.left = r.submission.max_tokens - r.generated
        if end is not None:
            self.left = min(self.left, end + 1 - self.start)
        self.stops = frozenset(r.submission.stop_token_ids)
        self.written = 0
        """Steps whose tokens are in its books."""

    def write(self, m: ModelState, ends: Sequence[float]) -> None:
        """Bring its books to where the last step ended."""
        if self.written == len(ends):
            return
        r, steps = self.request, len(ends)
        first, end = self.start + self.written, self.start + steps
        r.tokens += SimRunner.tokens(m.spec, r.id, first, end)
        r.computed = end - 1
        r.last_token_at = ends[-1]
        self.written = steps


def batch_of(
    m: ModelState, state: DeviceState, runner: SimRunner, prompts: bool
) -> DecodeBatch | None:
    """Return the batch of a model whose next step only decodes, with no admission and no new
    shortage of pages, as does the job in flight if there is one; None if that may be otherwise.

    `prompts`: whether the step may admit.
    """
    life = m.life
    stays = m.residency is Residency.RESIDENT and life.remap_to is None
    if m.kv.staged or m.stage_to is not None:
        return None  # its jobs move blocks
    if m.frozen or m.running.leaving or not stays or not _admits_nobody(m, state, prompts):
        return None
    # What waits for the end of a job waits for the end of the one in flight. Whoever has all of
    # the prompt from the cache is still to be told when it was admitted.
    if not all(
        r.decoding and r.first_token_at is not None and not r.cancelled and not r.waits_for
        for r in m.running
    ):
        return None
    most = min(state.settings.step_tokens, state.settings.step_logits)
    if len(m.running) + bool(m.shortages) > most:
        return None
    job = m.job
    if job is not None and (
        len(job.work) != len(m.running) or any(len(work.tokens) != 1 for work in job.work)
    ):
        return None
    return DecodeBatch(m, state.pool, runner.ends)


def fit(pool: Pool, needs: Iterable[tuple[DecodeBatch, int]]) -> bool:
    """Whether batches find room for the given number of blocks each, in any order: in free pages,
    or each in place of prefixes that its own model has cached."""
    pages, covered = 0.0, True
    for batch, blocks in needs:
        if not blocks:
            continue
        kv = batch.m.kv
        within, most = blocks <= kv.counts.room, kv.counts.pages_for(blocks)
        limit = inf if kv.bounds.most is None else kv.bounds.most - kv.pages
        pages += most if most <= limit else limit if within else inf
        covered = covered and within
    return (
        covered
        or pages <= pool.free - pool.ledger.reservations.promised - pool.ledger.reservations.kept
    )


def _admits_nobody(m: ModelState, state: DeviceState, prompts: bool) -> bool:
    """Whether no step of the model admits a request or reports a new shortage: a request that found
    no room keeps waiting while no more pages become free, and its shortage is known."""
    if m.held or not m.waiting or len(m.running) >= m.spec.max_running:
        return not m.shortages
    first = m.waiting.first.id
    known = all(s.request_id == first for s in m.shortages)
    return known and (not prompts or m.blocked == (first, state.freed))


def tokens_of(steps: Iterable[DecodeBatch]) -> Iterator[tuple[float, TokenOutput]]:
    """Yield the outputs to clients of steps, given as the batch of each, in order, and their
    times."""
    done: dict[int, int] = {}
    for batch in steps:
        n = done[id(batch)] = done.get(id(batch), -1) + 1
        for row in batch.rows:
            r, at = row.request, row.start + n
            yield batch.ends[n], TokenOutput(r.id, r.tokens[at], at - r.prompt_tokens)
