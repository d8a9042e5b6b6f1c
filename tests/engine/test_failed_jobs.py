"""Jobs that raise: who is at fault fails alone, and the others go on, token for token."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ballast.bench.inprocess import Answer, InProcess
from ballast.core.actions import Change
from ballast.core.event import FailedOutput, JobResult
from ballast.core.job import SequenceWork
from ballast.core.report import DeviceReport
from ballast.core.request import Sampling, Submission
from ballast.core.settings import FleetSettings, Slo
from ballast.sim.replay import replay
from ballast.sim.story_reader import read_device_stories
from tests.engine.test_requests import GRAMMAR, path  # noqa: F401
from tests.engine.test_requests import fleet as fleet_of_one
from tests.live.test_command_executor import ordered
from tests.live.test_live_device import asked, fleet, for_one, need, paths  # noqa: F401

Work = Sequence[SequenceWork]
Paths = dict[str, Path]


class Fragile:
    """Wraps an executor's `run`: raises where `breaks(work)`; notes who was in each job."""

    def __init__(self, server: InProcess, model: str, breaks: Callable[[Work], bool]) -> None:
        self.jobs: list[tuple[tuple[str, ...], bool]] = []
        """Ids of each job's requests, and whether it failed."""
        self._breaks = breaks
        (executor,) = server.device.executors[model]
        self._run = executor.run
        executor.run = self.run  # type: ignore[method-assign]

    def run(self, work: Work) -> list[JobResult]:
        failed = self._breaks(work)
        self.jobs.append((tuple(w.request_id for w in work), failed))
        if failed:
            # The worst moment: KV has been written, and matchers have moved on.
            self._run(work)
            raise RuntimeError("the kernel is on fire")
        return self._run(work)

    def check(self) -> None:
        """Each member of a job that failed is next seen alone, if it is seen again."""
        suspects: set[str] = set()
        for members, failed in self.jobs:
            if suspects.intersection(members):
                assert len(members) == 1, "a suspect runs alone"
            suspects.difference_update(members)
            if failed and len(members) > 1:
                suspects.update(members)


def undisturbed(settings: FleetSettings, requests: Sequence[Submission]) -> dict[str, Answer]:
    with InProcess(settings) as server:
        return server.generate(requests)


def settled(server: InProcess) -> None:
    """The whole state, once the loop has returned."""
    server.drain()
    state = server.device.state
    assert not state.requests
    for m in state.models.values():
        m.kv.validate([])
        assert m.kv.pages == state.pool.ledger.owned(f"kv:{m.spec.name}")
    state.arena.validate()
    state.pool.validate()


@pytest.mark.parametrize("at", [0, 60], ids=["in its prefill", "in its decode"])
def test_a_request_at_fault_fails_alone(paths: Paths, at: int) -> None:  # noqa: F811
    requests = asked(4, models=("a",))
    expected = undisturbed(fleet(paths), requests)
    poison = requests[2].id

    with InProcess(fleet(paths)) as server:
        fragile = Fragile(
            server, "a", lambda work: any(w.request_id == poison and w.end >= at for w in work)
        )
        answers = server.generate(requests)
        settled(server)
    fragile.check()
    end = answers.pop(poison).end
    assert isinstance(end, FailedOutput)
    assert (end.code, "on fire" in end.reason) == ("internal_error", True)
    for id, answer in answers.items():
        assert answer.finished.output_tokens == 40
        assert answer.tokens == expected[id].tokens, id
        assert answer.finished.preemptions == 0, "its KV was right"


def test_jobs_that_fail_in_company_only_end(paths: Paths) -> None:  # noqa: F811
    """A fault that no request has alone stops nobody: each round brings each of them a step."""
    requests = asked(4, models=("a",))
    expected = undisturbed(fleet(paths), requests)
    with InProcess(fleet(paths)) as server:
        fragile = Fragile(server, "a", lambda work: len(work) > 1)
        answers = server.generate(requests)
        settled(server)
    fragile.check()
    for id, answer in answers.items():
        assert answer.tokens == expected[id].tokens, id
    steps = sum(len(r.prompt) // 32 + 1 + 40 for r in requests)
    assert len(fragile.jobs) <= 2 * steps


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_failures_beside_evictions_change_no_token_and_replay(
    paths: Paths,  # noqa: F811
    temperature: float,
    tmp_path: Path,
) -> None:
    requests = asked(5, temperature)
    # A request that shares a prefix shares blocks with those that fail beside it.
    requests += [replace(r, id=f"{r.id}-twin", max_tokens=30) for r in requests[9:]]
    expected = undisturbed(fleet(paths), requests)
    report = failing(fleet(paths, need(paths)), requests, expected, tmp_path / "story")
    assert sum(m.evictions for m in report.models) > 0


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_failures_beside_preemptions_change_no_token_and_replay(
    paths: Paths,  # noqa: F811
    temperature: float,
    tmp_path: Path,
) -> None:
    requests = asked(5, temperature, models=("c",))
    expected = undisturbed(fleet({"c": paths["c"]}), requests)
    report = failing(for_one(paths), requests, expected, tmp_path / "story")
    assert sum(m.preemptions for m in report.models) > 0


def failing(
    settings: FleetSettings,
    requests: Sequence[Submission],
    expected: dict[str, Answer],
    story: Path,
) -> DeviceReport:
    """Serve the requests while jobs of several fail at random: their tokens are the expected ones,
    and the story, written at `story`, replays."""
    rng = random.Random(7)
    settings = replace(settings, story_path=str(story))
    with InProcess(settings) as server:
        fragile = [
            Fragile(server, m.name, lambda work: len(work) > 1 and rng.random() < 0.3)
            for m in settings.models
        ]
        answers = server.generate(requests)
        report = server.device.snapshot()
        settled(server)
    for each in fragile:
        each.check()
        assert any(failed for _, failed in each.jobs)
    for id, answer in answers.items():
        assert answer.tokens == expected[id].tokens, id
    (life,) = read_device_stories(story)
    found = replay(life)
    assert (found.difference, found.stray) == (None, None)
    assert any(entry.get("event") == "JobFailed" for entry in life.entries)
    return report


def test_more_running_requests_than_at_load_keep_their_grammars(path: Path) -> None:  # noqa: F811
    """An operator raises `max_running`: more outputs follow grammars than before."""

    def asking(name: str, grammar: str) -> Submission:
        sampling = Sampling(grammar=grammar, temperature=1.0, seed=int(name.rpartition(" ")[2]))
        prompt = tuple(range(3, 14))
        return Submission(id=name, model="a", prompt=prompt, max_tokens=60, sampling=sampling)

    settings = fleet_of_one(path, max_running=2)
    requests = [asking(f"follows {i}", GRAMMAR) for i in range(16)]
    requests += [replace(asking(f"free {i}", ""), ignore_eos=True) for i in range(4)]
    expected = undisturbed(settings, requests)
    with InProcess(settings) as server:
        change = Change(
            model="a",
            slo=Slo(),
            priority=0,
            queue_seconds=None,
            max_running=8,
            max_waiting=100,
        )
        assert ordered(server, change).code is None
        answers = server.generate(requests)
        settled(server)
    for id, answer in answers.items():
        assert answer.tokens == expected[id].tokens, id
        assert answer.finished.preemptions == 0
