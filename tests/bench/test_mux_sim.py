"""The benchmark of MuxServe's schedulers: equal terms for all, and what it says of its runs."""

from __future__ import annotations

import pytest

from ballast.bench.report import Report
from ballast.core.settings import Slo
from ballast.policy.presets import resolve
from ballast.sim.cluster import parse_kinds
from benchmarks import mux_sim
from benchmarks.mux_sim import COMPARED, LANES, SETTINGS, TERMS, Result, lanes_of, summary, workload
from tests.bench.test_bench_report import record


def test_all_rows_have_the_same_options_and_lanes() -> None:
    values = {
        row: resolve(c.preset, COMPARED.options(row)).values for row, c in COMPARED.rows.items()
    }
    for option in {o for of in values.values() for o in of}:
        assert len({of[option] for of in values.values() if option in of}) == 1, option
    for row in COMPARED.rows:
        assert {o: v for o, v in TERMS.items() if o in values[row]} == {
            o: v for o, v in values[row].items() if o in TERMS
        }
        alone = row == "fcfs" or "one lane" in row
        assert lanes_of(row) == (1 if alone else LANES)
        assert not any(c.ablates or c.own for c in COMPARED.rows.values())


def test_requests_are_as_long_and_as_many_as_the_figure_says() -> None:
    work = workload(SETTINGS["10a"], 1.0, 0.5, 200.0, seed=1)
    of = {m: [r for r in work.requests if r.model == m] for m in SETTINGS["10a"].rates}
    for model, rate in SETTINGS["10a"].rates.items():
        assert len(of[model]) == pytest.approx(200 * rate, rel=0.15)
    mean = {m: sum(r.prompt_tokens + r.output_tokens for r in rs) / len(rs) for m, rs in of.items()}
    assert mean["LLaMA-30b"] / mean["LLaMA-7b"] == pytest.approx(2.0, rel=0.15)
    assert mean["LLaMA-13b"] / mean["LLaMA-7b"] == pytest.approx(1.0, rel=0.1)
    assert max(r.prompt_tokens + r.output_tokens for r in work.requests) <= mux_sim.CONTEXT
    assert work == workload(SETTINGS["10a"], 1.0, 0.5, 200.0, seed=1)


def test_throughput_counts_what_ends_in_the_time_and_weighs_it_by_rate() -> None:
    records = [record(0), record(1), record(2), record(3, "b"), record(4, error="no")]
    report = Report.of(records, {"a": Slo(), "b": Slo()}, 10.0)
    # Each ends 1 s after it came; of five requests four are of `a`.
    assert mux_sim.throughput(report, 1.5, 4.5) == pytest.approx((2 * 4 + 1 * 1) / 5 / 3)


def test_a_ratio_that_is_off_by_more_than_a_third_is_named() -> None:
    def result(throughput: float) -> Result:
        return Result(throughput, {"a": 1.0}, 0.1, 9, 0, {"a": 1.0})

    rows = {"fcfs": 3.8, "round-robin": 6.2, "muxserve": 6.2}
    outcome = summary({"10a": {row: {1.0: result(t)} for row, t in rows.items()}})
    assert outcome["throughput_over_fcfs"] == {"10a": pytest.approx(6.2 / 3.8)}
    assert outcome["throughput_over_fcfs"] == outcome["throughput_over_fcfs_paper"]
    assert outcome["off_by_a_third"] == {"fcfs": [], "round-robin": ["10a"]}
    assert outcome["fairness_gap"]["10a"]["muxserve"] == 0.1


def test_a_row_runs_from_end_to_end() -> None:
    found = mux_sim.measure("10b", "muxserve", 0.5, 0.25, 8.0, mux_sim.ENGINE)
    again = mux_sim.measure("10b", "muxserve", 0.5, 0.25, 8.0, mux_sim.ENGINE)
    assert found == again
    assert found.requests > 10
    assert set(found.attainment) == set(found.kv_shares) == set(SETTINGS["10b"].rates)
    assert sum(found.kv_shares.values()) == pytest.approx(1.0)
    assert 0 < found.worst <= 1
    (kind,) = parse_kinds(mux_sim.DEVICE, LANES, mux_sim.ENGINE)
    specs = mux_sim.specs_of(SETTINGS["10b"], kind, 0.25)
    assert all(0 < s.slo.tpot < s.slo.ttft for s in specs)


def test_turns_of_limited_length_are_of_fcfs_alone() -> None:
    def run(row: str, longest: float) -> Result:
        return mux_sim.measure("10b", row, 1.0, 0.25, 8.0, mux_sim.ENGINE, longest)

    assert run("fcfs", 0.1) != run("fcfs", 0.0)
    assert run("round-robin", 0.1) == run("round-robin", 0.0)
