"""Compute the curve of marginal prices that a device publishes to the fleet policy."""

from __future__ import annotations

from collections.abc import Iterator

from ballast.core.actions import Action
from ballast.core.cost import copy_seconds
from ballast.core.price_curve import PriceCurve, curve_points
from ballast.core.request import Precedence
from ballast.core.view import DeviceView, ModelView, Residency
from ballast.policy.market.claim_and_offer import Claim, Offer
from ballast.policy.market.outlook import Outlook, waiting_pages
from ballast.policy.market.page_budget import PageBudget
from ballast.policy.market.supply_curve import SupplyCurve

_ANYBODY = Precedence(0, 0.0, 0)


def price_curve(ahead: Outlook, spare: SupplyCurve, undoing: float) -> PriceCurve:
    """Return a device's curve: supply at each price less demand of those who pay as much.

    `spare`: what can be had without undoing work; `undoing`: the least price of a page of running
    requests. KV that is expected beside what waits takes the cheapest pages. Weights that wait for
    pages lower what the device can spare; what it lacks is for KV alone, as borrowed pages hold
    nothing else.
    """
    view = ahead.view
    offered = _offered(view, spare, Claim("", _ANYBODY, view.total, may_preempt=False))
    supply = [(offer.price_of(pages) / gained, gained) for offer, pages, gained, _ in offered]
    wanted = list(_demands(ahead, undoing))
    kv = sum(pages for lendable, pages, _ in wanted if lendable)
    there = view.coming + view.borrowed - (ahead.reserve - ahead.backlog)
    level = there - sum(pages for _, pages, _ in wanted)
    lacking = min(kv, max(0, -level))
    changes = [(0.0, 0, 0), *((price, pages, 0) for price, pages in supply)]
    changes += ((gain, pages, pages if lendable else 0) for lendable, pages, gain in wanted)
    levels = []
    for price, pages, covered in sorted(changes):
        level, kv = level + pages, kv - covered
        levels.append((max(level, -kv), price))
    points = curve_points(levels, lacking)
    return PriceCurve(lacking, points, _link_price(ahead, lacking), _stranded(ahead))


def made_free(view: DeviceView, spare: SupplyCurve, to: str, pages: int) -> list[Action]:
    """Return the actions that free pages for another device, until `pages` are free: the cheapest
    ones, and all there are if these do not suffice."""
    lacked = pages - max(0, view.free - view.promised)
    found: dict[tuple[str, ...], Action] = {}
    if lacked > 0:
        claim = Claim(to, _ANYBODY, lacked, may_preempt=False)
        for offer, _, gained, taken in _offered(view, spare, claim):
            found[offer.key] = offer.act(taken, claim)
            lacked -= gained
            if lacked <= 0:
                break
    return list(found.values())


def _offered(
    view: DeviceView, spare: SupplyCurve, claim: Claim
) -> Iterator[tuple[Offer, int, int, int]]:
    """Yield offers, the cheapest page first, until a claim is covered or none is left; each with
    the pages taken of it, those gained by that, and the pages that its action frees."""
    budget, lacked = PageBudget(view), claim.pages
    for offer in spare.cheapest(budget, claim, lacked):
        if budget.used_up(offer) or offer.later or not claim.may_take(offer):
            continue
        pages = budget.left(offer, max(1, lacked))
        gained = budget.accept(offer, pages)
        if gained > 0:
            yield offer, pages, gained, budget.taken(offer.key) if offer.cumulative else pages
            lacked -= gained


def _demands(ahead: Outlook, undoing: float) -> Iterator[tuple[bool, int, float]]:
    """Yield what claims lack: whether borrowed pages would do, the pages, and the gain of each."""
    view = ahead.view
    wait = ahead.coming.wait(ahead.backlog - view.coming)
    running = {r.id for m in view.models for r in m.running}
    for s in view.shortages:
        if not s.limited and s.request_id in running:
            yield _lendable(view.model(s.model)), s.pages, undoing
    for m in view.models:
        if not m.waiting or m.held:
            continue
        if m.residency is Residency.ABSENT:
            yield (
                False,
                m.missing_pages,
                ahead.rise_of_waiting(m, ahead.turn) / max(1, m.missing_pages),
            )
        elif pages := waiting_pages(m):
            yield _lendable(m), pages, ahead.rise_of_waiting(m, wait) / pages


def _lendable(m: ModelView) -> bool:
    """Whether a model's KV can lie on borrowed pages (`DeviceView.borrowable`)."""
    return m.slab_pages == 1


def _link_price(ahead: Outlook, lacked: int) -> float:
    """Return the harm, for each of the pages lacked, of reading them over the link in each round of
    steps."""
    view = ahead.view
    rate = view.peer_bytes_per_second or view.link_bytes_per_second
    if lacked <= 0 or not rate:
        return 0.0
    seconds = copy_seconds(lacked * view.page_bytes, rate)
    return ahead.lane_waits_harm(seconds) / lacked


def _stranded(ahead: Outlook) -> dict[str, float]:
    waiting = (m for m in ahead.view.models if m.waiting and m.residency is Residency.ABSENT)
    return {m.name: ahead.arrivals_harm(m, ahead.absence(m, m.missing_pages)) for m in waiting}
