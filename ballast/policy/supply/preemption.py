"""Offer running requests at the harm of delaying them until they are admitted again."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ballast.core.actions import Preempt
from ballast.core.view import DeviceView, ModelView, RequestView, Residency
from ballast.policy.market.claim_and_offer import Claim, Offer
from ballast.policy.market.harm import harm
from ballast.policy.market.outlook import Outlook


def running_requests(ahead: Outlook, view: DeviceView, claim: Claim) -> Iterator[Offer]:
    """Offer preemption of running requests that came after the claim's, for claims that may undo
    work: cheapest first, where prices decide.

    A preempted request waits until pages become free by themselves, those before it in the queue
    served, and is computed again: the lane has less time for all others.
    """
    if not claim.may_preempt:
        return
    for m in view.models:
        if m.residency is not Residency.RESIDENT:
            continue
        for i in range(len(m.running) - 1, -1, -1):
            r = m.running[i]
            if r.order <= claim.order:
                break
            if r.pages > 0 or (r.blocks > 0 and m.name == claim.model):
                yield _preempting(ahead, m, r, len(m.waiting) + i)


def _preempting(ahead: Outlook, m: ModelView, r: RequestView, place: int) -> Offer:
    """Offer one request, the `place`th of its model's, waiting ones first.

    Its harm: of its delay, until it is admitted again and computed; and of the lane's time.
    """

    def price() -> float:
        seconds = m.costs.prefill_seconds(r.computed)
        waits = ahead.coming.wait(r.pages + ahead.backlog) + seconds * ahead.stretch
        return harm(waits, ahead.forecast(m, place)) + ahead.lane_price * seconds

    act = partial(_preempt, m.name, r.id)
    key = "request", m.name, r.id
    return Offer(key, m.name, r.pages, price, act, r.blocks, undoes=r.order)


def _preempt(model: str, request_id: str, _: int, claim: Claim) -> Preempt:
    return Preempt(model, request_id, why=f"{claim.model} gains more than it loses")
