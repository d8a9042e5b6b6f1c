"""MuxServe's ablations: rows that differ in one part, and a baseline that places all models."""

from __future__ import annotations

from functools import partial

import pytest

from ballast.policy.presets import resolve
from benchmarks import mux_ablations
from benchmarks.mux_ablations import (
    PARTS,
    PLACED,
    PLACEMENTS,
    Result,
    greedy,
    half_popular,
    most,
    most_attained,
)
from benchmarks.mux_cluster import together


@pytest.mark.parametrize("compared", [PARTS, PLACED])
def test_rows_have_equal_options(compared: mux_ablations.Comparison) -> None:
    values = [resolve(c.preset, compared.options(row)).values for row, c in compared.rows.items()]
    for option in {o for of in values for o in of}:
        assert len({of[option] for of in values if option in of}) == 1, option


@pytest.mark.parametrize("name", PLACEMENTS)
def test_either_placement_has_all_models_and_no_device_twice(name: str) -> None:
    cluster = PLACEMENTS[name]
    shares = half_popular(len(cluster.models))
    assert sum(shares) == pytest.approx(1.0)
    assert shares == sorted(shares, reverse=True)
    tenants = cluster.tenants(cluster.workload(4.0, shares, 30.0, 1), 30.0)
    for meshes in (greedy(tenants, cluster.each), together(tenants, cluster.each)):
        assert sum(n for n, _ in meshes) <= cluster.devices
        assert sorted(n for _, names in meshes for n in names) == sorted(cluster.models)
        least = {t.name: t.least_devices for t in tenants}
        assert all(n >= least[name] for n, names in meshes for name in names)


def test_the_ratio_told_is_the_largest_and_says_at_which_rate() -> None:
    def result(throughput: float, attainment: float) -> Result:
        return Result(throughput, attainment, attainment, [], 9, 0)

    rows = {
        "a": {1.0: result(2.0, 1.0), 2.0: result(6.0, 0.9)},
        "b": {1.0: result(2.0, 1.0), 2.0: result(3.0, 0.3)},
    }
    outcome = most("a", "b", rows)
    assert outcome == {"ratio": 2.0, "at_rate": 2.0, "attainment_ratio": pytest.approx(3.0)}
    rows["b"][1.0] = result(8.0, 0.25)
    outcome = most_attained("a", "b", rows)
    assert outcome == {"ratio": 0.25, "at_rate": 1.0, "attainment_ratio": pytest.approx(4.0)}


def test_a_row_runs_from_end_to_end() -> None:
    run = partial(mux_ablations.managed, sizes="7b,7b,13b", seconds=6.0)
    found = run("0.9", "compute", 1.0)
    assert found == run("0.9", "compute", 1.0)
    assert found.requests > 10
    assert 0 <= found.worst <= found.attainment <= 1
