"""The paper's setting is what it says, and the ratios compare like with like."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ballast.sim.profile import device_profile
from ballast.weights.rotor import Loads
from ballast.workload.generators import poisson
from ballast.workload.lengths import (
    ALPACA_OUTPUT,
    ALPACA_PROMPT,
    SHAREGPT_OUTPUT,
    SHAREGPT_PROMPT,
    LengthSampler,
)
from ballast.workload.workload import Workload, WorkloadRequest
from benchmarks.mirage_cases import GROUPS, METRICS, VARIANTS, Case, ratios, slowed
from benchmarks.mirage_paper import CLAIMS
from benchmarks.mirage_run import Measured, run
from benchmarks.mirage_setting import ALPACA, C1, C2, MEMORY, SHAREGPT, Device, Setting, specs_of
from benchmarks.mirage_sim import MOST, OTHER, SWEPT, links, multiples, ours

GH200 = Device(device_profile("GH200-96G"), MEMORY["GH200-96G"])


def arrivals(n: int) -> Workload:
    at = poisson(2.0, n, np.random.default_rng(0))[:n].tolist()
    return Workload.of(
        "poisson",
        [
            WorkloadRequest(id=i, at=t, model="any", prompt_tokens=1, output_tokens=1)
            for i, t in enumerate(at)
        ],
    )


@pytest.mark.parametrize(
    ("sampler", "published"),
    [
        (SHAREGPT_PROMPT, 161.31),
        (SHAREGPT_OUTPUT, 337.99),
        (ALPACA_PROMPT, 19.31),
        (ALPACA_OUTPUT, 58.45),
    ],
)
def test_lengths_have_the_published_means(sampler: LengthSampler, published: float) -> None:
    drawn = sampler.sample(np.random.default_rng(0), 200_000)
    assert drawn.mean() == pytest.approx(published, rel=0.02)


def test_a_fraction_of_the_memory_holds_weights_and_kv() -> None:
    for fractions in (C1, C2):
        for spec in specs_of(fractions, MEMORY["GH200-96G"]):
            taken = fractions[spec.name] * MEMORY["GH200-96G"]
            assert spec.share == pytest.approx(taken - spec.weight_bytes, rel=0.05)
            # vLLM would not start where KV holds less than one context.
            assert spec.share > spec.max_model_len * spec.kv_bytes_per_token


def test_requests_come_at_the_rate_and_are_spread_over_the_models() -> None:
    setting = Setting.of(C1, ALPACA)
    work = setting.requests(arrivals(300), 5.0, 0)
    assert len(work.requests) / work.seconds == pytest.approx(5.0)
    assert set(work.models) == set(C1)
    # Other rates are the same requests, sooner or later.
    later = setting.requests(arrivals(300), 2.5, 0)
    assert [(r.model, r.output_tokens) for r in later.requests] == [
        (r.model, r.output_tokens) for r in work.requests
    ]
    assert later.seconds == pytest.approx(2 * work.seconds)


def test_what_comes_after_the_peak_comes_more_slowly() -> None:
    work = arrivals(100)
    half = slowed(work, work.seconds / 2, 0.5)
    assert half.seconds == pytest.approx(1.5 * work.seconds)
    assert [r.id for r in half.requests] == [r.id for r in work.requests]


@pytest.mark.parametrize("apart", [False, True])
def test_equal_runs_are_equal_and_answer_every_request(apart: bool) -> None:
    setting = Setting.of(C1, SHAREGPT, apart)
    work = setting.requests(arrivals(40), 8.0, 1)
    told = run(setting, work, "static", {}, GH200)
    assert len(told.told) == told.requests == 40
    assert sum(map(len, told.told)) == sum(r.output_tokens for r in work.requests)
    assert told.summary() == run(setting, work, "static", {}, GH200).summary()


def test_latencies_are_those_that_clients_heard() -> None:
    told = tuple(np.array(at) for at in ((1.0, 2.0, 4.0), (9.0, 9.5)))
    seen = Measured((0.0, 5.0), told, 2, 0, Loads()).summary()
    assert seen["throughput"] == pytest.approx(5 / 9.5)
    assert seen["frame_throughput"] == pytest.approx(3 / 5)
    assert (seen["p50_ttft"], seen["p50_tbt"], seen["p50_tpot"]) == (2.5, 1.0, 1.0)
    late = Measured((0.0, 5.0), told, 2, 0, Loads()).summary(since=3.0)
    assert (late["p50_ttft"], late["p50_tbt"], late["p50_tpot"]) == (4.0, 0.5, 0.5)


def test_ratios_compare_runs_of_one_case() -> None:
    a, b = Case("mps_c1", "Alpaca", 1.0, 0, "mirage"), Case("mps_c1", "Alpaca", 2.0, 0, "mirage")
    c, d = (Case("mps_c1", "Alpaca", x.rate, 0, "recompute") for x in (a, b))
    runs = {a: {"x": 3.0}, b: {"x": 8.0}, c: {"x": 2.0}, d: {"x": 4.0}}
    assert ratios(runs, "mirage", "recompute", "x") == [1.5, 2.0]


def test_links_are_compared_with_recomputation_which_uses_none() -> None:
    base = [Case(name, "Alpaca", 1.0, 0, "recompute") for name in SWEPT]
    slow, fast = ([replace(c, variant="mirage", link=by) for c in base] for by in (32e9, 900e9))
    other = [replace(c, kind=OTHER, variant=v) for c in base for v in ("recompute", "mirage")]
    runs = {c: dict.fromkeys(METRICS, 2.0) for c in base}
    runs |= {c: dict.fromkeys(METRICS, 1.0) for c in slow}
    runs |= {c: dict.fromkeys(METRICS, 3.0) for c in fast}
    runs |= {c: dict.fromkeys(METRICS, 4.0) for c in other}
    told = links(runs)[SWEPT[0]]
    assert [by["throughput_over_recompute"] for by in told.values()] == [0.5, 1.5, 1.0]


def test_where_it_is_never_short_it_runs_at_the_highest_rate() -> None:
    assert multiples(None, (1.0, 2.0)) == (2.0**MOST,)
    assert multiples(3.0, (1.0, 2.0)) == (3.0, 6.0)


def test_a_claim_is_compared_with_what_it_speaks_of() -> None:
    claim = next(c for c in CLAIMS if c.group == "temporal_c1" and c.metric == "p99_tbt")
    metrics = {"p99_tbt": 1.0, "p99_tpot": 1.0}
    runs = {
        Case(claim.group, lengths, 1.0, 0, variant): {k: factor * v for k, v in metrics.items()}
        for lengths, gain in (("Alpaca", 1.0), ("ShareGPT", 0.5))
        for variant, factor in (("recompute", 1.0), ("mirage", gain), ("ample", 0.25))
    }
    told = ours(runs, claim)
    assert told is not None
    assert (told["ours"], told["no shortage"]) == (0.75, 0.25)
    assert (told["Alpaca"], told["ShareGPT"], told["pool alone"]) == (1.0, 0.5, None)


def test_every_claim_has_runs() -> None:
    for claim in CLAIMS:
        assert {claim.of, claim.over} <= set(GROUPS[claim.group].variants) <= set(VARIANTS)
