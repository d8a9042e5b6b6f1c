"""Both vms keep the same promises; the one of memory keeps its contents too."""

from __future__ import annotations

import errno
import fcntl
import os
import random
from collections.abc import Callable

import pytest

from ballast.core.actions import Short
from ballast.core.errors import BrokenPromise, DeviceError
from ballast.core.units import KiB
from ballast.memory import syscalls
from ballast.memory.address_space import count_mappings
from ballast.memory.tensor import array_at
from ballast.memory.vm import Range, Vm
from ballast.memory.vm_memfd import MemfdVm
from ballast.memory.vm_null import NullVm

PAGE = 64 * KiB


def _fill(range: Range, at: int, value: int) -> None:
    array_at(range.address(at), (PAGE,), "uint8")[:] = value


def _read(range: Range, at: int) -> int:
    view = array_at(range.address(at), (PAGE,), "uint8")
    assert (view == view[0]).all()
    return int(view[0])


def test_a_range_is_rounded_up_aligned_and_alone(vm: Vm) -> None:
    a, b = vm.reserve(PAGE + 1), vm.reserve(3 * PAGE)
    assert (a.n_pages, b.n_pages) == (2, 3)
    assert a.base % PAGE == b.base % PAGE == 0
    assert a.end <= b.base or b.end <= a.base
    assert len(vm.os_pages(a)) == 0


def test_mapping_is_what_the_system_shows(vm: Vm) -> None:
    a, b = vm.reserve(8 * PAGE), vm.reserve(8 * PAGE)
    vm.map(a, 1, [4, 5, 6, 2])
    vm.map(b, 0, [10], prefault=True)
    assert (len(vm.os_pages(a)), len(vm.os_pages(b))) == (4, 1)
    vm.unmap(a, 2, 2)
    assert len(vm.os_pages(a)) == 2
    vm.unmap(a, 1, 1)
    vm.unmap(a, 4, 1)
    vm.release(a)
    vm.unmap(b, 0, 1)
    assert len(vm.os_pages(b)) == 0


@pytest.mark.parametrize(
    "attempt",
    [
        lambda vm, r: vm.map(r, 0, [9]),
        lambda vm, r: vm.map(r, 2, [0]),
        lambda vm, r: vm.map(r, 2, [8, 8]),
        lambda vm, r: vm.map(r, 3, [8, 9]),
        lambda vm, r: vm.map(r, -1, [8]),
        lambda vm, r: vm.map(r, 2, [32]),
        lambda vm, r: vm.map(r, 2, [-1]),
        lambda vm, r: vm.unmap(r, 1, 2),
        lambda vm, r: vm.unmap(r, 0, 5),
        lambda vm, r: vm.release(r),
        lambda vm, r: vm.discard([0]),
        lambda vm, r: vm.populate([32]),
        lambda vm, r: vm.export([32]),
        lambda vm, r: vm.reserve(0),
        lambda vm, r: vm.map(Range(r.base + PAGE, 1, PAGE), 0, [8]),
        lambda vm, r: vm.os_pages(Range(7, 1, PAGE)) or vm.release(Range(7, 1, PAGE)),
    ],
)
def test_a_broken_promise_changes_nothing(vm: Vm, attempt: Callable[[Vm, Range], object]) -> None:
    r = vm.reserve(4 * PAGE)
    vm.map(r, 0, [0, 1])
    with pytest.raises(BrokenPromise):
        attempt(vm, r)
    assert len(vm.os_pages(r)) == 2


def test_an_alias_shares_a_page(vm: Vm) -> None:
    a, b = vm.reserve(PAGE), vm.reserve(2 * PAGE)
    vm.map(a, 0, [3])
    vm.map(b, 0, [3, 3], alias=True)
    assert (len(vm.os_pages(a)), len(vm.os_pages(b))) == (1, 2)
    vm.unmap(b, 0, 2)
    with pytest.raises(BrokenPromise):
        vm.map(b, 0, [3])
    vm.unmap(a, 0, 1)
    vm.map(b, 0, [3])


def test_contents_follow_the_page_and_aliases_are_one_memory(memfd: MemfdVm) -> None:
    a, b = memfd.reserve(4 * PAGE), memfd.reserve(4 * PAGE)
    memfd.map(a, 0, [7, 8])
    _fill(a, 0, 11)
    _fill(a, 1, 22)
    memfd.map(b, 3, [7], alias=True)
    assert _read(b, 3) == 11
    _fill(b, 3, 33)
    assert _read(a, 0) == 33
    memfd.unmap(a, 0, 2)
    memfd.map(a, 2, [8])
    assert _read(a, 2) == 22


