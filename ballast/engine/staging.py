"""Stage KV on the host beside a model's jobs, and bring it home: choose the blocks of each job.

Used by the dispatcher, which begins jobs, and by `jobs`, which ends them. Blocks are copied layer
by layer in the job itself, behind the use of each layer (SwiftCache, 3.3). There are two reasons:

- an order of the policy (`Stage`), carried out with the next job, which need not compute anything;
- a request that *streams*: its context is longer than the device's KV, so that of its full blocks
  none stays on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ballast.core.job import SequenceWork
from ballast.core.request import Request
from ballast.core.units import ceil_div
from ballast.core.view import StagingView
from ballast.engine.model import ModelState

_Pair = tuple[Request, SequenceWork]


def refusal(m: ModelState, blocks: int) -> str | None:
    """Return the reason why so many blocks cannot be staged now; None if they can."""
    if m.kv_staging is None or m.kv.staged.most == 0:
        return "its KV cannot be staged here"
    if m.stage_to is not None:
        return "its blocks are moving already"
    if not m.running:
        return "no request is running"
    if blocks == len(m.kv.staged):
        return "so many are staged already"
    if blocks > m.kv.staged.most:
        return f"the host has room for {m.kv.staged.most}"
    return None


def view(m: ModelState) -> StagingView | None:
    """Return what policies see of a model's staged blocks; None: none can be staged."""
    staged = m.kv.staged
    if m.kv_staging is None or staged.most == 0:
        return None
    size, now = m.spec.block_tokens, len(staged)
    full = sum(r.computed // size for r in m.running)
    streamed = sum(b < 0 for r in m.running if r.streams for b in r.blocks)
    moving = m.stage_to is not None
    to = m.stage_to if m.stage_to is not None else now
    return StagingView(to, max(0, full - now), staged.most, staged.slots, streamed, moving)


def longest(m: ModelState, room: int, chunk: int) -> int:
    """Return the tokens of the longest context whose blocks are staged, on `room` pages of the
    device: slots for one layer of each block, beside the blocks of a chunk of tokens (SwiftCache,
    equations 3 and 4); 0: none can be staged."""
    kv, size = m.kv, m.spec.block_tokens
    if m.kv_staging is None or kv.staged.most == 0:
        return 0
    left = room - kv.layout.pages(1 + ceil_div(chunk, size))
    return size * min(kv.staged.most, kv.staged.blocks_in(max(0, left)))


def pages_to_free(m: ModelState) -> int:
    """Return the pages that staging of blocks frees when the next job has ended, as expected."""
    staged, kv = m.kv.staged, m.kv
    if m.stage_to is None or m.stage_to <= len(staged) or not m.running:
        return 0
    blocks = m.stage_to - len(staged)
    slots = staged.pages_for(m.stage_to) - len(staged.pages)
    return max(0, blocks // kv.layout.blocks_per_slab * kv.layout.slab_pages - slots)


def moves_alone(m: ModelState) -> bool:
    """Whether blocks of a frozen model are to move, whose jobs compute nothing."""
    return m.frozen and m.stage_to is not None


def idle_work(m: ModelState) -> list[SequenceWork]:
    """Return the work of a job that computes nothing and moves blocks; empty if none is ordered."""
    if m.stage_to is None:
        return []
    return [SequenceWork(r.id, (), r.computed, r.blocks, None) for r in m.running if not r.fetching]


def begin(m: ModelState, work: Sequence[SequenceWork]) -> None:
    """Choose the moves of a job that is about to begin."""
    stream = m.kv_staging
    if stream is None:
        return
    staged, size = m.kv.staged, m.spec.block_tokens
    requests = {r.id: r for r in m.running}
    here = sorted(((requests[w.request_id], w) for w in work), key=lambda pair: pair[0].order)
    first = {id: i for i, id in enumerate(m.stage_order)}

    def in_order(pairs: Iterable[_Pair]) -> list[_Pair]:
        return sorted(pairs, key=lambda pair: first.get(pair[0].id, len(first)))

    stores = _distinct(b for r, w in here if r.streams for b in w.blocks[: w.end // size] if b >= 0)
    homes: list[int] = []
    if m.stage_to is not None:
        more = m.stage_to - len(staged) - len(stores)
        if more > 0:
            leave = in_order(reversed(here))
            ordered = (b for _, w in leave for b in w.blocks[: w.end // size] if b >= 0)
            stores = _distinct((*stores, *m.kv.staging.slab_by_slab(ordered)))[: len(stores) + more]
        elif more < 0:
            come = in_order(pair for pair in here if not pair[0].streams)
            homes = _distinct(b for _, w in come for b in w.blocks if b < 0)[:-more]
    stream.carry_blocks(m.kv.staging.begin_moves(stores, homes))


def end(m: ModelState, tables: Iterable[list[int]], *, done: bool) -> None:
    """End the moves of a job, before anything else follows from its end."""
    if m.kv_staging is None:
        return
    m.kv.staging.end_moves(tables, done=done)
    m.stage_to, m.stage_order = None, ()


def chunk_end(m: ModelState, r: Request, end: int) -> int:
    """Return up to where a streaming request's next chunk reaches, `end` at most: as far as pages
    are free, at least to the end of its next block."""
    size = m.spec.block_tokens
    have = len(r.blocks)
    if not r.streams or end <= have * size:
        return end
    blocks = ceil_div(end, size) - have
    while blocks > 1 and m.kv.grow(r.blocks, (have + blocks) * size) is not None:
        blocks = ceil_div(blocks, 2)
    return min(end, (have + blocks) * size)


def _distinct(blocks: Iterable[int]) -> list[int]:
    return list(dict.fromkeys(blocks))
