"""Back slabs of a KV cache with pages: of the device's window by number, or mapped in a range.

Used by `BlockBook`. Chooses no blocks and evicts nothing: if pages are
short it changes nothing and returns None.

`PageBacking` is the usual one: a slab is a page, its index is the page's number, and blocks are
found in the window. It makes no page-table call. `RangeBacking` has addresses of its own, into
which pages are mapped: for slabs of several pages, which need not be neighbours.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence, Set

from ballast.core.actions import Short
from ballast.core.change_counter import ChangeCounter
from ballast.core.errors import BrokenPromise, ConfigError
from ballast.core.model import ModelSpec
from ballast.core.units import ceil_div
from ballast.kv.layout import Layout
from ballast.memory.lending.borrower import Borrower
from ballast.memory.pool import Pool
from ballast.memory.range import BackedRange
from ballast.memory.vm import Range, Vm

_MOST_BLOCKS = 1 << 31
"""Block tables are int32."""


class PageBounds:
    """Bounds on the pages of the pool that a cache's growth may reach; None: no bound. They free
    nothing: the engine evicts what lies beyond them."""

    def __init__(self, freed: ChangeCounter) -> None:
        """`freed`: as of `BlockBook`."""
        self.freed = freed
        self.version = ChangeCounter()
        """Counts changes of the cache's contents and bounds; the parts of a model share one."""
        self.bound: int | None = None
        """Set by construction."""
        self.cap: int | None = None
        """Set by the fleet file."""
        self.floor = 0
        """Pages that are guaranteed to the cache; no others ever get them."""
        self._limit: int | None = None

    @property
    def limit(self) -> int | None:
        """Set by the policy."""
        return self._limit

    @limit.setter
    def limit(self, pages: int | None) -> None:
        self.version.n += 1
        self.freed.n += 1
        self._limit = pages

    @property
    def most(self) -> int | None:
        """The least of all bounds."""
        bounds = (self._limit, self.bound, self.cap)
        return min((b for b in bounds if b is not None), default=None)

    def keep_between(self, floor: int, cap: int | None) -> None:
        """Set guarantee and cap; `limit` stays as far above the former."""
        if (floor, cap) != (self.floor, self.cap):
            self.limit = None if self._limit is None else self._limit + floor - self.floor
            self.floor, self.cap = floor, cap


class Backing(ABC):
    """Backs slabs of one cache, within bounds on the pages that it takes of the pool."""

    def __init__(self, owner: str, layout: Layout, pool: Pool) -> None:
        self.owner = owner
        self.layout = layout
        self.pages = 0
        """Pages of the pool that back slabs now."""
        self.borrowed_slabs: set[int] = set()
        """Slabs backed by borrowed pages."""
        self.slots: list[int] = []
        """Pages of the pool, counted in `pages`, that back no slab but the slots of staged
        blocks."""
        self.bounds = PageBounds(pool.freed)
        self._pool = pool

    @property
    @abstractmethod
    def addresses(self) -> Range:
        """Addresses in which block `b` begins at `base + b * layout.stride_bytes`."""

    @property
    @abstractmethod
    def room(self) -> int:
        """Slabs that `back` could back now, unless the operating system refuses."""

    @abstractmethod
    def back(self, n: int) -> list[int] | None:
        """Back `n` more slabs and return their indices, ascending.

        Returns None, without a change, if limit, pool or machine are short. Raises DeviceError,
        without a change, if the operating system refuses to map.
        """

    @abstractmethod
    def back_at_home(self) -> int | None:
        """Back a slab with pages of the pool, and return its index; otherwise as `back`."""

    def set_slots(self, n: int) -> bool:
        """Have `n` pages of the pool for slots, more or fewer than now; False, without a change:
        the pool or the limit is short."""
        more = n - len(self.slots)
        if more > self._room:
            return False
        if more > 0:
            pages = self._pool.allocate(self.owner, more)
            if isinstance(pages, Short):
                return False
            self.slots += pages
        elif more < 0:
            self._pool.give_back(self.owner, self.slots[n:])
            del self.slots[n:]
        self.pages += more
        return True

    @property
    def slot_room(self) -> int:
        """Most pages that `set_slots` could have for slots now."""
        return self._room + len(self.slots)

    @abstractmethod
    def release(self, indices: Iterable[int]) -> int:
        """Release slabs at once, to the pool or to the borrowed pages; return the pages freed."""

    @abstractmethod
    def page_at(self, offset: int) -> int:
        """Return the number of the page with the byte at `offset` of `addresses`, in a backed
        slab."""

    @abstractmethod
    def os_backed(self) -> int:
        """Pages of the cache that the operating system shows where its blocks are read."""

    @abstractmethod
    def validate(self, backed: Set[int]) -> None:
        """Raises BrokenPromise unless `backed` are the backed slabs by all counts and mappings."""

    @abstractmethod
    def close(self) -> None:
        """Give up the addresses; no slab is backed."""

    @property
    def _room(self) -> int:
        """Pages that could be allocated from the pool now, within the limit."""
        room, most = self._pool.available(self.owner), self.bounds.most
        return room if most is None else max(0, min(room, most - self.pages))


