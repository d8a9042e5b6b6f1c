"""An arena holds pages that have no memory, so that the allocator may have as much."""

from __future__ import annotations

import subprocess
import sys

from ballast.core.actions import Short
from ballast.core.units import KiB
from ballast.memory.arena import AllocatorCap, Arena
from ballast.memory.pool import Pool
from ballast.memory.vm import Latch, Vm
from ballast.memory.vm_memfd import MemfdVm

PAGE = 64 * KiB


def test_an_arena_is_an_owner(vm: Vm) -> None:
    pool = Pool(vm, 16)
    arena = Arena(pool, "arena:lane0", 5 * PAGE + 1)
    assert (arena.pages, arena.most_pages, arena.short) == (6, 6, None)
    assert pool.ledger.owners() == {"arena:lane0": 6}
    assert arena.resize(2 * PAGE) is None
    assert (arena.pages, pool.free) == (2, 14)
    fence = Latch()
    assert arena.resize(PAGE, fence) is None
    assert (arena.pages, pool.ledger.reclaiming) == (1, 1)
    fence.set()
    pool.reap()
    assert arena.resize(6 * PAGE) is None
    arena.validate()
    arena.close()
    assert pool.free == 16
    pool.validate()


def test_a_short_arena_holds_nothing(vm: Vm) -> None:
    pool = Pool(vm, 4)
    arena = Arena(pool, "arena", 6 * PAGE)
    assert (arena.short, arena.pages, pool.free) == (Short(2), 0, 4)
    assert arena.resize(3 * PAGE) is None
    assert (arena.short, arena.pages) == (None, 3)


def test_an_arena_of_nothing(vm: Vm) -> None:
    pool = Pool(vm, 4)
    assert Arena(pool, "arena", 0).pages == 0
    assert pool.free == 4


def test_it_has_no_memory_of_its_own(memfd: MemfdVm) -> None:
    pool = Pool(memfd, 32)
    assert pool.free_pages.populate_some(32) == 32
    arena = Arena(pool, "arena", 10 * PAGE)
    assert memfd.physical_bytes() == 22 * PAGE
    assert arena.pages == 10


def test_a_confined_allocator_uses_freed_memory_again_and_a_cap_gives_it_back() -> None:
    code = """
import random, resource
from ballast.memory.arena import AllocatorCap, anonymous_bytes, confine_allocator
import torch
confine_allocator()
torch.empty(1 << 20).fill_(1)
MiB = 1 << 20
cap, strict = AllocatorCap(24 * MiB), AllocatorCap(4 * MiB)
def rounds(n):
    touched, kept = 0, []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(n):
        size = random.randrange(1, 17) * MiB
        x = torch.empty(size, dtype=torch.uint8)
        x.fill_(1)
        del x
        kept.append(bytearray(random.randrange(100, 5000)))
        touched += size
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / (touched / 4096)
random.seed(0)
rounds(50)
assert (share := rounds(200)) < 0.2, share
assert cap.used > 10 * MiB, cap.used
assert not strict.used <= strict.n_bytes
assert strict.check(), strict.used
assert (strict.trims, cap.trims) == (1, 0)
assert cap.check()
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=240, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_others_than_jobs_hold_is_exempt() -> None:
    cap = AllocatorCap(0)
    before, most = cap.used, 1 << 40
    cap.exempt(most)
    assert cap.used < before - most // 2
    cap.renew(5, lambda: None)
    assert cap.check()
    assert abs(cap.used) < most // 2, "the base has what is exempt left out"
    cap.exempt(0)
    assert cap.used > most // 2, "what was exempt has become the jobs'"


def test_what_loading_has_freed_is_not_in_use_when_a_cap_is_made() -> None:
    code = """
from ballast.memory.arena import AllocatorCap, confine_allocator
import torch
confine_allocator()
MiB = 1 << 20
loaded = torch.empty(30 * MiB, dtype=torch.uint8).fill_(1)
del loaded
cap = AllocatorCap(0)
job = torch.empty(20 * MiB, dtype=torch.uint8).fill_(1)
assert cap.used > 15 * MiB, cap.used
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=240, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
