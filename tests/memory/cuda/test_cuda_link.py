"""Copies to and from a GPU arrive, in order and by turns; what cannot be copied is told."""

from __future__ import annotations

import fcntl
import os
import queue
import threading
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest

from ballast.core.clock import VirtualClock
from ballast.core.errors import BrokenPromise, DeviceError
from ballast.core.event import TransferDoneEvent
from ballast.core.link import Direction
from ballast.core.units import KiB
from ballast.memory import syscalls
from ballast.memory.copies import Copy
from ballast.memory.cuda.calls import Attribute
from ballast.memory.cuda.link import CudaLink
from ballast.memory.cuda.pinning import PinnedMemory
from ballast.memory.cuda.vm import CudaVm
from ballast.memory.tensor import array_at
from ballast.memory.transfer import PRIOR_BYTES_PER_SECOND, STOPPED
from tests.memory.fake_cuda import FakeDriver, Misuse

PAGE = 64 * KiB


class Counting:
    """Each look is a millisecond later."""

    def __init__(self) -> None:
        self.looks = 0

    def now(self) -> float:
        self.looks += 1
        return self.looks / 1000


class Gate(FakeDriver):
    """No batch lands until it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()

    def wait(self, event: int) -> None:
        assert self.open.wait(240)
        super().wait(event)


@pytest.fixture
def done_events() -> queue.Queue[TransferDoneEvent]:
    return queue.Queue()


@pytest.fixture
def link(driver: FakeDriver, done_events: queue.Queue[TransferDoneEvent]) -> Iterator[CudaLink]:
    made = CudaLink(driver, 0, Counting(), done_events.put, chunk_bytes=10_000, ahead=2)
    yield made
    made.close()


def _source(n: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 255, n, dtype=np.uint8)


def test_all_copies_land_before_the_end_is_told(
    link: CudaLink, cuda: CudaVm, done_events: queue.Queue[TransferDoneEvent]
) -> None:
    source, back = _source(123_457), np.zeros(123_457, dtype=np.uint8)
    r = cuda.reserve(2 * PAGE)
    cuda.map(r, 0, [3, 9])
    base, to = source.ctypes.data, r.base
    cuts = [0, 1, 500, 30_000, 30_001, 123_457]
    link.start(9, [Copy(to + a, base + a, b - a) for a, b in pairwise(cuts)])
    done = done_events.get(timeout=240)
    assert (done.transfer_id, done.n_bytes, done.error) == (9, 123_457, None)
    assert done.seconds > 0
    assert (array_at(to, (123_457,), "uint8") == source).all()
    link.start(10, [Copy(back.ctypes.data, to, 123_457)], "kv", Direction.TO_HOST)
    assert done_events.get(timeout=240).transfer_id == 10
    assert (back == source).all()
    assert link.bytes_per_second != PRIOR_BYTES_PER_SECOND
    cuda.unmap(r, 0, 2)


def test_a_transfer_that_is_stopped_ends_with_what_is_in_flight(
    done_events: queue.Queue[TransferDoneEvent],
) -> None:
    driver = Gate()
    vm = CudaVm(driver, 0, PAGE, 4)
    assert vm.populate([0, 1]) is None
    r = vm.reserve(2 * PAGE)
    vm.map(r, 0, [0, 1])
    link = CudaLink(driver, 0, Counting(), done_events.put, chunk_bytes=10_000, ahead=2)
    source = _source(90_000)
    whole = [Copy(r.base, source.ctypes.data, 90_000)]
    for transfer in (1, 2, 3):
        link.start(transfer, whole)
    link.stop(2)
    second = done_events.get(timeout=240)
    assert (second.transfer_id, second.n_bytes, second.error) == (2, 0, STOPPED)
    link.stop(1)
    driver.open.set()
    first, third = (done_events.get(timeout=240) for _ in range(2))
    assert (first.transfer_id, first.error, third.transfer_id) == (1, STOPPED, 3)
    assert first.n_bytes <= 20_000
    assert (third.n_bytes, third.error) == (90_000, None)
    link.stop(3)
    link.close()
    assert done_events.empty()
    vm.close()
    assert driver.is_clean()


def test_nothing_to_copy(link: CudaLink, done_events: queue.Queue[TransferDoneEvent]) -> None:
    link.start(1, [])
    link.start(2, [Copy(8, 8, 0)])
    ends = [done_events.get(timeout=240) for _ in range(2)]
    assert [(d.transfer_id, d.n_bytes, d.error) for d in ends] == [(1, 0, None), (2, 0, None)]


def test_what_cannot_be_copied(
    link: CudaLink, cuda: CudaVm, driver: FakeDriver, done_events: queue.Queue[TransferDoneEvent]
) -> None:
    """A failed transfer ends when the part of it that was under way has."""
    source = _source(2 * PAGE)
    r = cuda.reserve(2 * PAGE)
    cuda.map(r, 0, [0])
    whole = Copy(r.base, source.ctypes.data, 2 * PAGE)
    link.start(1, [whole])
    link.start(2, [Copy(r.base, source.ctypes.data, -5)])
    link.start(3, [Copy(0, source.ctypes.data, 5)])
    link.start(4, [Copy(r.base, source.ctypes.data, PAGE)])
    ends = [done_events.get(timeout=240) for _ in range(4)]
    assert [e.transfer_id for e in ends] == [1, 2, 3, 4]
    assert ["cuMemcpyAsync" in (e.error or "") for e in ends] == [True, True, True, False]
    assert ends[0].n_bytes < PAGE
    assert ends[3].n_bytes == PAGE
    for call in ("wait", "record", "copy_to_device"):
        driver.fail(call)
        link.start(5, [Copy(r.base, source.ctypes.data, 25_000)])
        end = done_events.get(timeout=240)
        assert "asked for" in (end.error or ""), call
    link.start(6, [Copy(r.base, source.ctypes.data, PAGE)])
    assert done_events.get(timeout=240).error is None
    for stream in driver.streams:
        driver.run(stream)
    cuda.unmap(r, 0, 1)


def test_streams_share_by_bytes(done_events: queue.Queue[TransferDoneEvent]) -> None:
    driver = Gate()
    vm = CudaVm(driver, 0, PAGE, 4)
    assert vm.populate([0]) is None
    r = vm.reserve(PAGE)
    vm.map(r, 0, [0])
    link = CudaLink(driver, 0, Counting(), done_events.put, chunk_bytes=1000, ahead=1)
    source = _source(PAGE)
    link.start(0, [Copy(r.base, source.ctypes.data, 40_000)], "long")
    link.start(1, [Copy(r.base, source.ctypes.data, 4_300)], "short")
    driver.open.set()
    ends = [done_events.get(timeout=240) for _ in range(2)]
    assert [e.transfer_id for e in ends] == [1, 0]
    link.close()
    vm.close()
    assert driver.is_clean()


def test_closing_tells_what_was_not_finished(done_events: queue.Queue[TransferDoneEvent]) -> None:
    driver = Gate()
    vm = CudaVm(driver, 0, PAGE, 4)
    assert vm.populate([0]) is None
    r = vm.reserve(PAGE)
    vm.map(r, 0, [0])
    link = CudaLink(driver, 0, Counting(), done_events.put, chunk_bytes=1000, ahead=2)
    source = _source(PAGE)
    for i in (1, 2):
        link.start(i, [Copy(r.base, source.ctypes.data, 40_000)])
    side = link._sides[Direction.TO_DEVICE]
    with side._wake:
        side._closing = True
    driver.open.set()
    link.close()
    link.close()
    ends = [done_events.get(timeout=240) for _ in range(2)]
    assert [e.transfer_id for e in ends] == [1, 2]
    assert all("closed" in (e.error or "") and e.n_bytes < 40_000 for e in ends)
    with pytest.raises(DeviceError, match="closed"):
        link.start(3, [])
    vm.close()
    assert driver.is_clean()


def test_what_a_driver_may_refuse(done_events: queue.Queue[TransferDoneEvent]) -> None:
    driver = FakeDriver()
    driver.fail("new_stream", after=1)
    with pytest.raises(DeviceError, match="asked for"):
        CudaLink(driver, 0, Counting(), done_events.put)
    assert driver.is_clean()
    link = CudaLink(driver, 0, Counting(), done_events.put)
    driver.fail("destroy_stream")
    link.close()
    assert len(driver.streams) == 1


def test_senseless_settings(done_events: queue.Queue[TransferDoneEvent]) -> None:
    for bad in ({"chunk_bytes": 0}, {"ahead": 0}):
        with pytest.raises(DeviceError):
            CudaLink(FakeDriver(), 0, VirtualClock(), done_events.put, **bad)


def test_host_memory_is_pinned_where_the_device_can(
    driver: FakeDriver, caplog: pytest.LogCaptureFixture
) -> None:
    size = 4 * syscalls.PAGESIZE
    shared = syscalls.MAP_SHARED | syscalls.MAP_ANONYMOUS
    address = syscalls.mmap(0, size, syscalls.PROT_READ, shared)
    pins = PinnedMemory(driver, 1)
    assert pins.pin(address, size)
    assert (pins.n_bytes, driver.pinned) == (size, {address: (size, True)})
    with pytest.raises(BrokenPromise, match="already"):
        pins.pin(address, size)
    pins.unpin(address)
    pins.unpin(address)
    assert (pins.n_bytes, driver.pinned) == (0, {})
    driver.fail("pin")
    assert not pins.pin(address, size)
    assert "asked for" in caplog.text
    assert pins.pin(address, size)
    pins.close()
    assert driver.is_clean()
    syscalls.munmap(address, size)


@pytest.mark.parametrize("sealed", [False, True])
def test_what_is_mapped_to_be_read_is_pinned_as_if_it_could_be_written(sealed: bool) -> None:
    """Where the device pins nothing else; and it cannot be written to afterwards."""
    size = 2 * syscalls.PAGESIZE
    fd = os.memfd_create("pinned", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if sealed:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    address = syscalls.mmap(0, size, syscalls.PROT_READ, syscalls.MAP_SHARED, fd)
    driver = FakeDriver(attributes={Attribute.PINS_READ_ONLY: 0})
    pins = PinnedMemory(driver, 0)
    assert pins.pin(address, size) is not sealed
    assert driver.pinned == ({} if sealed else {address: (size, False)})
    (mode,) = [
        line.split()[1]
        for line in syscalls.maps().splitlines()
        if line.startswith(b"%x-" % address)
    ]
    assert mode == b"r--s"
    pins.close()
    assert driver.is_clean()
    syscalls.munmap(address, size)
    os.close(fd)


def test_memory_is_not_unpinned_under_a_copy(cuda: CudaVm, driver: FakeDriver) -> None:
    size = syscalls.PAGESIZE
    shared = syscalls.MAP_SHARED | syscalls.MAP_ANONYMOUS
    address = syscalls.mmap(0, size, syscalls.PROT_READ, shared)
    pins = PinnedMemory(driver, 0)
    assert pins.pin(address, size)
    r = cuda.reserve(PAGE)
    cuda.map(r, 0, [1])
    stream = driver.new_stream()
    driver.copy_to_device(r.base, address, size, stream)
    with pytest.raises(Misuse, match="work in flight"):
        pins.unpin(address)
    driver.finish(stream)
    pins.close()
    driver.destroy_stream(stream)
    cuda.unmap(r, 0, 1)
    syscalls.munmap(address, size)
