"""The fair queue: owners take turns, and each of them, and all together, are bounded."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ballast.core.fairqueue import FairQueue

OWNERS = st.sampled_from("abc")


def test_owners_take_turns_and_keep_their_order() -> None:
    queue: FairQueue[str] = FairQueue(10, 100)
    for item in ("a1", "a2", "a3", "b1", "c1", "c2"):
        assert queue.put(item[0], item) is None
    assert [queue.take() for _ in range(7)] == ["a1", "b1", "c1", "a2", "c2", "a3", None]


def test_an_owner_whose_first_item_may_not_come_holds_nobody_up() -> None:
    queue: FairQueue[str] = FairQueue(10, 100)
    for item in ("a1", "a2", "b1"):
        queue.put(item[0], item)
    assert queue.take(lambda item: item != "a1") == "b1"
    assert queue.take(lambda item: item != "a1") is None
    assert queue.take() == "a1"


@given(
    st.integers(1, 4),
    st.integers(1, 8),
    st.lists(st.one_of(OWNERS, st.none(), st.integers(0, 20)), max_size=60),
)
def test_bounds_hold_and_nobody_waits_for_two_of_another(
    most_each: int, most: int, calls: list[str | int | None]
) -> None:
    queue: FairQueue[tuple[str, int]] = FairQueue(most_each, most)
    present: list[tuple[str, int]] = []
    passed: Counter[tuple[str, str]] = Counter()
    """By (owner who waits, owner who was served): how often since the first had its turn."""
    for n, call in enumerate(calls):
        if isinstance(call, str):
            own = [item for item in present if item[0] == call]
            refusal = queue.put(call, (call, n))
            assert (refusal is not None) == (len(own) >= most_each or len(present) >= most)
            if refusal is None:
                present.append((call, n))
        elif call is None:
            item = queue.take()
            assert (item is None) == (not present)
            if item is not None:
                own = [other for other in present if other[0] == item[0]]
                assert item == own[0]
                present.remove(item)
                for other in {owner for owner, _ in present} - {item[0]}:
                    passed[other, item[0]] += 1
                    assert passed[other, item[0]] <= 1, "it had its turn, and has another"
                for pair in [pair for pair in passed if pair[0] == item[0]]:
                    del passed[pair]
        elif present:
            gone = present.pop(call % len(present))
            queue.remove(gone[0], gone)
            if all(owner != gone[0] for owner, _ in present):
                for pair in [pair for pair in passed if pair[0] == gone[0]]:
                    del passed[pair]
        assert len(queue) == len(present)