class PageBacking(Backing):
    """Slabs of one page each, in the device's window: a slab's index is its page's number.

    A slab is backed by a page of the pool, or, where these are short, by a borrowed one.
    """

    def __init__(
        self, owner: str, layout: Layout, pool: Pool, vm: Vm, borrower: Borrower | None = None
    ) -> None:
        super().__init__(owner, layout, pool)
        self._vm, self._borrower = vm, borrower
        self._last = -1
        """Page allocated last: the next ones preferably follow it."""
        if layout.slab_pages != 1:
            raise BrokenPromise(f"{owner}: slabs of {layout.slab_pages} pages in a window")
        if vm.window.n_pages * layout.blocks_per_slab > _MOST_BLOCKS:
            allowed = f"{layout.blocks_per_slab} blocks a page are too many: larger ones are needed"
            raise ConfigError(f"blocks of {owner}", layout.block_bytes, allowed)

    @property
    def addresses(self) -> Range:
        return self._vm.window

    @property
    def room(self) -> int:
        return self._room + (0 if self._borrower is None else self._borrower.unused)

    def back(self, n: int) -> list[int] | None:
        own = min(n, self._room)
        if n > own and (self._borrower is None or self._borrower.unused < n - own):
            return None
        pages = self._pool.allocate(self.owner, own, near=self._last if self._last >= 0 else None)
        if isinstance(pages, Short):
            return None
        self._count(pages)
        if n > own:
            assert self._borrower is not None
            borrowed = self._borrower.take(self.owner, n - own)
            assert not isinstance(borrowed, Short), "so many were unused"
            self.borrowed_slabs.update(borrowed)
            pages += borrowed
        self._vm.prefault(pages)
        return sorted(pages)

    def back_at_home(self) -> int | None:
        if not self._room:
            return None
        pages = self._pool.allocate(self.owner, 1)
        if isinstance(pages, Short):
            return None
        self._count(pages)
        return pages[0]

    def release(self, indices: Iterable[int]) -> int:
        ordered = sorted(indices)
        home = [page for page in ordered if page not in self.borrowed_slabs]
        self._pool.give_back(self.owner, home)
        self.pages -= len(home)
        if len(home) < len(ordered):
            assert self._borrower is not None
            borrowed_slabs = [page for page in ordered if page in self.borrowed_slabs]
            self._borrower.release(self.owner, borrowed_slabs)
            self.borrowed_slabs.difference_update(borrowed_slabs)
        return len(ordered)

    def page_at(self, offset: int) -> int:
        return offset // self.layout.page_bytes

    def os_backed(self) -> int:
        shown = self._vm.os_pages(self._vm.window)
        mine = self._pool.ledger.owner_of
        own = [page for page in range(self._pool.total) if mine(page) == self.owner]
        return sum(shown.get(page) == page for page in (*own, *self.borrowed_slabs))

    def validate(self, backed: Set[int]) -> None:
        ledger = self._pool.ledger
        pages = len(backed - self.borrowed_slabs) + len(self.slots)
        if self.pages != pages or self.pages != ledger.owned(self.owner):
            raise BrokenPromise(
                f"{self.owner}: {self.pages} pages, the pool counts {ledger.owned(self.owner)}"
            )
        if not self.borrowed_slabs <= backed or len(self.borrowed_slabs) != ledger.holders.held(
            self.owner
        ):
            raise BrokenPromise(f"{self.owner}: {len(self.borrowed_slabs)} pages are borrowed")
        for page in (*backed, *self.slots):
            borrowed = page in self.borrowed_slabs
            if (self.owner in ledger.holders.of(page)) != borrowed or (
                not borrowed and ledger.owner_of(page) != self.owner
            ):
                raise BrokenPromise(f"{self.owner}: page {page} is {ledger.owner_of(page)}'s")

    def close(self) -> None:
        """Nothing to do: the window is the device's."""

    def _count(self, pages: Sequence[int]) -> None:
        self.pages += len(pages)
        if pages:
            self._last = pages[-1]


