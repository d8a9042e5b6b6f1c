"""Set pages of the pool aside for activations, so that these count against the device's budget.

`Arena` is held by `DeviceState`. `AllocatorCap` checks on CPU that what jobs allocate stays within
the arena; `ballast.memory.cuda.allocator_cap` is its counterpart on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable

from ballast.core.actions import Short
from ballast.core.errors import BrokenPromise, DeviceError
from ballast.core.units import MiB, ceil_div
from ballast.memory import syscalls
from ballast.memory.pool import Pool
from ballast.memory.vm import Fence


class Arena:
    """Bare pages of `owner`, mapped nowhere, that stand for the memory of activations.

    On a CPU, PyTorch takes activations from the C allocator, as anonymous memory; on a GPU, from
    its own, as memory of the driver. The arena keeps as many bytes of the pool without physical
    memory as the largest job may allocate there, so that weights + KV + activations never exceed
    the budget in physical memory. (A GPU's driver could not map a page that has none.)
    """

    def __init__(self, pool: Pool, owner: str, n_bytes: int, most_bytes: int | None = None) -> None:
        """Allocate pages for `n_bytes`; where these are short, none, and `short` is set.

        `most_bytes`: the most that it may ever be resized to; None: `n_bytes`.
        """
        self.owner = owner
        self.most_pages = ceil_div(max(n_bytes, most_bytes or 0), pool.vm.page_bytes)
        """Most pages that it may have."""
        self._pool = pool
        self._pages: tuple[int, ...] = ()
        self.short: Short | None = self.resize(n_bytes)
        """Pages that the last `resize` was short of; None: it succeeded."""

    @property
    def pages(self) -> int:
        """Number of pages set aside now."""
        return len(self._pages)

    def resize(self, n_bytes: int, fence: Fence | None = None) -> Short | None:
        """Resize to pages for `n_bytes`, at most `most_pages`: allocate all missing pages or none,
        or free the surplus once `fence` is done."""
        wanted = ceil_div(n_bytes, self._pool.vm.page_bytes)
        if not 0 <= wanted <= self.most_pages:
            raise BrokenPromise(f"{self.owner}: {wanted} pages of at most {self.most_pages}")
        self.short = None
        if wanted < self.pages:
            kept, gone = self._pages[:wanted], self._pages[wanted:]
            self._pages = kept
            self._pool.give_back(self.owner, gone, fence)
        elif wanted > self.pages:
            more = self._pool.allocate(self.owner, wanted - self.pages, bare=True)
            if isinstance(more, Short):
                self.short = more
            else:
                self._pages += more
        return self.short

    def validate(self) -> None:
        """Raises BrokenPromise unless the ledger says that these pages are the owner's."""
        if any(self._pool.ledger.owner_of(page) != self.owner for page in self._pages):
            raise BrokenPromise(f"{self.owner}: a page of the arena is another's")

    def close(self) -> None:
        self.resize(0)


def confine_allocator(mmap_threshold: int = 1024 * MiB, keep: int = 1024 * MiB) -> None:
    """Make the C allocator re-use what activations free. Call once, before threads start.

    By default glibc takes blocks above 128 KiB (later: up to 32 MiB) from the system and returns
    them when freed, so that every step's activations are faulted in anew, at about 0.4 GB/s.

    - M_MMAP_THRESHOLD: blocks below it come from the heap, where they are re-used;
    - M_TRIM_THRESHOLD: up to `keep` free bytes at the heap's top stay with the process;
    - M_ARENA_MAX 1: one heap for all threads; several would each keep their own peak.

    On jobs of mixed sizes this left one page fault in eighty, for a heap that kept about 1.5 times
    its live peak (holes between blocks). `AllocatorCap` bounds that.

    Raises DeviceError where the C library is not glibc.
    """
    syscalls.mallopt(syscalls.M_ARENA_MAX, 1)
    try:
        syscalls.mallopt(syscalls.M_MMAP_THRESHOLD, mmap_threshold)
    except DeviceError:
        # glibc before 2.35 allows no more than half of a heap.
        syscalls.mallopt(syscalls.M_MMAP_THRESHOLD, 32 * MiB)
    syscalls.mallopt(syscalls.M_TRIM_THRESHOLD, keep)


class AllocatorCap:
    """Bounds the process's anonymous memory to `n_bytes` above its size when this was made.

    Make it after loading and warming up, with the bytes of the arena; `check` after each job.
    Freed memory that the allocator kept beyond the cap goes back to the machine, wherever in the
    heap it lies; the next job faults it in anew.
    """

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        self.trims = 0
        syscalls.malloc_trim()  # else what loading has freed would count as in use
        self._base = anonymous_bytes()
        self._exempt = 0
        self._paused = False
        self._renewal: tuple[int, Callable[[], None]] | None = None

    def exempt(self, n_bytes: int) -> None:
        """Exempt `n_bytes` that others than jobs have allocated, beside the base. Replaces the last
        such number. Callable from any thread."""
        self._exempt = n_bytes

    @property
    def used(self) -> int:
        """Bytes above the base and those exempt; negative where the process has shrunk."""
        return anonymous_bytes() - self._base - self._exempt

    @property
    def renewing(self) -> bool:
        """Whether a renewal waits for a `check` while no job runs."""
        return self._renewal is not None

    def check(self, *, alone: bool = True) -> bool:
        """Trim the heap if over the cap; return whether memory is within the cap now.

        Checking takes some 20 us, trimming milliseconds. `alone`: no job runs, so that a pending
        renewal may take the present memory as the base.
        """
        if self._renewal is not None and alone:
            self.n_bytes, forget = self._renewal
            self._renewal, self._paused = None, False
            forget()
            syscalls.malloc_trim()
            self._base = anonymous_bytes() - self._exempt
        if self._paused or self.used <= self.n_bytes:
            return True
        syscalls.malloc_trim()
        self.trims += 1
        return self.used <= self.n_bytes

    def pause(self) -> None:
        """Stop trimming until `renew`, while something is loaded beside the jobs."""
        self._paused = True

    def renew(self, n_bytes: int, forget: Callable[[], None]) -> None:
        """At the next `check` that is alone, call `forget`, which frees what jobs keep for
        themselves, and bound memory to `n_bytes` above its size then. Callable from any thread."""
        self._renewal = n_bytes, forget


def anonymous_bytes() -> int:
    """Physical memory of this process that is no file's and no device's, in bytes."""
    with open("/proc/self/statm", "rb", buffering=0) as file:
        fields = file.read().split()
    return (int(fields[1]) - int(fields[2])) * syscalls.PAGESIZE
