"""Define the protocol of a device's virtual memory: reserve ranges, map pages, export, fence.

Used by the pool, ranges, lending and machines. Implemented by `vm_memfd` (CPU), `cuda.vm` (GPU),
`group.vm` and the cluster's `RemoteVm` (tensor-parallel ranks), and `vm_null` (virtual time).

::

    virtual   range A  [ 7 ][ 8 ][ - ][ 2 ]      reserved once, addresses never move
              range B  [ h ][ h ][ 6 ][ - ]      - : backed by nothing, touching it is a fault
                                                 h : host memory, read only, and no page
              window   [ 0 ][ 1 ][ 2 ][ 3 ] ...  every page once, at its own number
    physical  pages    0 1 2 3 4 5 6 7 8 ...     a page is in one range, or in several as an alias

Weights lie in ranges. KV is found in the window, by page number: it comes, goes and changes owner
without a call.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ballast.core.actions import Short
from ballast.core.errors import DeviceError

_DEVICES_IN_WINDOW = 16
"""Addresses of a window, as a multiple of its device's pages: its own, and those of peers."""
_LEAST_IN_WINDOW = 1 << 14


def window_pages(n_pages: int) -> int:
    """Return the pages that the window of a device of `n_pages` has addresses for."""
    return max(_LEAST_IN_WINDOW, _DEVICES_IN_WINDOW * n_pages)


@dataclass(frozen=True, slots=True)
class Range:
    """Reserved virtual addresses `[base, base + n_pages * page_bytes)`."""

    base: int
    n_pages: int
    page_bytes: int

    @property
    def n_bytes(self) -> int:
        return self.n_pages * self.page_bytes

    @property
    def end(self) -> int:
        return self.base + self.n_bytes

    def address(self, at: int) -> int:
        """Address of the page at index `at`, 0 <= at <= n_pages."""
        return self.base + at * self.page_bytes


class Imported(Protocol):
    """Handles to pages of another process, owned by this one."""

    def close(self) -> None:
        """Release those that were not taken over. Raises DeviceError."""


@dataclass(frozen=True, slots=True)
class Exported:
    """Physical pages that another process may map; `ballast.memory.share` sends them there."""

    device: tuple[int, int]
    """Identity of the device, the same in all its exports."""
    page_bytes: int
    n_pages: int
    """Pages of the whole device; all of `pages` are below it."""
    pages: tuple[int, ...]
    fd: int | None
    """Descriptor of all pages: the vm's in the process that exports, the receiver's own in the
    other; None on a GPU."""
    page_fds: tuple[int, ...] | None = None
    """On a GPU, a descriptor for each of `pages`, owned by the holder of this object (`close`)."""
    imported: Imported | None = None
    """The handles that `CudaVm.open` has made of `page_fds`."""

    def close(self) -> None:
        """Close `page_fds`, or release the handles made of them, of an export not taken over."""
        for fd in self.page_fds or ():
            os.close(fd)
        if self.imported is not None:
            self.imported.close()

    def discard(self) -> None:
        """Close `fd` of an export that was received from another process and is not attached."""
        if self.fd is not None:
            os.close(self.fd)


def check_attach(exported: Exported, page_bytes: int, device: tuple[int, int]) -> None:
    """Raises DeviceError unless `device`, of pages of `page_bytes`, can attach those exported."""
    if exported.page_bytes != page_bytes:
        raise DeviceError("attach", f"pages of {exported.page_bytes} bytes beside {page_bytes}")
    if exported.device == device:
        raise DeviceError("attach", "these pages are the device's own")


class Fence(Protocol):
    """Work in flight that may still use some pages."""

    def done(self) -> bool: ...


class Latch:
    """A fence that is done once `set` was called, by any thread."""

    __slots__ = ("_set",)

    def __init__(self, done: bool = False) -> None:
        self._set = done

    def set(self) -> None:
        self._set = True

    def done(self) -> bool:
        return self._set


class WithoutHost:
    """Base of each `Vm` of several ranks: they cannot read host memory in place."""

    maps_host = False
    table_pages = 1

    def map_host(self, range: Range, at: int, source: int, n_bytes: int) -> None:
        raise DeviceError("host memory", "this device does not read it in place")

    def unmap_host(self, range: Range, at: int, source: int, n_bytes: int) -> None:
        raise DeviceError("host memory", "this device does not read it in place")


