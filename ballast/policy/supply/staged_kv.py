"""Offer KV blocks of running requests, which go to the host, at the harm of longer steps.

Steps then bring every layer of the staged blocks over the link (SwiftCache),
behind the work of other layers as far as that takes as long. What a step hides costs next to
nothing; beyond that all requests of the device wait, as models share the lane.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ballast.core.view import ModelView, Residency
from ballast.policy.market.claim_and_offer import Offer
from ballast.policy.market.outlook import Outlook
from ballast.policy.market.staged_blocks import (
    decode_seconds,
    freed_pages,
    most_staged,
    stage,
    staged_seconds,
)
from ballast.policy.market.supply_curve import convex

SLACK = 0.02
"""Part of a step's time by which copies that it hides may make it longer."""
STEPS = 4
"""Numbers of blocks beyond the hidden ones at which a model's are priced."""


def staged_kv(ahead: Outlook) -> Iterator[Offer]:
    """Offer blocks of models that run and move none now, a few at a time, at prices that rise."""
    able = [m for m in ahead.view.models if m.staging is not None and m.running]
    waits = {m.name: _wait(ahead, m, m.staging.staged) for m in able if m.staging is not None}
    for m in able:
        if m.residency is Residency.RESIDENT and m.staging is not None and not m.staging.moving:
            yield from _of(ahead, m, sum(waits.values()) - waits[m.name])


def _of(ahead: Outlook, m: ModelView, others: float) -> Iterator[Offer]:
    """Offer one model's blocks; `others`: seconds for which a round waits for other models'."""
    assert m.staging is not None
    view, staged = ahead.view, m.staging.staged
    hidden, top = most_staged(view, m, SLACK), min(staged + m.staging.home, m.staging.room)
    now = ahead.lane_waits_harm(others + _wait(ahead, m, staged))
    points = [(0, 0.0)]
    for blocks in sorted(
        {hidden, *(hidden + (top - hidden) * k // STEPS for k in range(1, STEPS + 1))}
    ):
        pages = freed_pages(view, m, blocks) if blocks > staged else 0
        if pages > points[-1][0]:
            harm = ahead.lane_waits_harm(others + _wait(ahead, m, blocks)) - now
            points.append((pages, max(harm, points[-1][1])))
    key, act = ("staged", m.name), partial(stage, view, m, top, 0)
    for (start, before), (end, after) in convex(points):
        price = partial(float, (after - before) / (end - start) * end)
        yield Offer(key, m.name, end, price, act, grain=1, cumulative=True, later=True)


def _wait(ahead: Outlook, m: ModelView, blocks: int) -> float:
    """Return the seconds by which a step becomes longer that reads so many staged blocks."""
    alone = decode_seconds(m)
    return max(0.0, staged_seconds(ahead.view, m, alone, blocks) - alone)
