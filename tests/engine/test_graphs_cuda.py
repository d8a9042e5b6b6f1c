"""CUDA graphs in the live engine, as far as that goes without a GPU: recorded when it is idle."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from ballast.bench.inprocess import InProcess
from ballast.core.clock import VirtualClock
from ballast.core.event import JobResult
from ballast.core.job import Job, SequenceWork
from ballast.core.units import MiB
from ballast.engine.views import device_view
from ballast.kernels.gpu.attention_plan import Bucket
from ballast.live.cuda_runner import MOST_PAUSES, RUNS, CudaRunner
from ballast.live.cuda_streams import GreenStreams, PlainStreams
from ballast.models.gpu.graphs import GraphCache
from tests.engine.gpus import OnHost, on_gpu, serving
from tests.live.test_cuda_machine import tight
from tests.live.test_live_device import asked, fleet, paths  # noqa: F401
from tests.memory.fake_cuda import FakeDriver
from tests.models.fake_graphs import Recorders, StaticAttention

LONG = 60.0
"""Seconds after which a test gives up waiting for another thread."""
GRAPHS = 64 * MiB


@pytest.mark.slow
def test_tokens_are_the_same_while_pages_move(paths: dict[str, Path]) -> None:  # noqa: F811
    """Models evict each other between the waves, and graphs of the first serve the second."""
    requests = asked(3)
    plain = fleet(paths)
    models = tuple(replace(m, model_impl="generic", linear="plain") for m in plain.models)
    with InProcess(replace(plain, models=models)) as server:
        alone = server.generate(requests)
    driver = FakeDriver(n_bytes=1 << 30)
    recorders = Recorders(driver)
    tested = tight(paths, preset="swap")
    device = tested.device
    budget = device.budget_bytes + GRAPHS
    tested = replace(tested, device=replace(device, budget_bytes=budget, graphs=GRAPHS))
    with serving(tested, driver, OnHost(StaticAttention, recorders)) as server:
        state = server.device.state
        held = state.graphs.pages
        assert state.pool.ledger.owned("arena:graphs") == held == GRAPHS // device.page_bytes
        assert device_view(state).arena == state.arena.pages + held
        cap = server.device.cap.n_bytes
        assert cap == state.arena.pages * device.page_bytes
        first = server.generate(requests)
        while (cache := graphs_of(server)).wanted:
            recorder = next(iter(list(recorders.made.values())), None)
            if recorder is not None:
                recorder.recorded.wait(0.01)
        second = server.generate([replace(r, id=f"{r.id}-again") for r in requests])
        outcome = server.device.snapshot()
        assert outcome.graphs is not None
        assert outcome.owners["arena:graphs"] == held
        assert sum(m.evictions for m in outcome.models) > 0
        server.drain()
        state.pool.validate()
        physical = server.device.machine.vm.physical_bytes()
        assert physical <= budget - (state.arena.pages + held) * device.page_bytes
        assert outcome.graphs.replays > 0
        assert 0 < outcome.graphs.n_bytes <= GRAPHS == cache.cap_bytes
        streams = set(driver.streams)
        assert set(recorders.made) <= streams - set(server.device.machine._streams.all)  # type: ignore[attr-defined]
    for id, answer in alone.items():
        assert first[id].tokens == second[f"{id}-again"].tokens == answer.tokens
    assert not recorders.graphs
    assert driver.is_clean()


def graphs_of(server: InProcess) -> GraphCache:
    found = server.device.machine._graphs  # type: ignore[attr-defined]
    assert isinstance(found, GraphCache)
    return found


def test_a_model_that_is_removed_leaves_no_graph(paths: dict[str, Path]) -> None:  # noqa: F811
    from ballast.core.command import CommandOutcome, Remove

    driver = FakeDriver(n_bytes=1 << 30)
    recorders = Recorders(driver)
    plain = fleet({"a": paths["a"]})
    settings = on_gpu(plain, graphs=GRAPHS)
    budget = settings.device.budget_bytes + 256 * MiB
    settings = replace(settings, device=replace(settings.device, budget_bytes=budget))
    with serving(settings, driver, OnHost(StaticAttention, recorders)) as server:
        server.generate(asked(1, models=("a",)))
        while graphs_of(server).wanted:
            threading.Event().wait(0.01)
        assert recorders.graphs
        streams = len(driver.streams)
        outcome: list[CommandOutcome] = []
        server.device.command(Remove("a", patience=5.0), outcome.append)
        server.device._command_executor._thread.submit(lambda: None).result()
        assert [o.code for o in outcome] == [None]
        assert not recorders.graphs
        assert len(driver.streams) == streams - 1, "that of its layers is gone, too"


class Busy:
    """Implements `Executor`: runs until it is let go, and wants a graph."""

    def __init__(self, graphs: GraphCache, name: str) -> None:
        self.began, self.go = threading.Event(), threading.Event()
        self._graphs, self._name = graphs, name

    def run(self, work: Sequence[SequenceWork]) -> list[JobResult]:
        self.began.set()
        assert self.go.wait(LONG)
        bucket = Bucket.decode(1, 8)
        if self._graphs.find(self._name, bucket) is None:
            self._graphs.want(self._name, bucket, lambda recording: torch.ones(2) + 1)
        return []

    def stalled(self) -> float:
        return 0.0

    def carried(self) -> tuple[float, float]:
        return 0.0, 0.0


@dataclass
class Lanes:
    """A runner of two lanes on a driver's stand-in, and what it posts."""

    quiet_seconds: float = LONG
    driver: FakeDriver = field(default_factory=FakeDriver)
    clock: VirtualClock = field(default_factory=VirtualClock)

    def __post_init__(self) -> None:
        self.context = self.driver.retain_context(0)
        self.driver.set_current(self.context)
        self.recorders, streams = Recorders(self.driver), PlainStreams(self.driver, 2)
        self.streams = streams
        self.graphs = GraphCache(64 * MiB, lambda stream: self.recorders(streams.twin(stream)))
        self.models = {name: Busy(self.graphs, name) for name in "ab"}
        self.ended = threading.Semaphore(0)
        self.ids = itertools.count()
        self.runner = CudaRunner(
            {name: (model, model) for name, model in self.models.items()},
            lambda event: self.ended.release(),
            self.clock,
            self.driver,
            self.context,
            OnHost(),
            streams,
            2,
            graphs=self.graphs,
            quiet_seconds=self.quiet_seconds,
        )

    def start(self, lane: int, model: str) -> None:
        self.runner.start(Job(next(self.ids), lane, model, ()))

    def end(self) -> None:
        assert self.ended.acquire(timeout=LONG)

    def close(self) -> None:
        self.runner.close()
        self.graphs.close()
        self.streams.close()
        self.driver.release_context(0)
        assert self.driver.is_clean()


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    made = Lanes()
    yield made
    made.close()


