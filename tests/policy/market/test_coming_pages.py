"""When pages become free by themselves, as answers of unknown length end."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ballast.policy.market.coming_pages import FOREVER, FreedPagesForecast, HeldPages

TOKEN, PAGE = 0.05, 1024


def test_of_many_that_run_some_end_soon_though_each_is_expected_to_end_late() -> None:
    many = FreedPagesForecast([HeldPages(100, 50, 500, 0.0, ())], TOKEN, PAGE)
    assert many.wait(10) == pytest.approx(0.1, rel=0.05), "500 pages in 5 s, in the mean"
    assert many.wait(250) == pytest.approx(5 * math.log(2), rel=0.05)
    assert many.wait(490) == FOREVER, "the last of them end late"
    assert many.wait(0) == many.wait(-5) == 0.0


def test_the_last_of_a_few_alike_comes_when_it_is_expected_to() -> None:
    for n in (1, 2, 3):
        few = FreedPagesForecast([HeldPages(50, n, 7 * n, 0.0, ())], TOKEN, PAGE)
        for k in range(1, n + 1):
            mean = 50 * TOKEN * sum(1 / i for i in range(n - k + 1, n + 1))
            assert few.wait(7 * k) == pytest.approx(mean, rel=0.15)


def test_one_that_is_bounded_to_fewer_tokens_than_expected_ends_then() -> None:
    two = FreedPagesForecast([HeldPages(100, 0, 0, 0.0, [(20, 7), (40, 3)])], TOKEN, PAGE)
    assert [two.wait(n) for n in (1, 7, 8, 10, 11)] == pytest.approx([1, 1, 2, 2, FOREVER])


def test_pages_by_which_others_grow_do_not_come() -> None:
    still = FreedPagesForecast([HeldPages(100, 50, 500, 0.0, ())], TOKEN, PAGE)
    growing = FreedPagesForecast([HeldPages(100, 50, 500, 2.0 * PAGE, ())], TOKEN, PAGE)
    faster = FreedPagesForecast([HeldPages(100, 50, 500, 50.0 * PAGE, ())], TOKEN, PAGE)
    assert still.wait(50) < growing.wait(50) < FOREVER
    assert faster.wait(1) == FOREVER, "they take more than ends bring"


def test_waits_of_many_are_those_of_each() -> None:
    mixed = [HeldPages(100, 5, 50, 100.0, [(20, 7), (40, 3)]), HeldPages(30, 2, 20, 0.0, [(5, 4)])]
    for coming in (
        FreedPagesForecast(mixed, TOKEN, PAGE),
        FreedPagesForecast([], TOKEN, PAGE),
        FreedPagesForecast(mixed, 0.0, PAGE),
    ):
        asked = np.arange(-1.0, 90.0)
        found = coming.waits(asked)
        assert found == pytest.approx([coming.wait(int(n)) for n in asked])
        assert (np.diff(found) >= 0).all()
