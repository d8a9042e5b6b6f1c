"""Claims covered by price: cheapest offers first, none in vain, and for no more than they gain."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from ballast.core.actions import DropCache
from ballast.core.cost import StepCosts
from ballast.core.view import DeviceView, ModelView, Shortage
from ballast.policy.market.claim_and_offer import Claim, Offer, Source
from ballast.policy.market.cover import cover
from ballast.policy.market.offers import younger_requests
from ballast.policy.market.page_budget import PageBudget
from ballast.policy.memory.balloon import Balloon
from ballast.policy.memory.layer_offers import LayerOffers
from ballast.policy.presets import PRESETS, option_names, resolve
from tests.policy.worlds import device, kind, layered, model, request

CLAIMER = model("claimer", running=(request(1),))


def fixed(*offers: Offer) -> Source:
    return lambda view, claim: offers


def offer(name: str, pages: int, price: float, grain: int = 0) -> Offer:
    def act(n: int, claim: Claim) -> DropCache:
        return DropCache(name, n)

    return Offer((name,), name, pages, lambda: price, act, grain=grain)


def covered(view: DeviceView, claim: Claim, *offers: Offer) -> tuple[list[object], PageBudget]:
    found = cover(view, [claim], [fixed(*offers)], by_price=True)
    return list(found.actions), found.budget


def claim(pages: int, gain: float = float("inf")) -> Claim:
    return Claim("claimer", request(1).order, pages, may_preempt=True, gain=gain)


def test_cheapest_pages_come_first() -> None:
    view = device(CLAIMER, free=2)
    actions, budget = covered(
        view, claim(10), offer("dear", 8, 8.0), offer("cheap", 4, 1.0), offer("fair", 6, 2.0)
    )
    assert actions == [DropCache("cheap", 4), DropCache("fair", 6)]
    assert budget.free == 2


def test_an_offer_counts_for_the_pages_that_the_claim_lacks_alone() -> None:
    """A thousand pages at a thousandth each are no bargain for one that needs one."""
    actions, _ = covered(
        device(CLAIMER, free=0), claim(1), offer("huge", 1000, 1.0), offer("small", 1, 0.5)
    )
    assert actions == [DropCache("small", 1)]


def test_of_a_divisible_offer_only_what_is_needed_is_paid() -> None:
    actions, _ = covered(
        device(CLAIMER, free=0),
        claim(3),
        offer("whole", 3, 2.0),
        offer("parts", 100, 50.0, grain=1),
    )
    assert actions == [DropCache("parts", 3)]


def test_what_turns_out_not_to_be_needed_is_given_back() -> None:
    """Five cheap pages and a block of ten: with the ten, the five are not needed."""
    actions, budget = covered(
        device(CLAIMER, free=0), claim(10), offer("five", 5, 1.0), offer("ten", 10, 4.0)
    )
    assert actions == [DropCache("ten", 10)]
    assert budget.free == 0


def test_a_claim_does_not_cost_more_than_it_gains() -> None:
    view = device(CLAIMER, free=2)
    for gain, expected in ((4.0, []), (4.1, [DropCache("a", 8)])):
        actions, budget = covered(view, claim(10, gain), offer("a", 8, 4.0))
        assert actions == expected
        assert budget.free == (0 if expected else 2), "nothing is taken for a claim not covered"


def test_no_source_can_have_older_work_undone() -> None:
    """Whatever it offers: the first of all is never undone."""
    older = offer("older", 10, 0.0)._replace(undoes=request(0).order)
    younger = offer("younger", 10, 9.0)._replace(undoes=request(2).order)
    for by_price in (False, True):
        view = device(CLAIMER, free=0)
        sources = [fixed(older, younger)]
        assert cover(view, [claim(5)], sources, by_price=by_price).actions == [
            DropCache("younger", 10)
        ]
        waits = claim(5)._replace(may_preempt=False)
        assert cover(view, [waits], sources, by_price=by_price).actions == []


def priced(m: ModelView, seconds_per_token: float) -> ModelView:
    return replace(m, costs=StepCosts(0.0, seconds_per_token, 0.0, 0.0, 0.0, 0.0))


def test_balloon_by_price_preempts_a_short_request_before_it_evicts_a_model_in_use() -> None:
    """In the fixed order an idle model goes first, though its next request is due at once."""
    short = (Shortage("a", "r1", 4, limited=False),)
    a = priced(model("a", kv=4, running=(request(1),)), 1e-6)
    b = priced(model("b", kv=4, running=(request(2, pages=4, tokens=8),)), 1e-6)
    idle = model("idle", pages=60, last_used=10.0)
    view = device(a, b, idle, free=0, shortages=short)
    fixed_order = Balloon()(view, None).actions
    assert [(kind(x), x.model) for x in fixed_order] == [("Evict", "idle")]
    by_price = Balloon(by_price=1)(view, None).actions
    assert [(kind(x), x.model) for x in by_price] == [("Preempt", "b")]


def test_every_preset_that_shares_memory_can_be_had_by_price() -> None:
    assert [name for name in PRESETS if "by_price" in option_names(name)] == [
        "balloon",
        "recompute",
        "mirage",
        "kvswap",
        "prism",
        "swiftcache",
        "superinfer",
    ]


@pytest.mark.parametrize("name", ["balloon", "recompute", "mirage", "kvswap"])
def test_by_price_the_same_is_covered_where_one_source_has_it(name: str) -> None:
    short = (Shortage("a", "r1", 4, limited=False),)
    a = model("a", kv=5, running=(request(1),))
    cached = model("c", kv=10, cached=6, running=(request(2),))
    view = device(a, cached, free=1, shortages=short)
    memory = resolve(name, {"by_price": 1}).memory
    decision = memory(view, memory(view, None).memo)
    assert [x for x in decision.actions if isinstance(x, DropCache)] == [
        DropCache("c", 3, "a needs pages")
    ]


def test_what_slows_a_batch_is_paid_for_each_of_its_requests() -> None:
    """Prices are request-seconds: computing anew and loads of layers delay all who run."""
    busy, other = request(3), request(4)
    alone = priced(layered(model("m", kv=8, running=(request(2, pages=4),)), lent=0), 1e-4)
    crowd = replace(alone, running=(request(2, pages=4), busy, other))
    claimer = priced(model("claimer", running=(request(1),)), 1e-4)
    for source in (younger_requests, _layers_of_m):
        one, three = (
            next(
                o.price()
                for o in source(device(claimer, m, free=0), claim(4))
                if o.owner == "m" and o.key[-1] in ("r2", "m")
            )
            for m in (alone, crowd)
        )
        assert one > 0
        assert three == pytest.approx(3 * one)


def _layers_of_m(view: DeviceView, claim: Claim) -> Iterable[Offer]:
    return LayerOffers(frozenset(("claimer", "m")), (), cap=False).of_active(view, claim)
