"""The reserve works beside the loop, and ends when told."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from ballast.core.actions import Short
from ballast.core.errors import DeviceError
from ballast.core.units import KiB
from ballast.memory.arena import Arena
from ballast.memory.pool import Pool
from ballast.memory.reserve import PopulatedReserve
from ballast.memory.vm_memfd import MemfdVm

PAGE = 64 * KiB


def test_populate_all(memfd: MemfdVm) -> None:
    pool = Pool(memfd, 32)
    arena = Arena(pool, "arena", 4 * PAGE)
    assert PopulatedReserve(pool).populate_all() is None
    assert pool.free_pages.populated == 28
    assert memfd.physical_bytes() == 28 * PAGE
    arena.close()
    pool.validate()


def test_it_fills_up_in_the_background_and_after_each_lease(memfd: MemfdVm) -> None:
    pool = Pool(memfd, 32)
    stepped = threading.Semaphore(0)
    real = pool.free_pages.populate_some

    def watched(n: int) -> int | Short:
        done = real(n)
        stepped.release()
        return done

    pool.free_pages.populate_some = watched  # type: ignore[method-assign]
    reserve = PopulatedReserve(pool, 8)
    reserve.start()
    reserve.start()
    assert stepped.acquire(timeout=240)
    assert stepped.acquire(timeout=240)
    assert isinstance(pool.allocate("a", 5), tuple)
    assert stepped.acquire(timeout=240)
    reserve.close()
    reserve.close()
    assert pool.free_pages.populated >= 4
    pool.validate()


def test_beside_a_busy_loop() -> None:
    vm = MemfdVm(PAGE, 128)
    pool = Pool(vm, 128)
    reserve = PopulatedReserve(pool)
    reserve.start()
    for i in range(400):
        everything = pool.allocate("a", 120)
        assert isinstance(everything, tuple)
        arena = pool.allocate("arena", 8, bare=True)
        assert isinstance(arena, tuple)
        assert vm.physical_bytes() <= 120 * PAGE
        pool.validate()
        pool.give_back("a", everything)
        pool.give_back("arena", arena)
        if i % 8 == 0:
            vm.discard(range(0))
    reserve.close()
    pool.validate()
    vm.close()


def test_no_memory_lets_it_rest(memfd: MemfdVm, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(memfd, 32)
    monkeypatch.setattr(memfd, "populate", lambda pages: Short(len(pages)))
    reserve = PopulatedReserve(pool)
    assert reserve.populate_all() == Short(4)
    assert reserve.short == Short(4)
    reserve.start()
    reserve.close()
    assert pool.free_pages.populated == 0
    pool.validate()


def test_the_interpreter_ends_with_a_reserve_and_a_link_at_work() -> None:
    code = """
from ballast.memory.pool import Pool
from ballast.memory.reserve import PopulatedReserve
from ballast.memory.copies import Copy
from ballast.memory.transfer import HostLink
from ballast.memory.vm_memfd import MemfdVm
from ballast.core.clock import VirtualClock
from ballast.core.link import LinkRates
vm = MemfdVm(65536, 4096)
r = vm.reserve(64 * 65536)
vm.map(r, 0, range(64))
PopulatedReserve(Pool(vm, 4096)).start()
link = HostLink(VirtualClock(), print, LinkRates.even(1.0), threads=2)
link.start(1, [Copy(r.base, r.base + 32 * 65536, 32 * 65536)])
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=240, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_a_driver_that_fails_lets_it_rest_until_the_next_lease(memfd: MemfdVm) -> None:
    pool = Pool(memfd, 32)
    tried = threading.Semaphore(0)
    real = pool.free_pages.populate_some
    errors = [DeviceError("cuMemCreate", "CUDA_ERROR_UNKNOWN")]

    def failing(n: int) -> int | Short:
        tried.release()
        if errors:
            raise errors.pop()
        return real(n)

    pool.free_pages.populate_some = failing  # type: ignore[method-assign]
    reserve = PopulatedReserve(pool, 8)
    reserve.start()
    assert tried.acquire(timeout=240)
    assert isinstance(pool.allocate("a", 1), tuple)
    assert tried.acquire(timeout=240), "its thread goes on"
    reserve.close()
    pool.validate()


