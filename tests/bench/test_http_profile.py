"""The engine behind a server, measured and written beside the one in this process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ballast.bench.http_profile import calibrate_over_http, ttft_of
from ballast.core.errors import ConfigError
from ballast.fleet.fleet_file import load_fleet
from ballast.fleet.make import make_fleet
from ballast.policy.presets import PRESETS
from ballast.sim.calibrate import calibrated
from ballast.sim.profile import OVER_HTTP, device_profile, profile_of
from ballast.sim.toml_file import as_toml


@pytest.mark.slow
def test_the_engine_behind_a_server_is_measured(tmp_path: Path) -> None:
    file = make_fleet(tmp_path / "fleet", n_models=1, size="tiny", steps=0, budget="32MiB").file
    fleet = load_fleet(file, presets=PRESETS)
    here, specs = calibrated(fleet, rounds=1)
    found = calibrate_over_http(file, fleet, specs, here, rounds=1)
    assert found.answer > here.answer
    assert found.costs[specs[0].name] != here.costs[specs[0].name]
    assert found.costs[specs[0].name].prefill_seconds(128) > 0
    assert (found.link, found.pages) == (here.link, here.pages)

    written = tmp_path / "here.toml"
    written.write_text(as_toml(profile_of("here", here, fleet.device, found)))
    assert device_profile(written).of(specs).answer == pytest.approx(here.answer, rel=1e-4)
    read = device_profile(written, OVER_HTTP).of(specs)
    assert read.answer == pytest.approx(found.answer, rel=1e-4)
    assert read.costs[specs[0].name].base == pytest.approx(
        found.costs[specs[0].name].base, rel=1e-4
    )

    lanes = replace(fleet, device=replace(fleet.device, lanes=2))
    with pytest.raises(ConfigError, match="one lane"):
        calibrate_over_http(file, lanes, specs, here)


def test_a_first_token_counts_from_the_turn_that_took_its_request() -> None:
    entries = [
        {"at": 1.0, "event": "Arrival", "n": 1},
        {"at": 1.0, "job": 5, "prefill": [[1, 0, 64, False]], "decode": []},
        {"at": 1.5, "event": "JobDone", "job": 5},
        {"at": 1.5, "event": "Arrival", "n": 2},
        {"at": 1.5, "job": 6, "prefill": [[1, 64, 8, True], [2, 0, 4, True]], "decode": []},
        {"at": 2.0, "event": "JobDone", "job": 6},
        {"at": 2.0, "job": 7, "decode": [1, 2]},
        {"at": 2.5, "event": "JobDone", "job": 7},
        {"at": 3.0, "event": "Arrival", "n": 3},
    ]
    assert ttft_of(entries) == [1.0, 0.5]
