"""Leaps on several lanes, and under policies that are asked at each step, change nothing."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ballast.bench.record import prompts_of, submission_for
from ballast.bench.story_report import report_story
from ballast.core.event import Output, TokenOutput
from ballast.core.link import LinkRates
from ballast.core.model import ModelSpec
from ballast.core.request import Submission
from ballast.core.settings import FleetSettings, Slo
from ballast.engine.story_file import StoryFile
from ballast.policy.presets import resolve
from ballast.sim.cluster import Cluster, parse_kinds
from ballast.sim.machine_profile import MachineProfile
from ballast.sim.replay import replay
from ballast.sim.simulate import simulate
from ballast.sim.story_reader import DeviceStory, read_device_stories
from tests.effort import some
from tests.sim.test_leap import COSTS, TimedOutputs, books, decisions, run
from tests.sim.test_orders import request
from tests.sim.test_simulate import fleet, spec

PAGES = 1600
"""Room for all models."""
OPTIONS: dict[str, dict[str, float]] = {
    "balloon": {"late_share": 0.1},
    "balloon+round-robin": {},
    "static+deadline": {"longest_gap": 0.02},
    "static+fcfs": {"longest_turn": 0.02},
    "static+round-robin": {"separate": 1.0},
}


def busy(
    seed: int, preset: str, lanes: int
) -> tuple[FleetSettings, list[ModelSpec], list[Submission]]:
    """Models that are all there, with answers that take a while; some keep no service level."""
    rng = random.Random(seed)
    specs = [
        replace(
            spec(f"m{i}", 10), slo=Slo(ttft=rng.choice([1e-4, 0.3, 5.0]), tpot=tpot), block_tokens=4
        )
        for i, tpot in enumerate((0.02, 0.1, 1.0, 0.05)[: 2 + seed % 3])
    ]
    asked = [
        request(i, rng.choice(specs).name, 2 * rng.random(), rng.randint(1, 200), n)
        for i, n in enumerate(rng.randint(1, 120) for _ in range(16))
    ]
    prompts = prompts_of({s.name: s.vocab for s in specs})
    requests = [submission_for(r, prompts(r)) for r in sorted(asked, key=lambda r: r.at)]
    requests = [replace(r, stop_token_ids=tuple(range(40, 40 + seed % 2))) for r in requests]
    setting = fleet(preset, specs, PAGES, lanes=lanes)
    return replace(setting, options=OPTIONS[preset]), specs, requests


@pytest.mark.parametrize("lanes", [1, 2, 3, 4])
@pytest.mark.parametrize("preset", OPTIONS)
def test_runs_with_and_without_leaps_are_the_same(preset: str, lanes: int) -> None:
    seen: Counter[str] = Counter()
    for seed in some(range(8), 3):
        setting, specs, requests = busy(seed, preset, lanes)
        single, one = run(setting, specs, requests, leaps=False)
        entries: list[dict[str, Any]] = []
        result, done = run(setting, specs, requests, leaps=True, sink=entries.extend)
        assert result == single, f"seed {seed}"
        assert books(done) == books(one), f"seed {seed}"
        assert decisions(done) == decisions(one), f"seed {seed}"
        seen["jobs"] += done.state.jobs
        for leap in (e for e in entries if e.get("event") == "Leap"):
            seen["steps"] += leap["steps"]
            seen["beside others"] += sum(p < done.state.lanes.parts for p in leap.get("parts", ()))
    assert seen["steps"] > 0.3 * seen["jobs"], seen
    assert (seen["beside others"] > 0.2 * seen["jobs"]) == (lanes > 1), seen


@pytest.mark.parametrize("lanes", [1, 3])
def test_tokens_that_leaps_pass_over_can_be_heard_all_at_once(lanes: int) -> None:
    setting, specs, requests = busy(3, "balloon", lanes)
    single, _ = run(setting, specs, requests, leaps=False)
    result: TimedOutputs = []
    passed: list[tuple[str, float]] = []

    def steps(ids: Sequence[str], times: Sequence[float]) -> None:
        passed.extend((id, at) for id in ids for at in times)

    profile = MachineProfile(
        costs={s.name: COSTS for s in specs},
        link=LinkRates.even(1e8),
        overhead=3e-4,
        wake=7e-4,
        settling=(5e-4, 2e-4, 1e-4),
        switch=6e-4,
        switch_back=2e-4,
        turn=4e-4,
        answer=1e-4,
    )
    simulate(setting, specs, requests, profile, lambda at, o: result.append((at, o)), steps=steps)
    here = [(o.request_id, at) for at, o in result if isinstance(o, TokenOutput)]
    assert passed
    assert sorted(here + passed) == sorted(
        (o.request_id, at) for at, o in single if isinstance(o, TokenOutput)
    )
    rest = [(at, o) for at, o in single if not isinstance(o, TokenOutput)]
    assert [(at, o) for at, o in result if not isinstance(o, TokenOutput)] == rest


@pytest.mark.parametrize("preset", OPTIONS)
def test_leaps_on_lanes_replay(preset: str, tmp_path: Path) -> None:
    """What was decided between two steps that a leap passed over follows from its story, too."""
    asked = 0
    seeds = some(range(8), 4)
    for seed in seeds:
        setting, specs, requests = busy(seed, preset, 1 + seed % 4)
        life = result(tmp_path / f"{seed}", setting, specs, requests, leaps=True)
        found = replay(life)
        assert (found.difference, found.stray) == (None, None), f"seed {seed}: {found.difference}"
        asked += sum("jobs" in e for e in life.entries)
    assert asked > 2 * len(seeds)


def test_leaps_on_lanes_are_retold_as_the_jobs_that_they_are(tmp_path: Path) -> None:
    for seed in range(4):
        setting, specs, requests = busy(seed, "balloon", 1 + seed)
        one, many = (
            report_story(
                [result(tmp_path / f"{seed}{leaps}", setting, specs, requests, leaps)], "a story"
            )
            for leaps in (False, True)
        )
        assert many.decodes.number == one.decodes.number
        assert many.decodes.seconds == pytest.approx(one.decodes.seconds)
        assert many.busy == pytest.approx(one.busy)
        assert many.report.total == one.report.total


def result(
    path: Path,
    setting: FleetSettings,
    specs: list[ModelSpec],
    requests: list[Submission],
    leaps: bool,
) -> DeviceStory:
    """A simulated life, by its file."""
    file = StoryFile(path, setting.device.name)
    costs = {s.name: COSTS for s in specs}
    profile = MachineProfile(costs=costs, link=LinkRates.even(1e8), overhead=3e-4)
    simulate(setting, specs, requests, profile, lambda at, o: None, file.write, leaps=leaps)
    file.close()
    (life,) = read_device_stories(path)
    return life


@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_leaps_change_nothing_on_groups(lanes: int) -> None:
    """A group is a device of larger pages: its decode steps are passed over like any other's."""
    specs = [spec(f"m{i}") for i in range(3)]
    prompts = prompts_of({s.name: s.vocab for s in specs})
    asked = [request(i, f"m{i % 3}", 2e-3 * i, 40 + i, 100 - i) for i in range(12)]
    result: dict[bool, list[tuple[str, float, Output]]] = {True: [], False: []}
    for leaps, received in result.items():

        def say(device: str, at: float, output: Output, received: Any = received) -> None:
            received.append((device, at, output))

        entries: list[dict[str, Any]] = []
        cluster = Cluster(
            parse_kinds("1xH100-80G:tp2", lanes=lanes),
            specs,
            resolve("balloon"),
            say,
            sink_of=lambda device, entries=entries: entries.extend,  # type: ignore[misc]
        )
        for device in cluster.devices.values():
            device._leaps = leaps
        cluster.run([submission_for(r, prompts(r)) for r in asked])
        steps = sum(e["steps"] for e in entries if e.get("event") == "Leap")
        assert (steps > 0.5 * cluster.jobs) == leaps, (steps, cluster.jobs)
    assert result[True] == result[False]
