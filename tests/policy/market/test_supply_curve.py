"""Supply curves that claims of a decision share, and what models keep between decisions, change no
decision: they equal those that are made anew for each claim of a new view."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast.core.actions import Preempt
from ballast.core.traffic import TrafficStats
from ballast.core.view import DeviceView, ModelView, RequestView, Residency, Shortage
from ballast.policy.market.claim_and_offer import Claim, Offer
from ballast.policy.market.outlook import Outlook
from ballast.policy.market.page_budget import PageBudget
from ballast.policy.market.supply_curve import ListedOffers, SupplyCurve
from ballast.policy.memory import arbiter
from ballast.policy.memory.arbiter import Arbiter
from ballast.policy.supply.parked_models import ParkedModels
from tests.policy import worlds
from tests.policy.worlds import device, layered, model, request

NOW = 100.0


class Anew(SupplyCurve):
    """Asks every source again for each claim, and keeps nothing."""

    def __init__(self, policy: Arbiter, ahead: Outlook) -> None:
        super().__init__(())
        self._policy, self._ahead = policy, ahead

    def cheapest(self, budget: PageBudget, claim: Claim, lacked: int) -> Iterable[Offer]:
        return Arbiter._supply(self._policy, self._ahead).cheapest(budget, claim, lacked)


class AskedAnew(Arbiter):
    """The preset without memory: `SupplyCurve`s are made for each claim."""

    def _supply(self, ahead: Outlook) -> SupplyCurve:
        return Anew(self, ahead)


def random_request(rng: random.Random, sequence: int, *, running: bool) -> RequestView:
    arrival = NOW - rng.choice([0.1, 0.5, 2.0, 9.0, 40.0])
    generated = rng.randrange(1, 60) if running else 0
    r = request(
        sequence,
        arrival=arrival,
        pages=rng.choice([0, 1, 2, 5]) if running else 0,
        blocks=rng.choice([0, 1, 3]) if running else 0,
        tokens=32 + generated,
        generated=generated,
        max_tokens=80,
    )
    return r._replace(first=min(NOW, arrival + rng.random() * 2) if running else None)


def random_model(rng: random.Random, name: str, first: int, scarce: bool) -> ModelView:
    kind = "busy" if scarce else rng.choice(["idle", "absent", "busy", "busy", "busy"])
    n_waiting = rng.randrange(3) if kind != "idle" else 0
    n_running = rng.randrange(1, 6) if kind == "busy" else 0
    waiting = sorted(
        (random_request(rng, first + i, running=False) for i in range(n_waiting)),
        key=lambda r: r.order,
    )
    running = sorted(
        (random_request(rng, first + 10 + i, running=True) for i in range(n_running)),
        key=lambda r: r.order,
    )
    m = model(
        name,
        Residency.ABSENT if kind == "absent" else Residency.RESIDENT,
        pages=10 * rng.randrange(1, 4),
        kv=20,
        cached=0 if scarce else rng.randrange(8),
        loose=0 if scarce else rng.randrange(2),
        waiting=tuple(waiting),
        running=tuple(running),
        first=rng.randrange(1, 6) if waiting else 0,
        last_used=NOW - rng.random() * 30,
        first_cached=rng.randrange(2),
    )
    traffic = TrafficStats()
    for at in sorted(rng.random() * NOW for _ in range(rng.randrange(5))):
        traffic = traffic.arrived(at)
    if rng.random() < 0.5:
        traffic = traffic.ended(32, rng.randrange(1, 60), rng.randrange(32))
    if kind != "absent":
        m = worlds.in_parts(m, *(m.own_pages // 5,) * 5, gone=5 if scarce else 0)
    if rng.random() < 0.3:
        m = layered(m)
    return replace(m, traffic=traffic, busy=rng.random() < 0.5)


def random_view(rng: random.Random, models: list[ModelView]) -> DeviceView:
    shortages = [
        Shortage(m.name, r.id, pages, limited=False, blocks=rng.randrange(1, 5))
        for m in models
        for r in (*m.waiting[:1], *m.running)
        if m.residency is Residency.RESIDENT and rng.random() < 0.5
        for pages in [rng.randrange(1, 4)]
    ]
    view = device(*models, free=rng.randrange(6), total=400, shortages=tuple(shortages))
    return replace(view, now=NOW, kv_fetch_bytes_per_second=rng.choice([0.0, 1e8]))


def unknown(view: DeviceView) -> DeviceView:
    """The view without what its models have had derived."""
    return replace(view, models=tuple(replace(m) for m in view.models))


@given(st.integers(0, 2**32))
def test_decisions_are_those_of_curves_made_anew(seed: int) -> None:
    rng = random.Random(seed)
    scarce = rng.random() < 0.5
    models = [random_model(rng, f"m{i}", 100 * i, scarce) for i in range(rng.randrange(2, 6))]
    memo: object = None
    for _ in range(3):
        view = random_view(rng, models)
        kept = Arbiter()(view, memo)
        anew = AskedAnew()(unknown(view), memo)
        assert kept == anew
        memo = kept.memo
        changed = rng.randrange(len(models))  # one model alone is another before the next
        models[changed] = random_model(rng, f"m{changed}", 100 * changed, scarce)


def test_a_device_without_open_claims_is_not_looked_ahead_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unexpected(*_: object) -> None:
        raise AssertionError("nothing has to be decided")

    monkeypatch.setattr(arbiter.Arbiter, "_supply", unexpected)
    monkeypatch.setattr(Outlook, "coming", property(unexpected))
    monkeypatch.setattr(Outlook, "work", property(unexpected))
    busy = model("busy", kv=9, running=(request(1, pages=3, generated=3),))
    assert Arbiter()(device(busy, model("idle"), free=0), None).actions == ()


def asked_often(m: ModelView) -> ModelView:
    traffic = m.traffic
    for at in range(50):
        traffic = traffic.arrived(NOW - 0.1 * at)
    return replace(m, traffic=traffic)


@given(st.integers(0, 2**32))
def test_no_offer_of_parking_costs_less_than_its_bound(seed: int) -> None:
    rng = random.Random(seed)
    models = [random_model(rng, f"m{i}", 100 * i, scarce=True) for i in range(3)]
    models = [worlds.in_parts(asked_often(m), 4, 4, 4) for m in models]
    view = replace(random_view(rng, models), total=60)
    waiting = next((m for m in models if m.waiting), models[0])
    order = (*waiting.waiting, *waiting.running)[0].order
    turn = rng.choice([None, 0.0, 0.3, 40.0])
    for lacked in (1, 3, 30):
        claim = Claim(waiting.name, order, lacked, may_preempt=True, admission=True)
        parked = ParkedModels(Outlook(view, turn=turn, parked=turn))
        prices = [price for price, _ in parked.cheapest(PageBudget(view), claim, lacked)]
        assert prices == sorted(prices)


def test_parking_is_not_priced_where_requests_cost_less_than_its_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late = [request(i, arrival=50.0, pages=9, generated=5)._replace(due=40.0) for i in range(9)]
    first = request(99, arrival=10.0, pages=1, generated=3)
    m = worlds.in_parts(model("m", kv=90, running=(first, *late)), 5, 5)
    view = device(m, free=0, total=400)
    lacking = Shortage("m", first.id, 1, limited=False)
    view = replace(view, now=NOW, shortages=(lacking,))

    def unexpected(*_: object) -> None:
        raise AssertionError("nothing is parked")

    monkeypatch.setattr(ParkedModels, "_parkings", property(unexpected))
    (undone,) = Arbiter()(view, None).actions
    assert isinstance(undone, Preempt)


def test_what_is_taken_in_part_is_priced_again() -> None:
    whole = Offer(("a",), "a", 4, lambda: 4.0, lambda n, c: None, grain=4, cumulative=True)  # type: ignore[arg-type,return-value]
    fine = Offer(("b",), "b", 9, lambda: 18.0, lambda n, c: None, grain=1)  # type: ignore[arg-type,return-value]
    offers = ListedOffers([whole, fine])
    budget = PageBudget(device(free=0))
    claim = Claim("m", request(1).order, 1, may_preempt=False)

    def prices(lacked: int) -> list[tuple[float, str]]:
        return [(p, o.owner) for p, o in offers.cheapest(budget, claim, lacked)]

    assert prices(4) == [(1.0, "a"), (2.0, "b")]
    assert prices(1) == [(2.0, "b"), (4.0, "a")]
    budget.accept(whole, 4)
    offers.take([whole])
    assert prices(4) == [(2.0, "b"), (float("inf"), "a")]
