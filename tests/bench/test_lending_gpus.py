"""`benchmarks.lending` between two processes that have a GPU's stand-in each."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import cast

from ballast.core.units import KiB
from ballast.memory.cuda.vm import CudaVm
from benchmarks.lending import NAMES, Cycles, Pair, costs
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


STEPS = {
    "lend": {"lend": 1.0, "accept": 2.0},
    "map": {"map": 4.0},
    "touch": {"touch": 8.0},
    "recall": {"ask_back": 16.0, "unmap": 32.0, "take_back": 64.0},
}
"""Seconds that the calls of each step take here."""


class TimedWorker:
    """Answers each call with its seconds, and what it has told."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[tuple[str, int]] = []

    def ask(self, what: str, peer: str, call: str, message: bytes, n: int) -> tuple[float, bytes]:
        assert (what, peer != self.name) == ("cost", True)
        (seconds,) = (calls[call] for calls in STEPS.values() if call in calls)
        slow = 1.0 if (call, n) in self.calls else 1000.0  # the first round
        self.calls.append((call, n))
        return seconds * slow, call.encode()


def test_each_step_is_timed() -> None:
    context = multiprocessing.get_context("forkserver")
    found = costs(Pair(context, PAGE, 128, (0, 1), run), rounds=1)
    assert set(found) == {"1", "16", "64"}
    assert all(set(steps) == set(STEPS) for steps in found.values())
    assert all(us > 0 for steps in found.values() for us in steps.values())


def test_a_steps_time_is_that_of_all_its_calls_for_each_page() -> None:
    workers = {name: TimedWorker(name) for name in NAMES}
    closed: list[bool] = []

    def other(name: str) -> str:
        return NAMES[1 - NAMES.index(name)]

    pair = SimpleNamespace(workers=workers, other=other, close=lambda: closed.append(True))
    found = costs(cast(Pair, pair), rounds=3)  # the median is that of the later two
    for n in (1, 16, 64):
        for step, calls in STEPS.items():
            assert found[str(n)][step] == sum(calls.values()) / n * 1e6
    lender, borrower = (workers[name].calls for name in NAMES)
    assert {call for call, _ in lender} == {"lend", "ask_back", "take_back"}
    assert {call for call, _ in borrower} == {"accept", "map", "touch", "unmap"}
    assert closed == [True]
