"""The search for the fewest devices, on functions of which the answer is known."""

from __future__ import annotations

import pytest

from ballast.bench.device_search import Sureness, fewest, settled


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 40, 64])
def test_finds_the_threshold_and_tries_its_neighbours(most: int) -> None:
    for threshold in range(1, most + 1):
        asked: list[int] = []

        def run(n: int, threshold: int = threshold, asked: list[int] = asked) -> float:
            asked.append(n)
            return 1.0 if n >= threshold else 0.5

        found = fewest(run, 0.99, most)
        assert (found.number, found.steady) == (threshold, True)
        assert len(set(asked)) == len(asked)
        neighbours = {threshold - 2, threshold - 1, threshold + 1} & set(range(1, most + 1))
        assert neighbours <= set(found.tried)
        assert max(asked) <= most


def test_says_where_no_number_suffices() -> None:
    found = fewest(lambda n: n / 100, 0.99, 12)
    assert found.number is None
    assert found.tried == {1: 0.01, 2: 0.02, 4: 0.04, 8: 0.08, 12: 0.12}


@pytest.mark.parametrize(
    ("meets", "number", "steady"),
    [
        ({6, 8, 9, 10, 11, 12, 16}, 6, False),  # seven do not, and six were found beside eight
        ({5, 6, 8, 9, 16}, 5, True),  # seven is never tried
        ({9, 11, 12, 13, 16}, 9, False),  # ten do not
        ({7, 8, 9, 16}, 7, True),
    ],
)
def test_more_devices_that_serve_worse_are_noticed(
    meets: set[int], number: int, steady: bool
) -> None:
    found = fewest(lambda n: 1.0 if n in meets else 0.0, 0.99, 40)
    assert (found.number, found.steady) == (number, steady)
    assert found.tried[number] == 1.0


@pytest.mark.parametrize("most", [1, 2, 7, 40])
def test_a_search_may_begin_anywhere(most: int) -> None:
    for guess in range(1, most + 3):
        for threshold in range(1, most + 1):
            asked: list[int] = []

            def run(n: int, threshold: int = threshold, asked: list[int] = asked) -> float:
                asked.append(n)
                return float(n >= threshold)

            assert fewest(run, 0.99, most, guess, neighbours=False).number == threshold
            assert len(set(asked)) == len(asked)
            assert 1 <= min(asked) <= max(asked) <= most
            if guess == threshold <= most:
                assert len(asked) <= 2
        assert fewest(lambda n: 0.0, 0.99, most, guess).number is None


def test_an_interval_has_settled_once_three_draws_did_not_widen_it() -> None:
    assert not settled([])
    assert not settled([3, 3, 3])
    assert settled([3, 3, 3, 3])
    assert not settled([3, 3, 3, 4])
    assert not settled([3, 5, 4, 6])
    assert settled([3, 5, 4, 3, 5])


def test_how_sure_an_answer_is_grows_with_draws() -> None:
    """After one draw a second may as well fail; 59 for 95 %, the textbook's number."""
    assert Sureness(2, 3, 1).at_least == pytest.approx(0.05)
    assert Sureness(2, 3, 58).at_least < 0.95 < Sureness(2, 3, 59).at_least
