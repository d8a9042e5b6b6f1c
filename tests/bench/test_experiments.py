"""Experiments of papers: equal terms for all rows, what they serve, and what they say of runs."""

from __future__ import annotations

from concurrent.futures import Executor, Future
from dataclasses import replace

import pytest

from ballast.core.job import JobLoad
from ballast.policy.presets import resolve
from ballast.sim.cluster import parse_kinds
from ballast.sim.model_catalogue import facts
from benchmarks import experiments, mux_cases, prism_cases
from benchmarks.experiment import TARGET, Experiment, Outcome, fewest, search, summary
from benchmarks.experiments import EXPERIMENTS
from benchmarks.mux_cases import CONTEXT, MUXSERVE, PER_HOST, TERMS, Cluster, costs_of, kind_of
from benchmarks.prism_cases import EIGHT, LARGE, SIZES, WARM_UP, Setting, by_size, levels, serve
from benchmarks.sweep import Sweep


def outcome(throughput: float = 1.0, both: float = 1.0, complete: bool = True) -> Outcome:
    return Outcome(throughput, both, both, both, both, 9, 0, 0, complete)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_rows_that_are_compared_have_equal_options(name: str) -> None:
    rows = EXPERIMENTS[name].rows
    values = [resolve(c.preset, rows.options(row)).values for row, c in rows.rows.items()]
    for option in {o for of in values for o in of}:
        assert len({of[option] for of in values if option in of}) == 1, option
    for of in values if name in MUXSERVE else ():
        assert {o: of[o] for o in TERMS if o in of} == {o: v for o, v in TERMS.items() if o in of}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_what_an_experiment_names_is_there(name: str) -> None:
    experiment = EXPERIMENTS[name]
    assert {experiment.ours, *experiment.over, *experiment.paper} <= experiment.rows.rows.keys()
    assert experiment.point in experiment.axis
    assert experiment.axis == tuple(sorted(experiment.axis))


# -- what they say ---------------------------------------------------------------------------------

SMALL = Experiment(
    "small",
    mux_cases.WAYS,
    (1.0, 2.0),
    lambda row, point, seed, seconds, cut: outcome(),
    over={"spatial": 1.8, "temporal": None},
)


def test_ratios_are_of_the_last_point_and_means_over_seeds() -> None:
    found = {
        "spatial": {1.0: [outcome(1.0)], 2.0: [outcome(1.0), outcome(2.0)]},
        "temporal": {1.0: [outcome(1.0)], 2.0: [outcome(1.0, 0.1)]},
        "muxserve": {1.0: [outcome(1.0)], 2.0: [outcome(3.0, 0.98)]},
    }
    result = summary(SMALL, found)
    assert result["throughput_over"] == {"spatial": 2.0, "temporal": 3.0}
    assert result["attained_up_to"]["spatial"] == 2.0
    assert result["attained_up_to"]["muxserve"] == pytest.approx(2**0.5)


def test_a_search_finds_the_fewest_and_runs_the_most_to_the_end() -> None:
    cuts: dict[float, bool] = {}

    def run(row: str, gpus: float, seed: int, seconds: float, cut: bool) -> Outcome:
        cuts[gpus] = cut
        return outcome(both=1.0 if gpus >= 3 + seed else 0.5, complete=not cut)

    experiment = replace(SMALL, axis=tuple(map(float, range(1, 9))), run=run, fewest=True)
    number, tried = search(experiment, "muxserve", 0, 1.0)
    assert number == 3
    assert tried[3].both >= TARGET > tried[2].both
    assert not cuts[8]
    assert cuts[3]
    assert search(experiment, "muxserve", 9, 1.0) == (None, {8.0: outcome(both=0.5)})


def test_a_row_that_the_most_devices_do_not_serve_has_no_number() -> None:
    found = {"a": {0: (3.0, {}), 1: (4.0, {})}, "b": {0: (3.0, {}), 1: (None, {})}}
    assert fewest(found)["devices"] == {
        "a": {"mean": 3.5, "least": 3.0, "most": 4.0},
        "b": {"mean": None, "least": 3.0, "most": None},
    }


class AtOnce(Executor):
    """Runs what it is given when it is given."""

    def submit(self, fn, /, *args, **kwargs):  # type: ignore[no-untyped-def]
        future: Future[object] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def test_both_kinds_have_their_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ["static", "prism"]
    few = replace(SMALL, rows=prism_cases.SEARCHED, axis=(1.0, 2.0), ours="prism", over={})
    for kind, key in ((few, "attained_up_to"), (replace(few, fewest=True), "devices")):
        monkeypatch.setitem(EXPERIMENTS, "small", kind)
        result = experiments.run("small", kind, rows, Sweep(1, AtOnce()))
        assert set(result[key]) == set(rows)


# -- MuxServe --------------------------------------------------------------------------------------


def test_requests_are_as_long_and_as_many_as_the_figure_says() -> None:
    unit = mux_cases.TEN_A
    work = unit.workload(1.0, 200.0, seed=1)
    of = {m: [r for r in work.requests if r.model == m] for m in unit.rates}
    for model, rate in unit.rates.items():
        assert len(of[model]) == pytest.approx(200 * rate, rel=0.15)
    mean = {m: sum(r.prompt_tokens for r in rs) / len(rs) for m, rs in of.items()}
    assert mean["LLaMA-30b"] > 1.5 * mean["LLaMA-7b"]
    assert mean["LLaMA-13b"] / mean["LLaMA-7b"] == pytest.approx(1.0, rel=0.1)
    assert max(r.prompt_tokens + r.output_tokens for r in work.requests) <= CONTEXT
    assert work == unit.workload(1.0, 200.0, seed=1)


