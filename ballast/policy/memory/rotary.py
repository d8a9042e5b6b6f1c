"""Let requests take turns by their slack where KV is short, as SuperInfer does.

The memory policy of preset `superinfer`: a baseline beside the papers' systems.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from ballast.core.actions import Preempt
from ballast.core.view import DeviceView, ModelView, RequestView, Residency
from ballast.policy.admission.turns_by_slack import back_by, is_fetched, restoring_seconds
from ballast.policy.market.claim_and_offer import Claim, Offer, Source
from ballast.policy.memory.recompute import Recompute


@dataclass(frozen=True, slots=True)
class Rotary(Recompute):
    """`Recompute`, except that requests that are ahead of their pace by `lead` seconds make way
    first, for requests whose next token is due earlier.

    Their KV goes to the tiers below the device, where there are any and it comes back sooner than
    it is computed; where it has to be computed again, a request makes way in this way once. The
    admission policy `TurnsBySlack` lets them rest, and come back in time.
    """

    lead: float = 0.5

    def sparing(self) -> Sequence[Source]:
        return (requests_ahead(self.lead),)


def requests_ahead(lead: float) -> Source:
    """Return a source of running requests whose next token is due `lead` seconds or more after they
    could be back, the one with most time first: each for claims of requests whose own next token
    is due before it would have to come back. No more important request rests for a less important
    one."""

    def offers(view: DeviceView, claim: Claim) -> Iterator[Offer]:
        urgent = _due(view.model(claim.model), claim)
        for latest, m, r in view.derived(_by_slack):
            spare = latest - view.now
            if spare < lead or latest <= urgent:
                return
            if r.pages or m.name == claim.model:
                yield _resting(view, m, r, spare)

    return offers


def _by_slack(view: DeviceView) -> Sequence[tuple[float, ModelView, RequestView]]:
    """Return running requests that have had their first token in time and when each would have to
    be back, the latest first."""
    found = [
        (back_by(view, m, r), m, r)
        for m in view.models
        if m.residency is Residency.RESIDENT
        for r in m.running
        if r.first is not None and (r.pages or r.blocks)
        if not r.undone or is_fetched(view, m, r)
    ]
    found.sort(key=lambda entry: (-entry[0], entry[1].name, entry[2].id))
    return found


def _due(m: ModelView, claim: Claim) -> float:
    """Return when the next token of a claim's request is due; for weights, the first one of its
    model's first request."""
    of_claim = (r for r in (*m.waiting[:1], *m.running) if r.order == claim.order)
    return next((r.next_due for r in of_claim), math.inf)


def _resting(view: DeviceView, m: ModelView, r: RequestView, spare: float) -> Offer:
    price = partial(restoring_seconds, view, m, r)
    act = partial(_rest, m.name, r.id, spare)
    key, rank = ("request", m.name, r.id), r.order.rank
    return Offer(key, m.name, r.pages, price, act, r.blocks, rank=rank, in_use=True)


def _rest(model: str, request_id: str, spare: float, _: int, claim: Claim) -> Preempt:
    return Preempt(
        model, request_id, f"it is {spare:.1f} s ahead of its pace, {claim.model} is not"
    )
