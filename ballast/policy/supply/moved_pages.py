"""Offer pages that a copy frees: scattered blocks that are moved together, and pages lent."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ballast.core.actions import Action
from ballast.core.cost import copy_seconds
from ballast.policy.market.claim_and_offer import Claim, Offer
from ballast.policy.market.harm import TIE
from ballast.policy.market.offers import compactions, recalls
from ballast.policy.market.outlook import Outlook


def scattered_blocks(ahead: Outlook) -> Iterator[Offer]:
    """Offer to compact scattered blocks, at the harm of the lane's time that the copy takes: at the
    link's rate, which is below that of the device's memory."""
    for offer in ahead.view.derived(compactions):
        yield offer._replace(price=partial(float, ahead.lane_price * _seconds(ahead, offer)))


def lent_pages(ahead: Outlook) -> Iterator[Offer]:
    """Offer to recall pages lent to other devices. They were lent because nobody here would pay as
    much: what they are worth to their borrower now, only the fleet policy knows. So the price is a
    tie-breaker, for the time until they come. What all that wait lack is recalled together, as each
    recall may wait for a job of the borrower."""
    for offer in ahead.view.derived(recalls):
        price = partial(float, TIE * _seconds(ahead, offer))
        yield offer._replace(price=price, act=partial(_recall, ahead, offer))


def _recall(ahead: Outlook, offer: Offer, pages: int, claim: Claim) -> Action:
    lacked = ahead.backlog - ahead.view.coming
    return offer.act(max(pages, min(offer.pages, lacked)), claim)


def _seconds(ahead: Outlook, offer: Offer) -> float:
    view = ahead.view
    return copy_seconds(offer.pages * view.page_bytes, view.link_bytes_per_second)
