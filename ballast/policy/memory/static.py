"""Give every model a fixed share of the device's memory: the classical baseline.

The memory policy of preset `static`. `recompute`, `mirage`, `kvswap` and `quotas` use its functions
for placing weights and for covering claims within a model's own limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ballast.core.actions import Action, Decision, DropCache, Limit, Refuse
from ballast.core.request import Precedence
from ballast.core.units import ceil_div
from ballast.core.view import DeviceView, ModelView, Residency
from ballast.policy.base import PlacedModels
from ballast.policy.market.claim_and_offer import Claim, Source
from ballast.policy.market.claims import kv_claims
from ballast.policy.market.cover import cover, gather
from ballast.policy.market.offers import lent_pages, own_younger_requests
from ballast.policy.market.page_budget import PageBudget
from ballast.policy.plans import activation, eviction


def placed(view: DeviceView, *, pooled: bool = False) -> tuple[list[ModelView], int]:
    """Return the models that have a place, and the pages that their weights leave.

    Models are placed in order while the weights fit beside KV: at least one page for each. Where
    the tokens to expect are known, places are planned: for the longest request of each model, or,
    if KV is `pooled`, of any of them, unless no model fits so. Segments that several models contain
    count once.
    """
    if any(m.spec.expected_tokens for m in view.models):
        found, room = _fill(view, request_pages, pooled)
        if found:
            return found, room
    return _fill(view, lambda m: 1, False)


def _fill(
    view: DeviceView, least_kv: Callable[[ModelView], int], pooled: bool
) -> tuple[list[ModelView], int]:
    """Place models in order while `least_kv` pages fit beside their weights, for each of them or,
    `pooled`, for the one that needs most."""
    room, kv = view.total - view.arena, 0
    found: list[ModelView] = []
    there: set[str] = set()
    for m in in_order_of_places(view):
        pages = m.own_pages + sum(s.pages for s in m.shared if s.owner not in there)
        more = max(kv, least_kv(m)) if pooled else kv + least_kv(m)
        if pages + more <= room:
            found.append(m)
            room -= pages
            kv = more
            there.update(s.owner for s in m.shared)
    return found, room


def request_pages(m: ModelView) -> int:
    """Return the KV pages of the longest request to expect of a model."""
    blocks = m.spec.blocks_of(m.spec.longest_request)
    return ceil_div(blocks, m.slab_blocks) * m.slab_pages


def in_order_of_places(view: DeviceView) -> list[ModelView]:
    """Return the models with the pinned ones first, as these stay on the device, each in descending
    order of their configured share, then of the tokens expected to be asked of them."""
    return sorted(
        view.models, key=lambda m: (not m.spec.pinned, -m.spec.share, -m.spec.expected_tokens)
    )


def shares(view: DeviceView) -> dict[str, int]:
    """Return the KV pages of each model that has a place: the pages that weights leave, divided in
    proportion to the configured shares."""
    models, room = placed(view)
    total = sum(m.spec.share for m in models)
    return {m.name: int(room * m.spec.share / total) for m in models}


@dataclass(frozen=True, slots=True)
class Division:
    """Division of KV pages among models; valid while the models, their configured shares and their
    order of places are the same."""

    among: tuple[tuple[str, float], ...]
    """(model, configured share), in the order of places."""
    pages: dict[str, int]


@dataclass(frozen=True, slots=True)
class FixedShares(PlacedModels):
    """Activate models that have a place, bound their KV, and refuse requests of models without one.

    Within its share a model serves first come first served; when its running requests need more
    than the share, its own youngest is preempted. When an operator adds or removes a model, the
    device is divided anew: a model that holds more than its new share loses cached prefixes, and
    the rest as its requests end.
    """

    def __call__(self, view: DeviceView, memo: object) -> Decision:
        known = memo if isinstance(memo, Division) else None
        division, actions = keep_places(view, known, shares)
        claims, _ = kv_claims(view, waiting=False)
        actions += cover_within(view, claims, [own_younger_requests])
        return Decision(tuple(actions), division)


def keep_places(
    view: DeviceView, known: Division | None, divide: Callable[[DeviceView], dict[str, int]]
) -> tuple[Division, list[Action]]:
    """Keep on the device every model that `divide` gives pages, its KV within them, and no other
    model.

    Returns the division in force, and the actions.
    """
    actions: list[Action] = []
    among = tuple((m.name, m.spec.share) for m in in_order_of_places(view))
    anew = known is None or known.among != among
    if known is None or anew:
        known = Division(among, divide(view))
        for m in sorted(view.models, key=lambda m: -m.spec.share):
            actions += _take_place(view, m, known.pages.get(m.name))
    for m in view.models:
        if m.name not in known.pages:
            why = f"{m.name} has no place: the fixed shares of the others fill the device"
            actions += [Refuse(m.name, r.id, why) for r in m.waiting]
            actions += [] if anew else _give_up_place(m)
        elif not anew and m.residency is Residency.ABSENT and m.waiting:
            if m.missing_pages <= view.free - view.promised:
                actions.append(activation(view, m, why="its place has become free"))
            else:
                actions += recalls(view, m.missing_pages)
    return known, actions


def cover_within(
    view: DeviceView, claims: Sequence[Claim], sources: Sequence[Source]
) -> list[Action]:
    """Cover claims where every model has its own limit, so that no model takes another's pages.

    Requests that lack pages of the pool then lack those lent to other devices, which are recalled,
    or those that others hold beyond shares that have shrunk: these drop their cached prefixes.
    """
    lacking = sum(s.pages for s in view.shortages if not s.limited)
    actions = recalls(view, lacking)
    if lacking > view.coming:
        for m in view.models:
            actions += _within_share(m, m.limit)
    return actions + cover_limited(view, claims, sources)


def part_limited(view: DeviceView, claims: Sequence[Claim]) -> tuple[list[Claim], list[Claim]]:
    """Divide claims into those that the pool can cover, and those of running requests that only
    their model's own limit stops, as the pool has enough."""
    limited = {
        r.order
        for s in view.shortages
        if s.limited and s.pages <= view.coming
        for r in view.model(s.model).running
        if r.id == s.request_id
    }
    return (
        [claim for claim in claims if claim.order not in limited],
        [claim for claim in claims if claim.order in limited],
    )


