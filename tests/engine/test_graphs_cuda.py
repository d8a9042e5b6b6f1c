"""CUDA graphs in the live engine, as far as that goes without a GPU: recorded when it is idle."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ballast.bench.inprocess import InProcess
from ballast.core.event import Result
from ballast.core.job import Job, SequenceWork
from ballast.core.units import MiB
from ballast.engine.inbox import MonotonicClock
from ballast.engine.runner_cuda import CudaRunner
from ballast.engine.streams_cuda import GreenStreams, PlainStreams
from ballast.engine.views import device_view
from ballast.kernels.device_plan import Bucket
from ballast.models.graphs import GraphCache
from tests.engine.gpus import OnHost, on_gpu, serving
from tests.engine.test_live import asked, fleet, paths  # noqa: F401
from tests.engine.test_machine_cuda import tight
from tests.memory.fake_cuda import FakeDriver
from tests.models.fake_graphs import Recorders, StaticAttention

LONG = 60.0
"""Seconds after which a test gives up waiting for another thread."""
GRAPHS = 64 * MiB


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
        assert state.pool.owned("arena:graphs") == held == GRAPHS // device.page_bytes
        assert device_view(state).arena == state.arena.pages + held
        cap = server.device.cap.n_bytes
        assert cap == state.arena.pages * device.page_bytes
        first = server.generate(requests)
        while (cache := graphs_of(server)).wanted:
            recorder = next(iter(list(recorders.made.values())), None)
            if recorder is not None:
                recorder.recorded.wait(0.01)
        second = server.generate([replace(r, id=f"{r.id}-again") for r in requests])
        told = server.device.snapshot()
        assert told.graphs is not None
        assert told.owners["arena:graphs"] == held
        assert sum(m.evictions for m in told.models) > 0
        state.pool.validate()
        physical = server.device.machine.vm.physical_bytes()
        assert physical <= budget - (state.arena.pages + held) * device.page_bytes
        assert told.graphs.replays > 0
        assert 0 < told.graphs.n_bytes <= GRAPHS == cache.cap_bytes
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
    from ballast.core.command import Outcome, Remove

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
        told: list[Outcome] = []
        server.device.command(Remove("a", patience=5.0), told.append)
        server.device._operator._thread.submit(lambda: None).result()
        assert [o.code for o in told] == [None]
        assert not recorders.graphs


class Busy:
    """Implements `Executor`: runs until it is let go, and wants a graph."""

    def __init__(self, graphs: GraphCache) -> None:
        self.began, self.go = threading.Event(), threading.Event()
        self._graphs = graphs

    def run(self, work: Sequence[SequenceWork]) -> list[Result]:
        self.began.set()
        assert self.go.wait(LONG)
        bucket = Bucket.decode(1, 8, 8)
        if self._graphs.find("m", bucket) is None:
            self._graphs.want("m", bucket, lambda recording: torch.ones(2) + 1)
        return []

    def stalled(self) -> float:
        return 0.0


def test_while_any_lane_has_a_job_nothing_is_recorded() -> None:
    driver = FakeDriver()
    context = driver.retain_context(0)
    driver.set_current(context)
    recorders, streams = Recorders(driver), PlainStreams(driver, 2)
    graphs = GraphCache(64 * MiB, lambda stream: recorders(streams.twin(stream)))
    done: list[object] = []
    ended = threading.Semaphore(0)

    def post(event: object) -> None:
        done.append(event)
        ended.release()

    models = {"a": Busy(graphs), "b": Busy(graphs)}
    executors = {name: (model, model) for name, model in models.items()}
    runner = CudaRunner(
        executors,
        post,
        MonotonicClock(),
        driver,
        context,
        OnHost(),
        streams,
        2,
        graphs=graphs,
        quiet_seconds=0.001,
    )
    runner.start(Job(1, 0, "a", ()))
    runner.start(Job(2, 1, "b", ()))
    assert models["a"].began.wait(LONG)
    assert models["b"].began.wait(LONG)
    models["a"].go.set()
    assert ended.acquire(timeout=LONG)
    assert graphs.wanted == 1
    # The first lane is idle and looks again and again; asked directly, it says the same.
    assert not runner.record_one(graphs)
    assert not recorders.made
    models["b"].go.set()
    assert ended.acquire(timeout=LONG)
    for lane, name in enumerate("ab"):
        while graphs.wanted:
            threading.Event().wait(0.001)
        runner.start(Job(3 + lane, lane, name, ()))
        assert ended.acquire(timeout=LONG)
    assert len(recorders.graphs) == 2, "each lane's stream has one"
    assert graphs.report().replays == 2
    runner.close()
    graphs.close()
    streams.close()
    driver.release_context(0)
    assert driver.is_clean()


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
