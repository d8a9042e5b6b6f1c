"""`benchmarks.lending` between two processes that have a GPU's stand-in each."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

from ballast.core.units import KiB
from ballast.memory.cuda.vm import CudaVm
from benchmarks.lending import Cycles, Pair, costs
from benchmarks.lending_worker import Worker, work
from tests.memory.fake_cuda import FakeDriver

PAGE = 64 * KiB


def run(connection: Connection, name: str, page: int, n_pages: int, gpu: int | None) -> None:
    assert gpu is not None
    vm = CudaVm(FakeDriver(devices=2), gpu, page, n_pages)
    work(connection, Worker(name, vm, n_pages, "cpu"))


def test_no_page_is_lost_or_used_twice() -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    pair = Pair(context, PAGE, 12, (0, 1), run)
    cycles = Cycles(pair, seed=3, kill_share=0.15)
    try:
        cycles.run(30)
    finally:
        pair.close()
    counts = cycles.counts
    assert counts["kill"] > 1
    assert counts["deaf"] > 0
    assert counts["stale_refused"] == counts["stale"] > 0
    assert (counts["leaked"], counts["corrupted"], counts["disagreements"]) == (0, 0, 0)
    assert counts["memories"] == 0


def test_each_step_is_timed() -> None:
    context = multiprocessing.get_context("forkserver")
    found = costs(Pair(context, PAGE, 128, (0, 1), run), rounds=1)
    assert set(found) == {"1", "16", "64"}
    assert all(us > 0 for steps in found.values() for us in steps.values())
