"""Fair shares of a capacity: one key cannot take what another needs."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from ballast.server.access.fair_shares import FairShares

CAPACITY = 60


def fill(shares: FairShares, key: str) -> int:
    """Take all that may be taken, one by one."""
    while shares.fits(key, 1, CAPACITY, divided=True):
        shares.hold(key, 1)
    return shares.held[key]


def test_alone_a_key_gets_half_and_beside_another_a_third() -> None:
    shares = FairShares()
    assert fill(shares, "a") == CAPACITY // 2
    assert fill(shares, "b") == CAPACITY // 4
    for key in ("a", "b") * 9:  # as places come and go
        shares.hold(key, -shares.held[key] // 2)
        fill(shares, key)
    assert abs(shares.held["a"] - CAPACITY // 3) <= 1
    assert abs(shares.held["b"] - CAPACITY // 3) <= 1


def test_undivided_it_is_all_of_one() -> None:
    shares = FairShares()
    assert shares.fits("a", CAPACITY, CAPACITY, divided=False)
    assert not shares.fits("a", CAPACITY + 1, CAPACITY, divided=False)


@example([("a", 20), ("a", 20), ("b", 20)])
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 20)), max_size=80))
def test_there_is_room_for_a_newcomer_and_the_books_are_right(asked: list[tuple[str, int]]) -> None:
    shares = FairShares()
    for key, amount in asked:
        if shares.fits(key, amount, CAPACITY, divided=True):
            shares.hold(key, amount)
    assert shares.total == sum(shares.held.values()) < CAPACITY
    assert shares.fits("newcomer", 1, CAPACITY, divided=True)
    for key, amount in list(shares.held.items()):
        shares.hold(key, -amount)
    assert not shares.held
    assert shares.total == 0
