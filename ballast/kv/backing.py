"""The pages beneath slabs: which slabs are backed, and how they come and go."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence, Set

from ballast.core.errors import BrokenPromise, DeviceError
from ballast.kv.layout import Layout
from ballast.memory.pool import Pool
from ballast.memory.range import BackedRange
from ballast.memory.vm import Vm


class Backing:
    """Slabs `0 .. n_slabs` in one range of addresses; the lowest that are not backed come first."""

    def __init__(self, owner: str, layout: Layout, pool: Pool, vm: Vm, n_slabs: int) -> None:
        self.owner = owner
        self.layout = layout
        self.pages = 0
        """Pages that back slabs now."""
        self.limit: int | None = None
        self.bound: int | None = None
        """Most pages, by choice and by construction; lowering them takes nothing away."""
        self._pool = pool
        # A pool smaller than one slab still gets a range; growth is Short for ever.
        self.range = BackedRange(pool, vm, owner, max(1, n_slabs) * layout.slab_bytes)
        self._vacant: list[int] = []
        """Heap of the slabs below `_end` that are not backed; all from `_end` on are not."""
        self._end = 0

    @property
    def most(self) -> int | None:
        return min((b for b in (self.limit, self.bound) if b is not None), default=None)

    def back(self, n: int) -> list[int] | None:
        """Back `n` more slabs, ascending; None, and no change, if limit, pool or machine are short.

        Raises DeviceError, without a change, if the operating system refuses to map.
        """
        pages = n * self.layout.slab_pages
        most = self.most
        if most is not None and self.pages + pages > most:
            return None
        if self._pool.available(self.owner) < pages:
            return None
        indices = self._claim(n)
        try:
            short = self.range.back_many(self._runs(indices))
        except DeviceError:
            self._vacate(indices)
            raise
        if short is not None:
            self._vacate(indices)
            return None
        self.pages += pages
        return indices

    def release(self, indices: Iterable[int]) -> int:
        """Slabs go back to the pool at once; pages freed."""
        ordered = sorted(indices)
        for at, n in self._runs(ordered):
            self.range.release(at, n)
        self._vacate(ordered)
        pages = len(ordered) * self.layout.slab_pages
        self.pages -= pages
        return pages

    def validate(self, backed: Set[int]) -> None:
        """Raises BrokenPromise unless exactly the slabs `backed` are, by every book there is."""
        pages = self.layout.slab_pages
        for index in backed:
            self.range.pages(index * pages, pages)
        if self.pages != len(backed) * pages or self.pages != self.range.backed:
            raise BrokenPromise(f"{self.owner}: {self.pages} pages, {self.range.backed} backed")
        if self.pages != self._pool.owned(self.owner):
            raise BrokenPromise(f"{self.owner}: the pool counts {self._pool.owned(self.owner)}")
        if sorted([*backed, *self._vacant]) != list(range(self._end)):
            raise BrokenPromise(f"{self.owner}: a slab is lost")

    def _claim(self, n: int) -> list[int]:
        """The lowest `n` slabs that are not backed, ascending."""
        indices = [heapq.heappop(self._vacant) for _ in range(min(n, len(self._vacant)))]
        more = n - len(indices)
        indices += range(self._end, self._end + more)
        self._end += more
        return indices

    def _vacate(self, indices: Iterable[int]) -> None:
        for index in indices:
            heapq.heappush(self._vacant, index)

    def _runs(self, indices: Sequence[int]) -> list[tuple[int, int]]:
        """Maximal `(page, pages)` of ascending slabs."""
        pages = self.layout.slab_pages
        runs: list[tuple[int, int]] = []
        for index in indices:
            at = index * pages
            if runs and sum(runs[-1]) == at:
                runs[-1] = (runs[-1][0], runs[-1][1] + pages)
            else:
                runs.append((at, pages))
        return runs
