"""Manage one model's paged KV cache on one device: allocate, cache, free and compact blocks.

`KvCache` is what the engine uses, live and in virtual time; `ModelState` holds one for each model.
A block is *used* (in at least one block table), *cached* (in no table, but holding a prefix that
may match again) or free. Slabs of blocks are backed by pages of the pool when a table grows, and
their pages are released as soon as no block of the slab is used or cached. Never touches KV bytes
itself: blocks are moved by a callable that the caller passes in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence, Set
from itertools import islice

from ballast.core.errors import BrokenPromise
from ballast.core.rotation import WHOLE, Rotation
from ballast.core.units import ceil_div
from ballast.kv import compaction
from ballast.kv.slabs import Slab
from ballast.kv.staging import BlockStaging


class KvCache(BlockStaging):
    """KV cache of one model. It owns its pages in the pool as ``kv:NAME``.

    Callers must not free, drop, compact or clear blocks that a job in flight uses.
    """

    # -- giving memory up -------------------------------------------------------------------------

    def drop_cached(self, pages: int, *, spare: Collection[int] = ()) -> int:
        """Forget cached prefixes until `pages` are freed or no more can be; return pages freed.

        Slabs of tenants with more than their share of the cached ones go first, among these and
        among the others the least recently used; slabs on borrowed pages last, slabs with a block
        of `spare` never. Prefixes in slabs in use stay: forgetting them would free no page.
        """
        if self._fixed:
            return 0
        self.version.n += 1
        spared = {block // self._size for block in spare}
        idle: Iterable[Slab] = self._slabs.to_drop(spared)
        if self._backing.abroad:
            idle = sorted(idle, key=lambda slab: slab.index in self._backing.abroad)
        dropped = list(islice(idle, max(0, ceil_div(pages, self.layout.slab_pages))))
        for slab in dropped:
            self._drop(slab)
        return self._give_back(dropped)

    def scrub(self, tenant: str | None) -> int:
        """Forget the cached prefixes of a tenant (None: of all) that no request uses; return their
        number of blocks."""
        if self._prefix is None:
            return 0
        self.version.n += 1
        emptied: list[Slab] = []
        n = 0
        for slab in list(self._slabs.of.values()):
            prefix = self._prefix
            lost = [b for b in slab.cached if tenant is None or prefix.tenant(b) == tenant]
            if not lost:
                continue
            n += len(lost)
            self._forget(lost)
            self._slabs.uncache(slab, lost)
            if not slab.occupied:
                emptied.append(slab)
        self._give_back(emptied)
        return n

    def compact(
        self, tables: Iterable[list[int]], pages: int, *, fixed: Set[int] = frozenset()
    ) -> int:
        """Move blocks together to empty whole slabs, until `pages` are freed; return pages freed.

        `tables` must be all tables with references; they are changed in place. Blocks in `fixed`
        (those of jobs in flight) do not move. If moves into free blocks empty too few slabs,
        cached blocks of slabs in use are forgotten first. Raises BrokenPromise, before anything
        moves, if a block that would move has references that are not in `tables`.
        """
        if self._fixed:
            return 0
        wanted = ceil_div(pages, self.layout.slab_pages)
        moves = compaction.plan(self._slabs, wanted, fixed)
        missing = wanted - len({source // self._size for source, _ in moves})
        if missing > 0 and self._forget_scattered(missing * self._size):
            moves = compaction.plan(self._slabs, wanted, fixed)
        if not moves:
            return 0
        return self._carry_out(moves, tables)

    def _forget_scattered(self, blocks: int) -> bool:
        """Forget at least `blocks` cached blocks of slabs in use, in the order of `drop_cached`.

        Returns whether there were any."""
        forgotten = 0
        for slab in list(self._slabs.to_thin()):
            if forgotten >= blocks:
                break
            forgotten += len(slab.cached)
            self._drop(slab)
        self.version.n += forgotten > 0
        return forgotten > 0

    def clear(self) -> None:
        """Forget all prefixes and free all pages. Raises BrokenPromise if a block is in use."""
        if self._refs:
            raise BrokenPromise(f"{self.owner} is cleared while {len(self._refs)} blocks are used")
        self.drop_cached(self.pages + self.borrowed_pages)
        self.turn(WHOLE)

    def turn(self, wanted: Rotation) -> bool:
        """Change which layers rotate, that is, share pages. No job may be running.

        KV of layers that rotated before or rotate now is undefined afterwards. Returns False,
        without a change, if the pool is short. Raises DeviceError, with contents lost, if the
        operating system refuses to map.
        """
        if self._layered is None or wanted == self.rotation:
            return wanted == self.rotation
        self.version.n += 1
        self.relocations += 1
        turned = self._layered.turn(wanted, self._slabs.of)
        self.freed.n += turned  # growth takes other pages than before
        return turned

    def close(self) -> None:
        """Free all pages and the reserved addresses."""
        self.clear()
        self._backing.close()

    # -- borrowed pages ---------------------------------------------------------------------------

    def holds(self, page: int) -> bool:
        """Return whether a borrowed page backs blocks now."""
        return page in self._backing.abroad

    def used_with(self, page: int) -> list[int]:
        """Return the used blocks on a borrowed page."""
        return [b for b in self._blocks_of(page) if b in self._refs]

    def forsake(self, page: int) -> bool:
        """Forget the prefixes cached on a borrowed page, and release it.

        Returns False, without a change, if a block of it is used."""
        slab = self._slabs.of[page]
        if slab.used:
            return False
        self.version.n += 1
        self._drop(slab)
        self._give_back([slab])
        return True

    def bring_home(self, page: int, tables: Iterable[list[int]]) -> bool:
        """Move the blocks of a borrowed page to one of the pool, and release it.

        `tables` must be all tables with references; they are changed in place. No job in flight may
        use the blocks. Returns False, without moving anything, if pages are short."""
        home = self._backing.back_at_home()
        if home is None:
            return False
        slab = self._slabs.of[page]
        self._slabs.open([home])
        held = [b for b in self._blocks_of(page) if b not in set(slab.free)]
        self._carry_out([(b, b + (home - page) * self._size) for b in held], tables)
        return True

    def _blocks_of(self, page: int) -> Sequence[int]:
        """Return all blocks of a slab of one page."""
        return range(page * self._size, (page + 1) * self._size)

    # -- inside -----------------------------------------------------------------------------------

    def _carry_out(self, moves: Sequence[tuple[int, int]], tables: Iterable[list[int]]) -> int:
        """Move blocks (source, target), and give back the slabs that this empties; return their
        pages."""
        self.version.n += 1
        self.relocations += 1
        tables = list(tables)
        self._check_references({source for source, _ in moves}, tables)
        moved: dict[int, int] = {}
        try:
            for source, target in moves:
                self._relocate(source, target)
                moved[source] = target
        finally:
            for table in tables:
                if not moved.keys().isdisjoint(table):
                    table[:] = [moved.get(block, block) for block in table]
            sources = {self._slabs.home(source).index for source in moved}
            homes = [self._slabs.of[index] for index in sources]
            freed = self._give_back([slab for slab in homes if not slab.occupied])
        return freed

    def _check_references(self, blocks: Set[int], tables: Iterable[Sequence[int]]) -> None:
        shown = Counter(block for table in tables for block in table if block in blocks)
        for block in blocks:
            if shown[block] != self._refs.get(block, 0):
                raise BrokenPromise(
                    f"{self.owner}: block {block} has {self._refs.get(block, 0)} references, "
                    f"the tables show {shown[block]}"
                )

    def _relocate(self, source: int, target: int) -> None:
        if self.move is not None:
            self.move(source, target)
        self._slabs.relocate(source, target)
        if source in self._refs:
            self._refs[target] = self._refs.pop(source)
        if self._prefix is not None:
            self._prefix.move(source, target)
