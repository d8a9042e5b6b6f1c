"""Price weights that passes read in host memory instead of on pages, for the preset `ballast`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from ballast.core.actions import Reside
from ballast.core.cost import copy_seconds
from ballast.core.view import DeviceView, ModelView, Residency
from ballast.policy.market.claim_and_offer import Claim, Offer
from ballast.policy.market.host_weights import laid
from ballast.policy.market.outlook import Outlook
from ballast.policy.market.page_budget import PageBudget
from ballast.policy.market.supply_curve import Priced, by_price
from ballast.policy.plans import activation


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
    copy = copy_seconds(missing * ahead.view.page_bytes, ahead.view.weights_bytes_per_second)
    reading = ahead.lane_waits_harm(_reading_seconds(ahead.view, m, missing))
    return max(0.0, reading - ahead.rise_of_waiting(m, copy))


def _reading_seconds(view: DeviceView, m: ModelView, pages: int) -> float:
    """Return the seconds in which the link carries so much more of a model with each pass, beside
    others that are read in place."""
    sharing = 1 + sum(bool(o.plan.in_place) for o in view.models if o.name != m.name)
    return copy_seconds(pages * view.page_bytes * sharing, view.link_bytes_per_second)


def _read_in_place(view: DeviceView, m: ModelView, _: int, claim: Claim) -> Reside:
    why = "reading it in host memory harms less than making room for it"
    return activation(view, m, why, in_place=True)


def priced_to_host(ahead: Outlook) -> Iterator[Offer]:
    """Offer weights of models that run at the harm of passes that read them over the link."""
    view = ahead.view
    if not view.reads_host or view.near_host:
        return
    for m in view.models:
        if m.running and not m.spec.pinned and not m.rotation.n_freed:
            for offer in laid(m):
                harm = ahead.lane_waits_harm(_reading_seconds(view, m, offer.pages))
                yield offer._replace(price=partial(float, harm))
