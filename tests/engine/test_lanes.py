"""Lanes: jobs of different models at once, exact under pressure, and never more than there is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast.bench.inprocess import InProcess
from ballast.bench.story_report import report_story
from ballast.core.cost import UNMEASURED
from ballast.core.errors import ConfigError
from ballast.core.event import FailedOutput, FinishedOutput
from ballast.core.job import Job
from ballast.core.settings import DeviceSettings, FleetSettings
from ballast.engine.lanes import Lanes
from ballast.sim.replay import replay
from ballast.sim.story_reader import read_device_stories
from tests.live.test_live_device import asked, fleet, need, paths  # noqa: F401
from tests.weights.test_host import allocated, only_its_own  # noqa: F401


@given(st.integers(1, 4), st.integers(0, 12), st.data())
def test_jobs_divide_what_there_is(n: int, more: int, data: st.DataObject) -> None:
    lanes = Lanes(DeviceSettings(budget_bytes=0, lanes=n, threads=n + more))
    running: list[Job] = []
    for id in range(30):
        if running and data.draw(st.booleans()):
            ended = running.pop(data.draw(st.integers(0, len(running) - 1)))
            lanes.end(ended)
        if not lanes.ready:
            continue
        others = data.draw(st.integers(0, 3))
        lane, parts = lanes.place(others)
        assert lanes.jobs[lane] is None
        if not running and not others:
            assert parts in (None, n + more), "alone, it has everything"
        job = Job(id, lane, "m", (), parts)
        lanes.begin(job)
        running.append(job)
        assert sum(lanes.share(job) for job in running) <= 1 + 1e-9
        assert all(lanes.share(job) > 0 for job in running)
        assert lanes.alone is (job if len(running) == 1 else None)


def several(settings: FleetSettings, lanes: int) -> FleetSettings:
    """The same with more lanes, and the activations of each beside the same pages."""
    with InProcess(settings) as server:
        arena = server.device.state.arena.pages
    device = settings.device
    budget = device.budget_bytes + (lanes - 1) * arena * device.page_bytes
    return replace(
        settings, device=replace(device, lanes=lanes, threads=lanes, budget_bytes=budget)
    )


@pytest.mark.parametrize("preset", ["swap", "balloon"])
def test_lanes_change_no_token_and_replay(
    paths: dict[str, Path],  # noqa: F811
    preset: str,
    tmp_path: Path,
) -> None:
    story = tmp_path / "story"
    requests = [*asked(4), *(replace(r, id=f"{r.id}-warm") for r in asked(2, 0.8))]
    with InProcess(fleet(paths)) as server:
        alone = server.generate(requests)
    tight = fleet(paths, need(paths), preset)
    with InProcess(replace(several(tight, 2), story_path=str(story))) as server:
        answers = server.generate(requests)
        report = server.device.snapshot()
        state = server.device.state
        state.pool.validate()
        assert state.pool.ledger.owned("arena:lanes") == state.arena.pages
        assert all(m.costs != UNMEASURED for m in state.models.values()), "costs are learned"
    for id, answer in answers.items():
        assert answer.tokens == alone[id].tokens, id
        assert answer.logprobs == pytest.approx(alone[id].logprobs, abs=1e-4)
    (life,) = read_device_stories(story)
    found = replay(life)
    assert found.difference is None, found.difference
    assert found.stray is None
    result = report_story([life], "it")
    assert 0 < result.busy <= 1
    assert result.report.total.requests == len(requests)
    flying: set[int] = set()
    together = 0
    for entry in life.entries:
        if "event" not in entry and "job" in entry:
            flying.add(entry["job"])
            together += len(flying) > 1
        elif entry.get("event") == "JobDone":
            flying.remove(entry["job"])
    if preset == "balloon":
        assert together > 0, "no two jobs ran at the same time"
        assert sum(m.evictions for m in report.models) > 0


def test_a_job_that_breaks_leaves_the_other_lane_alone(
    paths: dict[str, Path],  # noqa: F811
) -> None:
    with InProcess(several(fleet(paths), 3)) as server:

        def broken(work: object) -> list[object]:
            raise RuntimeError("the kernel is on fire")

        for victim in server.device.executors["b"]:
            victim.run = broken  # type: ignore[method-assign, assignment]
        answers = server.generate(asked(3))
    for key, answer in answers.items():
        assert isinstance(answer.end, FailedOutput if key.startswith("b") else FinishedOutput)


def test_more_lanes_than_threads_are_refused(paths: dict[str, Path]) -> None:  # noqa: F811
    settings = fleet(paths)
    before = allocated()
    with pytest.raises(ConfigError, match="lanes"):
        InProcess(replace(settings, device=replace(settings.device, lanes=2)))
    assert allocated() == before, "what was made is given back"
