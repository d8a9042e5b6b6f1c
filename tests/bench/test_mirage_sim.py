"""The paper's setting is what it says; ratios compare like with like, and cases weigh alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
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
from benchmarks.contenders import SHARINGS
from benchmarks.doc_tables import DOCS, marked, places, renew, renewed
from benchmarks.mirage_cases import AMPLE, CURVES, GROUPS, Case, canonical, ratios, slowed
from benchmarks.mirage_curves import (
    COMPARED,
    FULL_MULTIPLES,
    METRICS,
    MULTIPLES,
    anywhere,
    at_knees,
    averaged,
    curve_cases,
    curves,
    grid,
    knee,
    knees_wanted,
)
from benchmarks.mirage_paper import CLAIMS
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
from benchmarks.mirage_sweeps import OWN, SWEEPS, sweep_cases, swept
from benchmarks.mirage_tables import GROUPS as TITLES
from benchmarks.mirage_tables import paper, sweep_table, tables

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


def test_what_comes_after_the_peak_comes_more_slowly() -> None:
    work = arrivals(100)
    half = slowed(work, work.seconds / 2, 0.5)
    assert half.seconds == pytest.approx(1.5 * work.seconds)
    assert [r.id for r in half.requests] == [r.id for r in work.requests]


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
    late = Measured((0.0, 5.0), times, 2, 0, Loads()).summary(since=3.0)
    assert (late["p50_ttft"], late["p50_tbt"], late["p50_tpot"]) == (4.0, 0.5, 0.5)


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

KNEES = {(group, setting): 2.0 for group in CURVES for setting in GROUPS[group].settings}
AT = at_knees(KNEES)


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

    found = knee("alone", "Alpaca", 500, measured, quick=False)
    assert found == min(rate for rate in grid() if rate >= short_from)
    assert len(asked) <= 6
    assert {(c.row, c.sharing) for c in asked} == {("recompute", "shares")}
    assert max(b / a for a, b in zip(grid(), grid()[1:], strict=False)) < 1.42


def test_what_is_never_short_has_no_knee_and_is_run_up_to_the_highest_rate() -> None:
    assert knee("alone", "Alpaca", 500, lambda c, n: {"preemptions": 0.0}, quick=False) is None
    at = at_knees({("alone", "Alpaca"): None})
    assert at("alone", "Alpaca", 8.0).rate == grid()[-1]


def test_curves_go_from_below_the_knee_to_eight_times_it() -> None:
    for multiples in (MULTIPLES, FULL_MULTIPLES):
        assert (multiples[0], multiples[-1]) == (0.75, 8.0)
        assert multiples == tuple(sorted(multiples))
        cases = list(curve_cases(CURVES, AT, multiples))
        for group in CURVES:
            for setting in GROUPS[group].settings:
                rates = {c.rate for c in cases if (c.group, c.setting) == (group, setting)}
                assert rates == {2.0 * m for m in multiples}


def test_every_case_is_run_with_all_presets_at_every_rate() -> None:
    cases = set(curve_cases(CURVES, AT, MULTIPLES))
    assert len(cases) == len(list(curve_cases(CURVES, AT, MULTIPLES)))
    for group in CURVES:
        for setting in GROUPS[group].settings:
            for multiple in MULTIPLES:
                case = AT(group, setting, multiple)
                rows = {c.row for c in cases if replace(c, row="recompute") == case}
                assert rows >= {"recompute", "kvswap", "mirage"}
                if multiple > 1:
                    assert replace(case, memory=AMPLE) in cases
                    for sharing in ("shares", "paper"):
                        assert (replace(case, sharing=sharing) in cases) is GROUPS[group].shares


def invented(cases: list[Case], figure: Callable[[Case], float]) -> dict[Case, dict[str, float]]:
    """Results in which every figure of a case is the same."""
    keys = {*METRICS, *OWN, "p50_tbt", "seconds", "drain", "preemptions", "lent_layers"}
    keys |= {"most_lent", "remaps", "copying", "stalled"}
    return {canonical(c): dict.fromkeys(keys, figure(c)) for c in cases}


def gain(case: Case) -> float:
    """`mirage` has twice of ShareGPT's figure and eight times of Alpaca's, whatever the rate."""
    by_setting = {"ShareGPT": 2.0, "Alpaca": 8.0}
    return by_setting.get(case.setting, 4.0) if case.row == "mirage" else 1.0


def test_cases_weigh_alike_whatever_the_number_of_their_runs() -> None:
    cases = list(curve_cases(["temporal_c1"], AT, MULTIPLES))
    cases += [replace(c, seed=1) for c in cases if c.setting == "ShareGPT"]
    found = curves(invented(cases, gain), ["temporal_c1"], MULTIPLES)["temporal_c1"]
    for metric in METRICS:
        assert found["over"]["layers"][metric] == [pytest.approx(4.0)] * 3
        assert found["settings"]["Alpaca"]["over"]["layers"][metric] == [pytest.approx(8.0)] * 3
    # A geometric mean: a gain and an equal loss are no gain.
    assert averaged({cases[0]: 2.0, replace(cases[0], setting="ShareGPT"): 0.5}) == pytest.approx(
        1.0
    )
    assert averaged({}) is None


def test_a_curve_has_a_figure_for_each_rate_and_no_mean_of_them() -> None:
    cases = list(curve_cases(["alone"], AT, MULTIPLES))
    runs = invented(cases, lambda c: c.multiple if c.row == "mirage" else 1.0)
    found = curves(runs, ["alone"], MULTIPLES)["alone"]
    assert found["multiples"] == list(MULTIPLES)
    assert found["over"]["layers"]["p99_ttft"] == pytest.approx(list(MULTIPLES))
    assert found["settings"]["Alpaca"]["rates"] == [2.0 * m for m in MULTIPLES]
    assert "layers_shares" not in found["over"]


def test_ratios_compare_runs_of_one_case() -> None:
    a, b = AT("mps_c1", "Alpaca", 1.0), AT("mps_c1", "Alpaca", 2.0)
    runs = {
        replace(a, row="mirage"): {"x": 3.0},
        replace(b, row="mirage"): {"x": 8.0},
        a: {"x": 2.0},
        b: {"x": 4.0},
    }
    of = [replace(c, row="mirage") for c in (a, b)]
    assert list(ratios(runs, of, "x", row="recompute").values()) == [1.5, 2.0]


def test_recomputation_uses_no_link_and_runs_once_for_all() -> None:
    base = AT("mps_c1", "Alpaca", 8.0)
    assert canonical(replace(base, link=32e9)) == base
    lending = replace(base, row="mirage", link=32e9)
    assert canonical(lending) == lending
    assert canonical(replace(base, quantum=4.0, preemptive=True)) == base
    turns = replace(AT("temporal_c1", "Alpaca", 8.0), quantum=4.0)
    assert canonical(turns) == turns


def test_the_comparison_over_swapping() -> None:
    runs = invented(
        list(curve_cases(["alone"], AT, (2.0,))),
        lambda c: {"mirage": 6.0, "kvswap": 3.0}.get(c.row, 1.0),
    )
    over = curves(runs, ["alone"], (2.0,))["alone"]["over"]
    assert over["kvswap"]["throughput"] == [pytest.approx(2.0)]


# -- sweeps, tables -----------------------------------------------------------------------------


def everything() -> dict[str, object]:
    cases = [*curve_cases(CURVES, AT, MULTIPLES), *sweep_cases(SWEEPS, AT)]
    runs = invented(cases, gain)
    return {
        "knees": {" ".join(what): rate for what, rate in KNEES.items()},
        "curves": curves(runs, CURVES, MULTIPLES),
        "sweeps": {name: swept(name, runs, AT) for name in SWEEPS},
    }


def test_sweeps_run_at_knees_that_are_known() -> None:
    assert set(knees_wanted(sweep_cases(SWEEPS, anywhere))) <= KNEES.keys()
    preemptive = {c.preemptive for c in sweep_cases(["turns"], AT)}
    quanta = {c.quantum for c in sweep_cases(["turns"], AT)}
    assert preemptive == {False, True}
    assert len(quanta) > 2
    assert {c.step_tokens for c in sweep_cases(["steps"], AT)} >= {256, 2048, 8192}


def test_every_table_has_its_place_in_the_pages(tmp_path: Path) -> None:
    found = everything()
    made = tables(found)
    for name, sweep in found["sweeps"].items():  # type: ignore[attr-defined]
        assert len(sweep_table(sweep).splitlines()) > 2, name
    for page in DOCS.glob("mirage*.md"):
        (tmp_path / page.name).write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
    pages = places(tmp_path)
    assert made.keys() == {name for name in pages if name.startswith("mirage_sim.")}
    for page in set(pages.values()):
        for name, command in marked(page.read_text(encoding="utf-8")).items():
            assert f"benchmarks.{name.partition('.')[0]}" in command or name == "mirage_live"
    renew(made, tmp_path)
    written = {page.name: page.read_text(encoding="utf-8") for page in tmp_path.iterdir()}
    assert all(table in written[pages[name].name] for name, table in made.items())
    renew(made, tmp_path)
    assert written == {p.name: p.read_text(encoding="utf-8") for p in tmp_path.iterdir()}


def test_a_table_without_a_place_is_an_error_and_other_text_stays() -> None:
    page = "before\n<!-- begin a.b: some command -->\nold\n<!-- end a.b -->\nafter\n"
    expected = "before\n<!-- begin a.b: some command -->\nnew\n<!-- end a.b -->\nafter\n"
    assert renewed(page, {"a.b": "new"}) == expected
    assert renewed(page, {}) == page
    with pytest.raises(KeyError, match="no marker for c"):
        renewed(page, {"c": "new"})


def test_a_table_is_written_where_its_marker_is(tmp_path: Path) -> None:
    def page(name: str) -> str:
        return f"<!-- begin {name}: some command -->\nold\n<!-- end {name} -->\n"

    (tmp_path / "one.md").write_text(page("a"))
    (tmp_path / "two.md").write_text(page("b"))
    renew({"b": "new"}, tmp_path)
    assert (tmp_path / "one.md").read_text() == page("a")
    assert (tmp_path / "two.md").read_text() == page("b").replace("old", "new")
    with pytest.raises(KeyError, match="no marker for c"):
        renew({"a": "new", "c": "new"}, tmp_path)
    assert (tmp_path / "one.md").read_text() == page("a")
    (tmp_path / "three.md").write_text(page("a"))
    with pytest.raises(ValueError, match=r"a has a marker in .*one\.md and in .*three\.md"):
        renew({"b": "newer"}, tmp_path)


def test_every_claim_stands_beside_what_it_speaks_of() -> None:
    rows = SHARINGS["pool"].rows
    for claim in CLAIMS:
        assert {claim.of, claim.over} <= rows.keys()
        assert claim.setting in (None, *GROUPS[claim.group].settings)
    found = paper(everything())
    assert {entry["section"] for entry in found} >= {"7.2, Fig. 8", "7.3, Fig. 13", "7.4, Fig. 14"}
    for entry in found:
        assert len(entry["ours"]) == len(entry["multiples"]) == len(MULTIPLES)
    assert set(TITLES) == set(CURVES)
    assert "layers" in COMPARED
