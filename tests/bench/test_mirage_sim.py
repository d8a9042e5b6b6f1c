"""The paper's setting is what it says; ratios compare like with like, and cases weigh alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from ballast.core.units import MiB
from ballast.kv.layout import Layout
from ballast.sim.profile import device_profile
from ballast.weights.weight_stream import Loads
from ballast.workload.generators import poisson
from ballast.workload.lengths import (
    ALPACA_OUTPUT,
    ALPACA_PROMPT,
    SHAREGPT_OUTPUT,
    SHAREGPT_PROMPT,
    LengthSampler,
)
from ballast.workload.workload import Workload, WorkloadRequest
from benchmarks.mirage_cases import (
    AMPLE,
    COMPARED,
    FIGURES,
    GRID,
    GROUPS,
    METRICS,
    MULTIPLES,
    Case,
    at_multiple,
    curve_cases,
    curves,
    first_cases,
    knee,
    ratio,
)
from benchmarks.mirage_run import Enough, Measured, Remapped, Watch, run
from benchmarks.mirage_setting import (
    ALPACA,
    C1,
    C2,
    ENGINE,
    MEMORY,
    SHAREGPT,
    Device,
    Setting,
    page_by_default,
    specs_of,
)

GH200 = Device(device_profile("GH200-96G", ENGINE), MEMORY["GH200-96G"])


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


def test_pages_are_as_the_models_have_them_by_default_and_blocks_fill_them() -> None:
    memory = MEMORY["GH200-96G"]
    for fractions in (C1, C2):
        page = page_by_default(fractions, memory)
        assert page == 16 * MiB
        for spec in specs_of(fractions, memory, page_bytes=page):
            layout = Layout.of(spec, page)
            assert layout.slab_pages == 1
            assert layout.waste < 0.05
    assert page_by_default(C1, memory // 100) == 2 * MiB


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


@pytest.mark.parametrize("apart", [False, True])
def test_equal_runs_are_equal_and_answer_every_request(apart: bool) -> None:
    setting = Setting.of(C1, SHAREGPT, apart)
    work = setting.requests(arrivals(40), 8.0, 1)
    seen = run(setting, work, "static", {}, GH200)
    assert len(seen.times) == seen.requests == 40
    assert sum(map(len, seen.times)) == sum(r.output_tokens for r in work.requests)
    assert seen.summary() == run(setting, work, "static", {}, GH200).summary()


@pytest.mark.parametrize("apart", [False, True])
def test_mapping_pages_takes_time(apart: bool) -> None:
    """KV that grows by a page waits for the driver's calls, whole device or slice."""
    assert GH200.profile.pages is not None
    free = replace(GH200, profile=GH200.profile.model_copy(update={"pages": None}))
    setting = replace(Setting.of(C1, SHAREGPT, apart), page=2)
    work = setting.requests(arrivals(40), 8.0, 1)
    counted, uncounted = (run(setting, work, "recompute", {}, d).summary() for d in (GH200, free))
    assert counted["p50_tpot"] > 1.001 * uncounted["p50_tpot"]


def test_latencies_are_those_that_clients_saw() -> None:
    times = tuple(np.array(at) for at in ((1.0, 2.0, 4.0), (9.0, 9.5)))
    seen = Measured((0.0, 5.0), times, 2, 0, Loads(), Remapped(19.0, 9.5, 3, 2)).summary()
    assert seen["throughput"] == pytest.approx(5 / 9.5)
    assert (seen["p50_ttft"], seen["p50_tbt"], seen["p50_tpot"]) == (2.5, 1.0, 1.0)
    assert (seen["lent_layers"], seen["swapped_blocks"], seen["most_lent"]) == (2.0, 1.0, 3)


def test_the_drain_is_apart() -> None:
    """Until the last request comes at 5 s, three tokens; the last answer ends 4.5 s after that."""
    times = tuple(np.array(at) for at in ((1.0, 2.0, 4.0), (9.0, 9.5)))
    seen = Measured((0.0, 5.0), times, 2, 0, Loads()).summary()
    assert seen["frame_throughput"] == pytest.approx(3 / 5)
    assert seen["drain"] == pytest.approx(4.5)


def test_a_run_is_watched_and_stops_when_it_has_preempted_enough() -> None:
    setting = Setting.of({"OPT-13b": 0.35}, SHAREGPT)
    work = setting.requests(arrivals(90), 30.0, 1)
    seen = run(setting, work, "mirage", {}, GH200)
    assert seen.remapped.most > 0
    assert seen.remapped.changes > 0
    assert 0 < seen.summary()["lent_layers"] <= seen.remapped.most
    with pytest.raises(Enough):
        run(setting, work, "recompute", {}, GH200, enough=1)


def test_layers_lent_are_weighed_by_time() -> None:
    watch = Watch(float("inf"))
    for now, n_freed in ((1.0, 2), (3.0, 4), (4.0, 0), (9.0, 0)):
        model = SimpleNamespace(
            rotation=SimpleNamespace(n_freed=n_freed), kv=SimpleNamespace(staged=()), preemptions=0
        )
        watch(now, SimpleNamespace(models={"a": model}))  # type: ignore[arg-type]
    assert watch.remapped == Remapped(weights=2 * 2.0 + 4 * 1.0, kv=0.0, most=4, changes=3)


# -- curves -----------------------------------------------------------------------------------

FIRSTS = first_cases(GROUPS, quick=False, page=None)


