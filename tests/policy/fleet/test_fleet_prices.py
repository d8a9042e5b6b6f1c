"""Pages and models go where they are worth more, by what the difference exceeds the link's cost."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import Any

import pytest

from ballast.core.fleet import (
    DeviceCapacity,
    DeviceLoad,
    FleetAction,
    FleetView,
    LeaseView,
    LendPages,
    ModelDemand,
    ModelLoad,
    Place,
    RecallPages,
    Withdraw,
)
from ballast.core.price_curve import POINTS, PriceCurve, curve_points
from ballast.policy.fleet.by_price import ByPrice, PriceMemo
from ballast.policy.presets import resolve

PAGE = 1024
STARVED = PriceCurve(100, ((-60, 1e-4), (0, 1e-2)), link=1e-5)
"""It would pay a hundredth of a miss for each of 60 pages, and less for 40 more."""
IDLE = PriceCurve(0, ((50, 0.0), (90, 1e-3)))


def device(
    name: str, prices: PriceCurve | None, *hosting: ModelLoad, total: int = 200
) -> DeviceLoad:
    return DeviceLoad(DeviceCapacity(name, total * PAGE), hosting, PAGE, total, prices=prices)


def view(*devices: DeviceLoad, now: float = 0.0, leases: Sequence[LeaseView] = ()) -> FleetView:
    names = [d.name for d in devices]
    pairs = tuple((a, b) for a in names for b in names if a != b)
    models = {h.model for d in devices for h in d.hosting}
    needs = tuple(ModelDemand(m, 20 * PAGE, 10 * PAGE) for m in sorted(models))
    return FleetView(now, devices, needs, tuple(leases), pairs)


def lent(actions: Sequence[FleetAction]) -> list[tuple[str, str, str, int | None]]:
    about = [a for a in actions if isinstance(a, LendPages | RecallPages)]
    return [(type(a).__name__, a.lender, a.borrower, a.pages) for a in about]


def test_a_curve_says_what_pages_cost_and_avoid() -> None:
    assert STARVED.price == 1e-2
    assert STARVED.wanted == [(40, 1e-4), (60, 1e-2)]
    assert STARVED.relief(70) == pytest.approx(60 * 1e-2 + 10 * 1e-4)
    assert STARVED.relief(10**6) == pytest.approx(60 * 1e-2 + 40 * 1e-4)
    assert IDLE.cost(60) == pytest.approx(10 * 1e-3)
    assert (IDLE.price_of(50), IDLE.price_of(51), IDLE.price_of(91)) == (0.0, 1e-3, float("inf"))
    assert (IDLE.free, IDLE.spare, IDLE.price) == (50, 90, 0.0)


def test_a_curve_has_eight_points_that_cost_as_much_in_all() -> None:
    rng = random.Random(0)
    for _ in range(50):
        pages = [rng.randrange(1, 40) for _ in range(rng.randrange(1, 60))]
        prices = sorted(10 ** -rng.uniform(0, 6) for _ in pages)
        ends = [sum(pages[: i + 1]) - 30 for i in range(len(pages))]
        curve = PriceCurve(30, curve_points(zip(ends, prices, strict=True), 30))
        assert len(curve.points) <= POINTS
        whole = sum(n * p for n, p in zip(pages, prices, strict=True))
        assert curve.relief(30) + curve.cost(curve.spare) == pytest.approx(whole, rel=0.05)
        assert [p for _, p in curve.points] == sorted(p for _, p in curve.points)


def test_pages_are_lent_where_prices_differ_by_more_than_the_links_cost() -> None:
    seen = view(device("a", STARVED), device("b", IDLE))
    (lend,) = ByPrice()(seen, None).actions
    assert isinstance(lend, LendPages)
    assert lent([lend]) == [("LendPages", "b", "a", 60)]
    assert "worth 0.01 to a" in lend.why
    dear = replace(STARVED, link=2e-2)
    assert ByPrice()(view(device("a", dear), device("b", IDLE)), None).actions == ()
    assert ByPrice()(view(device("a", STARVED), device("b", None)), None).actions == ()
    assert ByPrice()(replace(seen, pairs=(("a", "b"),)), None).actions == ()


def test_the_cheapest_lends_first_and_says_who_else_could() -> None:
    cheap, small = PriceCurve(0, ((80, 1e-6),)), PriceCurve(0, ((30, 0.0),))
    seen = view(device("a", STARVED), device("b", IDLE), device("c", cheap), device("d", small))
    actions = ByPrice()(seen, None).actions
    wanted = [("LendPages", "b", "a", 50), ("LendPages", "d", "a", 30), ("LendPages", "c", "a", 20)]
    assert lent(actions) == wanted
    first = actions[0]
    assert isinstance(first, LendPages)
    assert first.why.endswith("costs b at most 0; next best: c at 1e-06")


def test_who_pays_most_borrows_first_and_no_borrower_lends() -> None:
    dearer = replace(STARVED, points=((0, 1e-1),))
    seen = view(device("a", STARVED), device("z", dearer), device("b", PriceCurve(0, ((70, 0.0),))))
    assert lent(ByPrice()(seen, None).actions) == [("LendPages", "b", "z", 70)]
    lease = LeaseView("b", "a", 20, 0)
    borrowing = view(device("z", dearer), device("a", IDLE), device("b", STARVED), leases=[lease])
    assert not [a for a in ByPrice()(borrowing, None).actions if isinstance(a, LendPages)]


def test_pages_come_home_where_the_lender_would_pay_more_for_them() -> None:
    lease = LeaseView("b", "a", 80, 0)
    cheap = PriceCurve(0, ((0, 0.0), (80, 1e-3)))
    seen = view(device("a", cheap), device("b", STARVED), leases=[lease])
    assert lent(ByPrice()(seen, None).actions) == [("RecallPages", "b", "a", 80)]
    kept = PriceCurve(0, ((80, 9e-3),))
    seen = view(device("a", kept), device("b", STARVED), leases=[lease])
    assert lent(ByPrice()(seen, None).actions) == []


def test_pages_go_home_that_their_borrower_has_had_no_use_for() -> None:
    policy, lease, memo = ByPrice(window=3.0), LeaseView("b", "a", 80, 0), None
    for now in range(4):
        seen = view(device("a", IDLE), device("b", IDLE), now=float(now), leases=[lease])
        decision = policy(seen, memo)
        memo = decision.memo
        assert lent(decision.actions) == ([("RecallPages", "b", "a", 50)] if now == 3 else [])
    again = policy(replace(seen, devices=(device("a", STARVED), seen.devices[1])), memo)
    assert isinstance(again.memo, PriceMemo)
    assert not again.memo.needless


def hosted(model: str, **more: float) -> ModelLoad:
    return ModelLoad(model, 0.1, 3, 0, weights=10 * PAGE, kv_pages=10)._replace(**more)  # type: ignore[arg-type]


def test_a_model_moves_where_its_pages_cost_less_than_they_avoid() -> None:
    crowded = PriceCurve(100, ((0, 1e-1),))
    policy = ByPrice()
    seen = view(device("a", crowded, hosted("x"), hosted("y", kv_pages=60)), device("b", IDLE))
    seen = replace(seen, pairs=())
    decision = policy(seen, None)
    (place,) = decision.actions
    assert isinstance(place, Place)
    assert (place.model, place.device, place.activate) == ("y", "b", True)
    assert "avoids 7 expected late requests on a, costs 0.02" in place.why
    assert "next best: x to b" in place.why
    full = PriceCurve(0, ((15, 0.0),))
    assert policy(replace(seen, devices=(seen.devices[0], device("b", full))), None).actions == ()
    there = device("b", IDLE, hosted("y"))
    decision = policy(replace(seen, now=1.0, devices=(seen.devices[0], there)), decision.memo)
    (leave,) = decision.actions
    assert isinstance(leave, Withdraw)
    assert (leave.model, leave.device) == ("y", "a")
    back = view(device("a", IDLE), device("b", crowded, hosted("y")), now=5.0)
    assert policy(replace(back, pairs=()), decision.memo).actions == (), "not again so soon"


def test_what_a_move_to_another_host_avoids_counts_once_weights_and_kv_are_there() -> None:
    crowded = PriceCurve(100, ((0, 1e-1),))
    hosts = {"a": "1", "b": "1", "c": "2"}
    full = PriceCurve(0, ((15, 0.0),))

    def moves(
        b: PriceCurve, seconds: float, *there: ModelLoad, used: int = 0
    ) -> tuple[str, str] | None:
        """`seconds`: of the weights over the network; `used`: pages of KV that is not cached."""
        seen = view(
            device("a", crowded, hosted("y", kv_pages=60, cached_pages=60 - used)),
            device("b", b),
            device("c", IDLE, *there),
        )
        devices = [replace(d, room=replace(d.room, host=hosts[d.name])) for d in seen.devices]
        network = 10 * PAGE / seconds if seconds else inf
        actions = ByPrice()(
            replace(seen, pairs=(), devices=tuple(devices), network=network), None
        ).actions
        return next(((a.device, a.why) for a in actions if isinstance(a, Place)), None)

    def place(*asked: Any, used: int = 0) -> str:
        found = moves(*asked, used=used)
        assert found is not None
        return ": ".join(found).partition(" expected")[0]

    assert place(IDLE, 30.0) == "b: avoids 7"
    assert place(full, 0.0) == "c: avoids 7"
    assert place(full, 30.0) == "c: avoids 3.5", "half of a minute is left"
    assert moves(full, 60.0) is None
    assert place(full, 15.0, used=10) == "c: avoids 3.5", "as many pages as weights"
    assert moves(full, 15.0, used=30) is None
    assert place(IDLE, 15.0, used=30) == "b: avoids 7", "on one host it comes at once"


def test_an_absent_model_moves_to_free_pages_for_requests_to_come() -> None:
    crowded = PriceCurve(0, ((5, 1e-3),), stranded={"x": 2.0})
    absent = hosted("x", weights=0, kv_pages=0)
    for target, moves in ((IDLE, True), (PriceCurve(0, ((90, 0.2),)), False)):
        actions = ByPrice()(view(device("a", crowded, absent), device("b", target)), None).actions
        assert [type(a) for a in actions] == [Place] * moves
    busy = device("b", IDLE, hosted("z", work=0.75))
    assert ByPrice()(view(device("a", crowded, absent), busy), None).actions == ()


def test_it_is_the_fleet_policy_of_ballast() -> None:
    assert resolve("ballast").fleet == ByPrice()


def test_a_model_moves_once_a_minute_at_most_whatever_prices_do() -> None:
    """An adversary makes pages dear where a model is, and worth nothing elsewhere."""
    crowded = PriceCurve(100, ((0, 1e-1),))
    policy, memo = ByPrice(), None
    homes = {"x": ["a"], "y": ["b"]}
    moves: dict[str, list[float]] = {"x": [], "y": []}
    for now in range(200):
        dear = homes["xy"[now % 2]][0]
        devices = (
            device(
                name,
                crowded if name == dear else IDLE,
                *(hosted(m) for m, on in homes.items() if name in on),
            )
            for name in "ab"
        )
        decision = policy(replace(view(*devices, now=float(now)), pairs=()), memo)
        memo = decision.memo
        for action in decision.actions:
            if isinstance(action, Place):
                homes[action.model].append(action.device)
                moves[action.model].append(now)
            elif isinstance(action, Withdraw):
                homes[action.model].remove(action.device)
    for at in moves.values():
        assert len(at) >= 2, "the adversary has them move"
        assert all(b - a >= policy.settling for a, b in pairwise(at))
