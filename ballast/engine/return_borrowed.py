"""Move KV out of borrowed pages that their lender has recalled, so that they can be returned.

Called by the loop, once a turn while pages are recalled. Cached prefixes there are dropped; used
blocks are copied to the device's own pages, for which the memory policy makes room. If too little
becomes free, requests are preempted in the policy's order: none fails, some are delayed. Blocks
that a job in flight uses are moved after its end.
"""

from __future__ import annotations

from ballast.core.actions import Preempt
from ballast.core.request import Request
from ballast.core.story import Story
from ballast.engine.apply import apply
from ballast.engine.model import ModelState
from ballast.engine.state import DeviceState
from ballast.engine.views import device_view
from ballast.policy.base import MemoryPolicy


def return_borrowed(state: DeviceState, story: Story, policy: MemoryPolicy) -> None:
    """Empty as many recalled pages as is possible now, and record the result in the story."""
    owners = {m.kv.owner: m for m in state.models.values()}
    home = dropped = 0
    for borrowed in state.lending.borrower.wanted():
        m, page = owners[borrowed.holder], borrowed.page
        if not m.kv.holds(page):
            continue  # it went with a request that has just been preempted
        used = set(m.kv.used_with(page))
        users = [r for r in m.running if not used.isdisjoint(r.blocks)]
        if any(r.in_flight for r in users) or not used.isdisjoint(m.kv.moves.coming):
            continue
        if m.kv.forsake(page):
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


def _bring_home(state: DeviceState, m: ModelState, page: int) -> bool:
    """Move a borrowed page's blocks to a page of the device's own, if one is free."""
    return m.kv.bring_home(page, [*(r.blocks for r in m.running), *state.migration.tables(m)])


def _preempt(
    state: DeviceState, m: ModelState, page: int, users: list[Request], story: Story
) -> bool:
    """Preempt the page's requests in order, until it is empty or its rest fits on an own page.

    Returns whether the rest was moved to the device's own pages."""
    for r in users:
        state.preempt(m, r)
        why = "borrowed pages are asked back"
        story.record_decision(state.now, Preempt(m.spec.name, r.id, why), None, by="lender")
        if not m.kv.holds(page) or m.kv.forsake(page):
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
    own, missing = m.kv.excess(wanted), wanted - state.pool.available(m.kv.owner)
    actions = policy.bring_home(device_view(state), m.spec.name, own, missing)
    refusals = [apply(state, action, []) for action in actions]
    return None in refusals
