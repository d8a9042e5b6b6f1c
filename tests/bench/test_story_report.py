"""Stories as reports: the same numbers as the run's own, and two of them compared."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ballast.bench.cluster_run import ClusterRun, run_cluster
from ballast.bench.report import LatencyStats, RequestStats
from ballast.bench.run_options import workload_of
from ballast.bench.stories import fresh, stories
from ballast.bench.story_report import report_story
from ballast.cli import app
from ballast.core.errors import ConfigError
from ballast.core.event import FailedOutput
from ballast.core.model import ModelSpec
from ballast.core.request import Submission
from ballast.core.settings import FleetSettings
from ballast.engine.story_file import StoryFile
from ballast.policy.presets import resolve
from ballast.sim.cluster import parse_kinds
from ballast.sim.replay import replay
from ballast.sim.story_reader import read_device_stories
from tests.sim.test_cluster import spec
from tests.sim.test_enough_memory import world
from tests.sim.test_leap import run

NAMES = [f"m{i}" for i in range(5)]


def ran(path: Path, preset: str) -> ClusterRun:
    """Two devices under pressure, and their story."""
    work = workload_of("bursty", NAMES, rate=4.0, seconds=12.0, most_tokens=1024, seed=3)
    specs = [spec(name) for name in NAMES]
    slos = {s.name: s.slo for s in specs}
    kinds = parse_kinds("1xA100-80G,1xA10", engine="eager")  # no time of a server's own
    with stories(fresh(path, preset, [preset])) as sink_of:
        return run_cluster(resolve(preset), kinds, specs, work, slos, sink_of=sink_of)


def near(a: LatencyStats | None, b: LatencyStats | None) -> bool:
    if a is None or b is None:
        return a is b
    return all(
        getattr(a, part) == pytest.approx(getattr(b, part), abs=1e-6)
        for part in ("mean", "p50", "p90", "p99")
    )


def same(a: RequestStats, b: RequestStats) -> bool:
    none = {"ttft": None, "tpot": None, "e2e": None}
    spreads = all(near(getattr(a, name), getattr(b, name)) for name in none)
    return spreads and replace(a, **none) == replace(b, **none)


@pytest.mark.parametrize("preset", ["static", "swap", "balloon"])
def test_a_story_reports_what_its_run_did(preset: str, tmp_path: Path) -> None:
    run = ran(tmp_path / "story", preset)
    lives = read_device_stories(tmp_path / "story")
    result = report_story(lives, preset)
    assert same(result.report.total, run.report.total)
    for name, served in run.report.models.items():
        assert same(result.report.models[name], served)
    assert result.prefills.number + result.decodes.number == run.jobs
    assert result.counts.get("Activate", 0) == run.total("activations")
    assert 0 < result.busy < 1
    assert sorted(life.device for life in lives) == sorted(run.devices)
    for life in lives:
        found = replay(life)
        assert (found.difference, found.stray) == (None, None)


def test_two_stories_are_compared(tmp_path: Path) -> None:
    files = [tmp_path / "balloon.jsonl", tmp_path / "swap.jsonl"]
    balloon, swap = (ran(file, file.stem) for file in files)
    runner = CliRunner()
    asked = ["story", "compare", *map(str, files), "--json", str(tmp_path / "out.json")]
    done = runner.invoke(app, asked, env={"COLUMNS": "160"})
    assert done.exit_code == 0, done.output
    assert "lanes busy" in done.output
    assert "the same decisions in the same order, " in done.output
    assert " of them; then:" in done.output
    found = json.loads((tmp_path / "out.json").read_text())
    for result, it in ((found["a"], balloon), (found["b"], swap)):
        assert result["total"]["attained"] == it.report.total.attained
        assert result["decisions"].get("Evict", 0) >= it.total("evictions")
    one, other = found["first_difference"]["a"], found["first_difference"]["b"]
    assert (one["action"], one["model"]) != (other["action"], other["model"])

    twice = runner.invoke(app, ["story", "compare", str(files[0]), str(files[0])])
    assert f"same order, all {sum(found['a']['decisions'].values())}\n" in twice.output


def test_a_request_goes_on_in_the_life_of_the_next_worker(tmp_path: Path) -> None:
    """One record, from its first arrival to its end, where a worker died in between."""
    fleet, specs, requests = world(1, "balloon")
    request = replace(requests[0], prompt=(1,) * 20, max_tokens=40)
    path = tmp_path / "story"
    first = story_of(path, fleet, specs, request)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[: 2 * len(lines) // 3]) + "\n")
    resumed = replace(request, resumed=tuple(first[:5]), arrival=9.0)
    story_of(path, fleet, specs, resumed)
    report = report_story(read_device_stories(path), "crashed").report
    assert report.total.answered == report.total.requests == 1
    (record,) = report.records
    assert record.output_tokens == 40
    assert record.ttft is not None
    assert record.ttft < 1
    assert record.e2e is not None
    assert record.e2e > 9


def story_of(
    path: Path, fleet: FleetSettings, specs: list[ModelSpec], request: Submission
) -> list[int]:
    """Append the story of one request, without leaps; its tokens."""
    file = StoryFile(path, "d")
    result, _ = run(fleet, specs, [request], leaps=False, sink=file.write)
    file.close()
    assert not any(isinstance(o, FailedOutput) for _, o in result)
    return [o.token for _, o in result if hasattr(o, "token")]


def test_a_story_without_answers_is_not_compared(tmp_path: Path) -> None:
    ran(tmp_path / "story", "swap")
    lives = read_device_stories(tmp_path / "story")
    for life in lives:
        life.entries = life.entries[:2]
    with pytest.raises(ConfigError, match="answers"):
        report_story(lives, "short")


def test_equal_simulations_have_equal_stories(tmp_path: Path) -> None:
    for name in ("once", "again"):
        ran(tmp_path / name, "balloon")
    once, again = ((tmp_path / name).read_bytes() for name in ("once", "again"))
    assert once == again
    assert len(once) > 10_000


def test_each_of_several_presets_has_its_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "story.jsonl"
    both = ["static", "balloon"]
    named = [fresh(path, preset, both) for preset in both]
    assert named == [path.with_name("story-static.jsonl"), path.with_name("story-balloon.jsonl")]
    assert fresh(path, "static", ["static"]) == path
    assert fresh(None, "static", both) is None
    with pytest.raises(ConfigError, match="--story"):
        fresh(tmp_path / "new", "static", ["static"])