def test_rows_have_the_same_devices_and_all_models() -> None:
    cluster = MUXSERVE["mux_19"].run
    assert isinstance(cluster, Cluster)
    assert len(cluster.models) == 19
    tenants = cluster.tenants(cluster.workload(2.0, 60.0, 1), 60.0)
    alone = [cut(tenants, cluster.devices) for cut in (mux_cases.apart, mux_cases.by_size)]
    for meshes in (*alone, mux_cases.together(tenants, cluster.devices)):
        assert sum(n for n, _ in meshes) <= cluster.devices
        assert all(n <= PER_HOST for n, _ in meshes)
        placed = sorted(name for _, names in meshes for name in names)
        assert placed == sorted(t.name for t in tenants)
    for meshes in alone:
        assert all(len(names) == 1 for _, names in meshes)
        left = cluster.devices - sum(n for n, _ in meshes)
        assert not any(n <= min(left, PER_HOST // 2) for n, _ in meshes), "none that could be used"


def test_by_size_models_of_a_size_have_as_many_devices() -> None:
    cluster = MUXSERVE["mux_19"].run
    assert isinstance(cluster, Cluster)
    cluster = replace(cluster, alpha=2.1)
    tenants = cluster.tenants(cluster.workload(2.0, 60.0, 1), 60.0)
    meshes = mux_cases.by_size(tenants, cluster.devices)
    ranks = {cluster.models[names[0]]: n for n, names in meshes}
    assert ranks == {"LLaMA-7b": 1, "LLaMA-13b": 1, "LLaMA-30b": 4, "LLaMA-65b": 8}


def test_costs_on_a_share_are_those_measured_there_and_between() -> None:
    kind, spec = kind_of(1, 3), facts("LLaMA-7b").spec(max_model_len=2048, fingerprint="7b")
    rows = kind.profile.on_parts(spec, 1)
    assert len(rows) > 2
    costs, step = costs_of(kind, spec), JobLoad(0, 0, 0, 8, 4000)
    assert costs(1, 1.0) == kind.costs(spec)
    for share, found in rows:
        assert costs(1, share).of(step) == pytest.approx(found.of(step))
    (low, a), (high, b) = rows[0], rows[1]
    between = costs(1, (low + high) / 2).of(step)
    assert min(a.of(step), b.of(step)) <= between <= max(a.of(step), b.of(step))
    assert costs(1, low / 2).of(step) == pytest.approx(2 * a.of(step))


@pytest.mark.parametrize(("name", "row"), [("mux_10b", "muxserve"), ("mux_19", "temporal")])
def test_a_row_of_muxserve_runs_from_end_to_end(name: str, row: str) -> None:
    found = MUXSERVE[name].run(row, 0.3, 1, 6.0, False)
    assert found.requests > 10
    assert 0 <= found.worst <= found.attainment <= 1


# -- Prism -----------------------------------------------------------------------------------------

FEW = Setting(EIGHT, seconds=40.0)


def test_there_are_as_many_models_as_said_with_weights_of_their_own() -> None:
    assert (len(EIGHT), len(prism_cases.EIGHTEEN), len(by_size())) == (8, 18, 58)
    assert [n for n, _ in SIZES] == [43, 8, 3, 4]
    assert sum(like in LARGE for like in by_size()) == 4
    served = Setting(by_size(), seconds=1.0).specs
    assert len({s.fingerprint for s in served}) == len({s.name for s in served}) == 58
    for gpus, devices in prism_cases.GROUPED.items():
        assert sum(kind.number * kind.ranks for kind in parse_kinds(devices)) == gpus


def test_every_model_is_asked_before_what_counts_and_requests_fit_the_context() -> None:
    setting = replace(FEW, clumps=2.0)
    work = setting.workload(seed=1)
    warming = [r for r in work.requests if r.at < WARM_UP]
    assert sorted(r.model for r in warming) == sorted(s.name for s in setting.specs)
    assert work == setting.workload(seed=1)
    assert len(replace(setting, clumps=4.0).workload(1).requests) > len(work.requests)
    long = replace(FEW, longer=50.0).workload(0)
    assert max(max(r.prompt_tokens, r.output_tokens) for r in long.requests) == 2048


def test_levels_are_above_what_a_model_alone_takes() -> None:
    setting = Setting(EIGHT[:3], seconds=40.0)
    slos = levels(setting, 0)
    assert len(slos) == 3
    assert all(0 < slo.tpot < slo.ttft for slo in slos.values())
    twice = levels(replace(setting, scale=2.0), 0)
    assert all(twice[n].ttft == 2 * slo.ttft for n, slo in slos.items())
    alone = serve(setting, "static", prism_cases.whole(3), 0, 40.0, False)
    assert alone.both >= 0.9
    assert alone.requests > 0


@pytest.mark.parametrize("row", ["prism", "prism, 45 s", "muxserve"])
def test_a_row_of_prism_runs_from_end_to_end(row: str) -> None:
    found = serve(FEW, row, prism_cases.whole(2), 0, 40.0, False)
    assert found.complete
    assert 0 <= found.worst <= found.attainment <= 1


def test_a_run_that_cannot_attain_the_target_is_cut_short_and_others_are_not() -> None:
    hopeless = replace(FEW, clumps=16.0, scale=0.05)
    cut, full = (serve(hopeless, "swap", "1xH100-80G", 0, 40.0, c) for c in (True, False))
    assert not cut.complete
    assert full.complete
    assert full.ttft <= cut.ttft < TARGET
    whole, short = (serve(FEW, "static", "8xH100-80G", 0, 40.0, c) for c in (False, True))
    assert whole == short
