"""Offer KV blocks of running requests: they go to the host, and steps read them from there.

A source of pages, as in `policy.market.offers`, and the way back. Each step brings every layer of
all staged blocks over the link, behind the work of other layers as far as that takes as long.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from functools import partial

from ballast.core.actions import Action, Stage
from ballast.core.job import JobLoad
from ballast.core.kv_swap import swapped_seconds
from ballast.core.link import LinkRates
from ballast.core.rotation import Rotation
from ballast.core.units import ceil_div
from ballast.core.view import DeviceView, ModelView, Residency
from ballast.policy.market.claim_and_offer import Claim, Offer, Source

STAGED = 1.0
"""Seconds for which blocks are expected to stay on the host; an assumption."""


def staged_blocks(slack: float) -> Source:
    """Return the source of pages of blocks that go to the host as long as decode steps become
    longer by at most `slack` of their time: the claim's own model's first, then others by name."""

    def offers(view: DeviceView, claim: Claim) -> Iterator[Offer]:
        for m in sorted(view.models, key=lambda m: (m.name != claim.model, m.name)):
            blocks = most_staged(view, m, slack)
            if m.staging is not None and blocks > m.staging.staged:
                pages = freed_pages(view, m, blocks)
                if pages > 0:
                    price = partial(_slowing, view, m, blocks)
                    act = partial(_stage, view, m)
                    yield Offer(
                        ("staged", m.name),
                        m.name,
                        pages,
                        price,
                        act,
                        grain=1,
                        cumulative=True,
                        later=True,
                    )

    return offers


def bring_home(view: DeviceView, spare: int) -> list[Action]:
    """Bring staged blocks home on up to `spare` free pages, model by model.

    A step with a block that comes home takes as long as one that reads it in slots; all steps after
    it are shorter. So blocks come home as soon as pages are free, and those of requests that stream
    never."""
    actions: list[Action] = []
    for m in sorted(view.models, key=lambda m: m.name):
        s = m.staging
        if s is None or s.moving or not m.running or m.waiting:
            continue
        blocks = min(s.staged - s.streamed, spare // m.slab_pages * m.slab_blocks)
        if blocks > 0:
            spare -= ceil_div(blocks, m.slab_blocks) * m.slab_pages
            actions.append(Stage(m.name, s.staged - blocks, "there is room for them"))
    return actions


def most_staged(view: DeviceView, m: ModelView, slack: float) -> int:
    """Return the most blocks of a model that may be staged: with which a step hides their copies,
    but for `slack` of its time; no more than now if it is moving some."""
    s = m.staging
    if s is None:
        return 0
    if s.moving or m.residency is not Residency.RESIDENT or not m.running:
        return s.staged
    counts = range(s.staged, min(s.staged + s.home, s.room) + 1)
    alone = _step_seconds(m)
    longest = alone * (1 + slack)
    hidden = bisect_right(counts, longest, key=lambda n: staged_seconds(view, m, alone, n))
    return counts[hidden - 1] if hidden else s.staged


def staged_seconds(view: DeviceView, m: ModelView, seconds: float, blocks: int) -> float:
    """Return the seconds of a pass that reads so many staged blocks, and takes `seconds` if it
    waits for none."""
    n = m.spec.n_layers
    slots = 1 if m.staging is None else m.staging.slots
    rates = LinkRates.even(view.link_bytes_per_second, view.link_bytes_per_second)
    loaded = blocks * m.spec.block_bytes // n
    return swapped_seconds(n, Rotation(tuple(range(n)), slots), seconds, loaded, 0, rates)


def freed_pages(view: DeviceView, m: ModelView, blocks: int) -> int:
    """Return the pages that become free if `blocks` of a model's blocks are staged in place of as
    many as now: those of the blocks, less those of their slots."""
    assert m.staging is not None
    more = blocks - m.staging.staged
    return (
        more // m.slab_blocks * m.slab_pages
        - _slot_pages(view, m, blocks)
        + _slot_pages(view, m, m.staging.staged)
    )


def _slot_pages(view: DeviceView, m: ModelView, blocks: int) -> int:
    assert m.staging is not None
    per_page = max(1, view.page_bytes * m.spec.n_layers // m.spec.block_bytes)
    return ceil_div(m.staging.slots * blocks, per_page)


def _stage(view: DeviceView, m: ModelView, pages: int, claim: Claim) -> Stage:
    """Return the action that frees `pages`, with the fewest blocks."""
    s = m.staging
    assert s is not None
    counts = range(s.staged, min(s.staged + s.home, s.room) + 1)
    blocks = next(
        (n for n in counts[:: m.slab_blocks] if freed_pages(view, m, n) >= pages), counts[-1]
    )
    return Stage(m.name, blocks, f"{claim.model} needs pages")


def _slowing(view: DeviceView, m: ModelView, blocks: int) -> float:
    """Return the request-seconds by which the model's steps become longer for `STAGED` seconds."""
    alone = _step_seconds(m)
    share = staged_seconds(view, m, alone, blocks) / alone - 1 if alone > 0 else 0.0
    return len(m.running) * STAGED * share


def _step_seconds(m: ModelView) -> float:
    """Return the seconds of the model's decode step without waits: of the last one, or by cost."""
    if m.decode_seconds is not None:
        return m.decode_seconds
    context = sum(r.tokens for r in m.running)
    return m.costs.of(JobLoad(0, 0, 0, len(m.running), context))
