"""Huge pages: the system's files say whether there are any; asking for them breaks no promise."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from ballast.core.errors import DeviceError
from ballast.core.units import KiB, MiB
from ballast.memory import huge_pages, syscalls
from ballast.memory.vm_memfd import MemfdVm

HUGE = huge_pages.huge_page_bytes()


def _folder(tmp_path: Path, policy: str) -> Path:
    (tmp_path / "shmem_enabled").write_text(f"always within_size advise never {policy} force\n")
    (tmp_path / "hpage_pmd_size").write_text(f"{4 * MiB}\n")
    return tmp_path


@pytest.mark.parametrize(("policy", "allowed"), [("advise", True), ("never", False)])
def test_the_policy_is_the_word_in_brackets(tmp_path: Path, policy: str, allowed: bool) -> None:
    folder = _folder(tmp_path, f"[{policy}]")
    assert huge_pages.shmem_policy(folder) == policy
    assert huge_pages.are_allowed(folder) is allowed


def test_only_whole_huge_pages_fit(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "[advise]")
    assert huge_pages.huge_page_bytes(folder) == 4 * MiB
    assert huge_pages.fits(8 * MiB, folder)
    assert not huge_pages.fits(2 * MiB, folder)


def test_a_system_without_them(tmp_path: Path) -> None:
    assert huge_pages.shmem_policy(tmp_path) is None
    assert not huge_pages.are_allowed(tmp_path)
    assert huge_pages.huge_page_bytes(tmp_path) == 2 * MiB


def test_small_pages_cannot_lie_in_huge_ones() -> None:
    with pytest.raises(DeviceError, match="huge"):
        MemfdVm(256 * KiB, 8, huge=True)


@pytest.mark.parametrize("moves", [None, False])
def test_a_device_that_asks_keeps_its_promises(moves: bool | None) -> None:
    """Whether Linux gives any: contents, budget and books are as without."""
    vm = MemfdVm(HUGE, 4, huge=True, moves=moves)
    assert vm.populate([0, 2]) is None
    assert vm.physical_bytes() == 2 * HUGE
    r = vm.reserve(4 * HUGE)
    vm.map(r, 1, [2, 0])
    ctypes.memset(r.address(1), 7, HUGE)
    vm.unmap(r, 1, 2)
    vm.map(r, 3, [2], prefault=True)
    assert ctypes.string_at(r.address(3), HUGE) == bytes([7]) * HUGE
    assert vm.os_pages(r) == {3: 2}
    vm.unmap(r, 3, 1)
    vm.discard([2])
    assert vm.physical_bytes() == HUGE
    vm.close()


@pytest.mark.skipif(not huge_pages.are_allowed(), reason="shmem_enabled gives no huge pages")
def test_where_they_are_allowed_they_come() -> None:
    before = _shmem_huge_bytes()
    vm = MemfdVm(HUGE, 8)
    assert vm.populate(range(8)) is None
    # Memory may be too fragmented for all of them.
    assert _shmem_huge_bytes() > before
    vm.close()


def _shmem_huge_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("ShmemHugePages:"):
            return int(line.split()[1]) * 1024
    return 0


def test_asking_where_nothing_is_mapped_is_no_error() -> None:
    address = syscalls.mmap(
        0, HUGE, syscalls.PROT_NONE, syscalls.MAP_PRIVATE | syscalls.MAP_ANONYMOUS
    )
    syscalls.munmap(address, HUGE)
    huge_pages.advise(address, HUGE)
