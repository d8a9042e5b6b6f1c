"""Offer not to bring a model's weights at all: its passes read them in host memory (C2CServe).

No page and no copy is needed, and requests can begin at once. But each pass takes as long as the
link takes to carry the weights, of which models that are read in place have a share each; all
requests of the device wait with it, as models share the lane.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from ballast.core.actions import Action, Reside
from ballast.core.cost import copy_seconds
from ballast.core.view import DeviceView, ModelView, Residency
from ballast.policy.market.claim_and_offer import Claim, Offer
from ballast.policy.market.outlook import Outlook
from ballast.policy.market.page_budget import PageBudget
from ballast.policy.market.supply_curve import Priced, by_price
from ballast.policy.plans import activation

RESERVE = 0.1
"""Part of the pages that stays free when weights leave host memory."""


class WeightsInPlace:
    """What an absent model's claim is offered: to read in host memory what is missing."""

    def __init__(self, ahead: Outlook) -> None:
        self._ahead = ahead

    def cheapest(self, budget: PageBudget, claim: Claim, lacked: int) -> Iterable[Priced]:
        """As of `OfferTable`."""
        view = self._ahead.view
        if not (claim.weights and view.reads_host):
            return ()
        m = view.model(claim.model)
        missing = m.missing_pages
        if m.residency is not Residency.ABSENT or m.shared or missing <= 0:
            return ()
        price = partial(float, _harm(self._ahead, m, missing))
        act = partial(_read_in_place, view, m)
        offer = Offer(("in place", m.name), m.name, missing, price, act, instead=True)
        return by_price(budget, [offer], lacked)

    def is_own(self, claim: Claim) -> bool:
        """As of `OfferTable`."""
        return claim.weights

    def take(self, offers: Sequence[Offer]) -> bool:
        """As of `OfferTable`."""
        return False


def _harm(ahead: Outlook, m: ModelView, missing: int) -> float:
    """Return the harm of passes that wait for the link, less that of the copy that is not made."""
    view = ahead.view
    sharing = 1 + sum(bool(o.plan.in_place) for o in view.models)
    n_bytes = missing * view.page_bytes
    reading = copy_seconds(n_bytes * sharing, view.link_bytes_per_second)
    copy = copy_seconds(n_bytes, view.weights_bytes_per_second)
    return max(0.0, ahead.lane_waits_harm(reading) - ahead.rise_of_waiting(m, copy))


def _read_in_place(view: DeviceView, m: ModelView, _: int, claim: Claim) -> Reside:
    why = "reading it in host memory harms less than making room for it"
    return activation(view, m, why, in_place=True)


def weights_home(view: DeviceView, free: int) -> list[Action]:
    """Bring weights onto `free` pages that nobody claims, of the first model for which all of them
    suffice, as far as `RESERVE` stays free."""
    spare = free - round(RESERVE * (view.total - view.arena))
    for m in view.models:
        home = m.plan.in_place and m.residency is Residency.RESIDENT and not m.busy
        if (
            home
            and m.running
            and m.plan.to(plan := replace(m.plan, in_place=frozenset())).pages <= spare
        ):
            return [Reside(m.name, plan, "there is room for its weights")]
    return []