def test_adjacent_pages_are_one_mapping(memfd: MemfdVm) -> None:
    r = memfd.reserve(16 * PAGE)
    before = count_mappings()
    memfd.map(r, 0, range(8))
    memfd.map(r, 8, range(8, 16))
    assert count_mappings() <= before + 1


def test_populate_needs_no_mapping_and_discard_undoes_it(memfd: MemfdVm) -> None:
    assert memfd.physical_bytes() == 0
    assert memfd.populate([3, 4, 9]) is None
    assert memfd.physical_bytes() == 3 * PAGE
    r = memfd.reserve(PAGE)
    memfd.map(r, 0, [4])
    _fill(r, 0, 5)
    assert memfd.populate([4]) is None
    assert _read(r, 0) == 5
    memfd.unmap(r, 0, 1)
    memfd.discard([3, 4, 9])
    assert memfd.physical_bytes() == 0


def _resident_bytes(memfd: MemfdVm) -> int:
    """Of its file in this process, wherever that is mapped, as the system counts them. Pages of
    other files come and go."""
    inode, found, mine = os.fstat(memfd._memory.file.fd).st_ino, 0, False
    with open("/proc/self/smaps") as file:
        for line in file:
            name, *values = line.split()
            if not name.endswith(":"):
                mine = int(values[3]) == inode
            elif name == "Rss:" and mine:
                found += int(values[0]) * KiB
    return found


def _is_present(range: Range, at: int) -> bool:
    return syscalls.is_present(range.address(at), PAGE)


def test_a_populated_page_is_resident_once(memfd: MemfdVm) -> None:
    """Whether nobody maps it, someone does, or did."""
    r = memfd.reserve(32 * PAGE)
    assert _resident_bytes(memfd) == 0

    def once() -> bool:
        return _resident_bytes(memfd) == 32 * PAGE

    assert memfd.populate(range(32)) is None
    assert once()
    memfd.map(r, 0, range(31, -1, -1))
    for at in range(32):
        _fill(r, at, at)
    assert once()
    memfd.unmap(r, 0, 32)
    assert once()
    assert memfd.populate(range(32)) is None
    memfd.map(r, 0, range(32))
    assert memfd.populate(range(32)) is None
    assert once()


def test_page_tables_move_with_populated_pages(memfd: MemfdVm) -> None:
    a, b = memfd.reserve(4 * PAGE), memfd.reserve(4 * PAGE)
    memfd.populate([5, 6, 9])
    memfd.map(a, 1, [5, 6, 9])
    assert all(_is_present(a, at) for at in (1, 2, 3))
    _fill(a, 2, 66)
    memfd.unmap(a, 2, 1)
    assert not _is_present(a, 2)
    memfd.map(b, 0, [6])
    assert _is_present(b, 0)
    assert _read(b, 0) == 66
    assert _is_present(a, 1)
    assert _is_present(a, 3)
    memfd.map(b, 1, [5], alias=True)
    assert not _is_present(b, 1)
    _fill(b, 1, 55)
    memfd.unmap(a, 1, 1)
    memfd.unmap(b, 1, 1)
    memfd.map(a, 1, [5], prefault=True)
    assert _is_present(a, 1)
    assert _read(a, 1) == 55


def test_what_was_never_populated_is_found_by_faults(memfd: MemfdVm) -> None:
    a = memfd.reserve(4 * PAGE)
    memfd.map(a, 0, [1, 2])
    assert not _is_present(a, 0)
    _fill(a, 0, 1)
    memfd.unmap(a, 0, 2)
    memfd.map(a, 2, [1, 2], prefault=True)
    assert _is_present(a, 2)
    assert _is_present(a, 3)
    assert _read(a, 2) == 1


def test_the_window_stays_one_mapping(memfd: MemfdVm) -> None:
    memfd.populate(range(32))
    r = memfd.reserve(64 * PAGE)
    order = random.Random(0).sample(range(32), 32)
    for at, page in enumerate(order):
        memfd.map(r, 2 * at, [page])
    before = count_mappings()
    for at in random.Random(1).sample(range(32), 32):
        memfd.unmap(r, 2 * at, 1)
    # 32 pages and the gaps between them are one reservation again.
    assert count_mappings() <= before - 62


