"""Offer KV blocks of running requests: they go to the host, and steps read them from there.

A source of pages, as in `policy.market.offers`, and the way back. Each step brings every layer of
all staged blocks over the link, behind the work of other layers as far as that takes as long.

Which requests' blocks are where: a staged block costs the link its bytes in each pass that is yet
to come (*bytes a pass x passes left*), one at home costs its share of a page, and its bytes once.
All blocks of a model are alike, so pages are worth most to requests with the most passes left:
theirs come home first, and leave last. With one pass left nothing is gained: bringing a block home
reads it once, as the pass would.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from ballast.core.actions import Action, Stage
from ballast.core.job import JobLoad
from ballast.core.units import ceil_div
from ballast.core.view import DeviceView, ModelView, RequestView, Residency
from ballast.policy.market.claim_and_offer import Claim, Offer, Source

STAGED = 1.0
"""Seconds for which blocks are expected to stay on the host; an assumption."""


def staged_blocks(slack: float, ahead: float = 0.0) -> Source:
    """Return the source of pages of blocks that go to the host as long as decode steps become
    longer by at most `slack` of their time: the claim's own model's first, then others by name.

    `ahead`: least pages freed at a time, where there are so many, in parts of the model's KV."""

    def offers(view: DeviceView, claim: Claim) -> Iterator[Offer]:
        for m in sorted(view.models, key=lambda m: (m.name != claim.model, m.name)):
            if m.staging is None:
                continue
            blocks = most_staged(view, m, slack)
            if blocks > m.staging.staged:
                pages = freed_pages(view, m, blocks)
                if pages > 0:
                    price = partial(_slowing, view, m, blocks)
                    act = partial(stage, view, m, blocks, round(ahead * m.kv_pages))
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


def bring_home(
    view: DeviceView, spare: int, models: Iterable[ModelView] | None = None
) -> list[Action]:
    """Bring staged blocks of `models` (None: of all) home on up to `spare` free pages, model by
    model.

    A step with a block that comes home takes as long as one that reads it in slots; all steps after
    it are shorter. So blocks come home as soon as pages are free, and those of requests that stream
    never."""
    actions: list[Action] = []
    for m in sorted(view.models if models is None else models, key=lambda m: m.name):
        s = m.staging
        if s is None or s.moving or not m.running or m.waiting:
            continue
        come = [r for r in by_passes_left(m) if r.staged and not r.streams]
        come = [r for r in reversed(come) if passes_left(m, r) > 1]
        blocks = min(
            s.staged - s.streamed,
            sum(r.staged for r in come),
            spare // m.slab_pages * m.slab_blocks,
        )
        if blocks > 0:
            spare -= ceil_div(blocks, m.slab_blocks) * m.slab_pages
            why = "there is room for them"
            order = _covering(come, blocks, lambda r: r.staged)
            actions.append(Stage(m.name, s.staged - blocks, why, order))
    return actions


def pages_away(m: ModelView) -> int:
    """Return the pages that the staged blocks of a model need to come home now, if they may."""
    s = m.staging
    if s is None or s.moving or not m.running or m.waiting:
        return 0
    return ceil_div(s.staged - s.streamed, m.slab_blocks) * m.slab_pages


def passes_left(m: ModelView, r: RequestView) -> int:
    """Return the passes that are expected to read a running request's KV: one for each token to
    come, and one for what is left of its prompt."""
    return m.expected_outputs(r) + (r.computed < r.tokens - 1)


def by_passes_left(m: ModelView) -> list[RequestView]:
    """Return a model's running requests, those with the fewest passes left first; of equals the
    youngest."""
    youngest_first = reversed(m.running)
    return sorted(youngest_first, key=lambda r: passes_left(m, r))


def _covering(
    requests: Iterable[RequestView], blocks: int, of: Callable[[RequestView], int]
) -> tuple[str, ...]:
    """Return the first requests, by id, that have so many blocks together."""
    found: list[str] = []
    for r in requests:
        if blocks <= 0:
            break
        found.append(r.id)
        blocks -= of(r)
    return tuple(found)


def most_staged(view: DeviceView, m: ModelView, slack: float) -> int:
    """Return the most blocks of a model that may be staged: with which a step hides their copies,
    but for `slack` of its time; no more than now if it is moving some."""
    s = m.staging
    if s is None:
        return 0
    if s.moving or m.residency is not Residency.RESIDENT or not m.running:
        return s.staged
    counts = range(s.staged, min(s.staged + s.home, s.room) + 1)
    alone = decode_seconds(m)
    longest = alone * (1 + slack)
    hidden = bisect_right(counts, longest, key=lambda n: staged_seconds(view, m, alone, n))
    return counts[hidden - 1] if hidden else s.staged


def staged_seconds(view: DeviceView, m: ModelView, seconds: float, blocks: int) -> float:
    """Return the seconds of a pass that reads so many staged blocks, and takes `seconds` if it
    waits for none: exact, for a pass that has the link to itself.

    Each layer computes for an equal part of the seconds, and loads are served in the order of
    layers: with several slots, one is loaded while another is used."""
    n, slots = m.spec.n_layers, 1 if m.staging is None else m.staging.slots
    each, load = seconds / n, blocks * m.spec.block_bytes / n / view.link_bytes_per_second
    if not blocks or slots == 1:
        return n * (each + load)
    return load + (n - 1) * max(load, each) + each


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


def stage(view: DeviceView, m: ModelView, most: int, least: int, pages: int, claim: Claim) -> Stage:
    """Return the action that frees `pages`, and at least `least`, with the fewest blocks; no more
    than `most` are staged."""
    s = m.staging
    assert s is not None
    counts, wanted = range(s.staged, most + 1), max(pages, least)
    blocks = next(
        (n for n in counts[:: m.slab_blocks] if freed_pages(view, m, n) >= wanted), counts[-1]
    )
    size = m.spec.block_tokens
    leave = by_passes_left(m)
    order = _covering(leave, blocks - s.staged, lambda r: max(0, r.computed // size - r.staged))
    return Stage(m.name, blocks, f"{claim.model} needs pages", order)


def _slowing(view: DeviceView, m: ModelView, blocks: int) -> float:
    """Return the request-seconds by which the model's steps become longer for `STAGED` seconds."""
    alone = decode_seconds(m)
    share = staged_seconds(view, m, alone, blocks) / alone - 1 if alone > 0 else 0.0
    return len(m.running) * STAGED * share


def decode_seconds(m: ModelView) -> float:
    """Return the seconds of the model's decode step without waits: of the last one, or by cost."""
    if m.decode_seconds is not None:
        return m.decode_seconds
    context = sum(r.tokens for r in m.running)
    return m.costs.of(JobLoad(0, 0, 0, len(m.running), context))
