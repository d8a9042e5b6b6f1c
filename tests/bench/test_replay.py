"""Open-loop replay against an engine that answers from a thread, in time that does not pass."""

from __future__ import annotations

import asyncio
import gc
import inspect
import threading
import time
from collections.abc import Mapping, Sequence

import pytest

from ballast.bench.device_run import run_live
from ballast.bench.record import Prompts, RequestRecorder, prompts_of
from ballast.bench.replay import (
    PATIENCE,
    TIMER_LATENESS,
    EngineTarget,
    TargetError,
    WorkloadReplay,
    punctual_sleep,
    replay,
)
from ballast.bench.run import report_http
from ballast.bench.sample import DecisionRecord, DeviceSample
from ballast.bench.servers import run_servers
from ballast.core.clock import Clock, VirtualClock
from ballast.core.errors import BrokenPromise
from ballast.core.event import (
    ArrivalEvent,
    CancelEvent,
    Event,
    FailedOutput,
    FinishedOutput,
    TokenOutput,
)
from ballast.core.report import DeviceReport
from ballast.core.request import Submission
from ballast.workload.workload import Workload, WorkloadRequest

PROMPTS: Prompts = prompts_of({"a": 100, "b": 100})


def workload(*times: float, model: str = "a") -> Workload:
    requests = [
        WorkloadRequest(id=n, at=at, model=model, prompt_tokens=3, output_tokens=2)
        for n, at in enumerate(times)
    ]
    return Workload.of("w", requests)


class Steps:
    """Sleeping lets what is due now happen, then moves a virtual clock."""

    def __init__(self) -> None:
        self.clock = VirtualClock(50.0)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)
        self.clock.advance_to(self.clock.now() + seconds)


class Scripted:
    """A target whose answers are told in advance, by request id."""

    def __init__(self, clock: Clock, failing: Mapping[str, Exception] | None = None) -> None:
        self._clock, self._failing = clock, failing or {}
        self.started: list[tuple[str, float]] = []
        self.held: set[str] = set()
        self.given_up: list[str] = []

    @property
    def clock(self) -> Clock:
        return self._clock

    async def run(self, submission: Submission, recorder: RequestRecorder) -> None:
        self.started.append((submission.id, self._clock.now()))
        if submission.id in self.held:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.given_up.append(submission.id)
                raise
        if submission.id in self._failing:
            raise self._failing[submission.id]
        recorder.token(submission.id, self._clock.now())
        recorder.finished(submission.id, self._clock.now(), 3, 2)

    async def memory(self) -> Mapping[str, DeviceSample]:
        return {"d": DeviceSample({"kv:a": 7})}

    async def decisions(self, origin: float) -> Sequence[DecisionRecord]:
        return [DecisionRecord(self._clock.now() - origin, "d", "Evict", "a", "")]


def run(w: Workload, target: Scripted, steps: Steps, timeout: float = 600.0) -> WorkloadReplay:
    return asyncio.run(replay(w, target, PROMPTS, timeout=timeout, sleep=steps.sleep))


def test_requests_go_out_at_their_times() -> None:
    steps = Steps()
    target = Scripted(steps.clock)
    result = run(workload(0.0, 1.5, 1.5, 4.0), target, steps)
    assert target.started == [("w0", 50.0), ("w1", 51.5), ("w2", 51.5), ("w3", 54.0)]
    assert [r.sent for r in result.records] == [0.0, 1.5, 1.5, 4.0]
    assert all(r.answered for r in result.records)
    assert result.wall_seconds == 4.0
    assert result.memory[0].owners == {"kv:a": 7}
    assert result.decisions == (DecisionRecord(4.0, "d", "Evict", "a", ""),)


def test_no_full_collection_meets_old_objects_while_requests_are_answered() -> None:
    frozen: list[int] = []

    class Watched(Scripted):
        async def run(self, submission: Submission, recorder: RequestRecorder) -> None:
            frozen.append(gc.get_freeze_count())
            await super().run(submission, recorder)

    steps = Steps()
    was_frozen = gc.get_freeze_count() > 0  # by conftest.py
    gc.unfreeze()
    try:
        run(workload(0.0, 1.0), Watched(steps.clock), steps)
        assert len(frozen) == 2
        assert min(frozen) > len(gc.get_objects()) / 2
        assert gc.get_freeze_count() == 0
    finally:
        if was_frozen:
            gc.freeze()


def test_an_unanswered_request_holds_up_nobody_and_times_out() -> None:
    steps = Steps()
    target = Scripted(steps.clock)
    target.held = {"w0"}
    result = run(workload(0.0, 1.0), target, steps, timeout=0.05)
    assert [r.error for r in result.records] == ["no complete answer within 0.05 s", None]
    assert target.given_up == ["w0"]


