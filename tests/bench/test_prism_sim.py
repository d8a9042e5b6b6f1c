"""Prism's settings: equal terms for all rows, levels of each model alone, and true figures."""

from __future__ import annotations

from concurrent.futures import Executor, Future
from dataclasses import replace

import pytest

from ballast.core import traffic
from ballast.policy.presets import resolve
from ballast.sim.cluster import parse_kinds
from benchmarks import prism_sim
from benchmarks.prism_setting import (
    COMPARED,
    EIGHT,
    EIGHTEEN,
    GROUPED,
    LARGE,
    LEAST_TPOT,
    LEAST_TTFT,
    MOVING,
    PRESETS,
    SIZES,
    TARGET,
    TPOT_SCALE,
    TTFT_SCALE,
    WARM_UP,
    Setting,
    by_size,
    levels,
    measure,
    whole,
)
from benchmarks.prism_sim import SEARCHED, SEARCHES, Search
from benchmarks.sweep import Sweep

SMALL = Setting(EIGHT, seconds=40.0)


def test_rows_that_are_compared_have_equal_options_and_one_order_of_compute() -> None:
    presets = {row: resolve(c.preset, COMPARED.options(row)) for row, c in COMPARED.rows.items()}
    assert {p.order for p in presets.values()} == {"deadline"}
    for option in {o for p in presets.values() for o in p.values}:
        found = {p.values[option] for p in presets.values() if option in p.values}
        assert len(found) == 1, option
    assert set(MOVING) < set(COMPARED.rows)
    assert set(SEARCHED) < set(PRESETS)


def test_there_are_as_many_models_as_said_with_weights_of_their_own() -> None:
    assert (len(EIGHT), len(EIGHTEEN), len(by_size())) == (8, 18, 58)
    assert [n for n, _ in SIZES] == [43, 8, 3, 4]
    assert sum(like in LARGE for like in by_size()) == 4
    served = Setting(by_size(), seconds=1.0).specs
    assert len({s.fingerprint for s in served}) == len({s.name for s in served}) == 58


def test_groups_have_as_many_gpus_as_said() -> None:
    for gpus, devices in GROUPED.items():
        assert sum(kind.number * kind.ranks for kind in parse_kinds(devices)) == gpus


def test_every_model_is_asked_before_what_counts() -> None:
    setting = replace(SMALL, clumps=2.0)
    work = setting.workload(seed=1)
    warming = [r for r in work.requests if r.at < WARM_UP]
    assert sorted(r.model for r in warming) == sorted(s.name for s in setting.specs)
    assert work == setting.workload(seed=1)
    assert len(replace(setting, clumps=4.0).workload(1).requests) > len(work.requests)
    thrice = replace(setting, warming=3).workload(1).requests
    assert len(thrice) == len(work.requests) + 2 * len(EIGHT)
    assert len({r.id for r in thrice}) == len(thrice)


def test_longer_requests_fill_no_more_than_the_context() -> None:
    long = replace(SMALL, longer=50.0).workload(0)
    assert {max(r.prompt_tokens, r.output_tokens) for r in long.requests} <= set(range(2049))
    assert sum(r.prompt_tokens == 2048 for r in long.requests) > len(long.requests) / 4


def test_levels_are_above_what_a_model_alone_takes() -> None:
    setting = Setting(EIGHT[:3], seconds=40.0, floor=False)
    slos = levels(setting, 0)
    assert len(slos) == 3
    assert all(0 < slo.tpot < slo.ttft for slo in slos.values())
    twice = levels(replace(setting, scale=2.0), 0)
    assert all(twice[n].ttft == 2 * slo.ttft for n, slo in slos.items())
    stated = levels(replace(setting, floor=True), 0)
    assert all(slo.ttft >= TTFT_SCALE * LEAST_TTFT for slo in stated.values())
    assert all(slo.tpot >= TPOT_SCALE * LEAST_TPOT for slo in stated.values())
    alone = measure(setting, "static", whole(3), 0)
    assert alone.both >= 0.9
    assert alone.requests > 0


@pytest.mark.parametrize("row", ["prism", "prism, 45 s", "muxserve"])
def test_a_row_runs_from_end_to_end(row: str) -> None:
    found = measure(SMALL, row, whole(2), 0)
    assert found == measure(SMALL, row, whole(2), 0)
    assert found.complete
    assert 0 <= found.worst <= 1
    assert found.activations >= 8, "all are brought in by the warm-up"


def test_a_run_that_cannot_attain_the_target_is_cut_short_and_others_are_not() -> None:
    hopeless = replace(SMALL, clumps=16.0, scale=0.05, floor=False)
    cut, full = (measure(hopeless, "swap", whole(1), 0, cut=c) for c in (True, False))
    assert not cut.complete
    assert full.complete
    assert full.ttft <= cut.ttft < TARGET
    assert measure(SMALL, "static", whole(8), 0, cut=True) == measure(SMALL, "static", whole(8), 0)


def test_a_search_finds_the_fewest_and_runs_the_most_to_the_end() -> None:
    search = Search("three", replace(SMALL, scale=4.0), {n: whole(n) for n in (1, 2, 3)}, {})
    fewest, tried = search.fewest("prism", 0)
    assert fewest is not None
    assert tried[fewest].both >= TARGET
    assert tried[3].complete
    assert all(r.both < TARGET for n, r in tried.items() if n < fewest)
    none, tried = replace(search, setting=replace(SMALL, scale=0.01, floor=False)).fewest("swap", 0)
    assert none is None
    assert set(tried) == {3}


def test_a_row_that_the_most_devices_do_not_serve_has_no_number() -> None:
    assert prism_sim.summary_of([3, 4]) == {"mean": 3.5, "least": 3, "most": 4}
    assert prism_sim.summary_of([3, None]) == {"mean": None, "least": 3, "most": None}


@pytest.mark.slow
def test_settings_of_the_sensitivity_change_what_they_name() -> None:
    window = traffic.WINDOW
    by_need = prism_sim.under(SMALL, 0, None, window)
    assert by_need == measure(SMALL, "prism", whole(2), 0)
    assert by_need == prism_sim.under(SMALL, 0, None, window, {"threshold": 0.2}), "the default"
    assert prism_sim.under(SMALL, 0, 5.0, window).activations > by_need.activations
    often = replace(SMALL, clumps=8.0)
    assert measure(replace(often, every=1.0), "prism", whole(2), 0) == prism_sim.under(
        often, 0, None, window, {"every": 1.0}
    )
    prism_sim.under(SMALL, 0, None, 10.0)
    assert window == traffic.WINDOW


class AtOnce(Executor):
    """Runs what it is given when it is given."""

    def submit(self, fn, /, *args, **kwargs):  # type: ignore[no-untyped-def]
        future: Future[object] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def test_a_part_has_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = measure(SMALL, "static", whole(2), 0)
    monkeypatch.setattr(Search, "fewest", lambda self, row, seed: (8, {8: tried}))
    for name, prefix in (("eighteen", ""), ("fiftyeight", "fiftyeight_")):
        search = replace(SEARCHES[name], layouts={8: whole(8)})
        result, _ = prism_sim.searched(
            name, search, ("static", "prism"), range(2), Sweep(1, AtOnce())
        )
        assert result[f"{prefix}devices_prism"] == result[f"{prefix}devices_static"] == 8
        assert len(result[name]["tried"]["prism"]) == 2
