"""The book alone: what it allows, what it refuses, and that refusing changes nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ballast.core.actions import Short
from ballast.core.errors import BrokenPromise
from ballast.memory.ledger import Ledger


def _snapshot(book: Ledger) -> object:
    return (
        book.free,
        book.reclaiming,
        book.reservations.promised,
        dict(book.borrowed),
        book.owners(),
        [(book.owner_of(p), book.holders.of(p)) for p in range(book.total)],
    )


def test_the_life_of_a_page() -> None:
    book = Ledger(4)
    book.allocate("a", [1, 2])
    assert (book.free, book.owned("a"), book.owner_of(1), book.owner_of(0)) == (2, 2, "a", None)
    book.give_back("a", [2])
    assert (book.free, book.reclaiming, book.reclaiming_of("a"), book.owned("a")) == (2, 1, 1, 1)
    book.freed("a", [2])
    book.hand_over("a", "b", [1])
    assert book.owners() == {"b": 1}
    assert (book.free, book.reclaiming) == (3, 0)
    book.validate()


def test_promises_count_reclaiming_pages_and_bind_the_others() -> None:
    book = Ledger(6)
    book.allocate("a", [0, 1, 2, 3])
    book.give_back("a", [0, 1])
    assert book.promise("arena", 3) is None
    assert book.promise("other", 2) == Short(1)
    assert book.available("a") == 0
    assert book.available("arena") == 2
    book.allocate("arena", [4, 5])
    assert (book.reservations.promised_to("arena"), book.reservations.promised) == (1, 1)
    assert book.reservations.cancel("arena") == 1
    assert book.reservations.cancel("arena") == 0
    book.validate()


def test_a_lease_does_not_take_what_is_promised_to_others() -> None:
    book = Ledger(4)
    assert book.promise("b", 2) is None
    with pytest.raises(BrokenPromise, match="promised to others"):
        book.allocate("a", [0, 1, 2])
    book.allocate("a", [0, 1])
    book.allocate("b", [2, 3])
    assert book.reservations.promised == 0
    book.validate()


def test_a_lent_page_stays_its_owners() -> None:
    book = Ledger(4)
    book.allocate("a", [0, 1])
    book.add_holder("a", [0], "peer")
    assert (book.owner_of(0), book.holders.of(0), book.holders.of(1)) == ("a", ("peer",), ())
    assert (book.owned("a"), book.held_of("a"), book.held_of("b")) == (2, {"peer": 1}, {})
    for attempt in (
        lambda: book.give_back("a", [0, 1]),
        lambda: book.hand_over("a", "b", [0]),
        lambda: book.remove_holder("a", [1], "peer"),
        lambda: book.remove_holder("a", [0], "third"),
        lambda: book.remove_holder("b", [0], "peer"),
        lambda: book.add_holder("b", [0], "third"),
        lambda: book.add_holder("a", [1], "a"),
    ):
        before = _snapshot(book)
        with pytest.raises(BrokenPromise):
            attempt()
        assert _snapshot(book) == before
    book.remove_holder("a", [0], "peer")
    book.give_back("a", [0, 1])
    book.freed("a", [0, 1])
    book.validate()


def test_a_page_can_have_many_holders_and_stays_until_the_last_lets_go() -> None:
    book = Ledger(4)
    book.allocate("a", [0, 1])
    for holder in ("x", "y", "x"):
        book.add_holder("a", [0], holder)
    assert (book.holders.of(0), book.held_of("a")) == (("x", "y", "x"), {"x": 2, "y": 1})
    assert (book.holders.held("x"), book.holders.held("y"), book.holders.held("a")) == (2, 1, 0)
    for holder in ("x", "y", "x"):
        book.validate()
        with pytest.raises(BrokenPromise, match="is held by"):
            book.give_back("a", [0])
        book.remove_holder("a", [0], holder)
    assert (book.holders.held("x"), book.held_of("a")) == (0, {})
    book.give_back("a", [0])
    book.validate()


@pytest.mark.parametrize(
    "attempt",
    [
        lambda b: b.allocate("b", [0]),
        lambda b: b.allocate("b", [2, 2]),
        lambda b: b.allocate("b", [4]),
        lambda b: b.allocate("b", [-1]),
        lambda b: b.give_back("b", [0]),
        lambda b: b.give_back("nobody", [0]),
        lambda b: b.give_back("a", [0, 0]),
        lambda b: b.freed("a", [0]),
        lambda b: b.freed("a", [3]),
        lambda b: b.hand_over("a", "b", [0, 2]),
        lambda b: b.promise("a", -1),
    ],
)
def test_a_refused_call_changes_nothing(attempt: Callable[[Ledger], object]) -> None:
    book = Ledger(4)
    book.allocate("a", [0, 1])
    book.allocate("b", [3])
    before = _snapshot(book)
    with pytest.raises(BrokenPromise):
        attempt(book)
    assert _snapshot(book) == before
    book.validate()


@pytest.mark.parametrize(
    "attempt",
    [
        lambda b: b.hand_over("peer", "a", [4]),
        lambda b: b.hand_over("peer", "peer", [4, 5]),
        lambda b: b.hand_over("a", "b", [0, 4]),
        lambda b: b.give_back("peer", [4]),
        lambda b: b.freed("peer", [4]),
        lambda b: b.allocate("a", [4]),
        lambda b: b.borrow("other", [4]),
        lambda b: b.return_borrowed("a", [4]),
        lambda b: b.return_borrowed("peer", [4, 6]),
    ],
)
def test_a_borrowed_page_has_one_owner_until_it_is_returned(
    attempt: Callable[[Ledger], object],
) -> None:
    """Its device's ledger knows of no other: who uses it here holds it."""
    book = Ledger(4)
    book.allocate("a", [0, 1])
    book.borrow("peer", [4, 5])

    def everything() -> object:
        pages = [(book.owner_of(p), book.holders.of(p)) for p in range(8)]
        return _snapshot(book), pages

    before = everything()
    with pytest.raises(BrokenPromise):
        attempt(book)
    assert everything() == before
    book.validate()
    book.add_holder("peer", [4], "a")
    book.remove_holder("peer", [4], "a")
    book.return_borrowed("peer", [4, 5])
    assert (book.owner_of(4), book.borrowed.total()) == (None, 0)
    book.validate()


def test_validate_sees_each_kind_of_damage() -> None:
    def damaged(damage: Callable[[Ledger], None]) -> None:
        book = Ledger(4)
        book.allocate("a", [0, 1])
        damage(book)
        with pytest.raises(BrokenPromise):
            book.validate()

    damaged(lambda b: setattr(b, "free", 3))
    damaged(lambda b: b.borrowed.update(a=1))
    damaged(lambda b: setattr(b.reservations, "promised", 1))
    damaged(lambda b: b._owned.__setitem__(0, 1))
    damaged(lambda b: b._codes.__setitem__(0, -1))
    damaged(lambda b: b.holders.by_page.__setitem__(3, ["peer"]))
    damaged(lambda b: b.holders._held.__setitem__("peer", 1))
    damaged(lambda b: b.reservations._promises.__setitem__("x", 3))
