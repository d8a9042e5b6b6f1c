"""Move KV out of borrowed pages: of those that are recalled, and those that decode steps wait for.

Called by the loop, once a turn. Of recalled pages cached prefixes there take the places of
colder ones, which are dropped; used blocks are copied to the device's own pages, for which the
memory policy makes room. If too little becomes free, requests are preempted in the policy's order:
none fails, some are delayed. Blocks that a job in flight uses are moved after its end.

A prefill reads its history once, each decode step reads all of it again. So where the link between
the devices takes longer for that than the step computes, pages of requests that begin to decode
change places with the coldest prefixes of the device's own (SwiftCache, 3.2: nothing crosses a link
for what is in the regular cache).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from ballast.core.actions import Preempt
from ballast.core.cost import copy_seconds
from ballast.core.job import JobLoad
from ballast.core.request import Request
from ballast.core.story import Story
from ballast.engine.apply import apply
from ballast.engine.model import ModelState
from ballast.engine.state import DeviceState
from ballast.engine.views import device_view
from ballast.memory.lending.borrower import BorrowedPage
from ballast.policy.base import MemoryPolicy
from ballast.policy.kv_fetching import is_worth_exchanging


def return_borrowed(state: DeviceState, story: Story, policy: MemoryPolicy) -> None:
    """Empty as many recalled pages as is possible now, and record the result in the story."""
    owners = {m.kv.owner: m for m in state.models.values()}
    wanted = state.lending.borrower.wanted()
    home, dropped = _move_cached(state, owners, wanted)
    for borrowed in wanted:
        m, page = owners[borrowed.holder], borrowed.page
        if not m.kv.borrowed.holds(page):
            continue  # it has just been cleared, or went with a preempted request
        used = set(m.kv.borrowed.used_on(page))
        users = [r for r in m.running if not used.isdisjoint(r.blocks)]
        if any(r.in_flight for r in users) or not used.isdisjoint(m.kv.book.moves.coming):
            continue
        if m.kv.borrowed.drop(page):
            dropped += 1
        elif _bring_home(state, m, page) or (
            _make_room(state, m, policy) and _bring_home(state, m, page)
        ):
            home += 1
        else:
            home += _preempt(state, m, page, _in_order(state, m, users, policy), story)
        state.news.n += 1
    if home or dropped:
        story.record_returned(state.now, home, dropped)


def bring_near(state: DeviceState) -> None:
    """Move home what the next decode steps would wait for, as far as no job in flight uses it."""
    rate = state.lending.bytes_per_second
    if rate is None or rate == inf:
        return
    for m in state.models.values():
        if m.kv.borrowed.pages and not m.frozen:
            state.news.n += _bring_near(state, m, rate) > 0


def _bring_near(state: DeviceState, m: ModelState, rate: float) -> int:
    """Return the pages that have moved."""
    kv, size = m.kv, m.kv.layout.blocks_per_slab
    decoding, _ = m.phases()
    fresh = [r for r in decoding if r.generated == 1 and not r.in_flight]
    pages = dict.fromkeys(b // size for r in fresh for b in kv.borrowed.among(r.blocks))
    if not pages:
        return 0
    read, _ = kv.borrowed.use([(r.blocks, r.computed, r.computed) for r in decoding])
    step = m.costs.of(JobLoad(0, 0, 0, len(decoding), sum(len(r.tokens) for r in decoding)))
    left = max(m.traffic.expected_outputs(r.submission.max_tokens - r.generated) for r in fresh)
    if not is_worth_exchanging(read * m.spec.block_bytes / rate, step, left):
        return 0
    fixed = (r for r in m.running if r.in_flight or r.fetching)
    used = {b // size for r in fixed for b in r.blocks} | {b // size for b in kv.book.moves.coming}
    movable = [page for page in pages if page not in used]
    return kv.borrowed.bring_near(
        movable, [*(r.blocks for r in m.running), *state.migration.tables(m)]
    )


def _move_cached(
    state: DeviceState, owners: Mapping[str, ModelState], wanted: Sequence[BorrowedPage]
) -> tuple[int, int]:
    """Clear the pages whose blocks are cached only, of models whose KV takes longer to compute than
    to copy over the link; return how many pages' prefixes were moved, and how many were dropped."""
    pages: dict[str, list[int]] = {}
    for borrowed in wanted:
        pages.setdefault(borrowed.holder, []).append(borrowed.page)
    moved = dropped = 0
    for holder, recalled in pages.items():
        m = owners[holder]
        copying = copy_seconds(m.spec.block_bytes, state.link_bytes_per_second)
        if copying < m.costs.per_token * m.spec.block_tokens:
            of = m.kv.borrowed.clear(recalled)
            moved, dropped = moved + of[0], dropped + of[1]
            state.news.n += any(of)
    return moved, dropped


def _bring_home(state: DeviceState, m: ModelState, page: int) -> bool:
    """Move a borrowed page's blocks to a page of the device's own, if one is free."""
    tables = [*(r.blocks for r in m.running), *state.migration.tables(m)]
    return m.kv.borrowed.bring_home(page, tables)


def _preempt(
    state: DeviceState, m: ModelState, page: int, users: list[Request], story: Story
) -> bool:
    """Preempt the page's requests in order, until it is empty or its rest fits on an own page.

    Returns whether the rest was moved to the device's own pages."""
    for r in users:
        state.preempt(m, r)
        why = "borrowed pages are asked back"
        story.record_decision(state.now, Preempt(m.spec.name, r.id, why), None, by="lender")
        if not m.kv.borrowed.holds(page) or m.kv.borrowed.drop(page):
            break
        if _bring_home(state, m, page):
            return True
    return False


def _in_order(
    state: DeviceState, m: ModelState, users: list[Request], policy: MemoryPolicy
) -> list[Request]:
    """Return the requests of a page, each once, in the policy's order of preemption."""
    youngest_first = {r.id: r for r in reversed(users)}
    named = policy.vacate(device_view(state), m.spec.name, [r.id for r in users])
    ids = dict.fromkeys([*(id for id in named if id in youngest_first), *youngest_first])
    return [youngest_first[id] for id in ids]


def _make_room(state: DeviceState, m: ModelState, policy: MemoryPolicy) -> bool:
    """Apply the policy's actions that make room for a page of `m`'s KV on the device's own pages.

    Returns whether any was carried out."""
    wanted = m.kv.layout.slab_pages
    own, missing = m.kv.counts.excess(wanted), wanted - state.pool.available(m.kv.owner)
    actions = policy.bring_home(device_view(state), m.spec.name, own, missing)
    refusals = [apply(state, action, []) for action in actions]
    return None in refusals
