"""Implement `Vm` over all ranks of a tensor-parallel group: a page is one page on every rank.

Used by the group's machine on the first rank, so that the engine sees one device.

::

    rank 0 (own)   range A  [ 7 ][ 8 ][ - ]     pages and indices are the same on all ranks,
    rank 1         range A' [ 7 ][ 8 ][ - ]     addresses are each rank's own

Each operation is carried out on all ranks or on none: if one rank fails, the others undo theirs,
and its error or shortage is the group's result.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from ballast.core.actions import Short
from ballast.core.errors import BrokenPromise, DeviceError
from ballast.memory.vm import Exported, Fence, Range, Vm, WithoutHost

_EMPTY = -1


class GroupRanges:
    """The same ranges on each rank; the group knows them by the first rank's."""

    def __init__(self) -> None:
        self._ranges: dict[int, tuple[Range, ...]] = {}
        """By the base address of the first rank's range."""
        self._bases: list[int] = []
        """Bases of all ranges, ascending; replaced, never mutated."""

    def add(self, ranges: Sequence[Range]) -> None:
        """Add a range, given on each rank."""
        self._ranges[ranges[0].base] = tuple(ranges)
        self._bases = sorted(self._ranges)

    def remove(self, range: Range) -> None:
        """Remove a range, given on the first rank."""
        del self._ranges[range.base]
        self._bases = sorted(self._ranges)

    def of(self, range: Range) -> tuple[Range, ...]:
        """Return the first rank's `range` on each rank."""
        ranges = self._ranges.get(range.base)
        if ranges is None or ranges[0] != range:
            raise BrokenPromise(f"{range} is no range of the group")
        return ranges

    def where(self, address: int) -> tuple[int, ...]:
        """Map `address`, in a range of the first rank, to the same byte's address on each rank.

        Raises BrokenPromise for an address in no range. From any thread.
        """
        bases = self._bases
        at = bisect_right(bases, address) - 1
        ranges = self._ranges.get(bases[at], ()) if at >= 0 else ()
        if not ranges or address >= ranges[0].end:
            raise BrokenPromise(f"{address:#x} is in no range of the group")
        return tuple(address - ranges[0].base + r.base for r in ranges)


class GroupVm(WithoutHost):
    """Implements `Vm` over the vms of all ranks, which must not be used otherwise.

    Ranges are the first rank's. Pages are neither exported nor attached.
    """

    def __init__(self, own: Vm, others: Sequence[Vm]) -> None:
        for other in others:
            if (other.page_bytes, other.n_pages) != (own.page_bytes, own.n_pages):
                raise BrokenPromise("the ranks of a group differ in their pages")
        self.page_bytes, self.n_pages = own.page_bytes, own.n_pages
        self._vms = (own, *others)
        self.window = own.window
        self.ranges = GroupRanges()
        self.ranges.add([vm.window for vm in self._vms])
        self._slots: dict[int, array[int]] = {}
        """Pages of each range, by its base on the first rank."""

    def reserve(self, n_bytes: int) -> Range:
        made: list[Range] = []
        with ExitStack() as undo:
            for vm in self._vms:
                made.append(vm.reserve(n_bytes))
                undo.callback(vm.release, made[-1])
            undo.pop_all()
        own = made[0]
        self._slots[own.base] = array("i", [_EMPTY]) * own.n_pages
        self.ranges.add(made)
        return own

    def release(self, range: Range) -> None:
        """A rank that cannot give its addresses back keeps them until it ends; others do."""
        ranges = self.ranges.of(range)
        # The own first, which checks: what the others have mapped is what it has.
        self._vms[0].release(ranges[0])
        self.ranges.remove(range)
        del self._slots[range.base]
        failed: list[DeviceError] = []
        for vm, theirs in zip(self._vms[1:], ranges[1:], strict=True):
            try:
                vm.release(theirs)
            except DeviceError as error:
                failed.append(error)
        if failed:
            raise failed[0]

    def map(
        self,
        range: Range,
        at: int,
        pages: Sequence[int],
        *,
        alias: bool = False,
        prefault: bool = False,
    ) -> None:
        def undo(vm: Vm, theirs: Range) -> None:
            vm.unmap(theirs, at, len(pages))

        self._on_all(
            self.ranges.of(range),
            lambda vm, theirs: vm.map(theirs, at, pages, alias=alias, prefault=prefault),
            undo,
        )
        self._slots[range.base][at : at + len(pages)] = array("i", pages)

    def unmap(self, range: Range, at: int, n: int) -> None:
        ranges = self.ranges.of(range)
        pages = self._slots[range.base][at : at + n].tolist()

        def undo(vm: Vm, theirs: Range) -> None:
            vm.map(theirs, at, pages, alias=True)

        self._on_all(ranges, lambda vm, theirs: vm.unmap(theirs, at, n), undo)
        self._slots[range.base][at : at + n] = array("i", [_EMPTY]) * n

    def populate(self, pages: Sequence[int]) -> Short | None:
        """Populate pages on all ranks. As with one vm, pages populated before memory ran out keep
        it until they are discarded; on ranks with enough memory, these are all pages."""
        for vm in self._vms:
            short = vm.populate(pages)
            if short is not None:
                return short
        return None

    def discard(self, pages: Sequence[int]) -> None:
        for vm in self._vms:
            vm.discard(pages)

    def attach(self, exported: Exported) -> int:
        raise DeviceError("attach", "a tensor-parallel group borrows no pages")

    def detach(self, first: int) -> None:
        raise BrokenPromise(f"no device is attached at {first}")

    def forget(self, pages: Sequence[int]) -> None:
        raise BrokenPromise(f"{len(pages)} pages of no device are forgotten")

    def enter(self, pages: Sequence[int]) -> None:
        raise BrokenPromise(f"{len(pages)} pages of no device enter the window")

    def leave(self, pages: Sequence[int]) -> None:
        raise BrokenPromise(f"{len(pages)} pages of no device leave the window")

    def prefault(self, pages: Sequence[int]) -> None:
        """Prefault pages on the first rank; others, to be spared a message, as they touch them."""
        self._vms[0].prefault(pages)

    def os_pages(self, range: Range) -> dict[int, int]:
        """Raises BrokenPromise where ranks differ."""
        ranges = self.ranges.of(range)
        found = [vm.os_pages(r) for vm, r in zip(self._vms, ranges, strict=True)]
        for rank, pages in enumerate(found):
            if pages != found[0]:
                raise BrokenPromise(f"rank {rank} has other pages mapped in {range} than rank 0")
        return found[0]

    def export(self, pages: Sequence[int]) -> Exported:
        raise DeviceError("export", "a tensor-parallel group lends no pages")

    def fence(self) -> Fence:
        """Fence of the first rank: calls return when all ranks have carried them out."""
        return self._vms[0].fence()

    def close(self) -> None:
        for vm in reversed(self._vms):
            vm.close()

    def _on_all(
        self,
        ranges: tuple[Range, ...],
        do: Callable[[Vm, Range], None],
        undo: Callable[[Vm, Range], None],
    ) -> None:
        with ExitStack() as undone:
            for vm, theirs in zip(self._vms, ranges, strict=True):
                do(vm, theirs)
                undone.callback(undo, vm, theirs)
            undone.pop_all()
