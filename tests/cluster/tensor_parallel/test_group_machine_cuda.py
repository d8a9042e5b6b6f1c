"""A group of two GPUs that are none, under pressure: tokens of one CPU, equal pages on both."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast.bench.inprocess import InProcess
from ballast.cluster.tensor_parallel import rank_process, rank_server
from ballast.cluster.tensor_parallel.cuda_rank_machine import CudaRankMachine
from ballast.cluster.tensor_parallel.group_machine import GroupMachine
from ballast.cluster.tensor_parallel.rank_machine import settings_of_rank
from ballast.core.clock import Clock
from ballast.core.errors import ConfigError, DeviceError, DeviceLost
from ballast.core.event import Event
from ballast.core.link import LinkRates
from ballast.core.settings import DeviceSettings, FleetSettings
from ballast.core.units import ceil_div
from ballast.engine.sizing import largest_jobs
from ballast.live.inbox import MonotonicClock
from ballast.sim.replay import replay
from ballast.sim.story_reader import read_device_stories
from ballast.transport.tensor_parallel.rank_connections import (
    LeaderConnection,
    RankConnection,
    RankGone,
)
from ballast.transport.tensor_parallel.rank_messages import JoinGroupMsg, PopulatePagesMsg
from ballast.weights.checkpoint import read_spec
from ballast.weights.sharding import Shard
from tests.cluster.tensor_parallel.fake_gpu_rank import (
    GPUS,
    Ends,
    RankOnThreads,
    ends,  # noqa: F401
    make,
)
from tests.cluster.tensor_parallel.test_group_machine import paths  # noqa: F401
from tests.engine.gpus import OnHost
from tests.memory.fake_cuda import FakeDriver
from tests.memory.fake_nvml import Board, FakeNvml
from tests.sim.test_live_story import PAGE, asked, fleet

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
"""That is how `Ends` ends a thread; with which code is looked at."""


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    made = FakeDriver(n_bytes=1 << 30, devices=GPUS)
    yield made
    assert made.is_clean(), "something is left of the first rank's device"


def over_gpus(settings: FleetSettings, pages: int) -> FleetSettings:
    """`pages` beside the arena, on two ranks."""
    device = replace(settings.device, name="cuda:0", tensor_parallel=2, threads=None)
    models = [replace(m, linear="plain") for m in settings.models]
    pages += ceil_div(largest_jobs([read_spec(m, ranks=2) for m in models], device), PAGE)
    return replace(settings, device=replace(device, budget_bytes=2 * pages * PAGE))


def serving(settings: FleetSettings, driver: FakeDriver, ends: Ends) -> InProcess:  # noqa: F811
    def own(
        device: DeviceSettings,
        shard: Shard,
        pace: LinkRates | None,
        clock: Clock,
        post: Callable[[Event], None],
    ) -> CudaRankMachine:
        return CudaRankMachine(device, shard, pace, clock, post, driver, OnHost())

    def group(fleet: FleetSettings, clock: Clock, post: Callable[[Event], None]) -> GroupMachine:
        return GroupMachine(fleet.device, None, clock, post, [RankOnThreads(make, ends)], own)

    return InProcess(settings, make_machine=group)


def test_a_live_group_under_pressure(
    paths: dict[str, Path],  # noqa: F811
    driver: FakeDriver,
    ends: Ends,  # noqa: F811
    tmp_path: Path,
) -> None:
    path = tmp_path / "story"
    plain = fleet(paths, "balloon", path, 400)
    requests = asked(paths)[:12]
    with InProcess(replace(plain, story_path=None)) as one:
        expected = one.generate(requests)
    with serving(over_gpus(plain, 16), driver, ends) as server:
        found = server.generate(requests)
        server.drain()
        state = server.device.state
        state.pool.validate()
        for m in state.models.values():
            m.weights.validate()
            # Asked of the driver on both ranks; raises where they differ.
            seen = len(state.pool.vm.os_pages(m.weights.range.range))
            assert seen == m.weights.range.os_backed()
        report = server.device.snapshot()
        assert driver.pinned, "weights in host memory are page-locked"
    assert {n: a.tokens for n, a in found.items()} == {n: a.tokens for n, a in expected.items()}
    assert report.page_bytes == 2 * PAGE
    # Which of the two it takes depends on when requests end.
    assert sum(m.evictions + m.preemptions for m in report.models) > 0
    assert ends.codes == [0] * 3, "its threads have ended"
    (life,) = read_device_stories(path)
    assert replay(life).difference is None


@given(gpu=st.integers(0, 7), ranks=st.integers(2, 8), pages=st.integers(8, 100))
def test_parts_are_equal_and_each_rank_has_a_gpu(gpu: int, ranks: int, pages: int) -> None:
    whole = DeviceSettings(
        name=f"cuda:{gpu}", budget_bytes=pages * PAGE, page_bytes=PAGE, tensor_parallel=ranks
    )
    parts = [settings_of_rank(whole, rank) for rank in range(ranks)]
    assert [p.gpu for p in parts] == list(whole.gpus)
    assert len({p.budget_bytes for p in parts}) == 1
    assert PAGE <= parts[0].budget_bytes <= whole.budget_bytes / ranks


def test_a_group_has_whole_gpus_that_are_there(driver: FakeDriver) -> None:
    device = DeviceSettings(
        name="cuda:0", budget_bytes=4 * PAGE, page_bytes=PAGE, tensor_parallel=2
    )

    def joined(device: DeviceSettings, nvml: FakeNvml) -> None:
        group = (device, Shard(0, device.tensor_parallel), None, MonotonicClock(), print)
        CudaRankMachine(*group, driver, OnHost(), nvml)

    with pytest.raises(ConfigError, match="CUDA shows 2"):
        joined(replace(device, tensor_parallel=3), FakeNvml())
    uuid = driver.uuid(0)
    cut = Board("GPU-whole", slices=[(f"MIG-{uuid}", 1 << 30, 14)])
    with pytest.raises(ConfigError, match="MIG slice"):
        joined(device, FakeNvml([cut]))


def test_a_rank_that_cannot_join_says_why(ends: Ends) -> None:  # noqa: F811
    device = DeviceSettings(
        name="cuda:1", budget_bytes=4 * PAGE, page_bytes=PAGE // 4, tensor_parallel=2
    )
    ours, theirs = socket.socketpair()
    first, further = RankConnection(ours), LeaderConnection(theirs.detach())
    first.send(JoinGroupMsg(1, device, None))

    def join() -> None:
        with pytest.raises(SystemExit):
            rank_process.serve_first_rank(further, further, further, further, make)

    with ThreadPoolExecutor(1) as thread:
        joining = thread.submit(join)
        with pytest.raises(DeviceError, match="what its driver maps at once"):
            first.receive()
        first.close()
        joining.result()
    further._connection.close()
    assert ends.codes == [0], "it ends when the first rank does"


def test_a_rank_that_loses_its_gpu_ends_and_answers_nothing(ends: Ends) -> None:  # noqa: F811
    device = DeviceSettings(
        name="cuda:1", budget_bytes=4 * PAGE, page_bytes=PAGE, tensor_parallel=2
    )
    driver = FakeDriver(n_bytes=1 << 30, devices=GPUS)
    ours, theirs = socket.socketpair()
    first, further = RankConnection(ours), LeaderConnection(theirs.detach())

    def own(*given: Any) -> CudaRankMachine:
        return CudaRankMachine(*given, driver, OnHost())

    made = rank_server.RankServer(JoinGroupMsg(1, device, None), print, print, own)
    driver.fail("create", error=DeviceLost("cuMemCreate", "CUDA_ERROR_LAUNCH_FAILED"))
    first.send(PopulatePagesMsg((0,)))
    with pytest.raises(SystemExit):
        rank_process._serve_connection(made, further)
    assert ends.codes == [1]
    further._connection.close()
    with pytest.raises(RankGone):
        first.receive()
    first.close()
    with pytest.raises(DeviceLost):
        made._machine.link.close()
