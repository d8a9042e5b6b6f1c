"""Layers that come back: to models that have become active, and to all when the peak is over."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from ballast.core.actions import Action
from ballast.core.request import Order
from ballast.core.view import DeviceView, Residency
from ballast.policy.cover import Ground, gather
from ballast.policy.layers import Layers
from ballast.policy.offers import Claim, Source, cached_prefixes


def to_active(
    view: DeviceView,
    ground: Ground,
    layers: Layers,
    returning: Iterable[str],
    sources: Iterable[Source],
) -> tuple[list[Action], frozenset[str]]:
    """What brings models that have become active to lend no more than active ones may (5.3), with
    pages that are free, or else come from `sources`; and those of them that wait for pages."""
    actions: list[Action] = []
    waiting = set()
    for m in view.models:
        if m.name not in returning or not m.rotation.lent or m.residency is not Residency.RESIDENT:
            continue
        excess = max(0, m.rotation.lent - layers.most(view, m))
        pages = excess * m.layer_pages
        claim = Claim(m.name, Order(0, view.now, 0), pages, may_preempt=False, activate=True)
        offers = chain.from_iterable(source(view, claim) for source in sources)
        actions += gather(ground, pages, offers)
        now = min(excess, max(0, min(ground.free, ground.coming)) // m.layer_pages)
        ground.free -= now * m.layer_pages
        ground.coming -= min(pages, max(0, ground.coming))
        if now or not excess:  # as an active model it may be better off with other layers
            actions.append(layers.lending(m, m.rotation.lent - now, "it has become active"))
        if now < excess:
            waiting.add(m.name)
    return actions, frozenset(waiting)


def off_peak(view: DeviceView, ground: Ground, layers: Layers, pages: int) -> list[Action]:
    """Layers of active models come back, then of those that are used next, as far as so many
    `pages` go, which are free or hold cached prefixes (7.6.1, dynamic reversion)."""
    remaps: list[Action] = []
    needed = 0
    lenders = chain(*(reversed(layers.order(view.models, active=a)) for a in (True, False)))
    for m in lenders:
        n = min(m.rotation.lent, max(0, pages - needed) // m.layer_pages)
        if n > 0:
            needed += n * m.layer_pages
            remaps.append(layers.lending(m, m.rotation.lent - n, "the peak is over"))
    claim = Claim("", Order(0, view.now, 0), needed, may_preempt=False, activate=True)
    ground.coming = ground.free
    return [*gather(ground, needed, cached_prefixes(view, claim)), *remaps]
