"""Programs: threads share each operation, and wait for none that is not within it."""

from __future__ import annotations

import ctypes
import threading
import time

import numpy as np
import pytest

from ballast.kernels import program_code, team
from ballast.kernels.intrinsics import compiled, fetch_add, int64_at, load_acquire, pause

# Fields of an operation's table.
GATE, NEXT, DONE, ITEMS = range(4)
"""GATE: items below ITEMS that may end."""


def _take_items(address):  # type: ignore[no-untyped-def]
    """Take one item after the other; an item ends when the gate is above it."""
    table = int64_at(address)
    item = fetch_add(table, NEXT, 1)
    while item < table[ITEMS]:
        while load_acquire(table) <= item:
            pause()
        fetch_add(table, DONE, 1)
        item = fetch_add(table, NEXT, 1)


@pytest.fixture(scope="module")
def kernel() -> int:
    return compiled(_take_items)


class Running:
    """A program whose operations have `gates`, each of two items, and threads that run it."""

    def __init__(self, kernel: int, gates: list[int]) -> None:
        self.tables = np.zeros((len(gates), 16), np.int64)
        self.tables[:, GATE], self.tables[:, ITEMS] = gates, 2
        kernels = np.full(len(gates), kernel)
        self._operations = np.stack([kernels, team.rows_of(self.tables)], 1)
        self._programs = team.program_tables(self._operations[None])
        self._run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(team.program_kernel())
        self._threads: list[threading.Thread] = []

    @property
    def done(self) -> list[int]:
        return [int(n) for n in self.tables[:, DONE]]

    def enter(self) -> threading.Thread:
        where = self._programs.ctypes.data
        thread = threading.Thread(target=self._run, args=(where,), daemon=True)
        thread.start()
        self._threads.append(thread)
        return thread

    def join(self) -> None:
        for thread in self._threads:
            thread.join()
        assert self._programs[0, program_code.PROGRESS] >> 32 == len(self.tables)


def test_an_operation_begins_when_all_work_of_the_one_before_is_done(kernel: int) -> None:
    running = Running(kernel, [1, 2, 2])
    running.enter()
    while running.tables[0, NEXT] < 2:  # it is held within the second item
        time.sleep(1e-3)
    other = running.enter()
    while not running._programs[0, program_code.PROGRESS] & 1:  # has left, and waits
        time.sleep(1e-3)
    assert other.is_alive()
    assert running.done == [1, 0, 0]
    running.tables[0, GATE] = 2
    running.join()
    assert running.done == [2, 2, 2]


def test_a_thread_that_comes_late_is_not_waited_for_and_does_nothing_twice(kernel: int) -> None:
    running = Running(kernel, [2] * 5)
    running.enter().join()
    assert running.done == [2] * 5
    running.enter().join()
    running.join()
    assert running.done == [2] * 5


def test_threads_that_come_at_any_time_do_each_item_once(kernel: int) -> None:
    for _ in range(20):
        running = Running(kernel, [2] * 300)
        for _ in range(4):
            running.enter()
        running.join()
        assert running.done == [2] * 300
