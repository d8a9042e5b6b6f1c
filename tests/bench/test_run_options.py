"""Workloads by name, as command lines give them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ballast.bench.run_options import GENERATORS, options_of, workload_of
from ballast.core.errors import ConfigError
from ballast.core.settings import DeviceSettings, FleetSettings
from tests.workload.test_traces import servegen_files

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


def test_a_part_of_a_trace_is_spread_over_the_fleet(tmp_path: Path) -> None:
    rows = "".join(f"one,{10 + n},{20 + n},{n}.0\n" for n in range(100))
    file = tmp_path / "arena.csv"
    file.write_text(f"adapter_dir,prompt_len,output_len,req_time\n{rows}")
    whole = workload_of(str(file), NAMES, rate=None, seconds=1e3)
    assert (len(whole.requests), whole.models) == (100, ("a",))
    part = workload_of(str(file), NAMES, rate=None, seconds=30.0, start=60.0, spread=0.5, seed=2)
    assert [r.prompt_tokens for r in part.requests] == list(range(70, 100))
    assert part.requests[0].at == 0.0
    assert len(part.models) > 4
    assert part == workload_of(
        str(file), NAMES, rate=None, seconds=30.0, start=60.0, spread=0.5, seed=2
    )
    # The last request is part of it; the rate is that of the part.
    twice = workload_of(str(file), NAMES, rate=2.0, seconds=1e3, start=60.0)
    assert len(twice.requests) == 40
    assert twice.stats().rate == pytest.approx(2.0)
    with pytest.raises(ConfigError, match=r"start.*at most 99: there the trace ends"):
        workload_of(str(file), NAMES, start=100.0)
    for wrong in ({"start": 5.0}, {"spread": 1.0}):
        with pytest.raises(ConfigError, match="for traces; poisson has none"):
            workload_of("poisson", NAMES, **wrong)


def test_client_statistics_are_drawn_from_at_the_time_asked_for(tmp_path: Path) -> None:
    file = servegen_files(tmp_path)
    asked = {"rate": 8.0, "seconds": 300.0, "most_tokens": 4096}
    early, late = (workload_of(str(file), NAMES, **asked, start=at) for at in (300.0, 1200.0))
    for work in (early, late):
        assert work.seconds <= 300.0
        assert len(work.requests) == pytest.approx(2400, rel=0.2)
    assert early.requests != late.requests
    assert early.requests != workload_of(str(file), NAMES, **asked, start=300.0, seed=1).requests


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
