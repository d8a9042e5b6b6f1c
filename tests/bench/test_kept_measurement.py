"""What the demo measured is found again for the same fleet and code, and for nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ballast.bench import kept_measurement
from ballast.cli_common import load
from ballast.sim.calibrate import by_sizes
from ballast.sim.job_spread import JobSpread
from ballast.sim.page_costs import PageCosts
from tests.bench.test_demo_terms import SPECS, machine, write_fleet


def test_a_measurement_is_found_under_its_key_alone(tmp_path: Path) -> None:
    profile = replace(
        machine(1.0),
        spread=JobSpread(quantiles=(0.9, 1.1)),
        pages=PageCosts(map=1e-5, unmap=2e-5, kv=False),
    )
    file = tmp_path / kept_measurement.FILE
    assert kept_measurement.find(file, "a") is None
    kept_measurement.keep(file, "a", profile, SPECS)
    found = kept_measurement.find(file, "a")
    assert found is not None
    assert (found.profile, found.specs) == (profile, SPECS)
    assert kept_measurement.find(file, "b") is None
    file.write_bytes(b"\x00")
    assert kept_measurement.find(file, "a") is None


def test_other_weights_and_another_budget_are_measured_anew(tmp_path: Path) -> None:
    file = write_fleet(tmp_path)
    key = kept_measurement.key_of(load(file))
    assert kept_measurement.key_of(load(file)) == key
    (tmp_path / SPECS[0].name / "model.safetensors").write_bytes(b"")
    other = kept_measurement.key_of(load(file))
    assert other != key
    file.write_text(file.read_text().replace("1GiB", "2GiB"))
    assert kept_measurement.key_of(load(file)) not in (key, other)


def test_models_of_equal_layers_are_measured_once() -> None:
    def host(layers: int, dtype: str = "float32") -> Any:
        spec = replace(SPECS[0], dtype=dtype)
        return SimpleNamespace(spec=spec, segments=("layer",) * layers, windows=(None,) * layers)

    hosts = {"a": host(2), "b": host(3), "c": host(2), "d": host(2, "bfloat16"), "e": host(3)}
    assert by_sizes(hosts) == {"a": ["a", "c"], "b": ["b", "e"], "d": ["d"]}
    assert by_sizes({n: host(2) for n in "abc"}) == {"a": ["a"], "b": ["b", "c"]}
    assert by_sizes({"a": host(1)}) == {"a": ["a"]}
