"""Track used, cached and free blocks of each slab, and choose blocks to allocate or uncache.

Used by `BlockBook`, `KvCache` and the compaction plan. Pure bookkeeping: holds no pages, no
reference counts and no prefix names.

::

    slab   in use                idle                  (not in the book)
           [used][cach][free]    [cach][free][cach]    [    ][    ][    ]
           holds referenced      holds cached          backed by nothing,
           blocks                blocks only           or about to be given back

Invariants: each block of a slab in the book is in exactly one of the three states; between calls
of `KvCache` every slab has a block that is not free. Every operation costs O(1) a block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from ballast.core.errors import BrokenPromise
from ballast.kv.survival import Survival


class Slab:
    """Block states of one slab. After a change of its fields the caller runs `Slabs.settle`."""

    __slots__ = (
        "_at_hand",
        "_bucket",
        "_level",
        "_line",
        "_queue",
        "cached",
        "free",
        "index",
        "since",
        "tenant",
        "used",
    )

    def __init__(self, index: int, blocks_per_slab: int) -> None:
        first = index * blocks_per_slab
        self.index = index
        self.free = list(range(first + blocks_per_slab - 1, first - 1, -1))
        """Free block numbers; allocated from the end."""
        self.used = 0
        """Blocks with at least one reference."""
        self.cached: dict[int, None] = {}
        """Blocks without references that hold a cached prefix, least recently used first."""
        self.tenant = ""
        """Tenant of the block that was cached last."""
        self.since = 0
        """When blocks of it came out of use last, on the clock of `Survival`."""
        self._bucket: _ByFree | None = None
        self._level = 0
        self._line: str | None = None
        self._queue: _Cached | None = None
        self._at_hand = 0

    @property
    def occupied(self) -> int:
        return self.used + len(self.cached)


class _ByFree:
    """Slabs with free blocks, bucketed by their number of free blocks."""

    __slots__ = ("_levels", "_mask", "blocks")

    def __init__(self, blocks_per_slab: int) -> None:
        self.blocks = 0
        self._levels: list[dict[int, Slab]] = [{} for _ in range(blocks_per_slab + 1)]
        self._mask = 0
        """Bit k is set if some slab has k free blocks."""

    def add(self, slab: Slab, level: int) -> None:
        self._levels[level][slab.index] = slab
        self._mask |= 1 << level
        self.blocks += level

    def remove(self, slab: Slab, level: int) -> None:
        slabs = self._levels[level]
        del slabs[slab.index]
        if not slabs:
            self._mask &= ~(1 << level)
        self.blocks -= level

    def fullest(self) -> Slab | None:
        """Return the slab with the fewest free blocks; of several, the one added last."""
        if not self._mask:
            return None
        level = (self._mask & -self._mask).bit_length() - 1
        slabs = self._levels[level]
        return slabs[next(reversed(slabs))]


class _Cached:
    """Slabs with cached blocks, least recently used first, and the same by tenant."""

    __slots__ = ("all", "of")

    def __init__(self) -> None:
        self.all: OrderedDict[int, Slab] = OrderedDict()
        self.of: OrderedDict[str, OrderedDict[int, Slab]] = OrderedDict()
        """By tenant, the one whose blocks were cached last at the end."""

    def touch(self, slab: Slab) -> None:
        """Add a slab, or make it the most recently used, in the line of its tenant."""
        self.remove(slab)
        self.all[slab.index] = slab
        line = self.of.get(slab.tenant)
        if line is None:
            line = self.of[slab.tenant] = OrderedDict()
        line[slab.index] = slab
        self.of.move_to_end(slab.tenant)
        slab._line = slab.tenant

    def remove(self, slab: Slab) -> None:
        """Remove a slab, if it is here."""
        if self.all.pop(slab.index, None) is not None:
            assert slab._line is not None
            line = self.of[slab._line]
            del line[slab.index]
            if not line:
                del self.of[slab._line]

    def next(self) -> Slab:
        """Return the slab to be uncached first."""
        return next(self.in_turn(()))

    def in_turn(self, spared: Collection[int]) -> Iterator[Slab]:
        """Yield all slabs but those `spared` in the order in which they are to be uncached.

        The least recently used slab of the tenant with the most slabs comes first: it is over its
        share, unless all are equal. Among equals, of the one whose blocks were cached last.
        """
        if len(self.of) <= 1:
            yield from (s for i, s in self.all.items() if i not in spared)
            return
        lines = {t: (s for i, s in line.items() if i not in spared) for t, line in self.of.items()}
        left = {t: len(line) - sum(i in line for i in spared) for t, line in self.of.items()}
        while left[tenant := max(reversed(left), key=left.__getitem__)]:
            left[tenant] -= 1
            yield next(lines[tenant])


class Slabs:
    """All slabs of a KV cache that are backed by pages now."""

    def __init__(self, blocks_per_slab: int) -> None:
        self.blocks_per_slab = blocks_per_slab
        self.of: dict[int, Slab] = {}
        """Backed slabs by index."""
        self._idle, self._mixed = _Cached(), _Cached()
        self.idle: OrderedDict[int, Slab] = self._idle.all
        """Slabs of cached blocks only, least recently used first."""
        self.at_hand = 0
        """Free and cached blocks in slabs in use: allocatable without a new or an idle slab."""
        self.mixed: OrderedDict[int, Slab] = self._mixed.all
        """Slabs in use that hold cached blocks, least recently used first."""
        self.survival = Survival()
        self._in_use = _ByFree(blocks_per_slab)
        self._others = _ByFree(blocks_per_slab)

    @property
    def free(self) -> int:
        """Free blocks of all slabs."""
        return self._in_use.blocks + self._others.blocks

    @property
    def idle_of(self) -> Mapping[str, int]:
        """Number of idle slabs of each tenant that has any."""
        lines = tuple(self._idle.of.items())  # reports are made by another thread
        return {tenant: len(line) for tenant, line in lines}

    def to_drop(self, spared: Collection[int]) -> Iterator[Slab]:
        """Yield the idle slabs but those `spared`, by index, in the order in which they are to be
        dropped: of tenants over their shares first, then the least recently used."""
        return self._idle.in_turn(spared)

    def to_thin(self) -> Iterator[Slab]:
        """Yield the slabs in use that hold cached blocks, in the same order."""
        return self._mixed.in_turn(())

    @property
    def holes(self) -> int:
        """Free blocks of slabs in use."""
        return self._in_use.blocks

    def home(self, block: int) -> Slab:
        """Return the slab of a block. Raises BrokenPromise if it is not backed."""
        slab = self.of.get(block // self.blocks_per_slab)
        if slab is None:
            raise BrokenPromise(f"block {block} is in no slab")
        return slab

    def open(self, indices: Iterable[int]) -> None:
        """Add slabs that have just been backed, with all blocks free. If `indices` ascend, blocks
        are allocated in ascending order."""
        for index in reversed(list(indices)):
            slab = self.of[index] = Slab(index, self.blocks_per_slab)
            self.settle(slab)

    def close(self, slab: Slab) -> None:
        """Remove a slab. Raises BrokenPromise if it has used or cached blocks."""
        if slab.occupied or slab._bucket is None:
            raise BrokenPromise(f"slab {slab.index} is given back while it holds something")
        slab._bucket.remove(slab, slab._level)
        del self.of[slab.index]

    def allocate(self, n: int) -> list[int]:
        """Mark `n` free blocks used and return them: the fullest slabs in use come first.

        Raises BrokenPromise if fewer are free."""
        blocks: list[int] = []
        while len(blocks) < n:
            slab = self._in_use.fullest() or self._others.fullest()
            if slab is None:
                raise BrokenPromise(f"{n} blocks taken, only {len(blocks)} were free")
            k = min(n - len(blocks), len(slab.free))
            blocks += slab.free[: -k - 1 : -1]
            del slab.free[-k:]
            slab.used += k
            self.settle(slab)
        return blocks

    def free_cached(self, n: int) -> list[int]:
        """Turn at least `n` cached blocks into free ones and return them; fewer if no more exist.

        Slabs in use come first, then whole idle slabs; among slabs those of tenants over their
        shares, and among these, and among the blocks of a slab, the least recently used.
        """
        gone: list[int] = []
        while len(gone) < n:
            if self.mixed:
                slab = self._mixed.next()
                lost = list(slab.cached)[: n - len(gone)]
            elif self.idle:
                slab = self._idle.next()
                lost = list(slab.cached)
            else:
                break
            self.survival.dropped(slab.since, len(lost))
            self.uncache(slab, lost)
            gone += lost
        return gone

    def uncache(self, slab: Slab, blocks: list[int]) -> None:
        """Turn cached blocks of a slab into free ones."""
        for block in blocks:
            del slab.cached[block]
        slab.free += blocks
        self.settle(slab)

    def chances(self) -> Callable[[], tuple[float, ...]]:
        """Return what computes the chances that blocks of idle slabs are used again, by age, the
        least recently used first (`Survival.chances`); none if nothing is known."""
        if not self.idle:
            return tuple
        oldest, newest = next(iter(self.idle.values())), next(reversed(self.idle.values()))
        blocks = len(self.idle) * self.blocks_per_slab
        return self.survival.chances(oldest.since, newest.since, blocks)

    def relocate(self, source: int, target: int) -> None:
        """Swap the states of a used or cached block and a free block of another slab."""
        old, new = self.home(source), self.home(target)
        new.free.remove(target)
        if source in old.cached:
            del old.cached[source]
            new.cached[target] = None
            new.tenant, new.since = old.tenant, old.since
        else:
            old.used -= 1
            new.used += 1
        old.free.append(source)
        self.settle(old)
        self.settle(new)

    def reorder(self, indices: Iterable[int]) -> None:
        """Make idle slabs least recently used first in the order of `indices`, which may name
        others too."""
        for index in indices:
            slab = self.of.get(index)
            if slab is not None and slab._queue is self._idle:
                self._idle.touch(slab)

    def settle(self, slab: Slab, *, touched: bool = False) -> None:
        """Update buckets, LRU queues and counts after a change of a slab.

        `touched`: make its cached blocks the most recently used."""
        level, n_cached = len(slab.free), len(slab.cached)
        bucket = (self._in_use if slab.used else self._others) if level else None
        if bucket is not slab._bucket or level != slab._level:
            if slab._bucket is not None:
                slab._bucket.remove(slab, slab._level)
            if bucket is not None:
                bucket.add(slab, level)
            slab._bucket, slab._level = bucket, level
        queue = (self._mixed if slab.used else self._idle) if n_cached else None
        if queue is not slab._queue:
            if slab._queue is not None:
                slab._queue.remove(slab)
            if queue is not None:
                queue.touch(slab)
            slab._queue = queue
        elif touched and queue is not None:
            queue.touch(slab)
        at_hand = level + n_cached if slab.used else 0
        self.at_hand += at_hand - slab._at_hand
        slab._at_hand = at_hand

    def validate(self) -> None:
        """Raises BrokenPromise unless every count and every queue follows from the slabs."""
        size = self.blocks_per_slab
        for index, slab in self.of.items():
            blocks = {*slab.free, *slab.cached}
            within = all(b // size == index for b in blocks)
            if not within or len(slab.free) + slab.occupied != size or slab.occupied == 0:
                raise BrokenPromise(f"slab {index}: {slab.used} used, {blocks} free or cached")
            if len(blocks) != len(slab.free) + len(slab.cached):
                raise BrokenPromise(f"slab {index}: a block is both free and cached")
        slabs = self.of.values()
        idle = {s.index for s in slabs if not s.used}
        mixed = {s.index for s in slabs if s.used and s.cached}
        if set(self.idle) != idle or set(self.mixed) != mixed:
            raise BrokenPromise("a slab is in the wrong queue")
        for cached in (self._idle, self._mixed):
            lines = {i: tenant for tenant, line in cached.of.items() for i in line}
            if lines != {i: s._line for i, s in cached.all.items()} or not all(cached.of.values()):
                raise BrokenPromise("a slab is in the wrong tenant's line")
        if self.at_hand != sum(len(s.free) + len(s.cached) for s in slabs if s.used):
            raise BrokenPromise(f"{self.at_hand} blocks at hand is a miscount")
        if self.holes != sum(len(s.free) for s in slabs if s.used):
            raise BrokenPromise(f"{self.holes} holes is a miscount")
        if self.free != sum(len(s.free) for s in slabs):
            raise BrokenPromise(f"{self.free} free blocks is a miscount")