class RangeBacking(Backing):
    """Slabs `0 .. n_slabs - 1` in one range of addresses; the lowest unbacked ones are used first.

    They are backed by pages of the pool alone.
    """

    def __init__(self, owner: str, layout: Layout, pool: Pool, vm: Vm, n_slabs: int) -> None:
        super().__init__(owner, layout, pool)
        self._most_slabs = max(1, n_slabs)
        # A pool smaller than one slab still gets a range; growth is Short for ever.
        self.range = BackedRange(pool, vm, owner, self._most_slabs * layout.slab_bytes)
        self._vacant: list[int] = []
        """Heap of unbacked slabs below `_end`; no slab from `_end` on is backed."""
        self._end = 0

    @property
    def addresses(self) -> Range:
        return self.range.range

    @property
    def room(self) -> int:
        left = len(self._vacant) + self._most_slabs - self._end
        return min(self._room // self.layout.slab_pages, left)

    def back(self, n: int) -> list[int] | None:
        if n > self.room:
            return None
        indices, done = self._claim(n), False
        try:
            done = self.range.back_many(self._runs(indices)) is None
        finally:
            if not done:
                self._vacate(indices)
        self.pages += done * n * self.layout.slab_pages
        return indices if done else None

    def back_at_home(self) -> int | None:
        indices = self.back(1)
        return None if indices is None else indices[0]

    def release(self, indices: Iterable[int]) -> int:
        ordered = sorted(indices)
        for at, n in self._runs(ordered):
            self.range.release(at, n)
        freed = len(ordered) * self.layout.slab_pages
        self.pages -= freed
        self._vacate(ordered)
        return freed

    def page_at(self, offset: int) -> int:
        return self.range.pages(offset // self.layout.page_bytes, 1)[0]

    def os_backed(self) -> int:
        return self.range.os_backed()

    def validate(self, backed: Set[int]) -> None:
        pages = self.layout.slab_pages
        for index in backed:
            self.range.pages(index * pages, pages)
        if self.pages != len(backed) * pages or self.pages != self.range.backed:
            raise BrokenPromise(f"{self.owner}: {self.pages} pages, {self.range.backed} backed")
        if self.pages != self._pool.ledger.owned(self.owner):
            raise BrokenPromise(
                f"{self.owner}: the pool counts {self._pool.ledger.owned(self.owner)}"
            )
        self.range.validate()
        if sorted([*backed, *self._vacant]) != list(range(self._end)):
            raise BrokenPromise(f"{self.owner}: a slab is lost")

    def close(self) -> None:
        self.range.close()

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

    def _runs(self, indices: Sequence[int]) -> list[tuple[int, int]]:
        """Return maximal runs `(page, pages)` of ascending slabs."""
        pages = self.layout.slab_pages
        runs: list[tuple[int, int]] = []
        for index in indices:
            at = index * pages
            if runs and sum(runs[-1]) == at:
                runs[-1] = (runs[-1][0], runs[-1][1] + pages)
            else:
                runs.append((at, pages))
        return runs


def backing_of(
    spec: ModelSpec, pool: Pool, vm: Vm, capacity_blocks: int | None, borrower: Borrower | None
) -> Backing:
    """Choose how a model's cache is backed. Arguments as of `KvCache`."""
    layout = Layout.of(spec, vm.page_bytes)
    owner = f"kv:{spec.name}"
    n_slabs = pool.total // layout.slab_pages
    if capacity_blocks is not None:
        n_slabs = min(n_slabs, ceil_div(capacity_blocks, layout.blocks_per_slab))
    backing: Backing
    if layout.slab_pages == 1:
        backing = PageBacking(owner, layout, pool, vm, borrower)
    else:
        backing = RangeBacking(owner, layout, pool, vm, n_slabs)
    if capacity_blocks is not None:
        backing.bounds.bound = n_slabs * layout.slab_pages
    return backing