def test_where_page_tables_cannot_be_moved_pages_can(
    memfd: MemfdVm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOMEM, "no memory for tables")

    r = memfd.reserve(8 * PAGE)
    memfd.populate(range(8))
    memfd.map(r, 0, range(8))
    for at in range(8):
        _fill(r, at, at)
    monkeypatch.setattr(syscalls, "move_page_tables", refuse)
    memfd.unmap(r, 2, 4)
    memfd.map(r, 2, [5, 4, 3, 2], prefault=True)
    assert [_read(r, at) for at in range(8)] == [0, 1, 5, 4, 3, 2, 6, 7]
    assert memfd.os_pages(r) == {0: 0, 1: 1, 2: 5, 3: 4, 4: 3, 5: 2, 6: 6, 7: 7}
    monkeypatch.undo()
    memfd.unmap(r, 0, 8)
    memfd.map(r, 0, range(8))
    assert [_read(r, at) for at in range(8)] == list(range(8))


def test_presence_is_told_of_every_page_of_a_stretch() -> None:
    page = syscalls.PAGESIZE
    at = syscalls.mmap(
        0,
        8 * page,
        syscalls.PROT_READ | syscalls.PROT_WRITE,
        syscalls.MAP_PRIVATE | syscalls.MAP_ANONYMOUS,
    )
    assert not syscalls.is_present(at, 8 * page)
    syscalls.prefault(at, 3 * page)
    assert syscalls.is_present(at, 3 * page)
    assert syscalls.is_present(at + 5, 2 * page)
    assert not syscalls.is_present(at + 5, 3 * page)
    assert not syscalls.is_present(at, 8 * page)
    syscalls.munmap(at, 8 * page)
    assert not syscalls.is_present(at, page)