def test_memory_of_pages_that_stay_free_goes_back(memfd: MemfdVm) -> None:
    pool = Pool(memfd, 32)
    gone = threading.Event()
    real = pool.free_pages.discard_some

    def watched(n: int) -> int:
        done = real(n)
        if pool.free_pages.populated <= 4:
            gone.set()
        return done

    pool.free_pages.discard_some = watched  # type: ignore[method-assign]
    pages = pool.allocate("a", 20)
    assert isinstance(pages, tuple)
    reserve = PopulatedReserve(pool, 4, unused_seconds=0.01)
    reserve.populate_all()
    reserve.start()
    assert gone.wait(240)
    assert memfd.physical_bytes() == 24 * PAGE
    gone.clear()
    pool.give_back("a", pages)
    assert gone.wait(240)
    reserve.close()
    assert (pool.free, pool.free_pages.populated) == (32, 4)
    assert memfd.physical_bytes() == 4 * PAGE
    pool.validate()
    assert isinstance(pool.allocate("b", 32), tuple), "it is taken again when needed"
    assert memfd.physical_bytes() == 32 * PAGE


def test_what_a_burst_needs_again_soon_keeps_its_memory(memfd: MemfdVm) -> None:
    pool = Pool(memfd, 32)
    reserve = PopulatedReserve(pool, 4, unused_seconds=1e6)
    pages = pool.allocate("a", 32)
    assert isinstance(pages, tuple)
    pool.give_back("a", pages)
    reserve._drain()
    assert pool.free_pages.populated == 32


def test_an_order_gives_memory_back_and_none_is_populated_ahead(memfd: MemfdVm) -> None:
    pool = Pool(memfd, 32)
    reserve = PopulatedReserve(pool)
    assert reserve.release(0).cancelled(), "its thread has not been started"
    reserve.populate_all()
    reserve.start()
    assert reserve.release(8).result(240) == 24
    assert memfd.physical_bytes() == 8 * PAGE
    pages = pool.allocate("a", 20)
    assert isinstance(pages, tuple), "it is taken again when needed"
    assert reserve.release(0).result(240) <= 8, "no more were populated ahead"
    assert (pool.free, pool.free_pages.populated) == (12, 0)
    assert memfd.physical_bytes() == 20 * PAGE
    pool.give_back("a", pages)
    pool.validate()
    assert reserve.release(32).result(240) == 0
    reserve.close()
    assert pool.free_pages.populated >= 20
    assert reserve.release(0).cancelled()
    pool.validate()


def test_an_order_waits_neither_for_a_long_fill_nor_after_the_end(memfd: MemfdVm) -> None:
    pool = Pool(memfd, 32)
    real, filling, go_on = pool.free_pages.populate_some, threading.Event(), threading.Event()

    def held(n: int) -> int | Short:
        filling.set()
        assert go_on.wait(240)
        return real(1)

    pool.free_pages.populate_some = held  # type: ignore[method-assign]
    reserve = PopulatedReserve(pool)
    reserve.start()
    assert filling.wait(240)
    first = reserve.release(0)
    go_on.set()
    assert first.result(240) == 1, "one step had begun"
    filling.clear()
    go_on.clear()
    assert reserve.release(32).result(240) == 0
    assert filling.wait(240)
    left = reserve.release(0)
    ending = threading.Thread(target=reserve.close)
    ending.start()
    while not reserve._closing:
        time.sleep(0.001)
    go_on.set()
    ending.join(240)
    assert left.cancelled()
    pool.validate()


def test_an_order_that_fails_says_so(memfd: MemfdVm, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(memfd, 8)

    def fail(pages: object) -> None:
        raise DeviceError("fallocate(PUNCH_HOLE)", "no")

    monkeypatch.setattr(memfd, "discard", fail)
    reserve = PopulatedReserve(pool)
    reserve.populate_all()
    reserve.start()
    with pytest.raises(DeviceError):
        reserve.release(0).result(240)
    assert reserve.release(8).result(240) == 0, "its thread goes on"
    reserve.close()
    pool.validate()


def test_pages_that_cannot_be_given_back_stay_populated(
    memfd: MemfdVm, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Pool(memfd, 8)
    pool.free_pages.populate_some(8)

    def fail(pages: object) -> None:
        raise DeviceError("fallocate(PUNCH_HOLE)", "no")

    monkeypatch.setattr(memfd, "discard", fail)
    with pytest.raises(DeviceError):
        pool.free_pages.discard_some(3)
    assert pool.free_pages.populated == 8
    pool.validate()
