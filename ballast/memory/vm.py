"""What the pool asks of a device's virtual memory. One page; `vm_null` is its fake.

::

    virtual   range A  [ 7 ][ 8 ][ - ][ 2 ]      reserved once, addresses never move
              range B  [ - ][ 5 ][ 6 ][ - ]      - : backed by nothing, touching it is a fault
    physical  pages    0 1 2 3 4 5 6 7 8 ...     a page is in one range, or in several as an alias
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ballast.core.actions import Short
from ballast.core.errors import DeviceError


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
        """Of the page at index `at`, 0 <= at <= n_pages."""
        return self.base + at * self.page_bytes


class Imported(Protocol):
    """A right to the pages of another process, which is one's own."""

    def close(self) -> None:
        """Give it back, if nobody has taken it over. Raises DeviceError."""


@dataclass(frozen=True, slots=True)
class Exported:
    """Physical pages another process may map: hand it over with `ballast.memory.share`."""

    device: tuple[int, int]
    """The same in everything that one device exports."""
    page_bytes: int
    n_pages: int
    """Of the whole device; `pages` lie below it."""
    pages: tuple[int, ...]
    fd: int | None
    """Of all pages. Borrowed from the vm that exported, owned by whoever received; None: none."""
    page_fds: tuple[int, ...] | None = None
    """On a GPU, one for each of `pages`: owned by whoever has this, see `close`."""
    imported: Imported | None = None
    """What `CudaVm.open` has made of `page_fds`."""

    def close(self) -> None:
        """Of an export that nobody takes over: its `page_fds`, or what was made of them."""
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
    """A fence that is done once someone says so. Safe to set from another thread."""

    __slots__ = ("_set",)

    def __init__(self, done: bool = False) -> None:
        self._set = done

    def set(self) -> None:
        self._set = True

    def done(self) -> bool:
        return self._set


class Vm(Protocol):
    """Physical pages `0 .. n_pages` of `page_bytes` each, and ranges they are mapped into.

    A call that breaks its promise (a double map, an unmap of the unmapped, an index out of range)
    raises BrokenPromise; a failing system call raises DeviceError. Either way the books and the
    mappings are as they were before the call.

    Pages of other devices can be *attached*: numbers above `n_pages` that are mapped and unmapped
    like one's own, and neither populated, discarded nor exported.
    """

    page_bytes: int
    n_pages: int

    def reserve(self, n_bytes: int) -> Range:
        """Addresses for `n_bytes`, rounded up to pages, aligned to a page, backed by nothing."""

    def release(self, range: Range) -> None:
        """Give addresses back. Nothing may be mapped in them any more."""

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

        Without `alias`, a page that is mapped anywhere already is refused. On a GPU pages have to
        be populated, attached ones to be exported to us, or it is refused. `prefault`: enter the
        (populated) pages into the page tables now, at a quarter of what faulting them in one by
        one would cost whoever touches them first.
        """

    def unmap(self, range: Range, at: int, n: int) -> None:
        """Take the backing of `n` indices away. The pages keep their contents."""

    def populate(self, pages: Sequence[int]) -> Short | None:
        """Give pages physical memory ahead of their first use; contents are kept.

        Needs no mapping by an owner. Short when the machine has no more; never a fatal signal.
        """

    def discard(self, pages: Sequence[int]) -> None:
        """Give the physical memory of unmapped pages back to the machine; contents are lost."""

    def attach(self, exported: Exported) -> int:
        """Make all pages of another device known; its page `i` is number `attach(...) + i` here.

        Takes `exported.fd` and `page_fds` over if it returns. A device attached already keeps its
        numbers. On a GPU only the pages exported can be mapped, each again after every lease.
        """

    def detach(self, first: int) -> None:
        """Forget the attached device whose page 0 is `first`. None of its pages may be mapped.

        As long as it is attached, or mapped by anyone, its memory outlives its own process.
        """

    def forget(self, pages: Sequence[int]) -> None:
        """Attached pages, none of them mapped, that are not ours to use until exported again. On a
        GPU their owner could not give their memory back before; elsewhere nothing changes."""

    def os_mapped(self, range: Range) -> int:
        """Pages mapped in the range, of whatever device, as `os_pages` finds them."""

    def os_pages(self, range: Range) -> dict[int, int]:
        """Index -> page wherever one is mapped; asked of the operating system, not of a book."""

    def mappings(self) -> int:
        """Mappings the whole process has now (the operating system allows so many)."""

    def export(self, pages: Sequence[int]) -> Exported:
        """Physical pages that another process can map."""

    def fence(self) -> Fence:
        """Done when all memory operations issued so far have taken effect."""

    def close(self) -> None:
        """Give everything back. Nothing may touch the device's addresses any more."""
