"""Numbers, bars and decisions in few cells."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ballast.dashboard.formatting import (
    FormattedDecision,
    bar,
    decided,
    rate_of,
    seconds_of,
    span_of,
    sparkline,
)


def test_times_and_rates_are_short() -> None:
    seconds = (0.0012, 0.0123, 0.9994, 0.9996, 12.34, 123.4)
    result = ["1.2ms", "12ms", "999ms", "1.0s", "12.3s", "123s"]
    assert [seconds_of(s) for s in seconds] == result
    spans = (-1.0, 9.9, 61.0, 3600.0, 11_520.0, 200_000.0)
    assert [span_of(s) for s in spans] == ["0s", "9s", "1m01s", "1h00m", "3h12m", "2d07h"]
    assert [rate_of(r) for r in (0.0, 0.25, 99.94, 99.95, 1234.0)] == [
        "0",
        "0.2",
        "99.9",
        "100",
        "1234",
    ]


def test_a_sparkline_shows_the_last_values_against_the_highest_of_them() -> None:
    assert sparkline([9.0, 0.0, 1.0, 2.0], 3) == "▁▅█"
    assert sparkline([0.0, 0.0], 5) == "▁▁"
    assert sparkline([], 5) == ""


@given(
    st.lists(st.integers(0, 1000), min_size=1, max_size=7),
    st.integers(0, 500),
    st.integers(10, 200),
)
def test_a_bar_has_its_width_and_no_part_is_off_by_more_than_its_neighbours(
    pages: list[int], more: int, width: int
) -> None:
    total = sum(pages) + more
    runs = bar([(n, str(i)) for i, n in enumerate(pages)], total, width)
    assert [mark for mark, _ in runs] == [str(i) for i in range(len(pages))]
    drawn = sum(len(cells) for _, cells in runs)
    assert drawn <= width
    if total and not more:
        assert drawn == width
    for n, (mark, cells) in zip(pages, runs, strict=True):
        assert set(cells) <= {mark}
        assert abs(len(cells) - (n / total * width if total else 0)) <= len(pages)
        assert n or not cells


def test_layers_that_rotate_are_named_where_they_are_few() -> None:
    few, many, none = (
        {"time": 1.0, "action": "Remap", "model": "a", "why": "b needs pages", "rotation": r}
        for r in (
            {"layers": [1, 5], "slots": 1},
            {"layers": list(range(0, 40, 4)), "slots": 2},
            {"layers": [], "slots": 0},
        )
    )
    assert [(d.verb, d.detail) for one in (few, many, none) for d in decided([one], 1)] == [
        ("remap", "b needs pages, layers 1, 5 rotate through 1 slot"),
        ("remap", "b needs pages, 10 layers rotate through 2 slots"),
        ("remap", "b needs pages, no layer rotates"),
    ]


def test_decisions_are_told_newest_first_and_rows_of_like_ones_once() -> None:
    first = {"time": 1.0, "action": "DropCache", "model": "a", "pages": 1, "why": "b needs pages"}
    again = {**first, "time": 2.0, "pages": 2}
    refused = {**first, "time": 3.0, "refused": "in use"}
    limit = {"time": 4.0, "action": "Limit", "model": "a", "pages": None, "why": ""}
    released = {"time": 5.0, "action": "Hold", "model": "a", "held": False, "why": "nobody waits"}
    pinned = {"time": 6.0, "action": "Change", "model": "a", "why": "by an operator"}
    joined = {"time": 7.0, "action": "Join", "model": "c", "why": "", "by": "operator"}
    by = {**pinned, "by": "operator"}
    result = decided([first, again, refused, limit, released, by, joined], 10)
    assert result == [
        FormattedDecision(7.0, "join", "c", "by an operator", ""),
        FormattedDecision(6.0, "change", "a", "by an operator", ""),
        FormattedDecision(5.0, "release", "a", "nobody waits", ""),
        FormattedDecision(4.0, "limit", "a", "no bound", ""),
        FormattedDecision(3.0, "drop cache", "a", "b needs pages, 1 page", "in use"),
        FormattedDecision(2.0, "drop cache", "a", "b needs pages, 2 pages", "", times=2),
    ]
    assert [d.time for d in decided([first, refused, limit], 2)] == [4.0, 3.0]


def test_what_a_decision_costs_comes_after_what_it_does() -> None:
    why = (
        "b needs pages; expected late requests: 0.1 by it, 2 without it; next best: weights of c 1"
    )
    one = {"time": 1.0, "action": "DropCache", "model": "a", "pages": 2, "why": why}
    (shown,) = decided([one], 1)
    assert shown.detail == f"b needs pages, 2 pages, {why.partition('; ')[2]}"