def cases_at(multiples: tuple[float, ...], groups: tuple[str, ...] = tuple(GROUPS)) -> list[Case]:
    """All runs of these groups, each with its knee at 2 requests a second."""
    points = [at_multiple(f, 2.0, m) for f in FIRSTS if f.group in groups for m in multiples]
    return [case for point in points for case in curve_cases(point)]


@pytest.mark.parametrize("short_from", [0.1, 1.0, 3.0, 500.0])
def test_a_knee_is_the_lowest_rate_at_which_one_request_in_a_hundred_is_preempted(
    short_from: float,
) -> None:
    asked: list[Case] = []

    def measured(case: Case, enough: float) -> dict[str, float] | None:
        asked.append(case)
        assert enough == 5.0
        preempted = 5.0 if case.rate >= short_from else 4.0
        # A run may be stopped once it has preempted enough.
        return None if preempted >= enough and len(asked) % 2 else {"preemptions": preempted}

    found = knee(FIRSTS[0], 500, measured)
    assert found == min(rate for rate in GRID if rate >= short_from)
    assert len(asked) <= 6
    assert {(c.row, c.sharing) for c in asked} == {("recompute", "shares")}
    assert max(b / a for a, b in pairwise(GRID)) < 1.42


def test_what_is_never_short_has_no_knee_and_is_run_up_to_the_highest_rate() -> None:
    assert knee(FIRSTS[0], 500, lambda c, n: {"preemptions": 0.0}) is None
    assert at_multiple(FIRSTS[0], None, 8.0).rate == GRID[-1]


def test_every_case_is_run_with_all_presets_at_every_rate() -> None:
    assert (MULTIPLES[0], MULTIPLES[-1]) == (0.75, 8.0)
    assert tuple(sorted(MULTIPLES)) == MULTIPLES
    cases = set(cases_at(MULTIPLES))
    assert len(cases) == len(cases_at(MULTIPLES))
    for first in FIRSTS:
        for multiple in MULTIPLES:
            point = at_multiple(first, 2.0, multiple)
            assert point.rate == 2.0 * multiple
            rows = {c.row for c in cases if replace(c, row="recompute") == point}
            assert rows >= {"recompute", "kvswap", "mirage"}
            if multiple > 1:
                assert replace(point, memory=AMPLE) in cases
                for sharing in ("shares", "paper"):
                    assert (replace(point, sharing=sharing) in cases) is GROUPS[point.group].shares


def invented(cases: list[Case], figure: Callable[[Case], float]) -> dict[Case, dict[str, float]]:
    """Results in which every figure of a case is the same."""
    return {case: dict.fromkeys({*METRICS, *FIGURES}, figure(case)) for case in cases}


def gain(case: Case) -> float:
    """`mirage` has twice of ShareGPT's figure and eight times of Alpaca's, whatever the rate."""
    by_setting = {"ShareGPT": 2.0, "Alpaca": 8.0}
    return by_setting.get(case.setting, 4.0) if case.row == "mirage" else 1.0


def test_settings_weigh_alike_whatever_the_number_of_their_runs() -> None:
    cases = cases_at(MULTIPLES, ("temporal_c1",))
    cases += [replace(c, seed=1) for c in cases if c.setting == "ShareGPT"]
    found = curves(invented(cases, gain), MULTIPLES)["temporal_c1"]
    for metric in METRICS:
        assert found["over"]["layers"][metric] == [pytest.approx(4.0)] * 3
        assert found["settings"]["Alpaca"]["over"]["layers"][metric] == [pytest.approx(8.0)] * 3
    # A geometric mean: a gain and an equal loss are no gain.
    runs = invented(cases, lambda c: {"mirage": 2.0 if c.seed else 0.5}.get(c.row, 1.0))
    points = [c for c in cases if c.setting == "ShareGPT"]
    assert ratio(runs, points, "layers", "p99_ttft") == pytest.approx(1.0)
    assert ratio({}, points, "layers", "p99_ttft") is None


def test_a_setting_that_is_never_short_is_in_no_mean() -> None:
    runs = invented(cases_at(MULTIPLES, ("temporal_c1",)), gain)
    found = curves(runs, MULTIPLES, [("temporal_c1", "Alpaca")])["temporal_c1"]
    assert found["over"]["layers"]["throughput"] == [pytest.approx(2.0)] * 3
    assert found["settings"]["Alpaca"]["over"]["layers"]["throughput"] == [pytest.approx(8.0)] * 3
    assert found["never_short"] == ["Alpaca"]


def test_a_curve_has_a_figure_for_each_rate_and_no_mean_of_them() -> None:
    cases = cases_at(MULTIPLES, ("alone",))
    runs = invented(cases, lambda c: c.multiple if c.row == "mirage" else 1.0)
    found = curves(runs, MULTIPLES)["alone"]
    assert found["multiples"] == list(MULTIPLES)
    assert found["over"]["layers"]["p99_ttft"] == pytest.approx(list(MULTIPLES))
    assert found["over"]["kvswap"]["throughput"] == pytest.approx(list(MULTIPLES))
    assert found["settings"]["Alpaca"]["rates"] == [2.0 * m for m in MULTIPLES]
    assert "layers_shares" not in found["over"]


def test_every_group_has_all_comparisons() -> None:
    found = curves(invented(cases_at(MULTIPLES), gain), MULTIPLES)
    assert set(found) == set(GROUPS)
    assert set(found["mps_c1"]["over"]) == set(COMPARED)
    assert found["mps_c1"]["paper"] == {"throughput": 1.07, "p99_ttft": 0.79, "p99_tbt": 0.34}