class Vm(Protocol):
    """Physical pages `0 .. n_pages` of `page_bytes` each, and ranges they are mapped into.

    A call that breaks the rules (a double map, an unmap of the unmapped, an index out of range)
    raises BrokenPromise; a failing system call raises DeviceError. Either way the records and the
    mappings are as they were before the call.

    Pages of other devices can be *attached*: they get numbers above `n_pages`, are mapped and
    unmapped like the device's own, and are neither populated, discarded nor exported.
    """

    page_bytes: int
    n_pages: int
    window: Range
    """Addresses of all pages by their numbers, `window_pages` of them: `window.address(page)`. A
    page of the device can be used there while it has memory, an attached one from `enter` to
    `leave`. Nothing else is mapped there, and being there counts as no mapping of a page."""

    def enter(self, pages: Sequence[int]) -> None:
        """Map attached pages, exported to this process, in the window: all or none."""

    def leave(self, pages: Sequence[int]) -> None:
        """Unmap attached pages from the window. They keep their contents."""

    def prefault(self, pages: Sequence[int]) -> None:
        """Enter pages that can be used in the window into its page tables, where they are missing:
        a job is spared the faults of first touch. Nothing is mapped."""

    def reserve(self, n_bytes: int) -> Range:
        """Reserve addresses for `n_bytes`, rounded up to pages and aligned; none is backed."""

    def release(self, range: Range) -> None:
        """Release the addresses of a range in which nothing is mapped any more."""

    def map(
        self,
        range: Range,
        at: int,
        pages: Sequence[int],
        *,
        alias: bool = False,
        prefault: bool = False,
    ) -> None:
        """Back range indices `at ..` by `pages`, in order; runs of adjacent pages cost one call.

        Without `alias`, a page that is mapped anywhere already is refused. On a GPU, so are pages
        that are not populated, or attached ones that are not exported to this process. `prefault`:
        enter the (populated) pages into the page tables now, at a quarter of the cost of faulting
        them in one by one at first touch.
        """

    def unmap(self, range: Range, at: int, n: int) -> None:
        """Unmap the pages of `n` indices. They keep their contents."""

    maps_host: bool
    """Whether host memory can be mapped into ranges; if not, `map_host` raises DeviceError."""

    @property
    def table_pages(self) -> int:
        """Pages of a page table, at whose multiples in a range what is mapped begins best: page
        tables then move by whole tables. 1: none move."""

    def map_host(self, range: Range, at: int, source: int, n_bytes: int) -> None:
        """Map host memory beneath range indices `at ..`, read only, in place of pages.

        `source`: its address in this process, where it is sealed shared memory (the host tier),
        and stays mapped. What is left of the last index stays unbacked. A GPU notes it alone: its
        kernels find page-locked host memory at addresses of their own.
        """

    def unmap_host(self, range: Range, at: int, source: int, n_bytes: int) -> None:
        """Unmap host memory that `map_host` has mapped with these arguments."""

    def populate(self, pages: Sequence[int]) -> Short | None:
        """Give pages physical memory ahead of their first use; contents are kept.

        They need not be mapped. Short when the machine has no more memory; never a fatal signal.
        """

    def discard(self, pages: Sequence[int]) -> None:
        """Give the physical memory of unmapped pages back to the machine; contents are lost."""

    def attach(self, exported: Exported) -> int:
        """Attach all pages of another device; its page `i` is number `attach(...) + i` here.

        Takes over `exported.fd` and `page_fds` if it returns. Raises DeviceError if the window has
        no addresses left for them. A device attached already keeps its numbers. On a GPU only the
        exported pages can be mapped, and need a new export each lease.
        """

    def detach(self, first: int) -> None:
        """Forget the attached device whose page 0 is `first`. None of its pages may be mapped, or
        in the window.

        As long as it is attached, or mapped by anyone, its memory outlives its own process.
        """

    def forget(self, pages: Sequence[int]) -> None:
        """Drop the handles of attached pages, none mapped, until they are exported again. On a
        GPU their owner can free their memory only then; elsewhere nothing changes."""

    def os_pages(self, range: Range) -> dict[int, int]:
        """Map index -> page of all that is mapped, as the operating system shows it."""

    def export(self, pages: Sequence[int]) -> Exported:
        """Export physical pages for another process to map."""

    def fence(self) -> Fence:
        """Return a fence that is done once all memory operations so far have taken effect."""

    def close(self) -> None:
        """Release all memory and addresses. Nothing may touch them any more."""
