"""Back slabs of a KV cache with pages of the pool, or with borrowed pages, and release them.

Used by `BlockBooks`, the base of `KvCache`, for the block-major layout; `LayeredBacking` extends
it. Chooses no blocks and evicts nothing: if pages are short it changes nothing and returns None.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence, Set

from ballast.core.errors import BrokenPromise, DeviceError
from ballast.kv.layout import Layout
from ballast.memory.lending.borrower import Borrower
from ballast.memory.pool import Pool
from ballast.memory.range import BackedRange
from ballast.memory.vm import Vm


class Backing:
    """Slabs `0 .. n_slabs - 1` in one range of addresses; the lowest unbacked ones are used first.

    A slab is backed by pages of the pool, or, where these are short, by borrowed ones.
    """

    def __init__(
        self,
        owner: str,
        layout: Layout,
        pool: Pool,
        vm: Vm,
        n_slabs: int,
        borrower: Borrower | None = None,
    ) -> None:
        self.owner = owner
        self.layout = layout
        self.pages = 0
        """Pages of the pool that back slabs now."""
        self.abroad: set[int] = set()
        """Slabs backed by borrowed pages."""
        self.limit: int | None = None
        self.bound: int | None = None
        """Upper bounds on pages of the pool: `limit` set by the policy, `bound` by construction
        (None: unbounded). Lowering them releases nothing."""
        self._pool = pool
        self._borrower = borrower
        self._most_slabs = max(1, n_slabs)
        # A pool smaller than one slab still gets a range; growth is Short for ever.
        self.range = BackedRange(pool, vm, owner, self._most_slabs * layout.range_bytes)
        self._vacant: list[int] = []
        """Heap of unbacked slabs below `_end`; no slab from `_end` on is backed."""
        self._end = 0

    @property
    def most(self) -> int | None:
        return min((b for b in (self.limit, self.bound) if b is not None), default=None)

    def back(self, n: int) -> list[int] | None:
        """Back `n` more slabs and return their indices, ascending.

        Returns None, without a change, if limit, pool or machine are short. Raises DeviceError,
        without a change, if the operating system refuses to map.
        """
        size = self.layout.slab_pages
        own = min(n, self._room // size)
        if n > own and (self._borrower is None or self._borrower.unused < (n - own) * size):
            return None
        if n > len(self._vacant) + self._most_slabs - self._end:
            return None
        indices = self._claim(n)
        home, abroad = indices[:own], indices[own:]
        try:
            done = self._back_home(home) and self._back_abroad(abroad)
        except DeviceError:
            self._undo(indices)
            raise
        if not done:
            self._undo(indices)
            return None
        return indices

    def release(self, indices: Iterable[int]) -> int:
        """Release slabs at once, to the pool or to the borrowed pages; return the pages freed."""
        ordered = sorted(indices)
        home = [index for index in ordered if index not in self.abroad]
        for at, n in self._runs(home):
            self.range.release(at, n)
        self.pages -= len(home) * self.layout.slab_pages
        if len(home) < len(ordered):
            self._release_abroad([index for index in ordered if index in self.abroad])
        self._vacate(ordered)
        return len(ordered) * self.layout.slab_pages

    def bring_home(self, index: int, copy: Callable[[int], None]) -> bool:
        """Replace a slab's borrowed pages by pages of the pool; its addresses stay.

        `copy(other)` copies the slab's contents to slab `other`, whose pages are then mapped in its
        place. No job in flight may use the slab. Returns False, without a change, if limit, pool or
        machine are short.
        """
        size = self.layout.slab_pages
        if self._room < size or not (self._vacant or self._end < self._most_slabs):
            return False
        (spare,) = self._claim(1)
        try:
            done = self._back_home([spare])
        except DeviceError:
            self._vacate([spare])
            raise
        if done:
            copy(spare)
            self._release_abroad([index])
            self.range.hand_to(spare * size, size, self.range, index * size)
        self._vacate([spare])
        return done

    def validate(self, backed: Set[int]) -> None:
        """Raises BrokenPromise unless `backed` are the backed slabs by all counts and mappings."""
        pages = self.layout.slab_pages
        for index in backed:
            self.range.pages(index * pages, pages)
        home = len(backed - self.abroad)
        if self.pages != home * pages or self.pages != self.range.backed:
            raise BrokenPromise(f"{self.owner}: {self.pages} pages, {self.range.backed} backed")
        if not self.abroad <= backed or self.range.aliased != len(self.abroad) * pages:
            raise BrokenPromise(f"{self.owner}: {self.range.aliased} pages are borrowed")
        if self.pages != self._pool.ledger.owned(self.owner):
            raise BrokenPromise(
                f"{self.owner}: the pool counts {self._pool.ledger.owned(self.owner)}"
            )
        if sorted([*backed, *self._vacant]) != list(range(self._end)):
            raise BrokenPromise(f"{self.owner}: a slab is lost")

    @property
    def _room(self) -> int:
        """Pages that could be allocated from the pool now, within the limit."""
        room = self._pool.available(self.owner)
        return room if self.most is None else max(0, min(room, self.most - self.pages))

    def _back_home(self, indices: Sequence[int]) -> bool:
        if indices and self.range.back_many(self._runs(indices)) is not None:
            return False
        self.pages += len(indices) * self.layout.slab_pages
        return True

    def _back_abroad(self, indices: Sequence[int]) -> bool:
        for at, n in self._runs(indices):
            assert self._borrower is not None
            if self._borrower.back(self.range, at, n) is not None:
                return False
            size = self.layout.slab_pages
            self.abroad.update(range(at // size, (at + n) // size))
        return True

    def _release_abroad(self, indices: Sequence[int]) -> None:
        assert self._borrower is not None
        for at, n in self._runs(indices):
            self._borrower.release(self.range, at, n)
        self.abroad.difference_update(indices)

    def _undo(self, indices: Sequence[int]) -> None:
        """Release those of the slabs that were backed, and make all of them vacant again."""
        backed = [i for i in indices if self.range.is_backed(i * self.layout.slab_pages)]
        self.release(backed)
        self._vacate([i for i in indices if i not in set(backed)])

    def _claim(self, n: int) -> list[int]:
        """Take the lowest `n` unbacked slabs out of the vacant ones; return them, ascending."""
        indices = [heapq.heappop(self._vacant) for _ in range(min(n, len(self._vacant)))]
        more = n - len(indices)
        indices += range(self._end, self._end + more)
        self._end += more
        return indices

    def _vacate(self, indices: Iterable[int]) -> None:
        for index in indices:
            heapq.heappush(self._vacant, index)

    def _runs(self, indices: Sequence[int], pages: int = 0) -> list[tuple[int, int]]:
        """Return maximal runs `(page, pages)` of ascending slabs; `pages` per slab, 0: all."""
        pages = pages or self.layout.slab_pages
        runs: list[tuple[int, int]] = []
        for index in indices:
            at = index * pages
            if runs and sum(runs[-1]) == at:
                runs[-1] = (runs[-1][0], runs[-1][1] + pages)
            else:
                runs.append((at, pages))
        return runs
