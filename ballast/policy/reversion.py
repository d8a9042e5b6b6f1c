"""Layers that come back, as claims for the pages they take: to models that have become active, and
to all when the peak is over."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain

from ballast.core.actions import Action, Remap
from ballast.core.request import Order
from ballast.core.view import DeviceView, ModelView, Residency
from ballast.policy.budget import PageBudget
from ballast.policy.cover import cover
from ballast.policy.layers import Layers
from ballast.policy.market import Claim, Source
from ballast.policy.offers import cached_prefixes


def to_active(
    view: DeviceView,
    budget: PageBudget,
    layers: Layers,
    returning: Iterable[str],
    sources: Sequence[Source],
) -> tuple[list[Action], frozenset[str]]:
    """What brings models that have become active to lend no more than active ones may (5.3), with
    pages that are free, or else come from `sources`; and those of them that wait for pages."""
    actions: list[Action] = []
    waiting = set()
    for m in view.models:
        lent = layers.lent(m, budget)
        if m.name not in returning or not lent or m.residency is not Residency.RESIDENT:
            continue
        excess = max(0, lent - layers.most(view, m))
        if not excess:  # as an active model it may be better off with other layers
            actions.append(layers.lending(m, lent, "it has become active"))
            continue
        claim = Claim(
            m.name,
            Order(0, view.now, 0),
            excess * m.layer_pages,
            may_preempt=False,
            weights=True,
            grain=m.layer_pages,
            then=partial(_back, layers, m, lent),
        )
        covered = cover(view, [claim], sources, budget)
        actions += covered.actions
        if covered.parts[m.name] < claim.pages:
            waiting.add(m.name)
    return actions, frozenset(waiting)


def _back(layers: Layers, m: ModelView, lent: int, pages: int) -> Remap:
    return layers.lending(m, lent - pages // m.layer_pages, "it has become active")


def off_peak(view: DeviceView, budget: PageBudget, layers: Layers, pages: int) -> list[Action]:
    """Layers of active models come back, then of those that are used next, as far as so many
    `pages` go, which are free or hold cached prefixes (7.6.1, dynamic reversion)."""
    remaps: list[Action] = []
    needed = 0
    lenders = chain(*(reversed(layers.order(view.models, active=a)) for a in (True, False)))
    for m in lenders:
        lent = layers.lent(m, budget)
        n = min(lent, max(0, pages - needed) // m.layer_pages)
        if n > 0:
            needed += n * m.layer_pages
            remaps.append(layers.lending(m, lent - n, "the peak is over"))
    claim = Claim("", Order(0, view.now, 0), needed, may_preempt=False, weights=True, grain=1)
    budget.coming = budget.free
    return [*cover(view, [claim], [cached_prefixes], budget).actions, *remaps]
