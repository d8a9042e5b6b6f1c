"""Return memory to models that gave it up, from pages that are free or hold unused caches.

Dynamic reversion of MIRAGE (5.3, 7.6.1): rotating layers become resident again. Used by the memory
policies `mirage` (weights) and `kvswap` (KV).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ballast.core.actions import Action
from ballast.core.request import Precedence
from ballast.core.view import DeviceView, ModelView, Residency
from ballast.policy.market.claim_and_offer import Claim, Source
from ballast.policy.market.cover import cover
from ballast.policy.market.offers import oldest
from ballast.policy.market.page_budget import PageBudget
from ballast.policy.memory.layer_offers import LayerOffers, freed_layers


def give_back(
    view: DeviceView,
    budget: PageBudget,
    claims: Iterable[Claim],
    spare: int,
    sources: Sequence[Source],
) -> list[Action]:
    """Cover divisible claims in the order given, with at most `spare` pages: free pages first, then
    pages from `sources`."""
    within: list[Claim] = []
    for claim in claims:
        pages = min(claim.pages, spare) // claim.grain * claim.grain
        if pages >= claim.least:
            within.append(claim._replace(pages=pages, due=float(len(within))))
            spare -= pages
    budget.coming = budget.free
    return cover(view, within, sources, budget).actions


def to_active(
    view: DeviceView,
    budget: PageBudget,
    layers: LayerOffers,
    returning: Iterable[str],
    sources: Sequence[Source],
) -> tuple[list[Action], frozenset[str]]:
    """Return layers to models that have just become active, until they give up no more than active
    models may (5.3), from free pages or else from `sources`; where its requests would wait for
    layers too long, work of younger ones is undone.

    Returns the actions, and those of the `returning` models that still wait for pages.
    """
    actions: list[Action] = []
    waiting = set()
    for m in view.models:
        freed = freed_layers(m, budget)
        if m.name not in returning or not freed or m.residency is not Residency.RESIDENT:
            continue
        excess = max(0, freed - layers.most(view, m))
        if not excess:  # as an active model it may be better off with other layers
            actions.append(layers.remap(m, freed, "it has become active"))
            continue
        claim = _layers_claim(view, layers, m, freed, excess, "it has become active")
        if layers.stalls(view, m):
            claim = claim._replace(order=oldest(m), may_preempt=True)
        covered = cover(view, [claim], sources, budget)
        actions += covered.actions
        if covered.parts[m.name] < claim.pages:
            waiting.add(m.name)
    return actions, frozenset(waiting)


def off_peak(view: DeviceView, budget: PageBudget, layers: LayerOffers) -> list[Claim]:
    """List claims for all layers given up: of active models first, then of those used next (7.6.1,
    dynamic reversion)."""
    models = [
        m for active in (True, False) for m in reversed(layers.order(view.models, active=active))
    ]
    freed = ((m, freed_layers(m, budget)) for m in models)
    return [_layers_claim(view, layers, m, n, n, "the peak is over") for m, n in freed if n > 0]


def _layers_claim(
    view: DeviceView, layers: LayerOffers, m: ModelView, freed: int, n: int, why: str
) -> Claim:
    """Return the claim for the pages of `n` layers, of a model that gives up `freed` layers now."""

    def back(pages: int) -> Sequence[Action]:
        return (layers.remap(m, freed - pages // m.layer_pages, why),)

    return Claim(
        m.name,
        Precedence(0, view.now, 0),
        n * m.layer_pages,
        may_preempt=False,
        weights=True,
        grain=m.layer_pages,
        then=back,
    )
