"""Harm: the rise of the probability to miss a deadline, and a little of the delay."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast.policy.market.harm import TIE, Forecast, harm, miss_probability, weight_of

delays = st.floats(0.0, 100.0)
forecasts = st.builds(
    Forecast, st.floats(-50.0, 50.0), st.floats(0.05, 10.0), st.floats(0.001, 100.0)
)


@given(delays, forecasts)
def test_harm_is_between_the_ties_and_a_miss(delay: float, forecast: Forecast) -> None:
    found = harm(delay, forecast) / forecast.weight
    assert TIE * delay - 1e-9 <= found <= 1.0 + TIE * delay + 1e-9


@given(delays, delays, forecasts)
def test_a_longer_delay_harms_no_less(a: float, b: float, forecast: Forecast) -> None:
    assert harm(min(a, b), forecast) <= harm(max(a, b), forecast) + 1e-9


@given(delays, delays, forecasts)
def test_delays_in_turn_harm_as_much_as_together(a: float, b: float, forecast: Forecast) -> None:
    later = forecast._replace(slack=forecast.slack - a)
    assert harm(a + b, forecast) == pytest.approx(
        harm(a, forecast) + harm(b, later), abs=1e-6 * forecast.weight
    )


@given(delays, forecasts, st.floats(0.1, 10.0))
def test_harm_grows_with_weight(delay: float, forecast: Forecast, factor: float) -> None:
    heavier = forecast._replace(weight=factor * forecast.weight)
    assert harm(delay, heavier) == pytest.approx(factor * harm(delay, forecast), abs=1e-9)


def test_the_hopeless_lose_no_more_than_time() -> None:
    missed = Forecast(-math.inf, 0.1)
    assert harm(3.0, missed) == pytest.approx(3.0 * TIE)
    assert harm(3.0, Forecast(-10.0, 0.1)) == pytest.approx(3.0 * TIE)


def test_what_is_urgent_loses_more_than_what_has_slack() -> None:
    assert harm(1.0, Forecast(0.5, 0.2)) > 0.8
    assert harm(1.0, Forecast(5.0, 0.2)) < 0.01


def test_a_certain_forecast_is_a_step() -> None:
    assert (miss_probability(1.0, 0.0), miss_probability(-1.0, 0.0)) == (0.0, 1.0)
    assert miss_probability(0.0, 1.0) == pytest.approx(0.5)


def test_a_more_important_request_weighs_more() -> None:
    assert weight_of(-1) > weight_of(0) > weight_of(1) > 0.0
    assert weight_of(-1000) < math.inf