def cover_limited(
    view: DeviceView, claims: Sequence[Claim], sources: Sequence[Source]
) -> list[Action]:
    """Make room for claims within their models' limits, taking offers of `sources` against each
    model's own KV."""
    actions: list[Action] = []
    by_model: dict[str, list[Claim]] = {}
    for claim in claims:
        by_model.setdefault(claim.model, []).append(claim)
    for name, own in by_model.items():
        budget = PageBudget(view, unused(view, view.model(name)))
        actions += cover(view, own, sources, budget).actions
    return actions


def recalls(view: DeviceView, pages: int) -> list[Action]:
    """Recall lent pages if fewer than `pages` are coming."""
    claim = Claim("", Precedence(0, view.now, 0), pages, may_preempt=False)
    return gather(view, claim, [lent_pages])


def _take_place(view: DeviceView, m: ModelView, share: int | None) -> list[Action]:
    """Bring a model to its new `share`; None: it has lost its place."""
    if share is None:
        return _give_up_place(m)
    actions: list[Action] = [Limit(m.name, share, why="fixed share"), *_within_share(m, share)]
    if m.residency is Residency.ABSENT:
        actions.append(activation(view, m, why="fixed share"))
    return actions


def _give_up_place(m: ModelView) -> list[Action]:
    """Evict a model without a place, unless it is absent, loading or pinned."""
    if m.residency is not Residency.RESIDENT or m.spec.pinned:
        return []
    return [eviction(m, why="the fixed shares of the others fill the device")]


def _within_share(m: ModelView, share: int | None) -> list[Action]:
    """Drop cached prefixes of a model that holds more than its `share`."""
    if share is None or m.kv_pages <= share or not m.cached_pages:
        return []
    return [DropCache(m.name, m.kv_pages - share, why="its fixed share is smaller now")]


def within(view: DeviceView, m: ModelView, more: int = 0) -> DeviceView:
    """Return the device's view bounded by a model's limit: only the limit's unused pages, plus
    `more`, are free."""
    return replace(view, free=unused(view, m, more), reclaiming=0, recalled=0, promised=0)


def unused(view: DeviceView, m: ModelView, more: int = 0) -> int:
    """Return the pages that a model may still use within its limit plus `more`, pages of its own
    cached prefixes included."""
    limit = m.limit if m.limit is not None else view.total
    return max(0, limit - m.kv_pages + m.cached_pages + more)
