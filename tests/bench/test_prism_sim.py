"""Prism's settings: equal terms for all rows, levels of each model alone, and true figures."""

from __future__ import annotations

import pytest

from ballast.policy.presets import resolve
from benchmarks import prism_sim
from benchmarks.prism_sim import COMPARED, EIGHT, EIGHTEEN, WARM_UP, levels, measure, workload


def test_rows_that_are_compared_have_equal_options_and_one_order_of_compute() -> None:
    presets = {row: resolve(c.preset, COMPARED.options(row)) for row, c in COMPARED.rows.items()}
    assert {p.order for p in presets.values()} == {"deadline"}
    for option in {o for p in presets.values() for o in p.values}:
        found = {p.values[option] for p in presets.values() if option in p.values}
        assert len(found) == 1, option
    assert set(prism_sim.MOVING) < set(COMPARED.rows)


def test_there_are_as_many_models_as_said_with_weights_of_their_own() -> None:
    assert (len(EIGHT), len(EIGHTEEN)) == (8, 18)
    served = prism_sim.specs(EIGHTEEN)
    assert len({s.fingerprint for s in served}) == len({s.name for s in served}) == 18


def test_every_model_is_asked_before_what_counts() -> None:
    work = workload(EIGHT, 2.0, 60.0, seed=1)
    warming = [r for r in work.requests if r.at < WARM_UP]
    assert sorted(r.model for r in warming) == sorted(s.name for s in prism_sim.specs(EIGHT))
    assert work == workload(EIGHT, 2.0, 60.0, seed=1)
    more = workload(EIGHT, 4.0, 60.0, seed=1)
    assert len(more.requests) > len(work.requests)


def test_levels_are_above_what_a_model_alone_takes() -> None:
    slos = levels(EIGHT[:3], 40.0, 0, 1.0)
    assert len(slos) == 3
    assert all(0 < slo.tpot < slo.ttft for slo in slos.values())
    twice = levels(EIGHT[:3], 40.0, 0, 2.0)
    assert all(twice[n].ttft == 2 * slo.ttft for n, slo in slos.items())
    alone = measure(EIGHT[:3], "static", 3, 1.0, 40.0, 0)
    assert alone.both >= 0.9
    assert alone.requests > 0


@pytest.mark.parametrize("row", ["prism", "prism, 45 s"])
def test_a_row_runs_from_end_to_end(row: str) -> None:
    found = measure(EIGHT, row, 2, 1.0, 40.0, 0)
    assert found == measure(EIGHT, row, 2, 1.0, 40.0, 0)
    assert 0 <= found.worst <= 1
    assert found.activations >= 8, "all are brought in by the warm-up"


def test_a_row_that_eight_devices_do_not_serve_has_no_number() -> None:
    assert prism_sim.told_of([3, 4]) == {"mean": 3.5, "least": 3, "most": 4}
    assert prism_sim.told_of([3, None]) == {"mean": None, "least": 3, "most": None}