def test_while_any_lane_has_a_job_nothing_is_recorded() -> None:
    lanes = Lanes(quiet_seconds=0.001)
    models, graphs = lanes.models, lanes.graphs
    lanes.start(0, "a")
    lanes.start(1, "b")
    assert models["a"].began.wait(LONG)
    assert models["b"].began.wait(LONG)
    models["a"].go.set()
    lanes.end()
    assert graphs.wanted == 1
    # The first lane is idle and looks again and again; asked directly, it says the same.
    assert not lanes.runner.record_one(graphs)
    assert not lanes.recorders.made
    models["b"].go.set()
    lanes.end()
    for lane, name in enumerate("ab"):
        while graphs.wanted:
            threading.Event().wait(0.001)
        lanes.start(lane, name)
        lanes.end()
    assert len(lanes.recorders.graphs) == 2, "each lane's stream has one"
    assert graphs.report().replays == 2
    lanes.close()


def test_under_a_load_that_never_pauses_jobs_wait_for_a_recording(lanes: Lanes) -> None:
    """The lane is given its next job before it has ended the last one."""
    model = lanes.models["a"]
    model.go.set()
    for _ in range(RUNS + 1):
        lanes.start(0, "a")
    for _ in range(RUNS + 1):
        lanes.end()
    outcome = lanes.graphs.report()
    assert (outcome.eager, outcome.replays, outcome.graphs) == (RUNS, 1, 1)


def test_a_recording_waits_for_the_jobs_that_run(lanes: Lanes) -> None:
    other, model = lanes.models["b"], lanes.models["a"]
    lanes.start(1, "b")
    assert other.began.wait(LONG)
    model.go.set()
    for _ in range(RUNS):
        lanes.start(0, "a")
        lanes.end()
    lanes.start(0, "a")  # waits
    assert not lanes.recorders.made
    other.go.set()
    lanes.end()
    lanes.end()
    assert lanes.graphs.report().replays == 1


def test_recordings_take_no_more_than_their_share_of_the_time(lanes: Lanes) -> None:
    """One took a second of the clock: for the next 20 jobs wait for none."""
    lanes.graphs.record_one = lasting(lanes.clock, lanes.graphs.record_one)  # type: ignore[method-assign]
    for model in lanes.models.values():
        model.go.set()
    for name in "ab":
        for _ in range(RUNS + 1):
            lanes.start(0, name)
            lanes.end()
    assert lanes.graphs.report().graphs == 1
    lanes.clock.advance_to(lanes.clock.now() + 1.0 / MOST_PAUSES)
    lanes.start(0, "b")
    lanes.end()
    assert lanes.graphs.report().graphs == 2


def lasting(clock: VirtualClock, do: Callable[[], None]) -> Callable[[], None]:
    def done() -> None:
        do()
        clock.advance_to(clock.now() + 1.0)

    return done


def test_a_graph_that_was_lost_is_recorded_while_weights_come(lanes: Lanes) -> None:
    for model in lanes.models.values():
        model.go.set()
    lanes.start(0, "a")
    lanes.end()
    lanes.runner.activating("a")  # has lost none
    lanes.start(0, "a")
    lanes.end()
    assert not lanes.recorders.made
    while not lanes.runner.record_one(lanes.graphs):
        threading.Event().wait(0.001)
    recorder = next(iter(lanes.recorders.made.values()))
    lanes.graphs.cap_bytes = 0
    lanes.graphs._shrink()
    assert lanes.graphs.report().dropped == 1
    lanes.graphs.cap_bytes = 64 * MiB
    recorder.recorded.clear()
    lanes.runner.activating("a")
    assert recorder.recorded.wait(LONG)
    lanes.start(0, "a")
    lanes.end()
    assert lanes.graphs.report().replays == 1


def test_graphs_are_recorded_on_the_multiprocessors_that_run_them() -> None:
    driver = FakeDriver()
    context = driver.retain_context(0)
    driver.set_current(context)
    streams = GreenStreams(driver, 0, 2)
    make: Callable[[int], int] = streams.twin
    for stream in streams.all:
        twin = make(stream)
        assert twin not in streams.all
        assert driver.green_streams.get(twin) == driver.green_streams.get(stream)
    streams.close()
    driver.release_context(0)
    assert driver.is_clean()
