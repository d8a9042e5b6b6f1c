"""Find a range of a tensor-parallel group, or one byte of it, on all ranks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from ballast.core.errors import BrokenPromise
from ballast.memory.vm import Range


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
