"""A GPU's memory over a driver that checks every call: what the tests of all vms do not ask."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from ballast.core.actions import Short
from ballast.core.errors import BrokenPromise, DeviceError, DeviceLost
from ballast.core.units import KiB
from ballast.memory.cuda.calls import Attribute
from ballast.memory.cuda.vm import CudaVm
from ballast.memory.pool import Pool
from ballast.memory.range import BackedRange
from ballast.memory.share import receive_pages, send_pages
from ballast.memory.tensor import array_at
from ballast.memory.vm import Range
from tests.descriptors import open_descriptors
from tests.memory.fake_cuda import FakeDriver, Misuse

PAGE = 64 * KiB


def open_fds() -> int:
    return len(open_descriptors())


def contents(range: Range, at: int) -> int:
    return int(array_at(range.address(at), (PAGE,), "uint8")[PAGE - 1])


def test_contents_follow_the_page_and_aliases_are_one_memory(cuda: CudaVm) -> None:
    a, b = cuda.reserve(4 * PAGE), cuda.reserve(4 * PAGE)
    cuda.map(a, 0, [7, 8])
    array_at(a.base, (2, PAGE), "uint8")[:] = [[11], [22]]
    cuda.map(b, 3, [7], alias=True)
    assert contents(b, 3) == 11
    cuda.unmap(a, 0, 2)
    cuda.map(a, 2, [8])
    assert contents(a, 2) == 22
    assert (cuda.os_pages(a), cuda.os_pages(b)) == ({2: 8}, {3: 7})
    cuda.unmap(b, 3, 1)
    cuda.unmap(a, 2, 1)


def test_handles_are_made_once(cuda: CudaVm, driver: FakeDriver) -> None:
    r = cuda.reserve(8 * PAGE)
    driver.calls.clear()
    for _ in range(3):
        cuda.map(r, 0, [4, 9, 5])
        cuda.unmap(r, 0, 3)
    assert driver.calls == 3 * ["map", "map", "map", "set_access", "unmap"]
    assert cuda.populate([4, 5]) is None
    assert driver.calls[-1] == "unmap"


def test_memory_comes_and_goes(driver: FakeDriver) -> None:
    driver.n_bytes = 6 * PAGE
    vm = CudaVm(driver, 0, PAGE, 8)
    assert vm.populate([0, 1, 3]) is None
    assert vm.populate([2, 3, 5, 6, 7]) == Short(1)
    assert (vm.physical_bytes(), driver.used[0]) == (6 * PAGE, 6 * PAGE)
    vm.discard([0, 1, 4, 7])
    assert driver.used[0] == 4 * PAGE
    r = vm.reserve(PAGE)
    with pytest.raises(BrokenPromise, match="no memory"):
        vm.map(r, 0, [1])
    with pytest.raises(BrokenPromise, match="no memory"):
        vm.export([2, 1])
    vm.close()


def test_a_short_pool_gives_back_what_it_got(driver: FakeDriver) -> None:
    driver.n_bytes = 6 * PAGE
    vm = CudaVm(driver, 0, PAGE, 8)
    pool = Pool(vm, 8)
    assert pool.allocate("a", 8) == Short(2)
    assert driver.used[0] == 0
    pages = pool.allocate("a", 6)
    assert isinstance(pages, tuple)
    pool.give_back("a", pages)
    assert isinstance(pool.allocate("arena", 8, bare=True), tuple)
    assert driver.used[0] == 0
    pool.validate()
    vm.close()


def test_a_driver_that_unmaps_no_stretch_is_asked_page_by_page() -> None:
    driver = FakeDriver(stretches=False)
    vm = CudaVm(driver, 0, PAGE, 8)
    assert vm.populate(range(8)) is None
    r = vm.reserve(8 * PAGE)
    for calls in (4, 3, 3):
        vm.map(r, 1, [4, 6, 5])
        driver.calls.clear()
        vm.unmap(r, 1, 3)
        assert driver.calls == ["unmap"] * calls
        assert vm.os_pages(r) == {}
    vm.map(r, 1, [4, 6, 5])
    vm.close()
    assert driver.is_clean()


def test_a_stretch_that_fails_once_is_unmapped_page_by_page(cuda: CudaVm) -> None:
    driver = cuda.driver
    assert isinstance(driver, FakeDriver)
    r = cuda.reserve(8 * PAGE)
    cuda.map(r, 0, [4, 5])
    driver.fail("unmap", after=1)
    driver.fail("unmap")
    with pytest.raises(DeviceError, match="asked for"):
        cuda.unmap(r, 0, 2)
    assert cuda.os_pages(r) == {0: 4, 1: 5}, "both ways failed: as before"
    cuda.unmap(r, 0, 2)
    assert cuda.os_pages(r) == {}


def test_what_a_device_must_be_able_to() -> None:
    for need in (Attribute.MAPS_MEMORY, Attribute.EXPORTS_FDS):
        with pytest.raises(DeviceError, match=need.value):
            CudaVm(FakeDriver(attributes={need: 0}), 0, PAGE, 8)
    for page_bytes in (PAGE // 2, 3 * PAGE, PAGE + 1, 0):
        with pytest.raises(DeviceError, match="powers of two from 65536"):
            CudaVm(FakeDriver(), 0, page_bytes, 8)
    with pytest.raises(DeviceError, match="INVALID_DEVICE"):
        CudaVm(FakeDriver(), 1, PAGE, 8)


@pytest.mark.parametrize(
    ("attempt", "calls"),
    [
        (lambda vm, r: vm.reserve(3 * PAGE), 1),
        (lambda vm, r: vm.map(r, 4, [5, 6, 7]), 4),
        (lambda vm, r: vm.unmap(r, 0, 4), 4),
        (lambda vm, r: vm.discard([8, 9, 10]), 3),
        (lambda vm, r: vm.populate([20, 21]), 2),
        (lambda vm, r: vm.export([1, 2]).close(), 2),
        (lambda vm, r: vm.os_pages(r), 1),
    ],
)
def test_any_call_may_fail(
    driver: FakeDriver, attempt: Callable[[CudaVm, Range], object], calls: int
) -> None:
    """Books and driver are as before, and the same again succeeds."""
    for after in range(calls):
        vm = CudaVm(driver, 0, PAGE, 24)
        assert vm.populate(range(16)) is None
        r = vm.reserve(8 * PAGE)
        vm.map(r, 0, [3, 2, 1, 0])
        vm._memory._stretches = False
        before = (vm.os_pages(r), vm.physical_bytes(), open_fds())
        reserved = dict(driver.reserved)
        driver.calls.clear()
        driver.fail(after=after)
        with pytest.raises(DeviceError, match="asked for"):
            attempt(vm, r)
        if driver.calls[0] != "create":
            assert (vm.os_pages(r), vm.physical_bytes(), open_fds()) == before
        assert driver.reserved == reserved
        driver.calls.clear()
        attempt(vm, r)
        assert len(driver.calls) >= calls - after
        vm.close()


def test_a_range_of_the_pool_over_every_failure(driver: FakeDriver) -> None:
    for after in range(10):
        vm = CudaVm(driver, 0, PAGE, 8)
        vm._memory._stretches = False
        pool = Pool(vm, 8)
        a, b = (BackedRange(pool, vm, name, 8 * PAGE) for name in "ab")
        assert a.back(0, 3) is None
        driver.fail("create", "map", "set_access", "unmap", after=after)
        attempts: list[Callable[[], object]] = [
            partial(b.back, 1, 2),
            partial(b.alias, 4, a.pages(0, 2), "a"),
            partial(b.unalias, 4, 2, "a"),
        ]
        failed = 0
        for attempt in attempts:
            try:
                attempt()
            except DeviceError:
                failed += 1
                attempt()
            pool.validate()
            for r in (a, b):
                r.validate()
                assert r.os_backed() == pool.ledger.owned(r.owner) + pool.ledger.holders.held(
                    r.owner
                )
        assert failed == 1
        vm.close()


def test_a_failure_beyond_repair_is_told_for_ever(driver: FakeDriver) -> None:
    one = FakeDriver()
    vm = CudaVm(one, 0, PAGE, 8)
    assert vm.populate(range(8)) is None
    r = vm.reserve(8 * PAGE)
    one.fail("set_access")
    one.fail("unmap")
    seen: list[DeviceLost] = []
    one.when_lost(seen.append)
    with pytest.raises(DeviceError, match="set_access: CUDA_ERROR_UNKNOWN"):
        vm.map(r, 0, [1, 2])
    assert [str(error) for error in seen] == [str(one.lost)], "its worker is to be replaced"
    for call in (lambda: vm.map(r, 0, [1]), lambda: vm.populate([1]), vm.fence):
        with pytest.raises(DeviceLost, match=r"lost since set_access.*, and undoing that: unmap"):
            call()
    vm.close()


def test_pages_wait_for_the_lanes_that_use_them(cuda: CudaVm, driver: FakeDriver) -> None:
    pool = Pool(cuda, 8)
    r = BackedRange(pool, cuda, "kv", 8 * PAGE)
    assert r.back(0, 4) is None
    lanes = [driver.new_stream(), driver.new_stream()]
    for lane in lanes:
        cuda.watch(lane)
    driver.launch(lanes[0], r.range.base, PAGE, 9)
    driver.launch(lanes[1], r.range.address(1), PAGE, 8)
    with pytest.raises(Misuse, match="which work on stream"):
        cuda.unmap(r.range, 0, 1)
    fence = cuda.fence()
    r.release(0, 2, fence)
    driver.launch(lanes[0], r.range.address(2), PAGE, 7)
    assert (pool.reap(), r.leaving) == (0, 2)
    driver.run(lanes[1])
    assert pool.reap() == 0
    driver.run(lanes[0], 2)
    assert (pool.reap(), r.leaving) == (2, 0)
    assert fence.done()
    driver.run(lanes[0])
    assert contents(r.range, 2) == 7
    cuda.fence()
    assert len(driver.events) == 2, "events are used again"
    for lane in lanes:
        cuda.unwatch(lane)
        driver.destroy_stream(lane)
    assert cuda.fence().done()


def test_a_kernel_that_failed_is_told_by_the_fence(cuda: CudaVm, driver: FakeDriver) -> None:
    lane = driver.new_stream()
    cuda.watch(lane)
    fence = cuda.fence()
    driver.fail("is_done", error=DeviceError("cuEventQuery", "CUDA_ERROR_ILLEGAL_ADDRESS"))
    with pytest.raises(DeviceError, match="ILLEGAL_ADDRESS"):
        fence.done()
    cuda.unwatch(lane)
    driver.destroy_stream(lane)


def test_each_thread_has_the_context(cuda: CudaVm, driver: FakeDriver) -> None:
    def populate() -> Short | None:
        cuda.discard([1])
        return cuda.populate([1])

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(populate).result(60) is None


def lent(source: CudaVm, pages: list[int]) -> tuple[socket.socket, socket.socket]:
    a, b = socket.socketpair()
    exported = source.export(pages)
    send_pages(a, exported)
    exported.close()
    return a, b


def test_pages_go_to_another_process(driver: FakeDriver, cuda: CudaVm) -> None:
    """Of its own driver; the descriptors go over a socket."""
    other = FakeDriver()
    borrower = CudaVm(other, 0, PAGE, 4)
    fds = open_fds()
    a, b = lent(cuda, [5, 9])
    received = receive_pages(b)
    assert (received.pages, received.fd, len(received.page_fds or ())) == ((5, 9), None, 2)
    first = borrower.attach(received)
    assert first == 5
    mine, theirs = cuda.reserve(2 * PAGE), borrower.reserve(4 * PAGE)
    cuda.map(mine, 0, [9])
    borrower.map(theirs, 2, [first + 5, first + 9])
    array_at(theirs.address(3), (PAGE,), "uint8")[:] = 44
    assert contents(mine, 0) == 44
    assert borrower.os_pages(theirs) == {2: first + 5, 3: first + 9}
    with pytest.raises(DeviceError, match="not exported"):
        borrower.map(theirs, 0, [first + 6])
    with pytest.raises(BrokenPromise):
        borrower.detach(first)
    borrower.unmap(theirs, 2, 2)
    other.fail("release")
    with pytest.raises(DeviceError):
        borrower.detach(first)
    borrower.detach(first)
    a.close()
    b.close()
    assert open_fds() == fds
    borrower.close()
    assert other.is_clean()


def test_many_pages_go_in_several_messages(driver: FakeDriver) -> None:
    vm = CudaVm(driver, 0, PAGE, 300)
    assert vm.populate(range(300)) is None
    a, b = lent(vm, list(range(300)))
    received = receive_pages(b)
    peer = CudaVm(driver, 1, PAGE, 4)
    first = peer.attach(received)
    r = peer.reserve(300 * PAGE)
    peer.map(r, 0, range(first, first + 300))
    for end in (a, b, peer, vm):
        end.close()


def test_memory_made_anew_replaces_what_was_lent_before(driver: FakeDriver, cuda: CudaVm) -> None:
    peer = CudaVm(driver, 1, PAGE, 4)
    first = peer.attach(cuda.export([3, 4]))
    r, own = peer.reserve(2 * PAGE), cuda.reserve(PAGE)
    peer.map(r, 0, [first + 4])
    cuda.discard([3])
    assert cuda.populate([3]) is None
    used = driver.used[0]
    assert peer.attach(cuda.export([3, 4])) == first
    assert driver.used[0] == used - PAGE, "what page 3 had before is free"
    peer.map(r, 1, [first + 3])
    cuda.map(own, 0, [3])
    array_at(own.base, (PAGE,), "uint8")[:] = 5
    assert contents(r, 1) == 5
    cuda.unmap(own, 0, 1)
    peer.close()


def test_what_is_returned_can_be_stripped_of_its_memory(driver: FakeDriver) -> None:
    """Else an arena's bytes would be the allocator's and, by the borrower's handles, ours too."""
    vm, peer = CudaVm(driver, 0, PAGE, 4), CudaVm(driver, 1, PAGE, 4)
    lender, borrower = Pool(vm, 4), Pool(peer, 4)
    first = peer.attach(vm.export(()))
    for _ in range(2):
        pages = lender.allocate("lent", 3)
        assert isinstance(pages, tuple)
        assert peer.attach(vm.export(pages)) == first
        away = [first + page for page in pages]
        borrower.borrow("a", away)
        kv = BackedRange(borrower, peer, "kv", 4 * PAGE)
        kv.alias(0, away, "a")
        with pytest.raises(BrokenPromise):
            peer.forget(away)
        kv.unalias(0, 3, "a")
        borrower.return_borrowed("a", away)
        peer.forget(away)
        lender.give_back("lent", pages)
        kv.close()
        arena = lender.allocate("arena", 4, bare=True)
        assert isinstance(arena, tuple)
        assert driver.used == [0, 0]
        lender.give_back("arena", arena)
    with pytest.raises(BrokenPromise):
        peer.forget([0])
    peer.close()
    vm.close()


def test_what_cannot_be_attached(cuda: CudaVm) -> None:
    apart = FakeDriver(devices=2, peers=False)
    vm, peer = CudaVm(apart, 0, PAGE, 4), CudaVm(apart, 1, PAGE, 4)
    assert vm.populate([0]) is None
    exported = vm.export([0])
    with pytest.raises(DeviceError, match="device 1 cannot use memory of 0"):
        peer.attach(exported)
    second = CudaVm(apart, 0, PAGE, 4)
    assert second.attach(exported) == 5
    apart.fail("import_fd")
    again = vm.export([0])
    with pytest.raises(DeviceError, match="asked for"):
        second.attach(again)
    second.attach(again)
    with pytest.raises(DeviceError, match="the device's own"):
        vm.attach(vm.export(()))
    for made in (second, peer, vm):
        made.close()
    assert apart.is_clean()


def test_closed_is_closed(driver: FakeDriver) -> None:
    vm = CudaVm(driver, 0, PAGE, 4)
    vm.reserve(PAGE)
    vm.close()
    vm.close()
    with pytest.raises(BrokenPromise, match="closed"):
        vm.reserve(PAGE)
