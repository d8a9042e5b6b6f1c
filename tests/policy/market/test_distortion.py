"""Estimates that are taken away, or wrong, are so by the factor given."""

from __future__ import annotations

import pytest

from ballast.core.traffic import TrafficStats
from ballast.policy.market.distortion import Distortion
from tests.policy.worlds import device, model


def seen() -> TrafficStats:
    """A request every 8 s: 40 tokens of prompt, half of them cached, and 30 of output."""
    traffic = TrafficStats()
    for k in range(30):
        traffic = traffic.arrived(8.0 * k).ended(40, 30, 20)
    return traffic


def distorted(**factors: float) -> TrafficStats:
    m = model("m")
    object.__setattr__(m, "traffic", seen())
    return Distortion(**factors).of(device(m, free=0)).models[0].traffic


NOW = 8.0 * 29


def test_what_is_not_distorted_is_left_as_it_was() -> None:
    view = device(model("m"), free=0)
    assert Distortion().of(view) is view


@pytest.mark.parametrize("factor", [1 / 3, 3.0])
def test_estimates_are_wrong_by_their_factors(factor: float) -> None:
    wrong = distorted(arrivals=factor, lengths=factor, reused=factor)
    assert wrong.expected(NOW).rate == pytest.approx(factor * seen().expected(NOW).rate)
    assert wrong.outputs.mean == pytest.approx(30 * factor)
    assert wrong.reuse.found == pytest.approx(min(1.0, 0.5 * factor))
    # The period of 8 s is one of 24 s, or of 2.7 s, within the width of a bin.
    soon = 8.0 / factor
    assert wrong.chance(NOW, soon * 1.5) > 0.8
    assert wrong.chance(NOW, soon / 2) < 0.3


def test_without_an_estimate_its_prior_stands() -> None:
    nothing = distorted(arrivals=0, lengths=0, reused=0)
    assert nothing.expected_outputs(77) == 77
    assert nothing.reused(0.05) == 0.05
    assert nothing.chance(NOW, 4.0) > seen().chance(NOW, 4.0)  # no period is known
    assert nothing.expected(NOW).rate == seen().expected(NOW).rate