def test_populating_past_the_end_of_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device larger than its file: what the kernel says where memory runs out, for real."""
    truncate = os.ftruncate
    monkeypatch.setattr(os, "ftruncate", lambda fd, n_bytes: truncate(fd, n_bytes // 2))
    vm = MemfdVm(PAGE, 8)
    assert vm.populate([0, 1, 3]) is None
    assert vm.populate([2, 3, 5, 6]) == Short(2)
    vm.close()


def test_no_memory_is_short_and_other_faults_are_not(
    memfd: MemfdVm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(number: int) -> Callable[..., None]:
        def call(*_: int) -> None:
            raise OSError(number, os.strerror(number))

        return call

    monkeypatch.setattr(syscalls, "can_populate", lambda: True)
    monkeypatch.setattr(syscalls, "madvise", fail(errno.ENOMEM))
    assert memfd.populate([0, 1]) == Short(2)
    monkeypatch.setattr(syscalls, "madvise", fail(errno.EPERM))
    with pytest.raises(DeviceError, match="Operation not permitted"):
        memfd.populate([0])


def test_populate_without_the_kernels_help(memfd: MemfdVm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syscalls, "can_populate", lambda: False)
    assert memfd.populate([1, 2]) is None
    assert memfd.physical_bytes() == 2 * PAGE


def test_a_failing_map_leaves_nothing_mapped(
    memfd: MemfdVm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memfd._memory, "moves", False)
    r = memfd.reserve(8 * PAGE)
    real, calls = syscalls.mmap, []

    def fail_second(*args: int) -> int:
        calls.append(args)
        if len(calls) == 2:
            raise OSError(errno.ENOMEM, "no more mappings")
        return real(*args)

    monkeypatch.setattr(syscalls, "mmap", fail_second)
    with pytest.raises(DeviceError, match="no more mappings"):
        memfd.map(r, 0, [0, 1, 5, 6, 9])
    assert len(memfd.os_pages(r)) == 0
    memfd.map(r, 0, [0, 1, 5, 6, 9])
    assert len(memfd.os_pages(r)) == 5


def test_mappings_stay_below_half_of_the_limit(
    memfd: MemfdVm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(syscalls, "max_map_count", lambda: 2 * (count_mappings() + 20))
    tight = MemfdVm(PAGE, 64)
    r = tight.reserve(64 * PAGE)

    def map_scattered() -> None:
        for page in range(64):
            tight.map(r, page, [63 - page])

    with pytest.raises(DeviceError, match=r"sysctl -w vm\.max_map_count") as raised:
        map_scattered()
    assert raised.value.call == "mmap"
    assert 0 < len(tight.os_pages(r)) < 64
    tight.close()


def test_odd_sizes_are_refused() -> None:
    with pytest.raises(DeviceError):
        MemfdVm(1000, 4)
    with pytest.raises(DeviceError):
        MemfdVm(PAGE, 0)


def test_null_addresses_are_no_ones_else() -> None:
    a, b = NullVm(PAGE, 4), NullVm(PAGE, 4)
    ranges = [a.reserve(PAGE), a.reserve(5 * PAGE), b.reserve(PAGE)]
    assert len({r.base for r in ranges}) == 3
    assert min(r.base for r in ranges) >= 1 << 60


# -- host memory beneath a range -----------------------------------------------------------------


def _sealed(n_bytes: int, value: int) -> tuple[int, int]:
    """Descriptor and address of a sealed file, mapped read only, as the host tier has them."""
    fd = os.memfd_create("sealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, bytes([value]) * n_bytes)
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    flags = syscalls.MAP_SHARED | syscalls.MAP_POPULATE
    return fd, syscalls.mmap(0, n_bytes, syscalls.PROT_READ, flags, fd)


def _permissions(address: int) -> bytes:
    for line in syscalls.maps().splitlines():
        low, high = (int(end, 16) for end in line.split(None, 1)[0].split(b"-"))
        if low <= address < high:
            return line.split(None, 2)[1]
    raise AssertionError(f"nothing is mapped at {address:#x}")


@pytest.mark.parametrize("moves", [False, True])
def test_host_memory_lies_beneath_a_range_read_only_and_takes_no_page(moves: bool) -> None:
    vm = MemfdVm(PAGE, 8, moves=moves)
    size = 2 * PAGE + 8192  # ends within a page
    fd, source = _sealed(size, 7)
    a, b = vm.reserve(4 * PAGE), vm.reserve(4 * PAGE)
    for r in (a, b):  # two models with one segment
        vm.map_host(r, 1, source, size)
        assert array_at(r.address(1), (size,), "uint8").tobytes() == b"\7" * size
        assert _permissions(r.address(1)) == b"r--s"
        assert _permissions(r.address(1) + size) == b"---p"
        assert len(vm.os_pages(r)) == 0
    vm.map(a, 0, [3])
    with pytest.raises(OSError):
        os.ftruncate(fd, PAGE)
    for r in (a, b):
        vm.unmap_host(r, 1, source, size)
        assert _permissions(r.address(1)) == b"---p"
        assert array_at(source, (size,), "uint8").tobytes() == b"\7" * size
    vm.map(a, 1, [4])
    syscalls.munmap(source, size)
    os.close(fd)
    vm.close()


def test_only_shared_memory_can_lie_beneath_a_range() -> None:
    vm = MemfdVm(PAGE, 8)
    r = vm.reserve(2 * PAGE)
    private = syscalls.MAP_PRIVATE | syscalls.MAP_ANONYMOUS
    source = syscalls.mmap(0, PAGE, syscalls.PROT_READ | syscalls.PROT_WRITE, private)
    with pytest.raises(DeviceError, match="mremap"):
        vm.map_host(r, 0, source, PAGE)
    assert _permissions(r.address(0)) == b"---p"
    vm.map(r, 0, [1])
    syscalls.munmap(source, PAGE)
    vm.close()


@pytest.mark.parametrize(
    "attempt",
    [
        lambda vm, r: vm.map_host(r, 0, 4096, PAGE),
        lambda vm, r: vm.map_host(r, 2, 4096, PAGE + 1),
        lambda vm, r: vm.map_host(r, 3, 4096, 2 * PAGE),
        lambda vm, r: vm.map(r, 1, [5]),
        lambda vm, r: vm.unmap(r, 1, 1),
        lambda vm, r: vm.unmap(r, 0, 2),
        lambda vm, r: vm.unmap_host(r, 0, 4096, PAGE),
        lambda vm, r: vm.unmap_host(r, 1, 4096, PAGE + 1),
        lambda vm, r: vm.release(r),
    ],
)
def test_host_memory_and_pages_exclude_each_other(
    attempt: Callable[[Vm, Range], object],
) -> None:
    vm = NullVm(PAGE, 8)
    r = vm.reserve(4 * PAGE)
    vm.map(r, 0, [0])
    vm.map_host(r, 1, 4096, PAGE)
    vm.map(r, 3, [2])
    with pytest.raises(BrokenPromise):
        attempt(vm, r)
    assert vm.os_pages(r) == {0: 0, 3: 2}
    vm.unmap_host(r, 1, 4096, PAGE)
    vm.map(r, 1, [5])
