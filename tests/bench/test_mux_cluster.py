"""The benchmark of MuxServe's clusters: the same models, devices and terms for every row."""

from __future__ import annotations

import pytest

from ballast.policy.presets import resolve
from ballast.workload.generators import power_law
from benchmarks import mux_cluster
from benchmarks.mux_cluster import CLUSTERS, COMPARED, PER_HOST, Result, summary
from benchmarks.mux_sim import TERMS


def test_rows_have_equal_options() -> None:
    values = [resolve(c.preset, COMPARED.options(row)).values for row, c in COMPARED.rows.items()]
    for option in {o for of in values for o in of}:
        assert len({of[option] for of in values if option in of}) == 1, option
    for of in values:
        assert {o: of[o] for o in TERMS if o in of} == {o: v for o, v in TERMS.items() if o in of}


@pytest.mark.parametrize("name", CLUSTERS)
def test_rows_have_the_same_devices_and_all_models(name: str) -> None:
    cluster = CLUSTERS[name]
    assert len(cluster.models) == int(name)
    work = cluster.workload(2.0, power_law(len(cluster.models), 0.9), 60.0, 1)
    tenants = cluster.tenants(work, 60.0)
    alone = [cut(tenants, cluster.devices) for cut in (mux_cluster.apart, mux_cluster.by_size)]
    for meshes in (*alone, mux_cluster.together(tenants, cluster.each)):
        assert sum(n for n, _ in meshes) <= cluster.devices
        assert all(n <= PER_HOST for n, _ in meshes)
        assert sorted(name for _, names in meshes for name in names) == sorted(
            t.name for t in tenants
        )
    for meshes in alone:
        assert all(len(names) == 1 for _, names in meshes)
        left = cluster.devices - sum(n for n, _ in meshes)
        assert not any(n <= min(left, PER_HOST // 2) for n, _ in meshes), "none that could be used"


def test_by_size_models_of_a_size_have_as_many_devices() -> None:
    cluster = CLUSTERS["19"]
    work = cluster.workload(2.0, power_law(19, 2.1), 60.0, 1)
    meshes = mux_cluster.by_size(cluster.tenants(work, 60.0), cluster.devices)
    ranks = {cluster.models[names[0]]: n for n, names in meshes}
    assert ranks == {"LLaMA-7b": 1, "LLaMA-13b": 1, "LLaMA-30b": 4, "LLaMA-65b": 8}
    assert all(ranks[cluster.models[names[0]]] == n for n, names in meshes)


def test_ratios_are_of_the_highest_rate_and_of_the_better_baseline() -> None:
    def result(throughput: float, attainment: float) -> Result:
        return Result(throughput, attainment, attainment, [], 9, 0)

    rows = {
        "spatial": {1.0: result(1.0, 1.0), 2.0: result(2.0, 0.9)},
        "spatial, by size": {1.0: result(1.0, 1.0), 2.0: result(1.5, 0.8)},
        "temporal": {1.0: result(1.0, 0.5), 2.0: result(1.0, 0.1)},
        "muxserve": {1.0: result(1.0, 1.0), 2.0: result(3.0, 0.98)},
    }
    outcome = summary(rows)
    assert outcome["throughput_over_spatial"] == pytest.approx(1.5)
    assert outcome["throughput_over_spatial_by_size"] == pytest.approx(2.0)
    assert outcome["throughput_over_temporal"] == pytest.approx(3.0)
    assert outcome["requests_at_99_over_best"] == pytest.approx(2**0.5 / 2**0.1)
    rows["muxserve"][2.0] = result(3.0, 1.0)
    assert summary(rows)["requests_at_99_over_best"] is None, "it was not seen to end"


def test_a_row_runs_from_end_to_end() -> None:
    found = mux_cluster.measure("19", 0.9, "muxserve", 0.3, 6.0)
    assert found == mux_cluster.measure("19", 0.9, "muxserve", 0.3, 6.0)
    assert found.requests > 10
    assert 0 <= found.worst <= found.attainment <= 1
