"""Plans of residency: what is given up first, and what a change costs."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ballast.core.residency_plan import ResidencyPlan, Unit
from ballast.core.rotation import WHOLE, Rotation

UNITS = (Unit(3, 30), Unit(2, 19), Unit(2, 18), Unit(2, 20), Unit(2, 17), Unit(4, 35))
"""Embeddings, four layers, a head."""
RESIDENT = ResidencyPlan(UNITS, 4)
ABSENT = RESIDENT.without(None)
ROTATING = replace(RESIDENT, rotation=Rotation((0, 1, 3), 2))


def test_the_last_layers_go_first_and_the_embeddings_last() -> None:
    assert RESIDENT.parts == (2, 2, 2, 2, 4, 3)
    gone = [sorted(RESIDENT.without(n).absent) for n in (0, 1, 2, 3, 8, 9, 15)]
    assert gone == [[], [4], [4], [3, 4], [1, 2, 3, 4], [1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]
    assert RESIDENT.without(2).without(2) == RESIDENT.without(4)
    assert RESIDENT.without(3).parts == (2, 2, 4, 3)
    assert RESIDENT.without(15) == ABSENT
    assert ABSENT.empty
    assert not RESIDENT.without(12).empty


def test_shared_units_stay_until_all_go() -> None:
    shared = replace(RESIDENT, units=(Unit(3, 30, shared=True), *UNITS[1:]))
    assert shared.parts == (2, 2, 2, 2, 4)
    assert shared.without(100).absent == {1, 2, 3, 4, 5}
    assert shared.without(None).empty


def test_slots_go_with_all_that_is_in_them() -> None:
    assert ROTATING.parts == (4, 2, 4, 3)
    assert ROTATING.without(1) == replace(RESIDENT, absent=frozenset({1, 2, 4}))
    assert ROTATING.without(5) == replace(RESIDENT, absent=frozenset({1, 2, 3, 4}))
    assert ROTATING.without(0) == ROTATING


def test_what_plans_cost() -> None:
    assert RESIDENT.device_pages == 15
    assert ROTATING.device_pages == 13
    assert ABSENT.device_pages == 0
    part = RESIDENT.without(3)
    assert (part.device_pages, part.missing_pages) == (11, 4)


@given(st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=3), st.integers(0, 40))
def test_no_more_parts_go_than_are_needed(units: list[tuple[int, bool]], pages: int) -> None:
    plan = ResidencyPlan(tuple(Unit(n, n, shared) for n, shared in units), len(units) - 2)
    after = plan.without(pages)
    freed = plan.device_pages - after.device_pages
    assert freed == sum(plan.parts) - sum(after.parts) == after.missing_pages
    assert freed >= min(pages, plan.device_pages)
    if after != plan:
        last = plan.parts[len(plan.parts) - len(after.parts) - 1]
        assert freed - last < pages
    assert after.whole() == plan == after.whole().without(0)
    assert plan.rotation == WHOLE


def test_units_read_in_place_take_no_page_and_are_read_by_each_pass() -> None:
    direct = ABSENT.reading(frozenset(range(6)))
    assert direct.runnable
    assert (direct.device_pages, direct.missing_pages) == (0, 0)
    assert direct.without(None) == ABSENT
    mixed = RESIDENT.reading(frozenset({2, 4}))
    assert mixed.device_pages == 11
    assert mixed.parts == (2, 2, 4, 3)
    assert mixed.without(2).in_place == mixed.in_place
    assert not mixed.without(2).runnable
    assert ROTATING.reading(frozenset({2})).rotation == WHOLE
    assert mixed.whole() == RESIDENT
    gone = mixed.without(2)
    assert gone.completed(in_place=False) == mixed
    assert gone.completed(in_place=True) == RESIDENT.reading(mixed.in_place | gone.absent)


def test_what_a_change_costs_follows_from_the_two_plans() -> None:
    part = RESIDENT.without(3)
    come, go = part.to(RESIDENT), RESIDENT.to(part)
    assert (come.coming, come.going) == (go.going, go.coming) == (part.absent, frozenset())
    assert come.pages == -go.pages == part.missing_pages
    assert RESIDENT.to(ROTATING).pages == ROTATING.device_pages - RESIDENT.device_pages < 0
    assert RESIDENT.to(RESIDENT.reading(frozenset({2}))).pages == -UNITS[2].pages
    assert RESIDENT.to(RESIDENT) == (frozenset(), frozenset(), 0)
