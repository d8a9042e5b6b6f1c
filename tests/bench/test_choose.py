"""Workloads by name, as command lines give them."""

from __future__ import annotations

import pytest

from ballast.bench.choose import GENERATORS, options_of, workload_of
from ballast.core.errors import ConfigError
from ballast.core.settings import DeviceSettings, FleetSettings

NAMES = ("a", "b", "c", "d", "e", "f", "g", "h")


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("rate", [1.0, 4.0])
def test_generators_keep_to_rate_length_and_seed(name: str, rate: float) -> None:
    made = workload_of(name, NAMES, rate=rate, seconds=120.0, most_tokens=200, seed=3)
    assert made == workload_of(name, NAMES, rate=rate, seconds=120.0, most_tokens=200, seed=3)
    assert 0.5 * rate * 120 <= len(made.requests) <= 1.6 * rate * 120
    assert made.seconds < 120.0
    assert max(r.prompt_tokens for r in made.requests) <= 100
    assert max(r.output_tokens for r in made.requests) <= 100
    assert set(made.models) <= set(NAMES)


def test_a_name_that_is_neither_says_what_is_allowed() -> None:
    with pytest.raises(ConfigError, match="bursty, poisson, gamma"):
        workload_of("burst", NAMES)


def test_presets_are_compared_with_the_fleets_options_wherever_they_have_them() -> None:
    options = {"temporal": 1.0, "quantum": 0.5, "pooled": 0.0, "lru": 1.0}
    fleet = FleetSettings(
        models=(), device=DeviceSettings(budget_bytes=1), preset="mirage", options=options
    )
    assert options_of(fleet, "mirage") == options
    assert options_of(fleet, "kvswap") == {"temporal": 1.0, "quantum": 0.5, "pooled": 0.0}
    assert options_of(fleet, "swap") == {"quantum": 0.5}
    assert options_of(fleet, "static") == {}
