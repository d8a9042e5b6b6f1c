"""Workloads by name, as command lines give them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ballast.bench.expected_load import expecting
from ballast.bench.run_options import GENERATORS, compared_presets, options_of, workload_of
from ballast.bench.simulation_setup import WorkloadOptions
from ballast.core.errors import ConfigError
from ballast.core.settings import AdapterSettings, DeviceSettings, FleetSettings, ModelSettings
from ballast.workload.workload import Workload, WorkloadError, WorkloadRequest
from tests.workload.test_traces import AGENTIC, servegen_files

DEVICE = DeviceSettings(budget_bytes=1 << 30)
NAMES = ("a", "b", "c", "d", "e", "f", "g", "h")


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("rate", [1.0, 4.0])
def test_generators_keep_to_rate_length_and_seed(name: str, rate: float) -> None:
    made = workload_of(name, NAMES, rate=rate, seconds=120.0, most_tokens=200, seed=3)
    assert made == workload_of(name, NAMES, rate=rate, seconds=120.0, most_tokens=200, seed=3)
    assert 0.5 * rate * 120 <= len(made.requests) <= 1.6 * rate * 120
    assert made.seconds < 120.0
    assert max(r.prompt_tokens for r in made.requests) <= 100
    assert max(r.output_tokens for r in made.requests) <= 100
    assert set(made.models) <= set(NAMES)


@pytest.mark.parametrize("n_models", [1, 3, 10])
@pytest.mark.parametrize("seed", range(6))
def test_bursts_have_as_many_requests_as_were_asked_for(n_models: int, seed: int) -> None:
    names = [f"m{i}" for i in range(n_models)]
    for rate, seconds in ((0.5, 40.0), (2.0, 300.0), (8.0, 40.0)):
        made = workload_of("bursty", names, rate=rate, seconds=seconds, seed=seed)
        assert len(made.requests) == round(rate * seconds)


def test_a_part_of_a_trace_is_spread_over_the_fleet(tmp_path: Path) -> None:
    rows = "".join(f"one,{10 + n},{20 + n},{n}.0\n" for n in range(100))
    file = tmp_path / "arena.csv"
    file.write_text(f"adapter_dir,prompt_len,output_len,req_time\n{rows}")
    whole = workload_of(str(file), NAMES, rate=None, seconds=1e3)
    assert (len(whole.requests), whole.models) == (100, ("a",))
    part = workload_of(str(file), NAMES, rate=None, seconds=30.0, start=60.0, spread=0.5, seed=2)
    assert [r.prompt_tokens for r in part.requests] == list(range(70, 100))
    assert part.requests[0].at == 0.0
    assert len(part.models) > 4
    assert part == workload_of(
        str(file), NAMES, rate=None, seconds=30.0, start=60.0, spread=0.5, seed=2
    )
    # The last request is part of it; the rate is that of the part.
    twice = workload_of(str(file), NAMES, rate=2.0, seconds=1e3, start=60.0)
    assert len(twice.requests) == 40
    assert twice.stats().rate == pytest.approx(2.0)
    with pytest.raises(ConfigError, match=r"start.*at most 99: there the trace ends"):
        workload_of(str(file), NAMES, start=100.0)
    for wrong in ({"start": 5.0}, {"spread": 1.0}):
        with pytest.raises(ConfigError, match="for traces; poisson has none"):
            workload_of("poisson", NAMES, **wrong)


def azure(folder: Path, name: str, times: Iterable[float], prompt: int = 100) -> Path:
    file = folder / name
    stamps = (datetime.fromtimestamp(at, UTC).isoformat() for at in times)
    rows = "".join(f"{stamp},{prompt},20\n" for stamp in stamps)
    file.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}")
    return file


@pytest.mark.parametrize("rate", [0.5, 1.0, 7.0])
@pytest.mark.parametrize("start", [0.0, 37.0])
def test_a_rate_is_that_of_the_seconds_asked_for(tmp_path: Path, rate: float, start: float) -> None:
    """However much busier the trace's beginning is than its rest."""
    times = [n / 20 for n in range(1000)] + [50.0 + 30 * n for n in range(1000)]
    file = azure(tmp_path, "t.csv", times)
    work = workload_of(str(file), NAMES, rate=rate, seconds=20.0, start=start)
    assert len(work.requests) == round(rate * 20)
    assert work.seconds < 20.0
    assert work.stats().rate == pytest.approx(rate, rel=0.15)
    together = azure(tmp_path, "u.csv", [3.0 * (n // 9) for n in range(900)])
    assert len(workload_of(str(together), NAMES, rate=rate, seconds=20.0).requests) == rate * 20


def test_a_trace_that_ends_says_so(tmp_path: Path) -> None:
    file = str(azure(tmp_path, "t.csv", range(40)))
    asked = WorkloadOptions(file, rate=2.0, seconds=100.0)
    work = asked.drawn(NAMES, 0)
    assert len(work.requests) == 40
    assert work.stats().rate == pytest.approx(2.0)
    assert asked.described(work).startswith("40 requests in 100 s, 0.4/s (2/s were asked for): ")
    assert "the trace ends after 20 s" in asked.described(work)
    assert "ends after 39 s" in workload_of(file, NAMES, seconds=100.0).describe()
    assert "ends" not in workload_of(file, NAMES, seconds=30.0).describe()


def test_the_first_words_say_what_is_got_and_what_was_cut(tmp_path: Path) -> None:
    file = str(azure(tmp_path, "t.csv", range(90), prompt=11_000))
    asked = WorkloadOptions(file, rate=3.0, seconds=20.0, most_tokens=4096)
    cut = "60 of 60 prompts cut to at most 4,096 tokens: from 11,000 on average (longest 11,000)"
    said = asked.described(asked.drawn(NAMES, 0))
    assert said.startswith(f"60 requests in 20 s, 3/s; {cut} to 4,076: t (Azure")
    # Of a trace nothing is cut that models can hold.
    whole = replace(asked, most_tokens=None, context=16_384)
    assert "cut" not in whole.described(whole.drawn(NAMES, 0))
    less = replace(asked, most_tokens=None, context=8_192)
    assert "60 of 60 prompts cut" in less.described(less.drawn(NAMES, 0))


def test_several_workloads_at_once(tmp_path: Path) -> None:
    code, chat = (azure(tmp_path, name, range(500)) for name in ("code.csv", "conv.csv"))
    mixed = workload_of([str(code), f"azure:{chat}"], NAMES, rate=4.0, seconds=30.0)
    counts = Counter(r.model for r in mixed.requests)
    assert counts == {"a": 60, "b": 60}, "each is a model of its own"
    both = WorkloadOptions((str(code), "poisson"), 4.0, 30.0, 512)
    work = both.drawn(NAMES, 0)
    assert sum(r.prompt_tokens == 100 and r.output_tokens == 20 for r in work.requests) >= 60
    assert len(work.requests) == pytest.approx(120, rel=0.3)
    assert both.described(work).count("code: ") > 0
    assert work == both.drawn(NAMES, 0)
    alone = workload_of([str(code)], NAMES, rate=4.0, seconds=30.0)
    assert alone == workload_of(str(code), NAMES, rate=4.0, seconds=30.0)
    with pytest.raises(ConfigError, match=r"workload: 'absent\.csv'"):
        workload_of([str(code), "absent.csv"], NAMES)


def test_sessions_spacing_and_models_are_chosen(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(AGENTIC)
    for gap, last in ((5.0, 5.0), (None, 60.0)):
        work = workload_of(str(file), NAMES, seconds=1e3, session_gap=gap)
        assert max(r.at for r in work.requests if r.session == "s2") == last
    only = WorkloadOptions(str(file), seconds=1e3, trace_models="m2").drawn(NAMES, 0)
    assert (len(only.requests), only.models) == (1, ("a",))
    with pytest.raises(WorkloadError, match="has no model m3; it has m1, m2"):
        workload_of(str(file), NAMES, trace_models=["m2", "m3"])
    served = servegen_files(tmp_path)
    for wanted in (["small"], ["small", "big"]):
        drawn = workload_of(str(served), NAMES, rate=4.0, seconds=60.0, trace_models=wanted)
        assert (len(drawn.requests), len(drawn.models)) == (240, len(wanted))
    for wrong in ({"session_gap": 5.0}, {"trace_models": ["m1"]}):
        with pytest.raises(ConfigError, match="for traces; poisson has none"):
            workload_of("poisson", NAMES, **wrong)


def test_client_statistics_are_drawn_from_at_the_time_asked_for(tmp_path: Path) -> None:
    file = servegen_files(tmp_path)
    asked = {"rate": 8.0, "seconds": 300.0, "most_tokens": 4096}
    early, late = (workload_of(str(file), NAMES, **asked, start=at) for at in (300.0, 1200.0))
    for work in (early, late):
        assert work.seconds <= 300.0
        assert len(work.requests) == 2400
    assert early.requests != late.requests
    assert early.requests != workload_of(str(file), NAMES, **asked, start=300.0, seed=1).requests


def test_a_name_that_is_neither_says_what_is_allowed() -> None:
    with pytest.raises(ConfigError, match="bursty, poisson, gamma"):
        workload_of("burst", NAMES)


def test_presets_are_compared_with_the_fleets_options_wherever_they_have_them() -> None:
    options = {"temporal": 1.0, "quantum": 0.5, "pooled": 0.0, "lru": 1.0}
    fleet = FleetSettings(
        models=(), device=DeviceSettings(budget_bytes=1), preset="mirage", options=options
    )
    assert options_of(fleet, "mirage") == options
    assert options_of(fleet, "kvswap") == {"temporal": 1.0, "quantum": 0.5, "pooled": 0.0}
    assert options_of(fleet, "swap") == {"quantum": 0.5}
    assert options_of(fleet, "static") == {}


def test_a_preset_is_compared_with_what_people_run_in_its_own_order() -> None:
    def of(preset: str) -> list[str]:
        return compared_presets(FleetSettings(models=(), device=DEVICE, preset=preset), None)

    assert of("balloon") == ["lru+deadline", "recompute+deadline", "balloon"]
    assert of("static") == ["lru+round-robin", "recompute+round-robin", "static"]
    assert of("lru+fcfs") == ["recompute+fcfs", "lru+fcfs"]
    fleet = FleetSettings(models=(), device=DEVICE, preset="balloon")
    assert compared_presets(fleet, "swap, static,swap") == ["swap", "static"]


def test_presets_with_places_know_what_the_workload_asks_for() -> None:
    """A model's adapters count for it, and what the fleet states stands."""
    models = tuple(ModelSettings(name=name, path=name) for name in "ab")
    adapter = AdapterSettings(name="x", path="x")
    models = (replace(models[0], adapters=(adapter,)), replace(models[1], expected_tokens=7.0))
    asked = [
        WorkloadRequest(id=i, at=float(i), model=m, prompt_tokens=30, output_tokens=10)
        for i, m in enumerate(["a", "x", "b", "a", "x"])
    ]
    workload = Workload.of("asked", asked)
    fleet = FleetSettings(models=models, device=DEVICE)
    a, b = expecting(fleet, workload).models
    assert (a.expected_tokens, a.expected_longest) == (40.0, 40)
    assert (b.expected_tokens, b.expected_longest) == (7.0, 40)
