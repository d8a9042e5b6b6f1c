"""Promises and guarantees: what they keep from others, and what an allocation uses up."""

from __future__ import annotations

import pytest

from ballast.core.actions import Short
from ballast.core.errors import BrokenPromise
from ballast.memory.page_reservations import PageReservations


def test_a_promise_is_refused_whole_and_used_up_in_parts() -> None:
    made = PageReservations(lambda owner: 0)
    assert made.promise("a", 3, spare=2) == Short(1)
    assert made.promise("a", 1, spare=-2) == Short(1)
    assert made.promised == 0
    assert made.promise("a", 3, spare=3) is None
    assert (made.of_others("a"), made.of_others("b")) == (0, 3)
    made.use("a", 2)
    assert made.promised_to("a") == 1
    made.use("a", 5)
    made.use("b", 5)
    assert (made.promised, made.cancel("a")) == (0, 0)
    made.validate(0)


def test_a_guarantee_reserves_what_its_owner_lacks_beside_its_promise() -> None:
    owned = {"a": 1}
    made = PageReservations(lambda owner: owned.get(owner, 0))
    assert made.guarantee("a", 3)
    assert not made.guarantee("a", 3)
    assert made.promise("a", 2, spare=2) is None
    assert (made.kept, made.kept_for("a"), made.of_others("b")) == (2, 2, 4)
    owned["a"] = 5
    assert (made.kept, made.of_others("b"), made.of_others("a")) == (0, 2, 0)
    assert made.guarantee("a", 0)
    assert made.cancel("a") == 2


def test_promises_beyond_the_room_are_found() -> None:
    made = PageReservations(lambda owner: 0)
    made.promise("a", 3, spare=3)
    with pytest.raises(BrokenPromise, match="promised 3 of 2"):
        made.validate(2)