def test_failures_are_recorded_not_raised() -> None:
    steps = Steps()
    target = Scripted(steps.clock, {"w1": TargetError("HTTP 503: draining")})
    result = run(workload(0.0, 1.0, 2.0), target, steps)
    assert [r.error for r in result.records] == [None, "HTTP 503: draining", None]


def test_a_bug_in_a_target_is_not_taken_for_a_failed_request() -> None:
    steps = Steps()
    target = Scripted(steps.clock, {"w0": TypeError("bug")})
    with pytest.raises(ExceptionGroup):
        run(workload(0.0), target, steps)


def test_an_empty_workload_ends_at_once() -> None:
    steps = Steps()
    assert run(Workload("w", ()), Scripted(steps.clock), steps).records == ()


class ThreadedEngine:
    """Answers on a thread of its own; model `b` is refused, requests in `silent` get no answer."""

    def __init__(self) -> None:
        self.target = EngineTarget(VirtualClock())
        story = [{"at": -1.0, "action": "Activate", "model": "a"}]
        story += [{"at": 1.0, "event": "Timer"}, {"at": 2.0, "action": "Evict", "model": "a"}]
        self.target.connect(self.post, self.snapshot, story)
        self.cancelled: list[str] = []
        self.silent: set[str] = set()

    def post(self, event: Event) -> None:
        if isinstance(event, CancelEvent):
            self.cancelled.append(event.request_id)
        elif isinstance(event, ArrivalEvent) and event.submission.id not in self.silent:
            threading.Thread(target=self._answer, args=(event.submission,)).start()

    def snapshot(self) -> DeviceReport:
        return DeviceReport(
            device="d", now=0.0, page_bytes=2, total=3, free=1, reclaiming=0,
            owners={"kv:a": 2}, models=(), jobs=0, draining=False,
        )  # fmt: skip

    def _answer(self, submission: Submission) -> None:
        name, n = submission.id, submission.max_tokens
        if submission.model == "b":
            self.target.outbox([FailedOutput(name, "model_not_found", "no b here")])
            return
        self.target.outbox([TokenOutput(name, 1, index) for index in range(n)])
        self.target.outbox([FinishedOutput(name, "length", 3, n, 1, 0)])


def test_engine_target_answers_from_another_thread() -> None:
    engine = ThreadedEngine()
    result = asyncio.run(replay(workload(0.0, 0.0, 0.0), engine.target, PROMPTS))
    assert [(r.output_tokens, r.cached_tokens) for r in result.records] == [(2, 1)] * 3
    assert result.memory[0].owners == {"kv:a": 4, "reclaiming": 0, "free": 2}
    assert result.decisions == (DecisionRecord(2.0, "d", "Evict", "a", ""),), (
        "that of before is not"
    )
    assert engine.cancelled == []


def test_engine_target_records_refusals() -> None:
    engine = ThreadedEngine()
    result = asyncio.run(replay(workload(0.0, model="b"), engine.target, PROMPTS))
    assert result.records[0].error == "model_not_found: no b here"


def test_engine_target_cancels_what_timed_out_and_ignores_what_comes_late() -> None:
    engine = ThreadedEngine()
    engine.silent = {"w0"}
    result = asyncio.run(replay(workload(0.0), engine.target, PROMPTS, timeout=0.05))
    assert result.records[0].error == "no complete answer within 0.05 s"
    assert engine.cancelled == ["w0"]
    engine.target.outbox([FinishedOutput("w0", "length", 3, 2, 0, 0)])


def test_an_unconnected_engine_is_a_bug_not_a_failed_request() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(replay(workload(0.0), EngineTarget(VirtualClock()), PROMPTS))
    assert caught.group_contains(BrokenPromise)


def test_progress_is_told_how_many_requests_have_ended() -> None:
    engine = ThreadedEngine()
    outcome: list[tuple[object, ...]] = []
    work = workload(0.0, 0.0)
    asyncio.run(
        replay(work, engine.target, PROMPTS, progress=lambda *at: outcome.append(at), name="swap")
    )
    assert outcome == [("swap", n, 2, "") for n in range(3)]


def test_a_punctual_sleep_is_never_too_short_and_lets_others_go_on() -> None:
    async def slept() -> tuple[list[float], int]:
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(others())
        found = []
        for seconds in (0.0, TIMER_LATENESS / 2, TIMER_LATENESS, 3 * TIMER_LATENESS):
            began = time.perf_counter()
            await punctual_sleep(seconds)
            found.append(time.perf_counter() - began - seconds)
        task.cancel()
        return found, turns

    late, turns = asyncio.run(slept())
    assert min(late) >= 0
    assert turns > 10


def test_a_request_is_waited_for_as_long_whatever_serves_it() -> None:
    """Answers of agents are long, and a busy machine takes minutes for them."""
    ways = (replay, run_live, run_servers, report_http)
    assert {inspect.signature(way).parameters["timeout"].default for way in ways} == {PATIENCE}
