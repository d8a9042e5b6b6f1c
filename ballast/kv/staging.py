"""Stage blocks in use: copy them to the host beside a job, and bring them home in the same way.

Base class of `KvCache`. The engine orders moves before a job, for blocks that its sequences use,
and ends them with it. A full block never changes, so that until then its source is what tables
name: a job that fails leaves everything as it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ballast.core.errors import BrokenPromise
from ballast.kv.staged import BlockMoves
from ballast.kv.tables import BlockTables


class BlockStaging(BlockTables):
    """Moves of used blocks between the device and the host."""

    def slab_by_slab(self, blocks: Iterable[int]) -> list[int]:
        """Return used blocks in the order in which to store them: slabs that hold nothing else come
        first, which frees their pages; otherwise in the order of their first blocks."""
        groups: dict[int, dict[int, None]] = {}
        for block in blocks:
            groups.setdefault(block // self._size, {})[block] = None
        of = self._slabs.of
        ordered = sorted(groups.items(), key=lambda group: of[group[0]].occupied > len(group[1]))
        return [block for _, group in ordered for block in group]

    def begin_moves(self, stores: Sequence[int], homes: Sequence[int]) -> BlockMoves:
        """Order the copies of the next job: as many as possible, in order, of device blocks to the
        host (`stores`) and of staged ones to blocks of the device (`homes`). All are in use, and
        the job uses them. Returns the moves."""
        if self.moves:
            raise BrokenPromise(f"{self.owner}: the moves of a job have not ended")
        staged = stores[: self.staged.room]
        pairs = tuple(zip(staged, self.staged.allocate(len(staged)), strict=True))
        brought: list[int] = []
        while homes and self.grow(brought, len(homes) * self.spec.block_tokens) is not None:
            homes = homes[: len(homes) // 2]
        self.moves = BlockMoves(pairs, tuple(zip(homes, brought, strict=True)))
        if self.moves:
            self.version.n += 1
        return self.moves

    def end_moves(self, tables: Iterable[list[int]], *, done: bool) -> bool:
        """End the moves of a job; `done`: it has succeeded. `tables` must be all tables with
        references; they are changed in place. Returns whether all moves count: none does after a
        failure, nor stores for whose staged blocks there would be no slots."""
        moves, self.moves = self.moves, BlockMoves()
        if not moves:
            if len(self.staged.pages) > self.staged.pages_for(len(self.staged)):
                self._set_slots(self.staged.pages_for(len(self.staged)))
            return True
        self.version.n += 1
        stores, homes = moves.stores, moves.homes
        if done and not self._has_slots(stores, len(homes)):
            stores = ()
        elif not done:
            stores = homes = ()
        self.staged.free(host for _, host in moves.stores[len(stores) :])
        self._release([block for _, block in moves.homes[len(homes) :]])
        moved = dict((*stores, *homes))
        for table in tables:
            if not moved.keys().isdisjoint(table):
                table[:] = [moved.get(block, block) for block in table]
        for source, target in moved.items():
            self._rename(source, target)
        self.relocations += bool(moved)
        self.freed.n += 1
        self.staged.free(staged for staged, _ in homes)
        self._vacate([block for block, _ in stores])
        if moved and not self._set_slots(self.staged.pages_for(len(self.staged))):
            raise BrokenPromise(f"{self.owner}: slots were to be on the pages of staged blocks")
        return (stores, homes) == (moves.stores, moves.homes)

    def _has_slots(self, stores: Sequence[tuple[int, int]], homes: int) -> bool:
        """Return whether slots for all staged blocks, with `stores` and without `homes`, fit what
        is free and what the stores leave."""
        size, of = self._size, self._slabs.of
        left = Counter(block // size for block, _ in stores)
        abroad = self._backing.abroad
        emptied = sum(of[i].occupied == n and i not in abroad for i, n in left.items())
        wanted = self.staged.pages_for(len(self.staged) - homes)
        return wanted <= emptied + self._backing.slot_room

    def _rename(self, source: int, target: int) -> None:
        """Transfer references and name of a block to another, which has at most one reference."""
        shared = self._refs.pop(source)
        self._refs[target] = shared
        if self._prefix is not None:
            self._prefix.move(source, target)

    def _vacate(self, blocks: Sequence[int]) -> None:
        """Turn device blocks whose contents have moved into free ones."""
        slabs = {self._slabs.home(block).index: self._slabs.home(block) for block in blocks}
        for block in blocks:
            slab = slabs[block // self._size]
            slab.used -= 1
            slab.free.append(block)
        for slab in slabs.values():
            self._slabs.settle(slab)
        self._give_back([slab for slab in slabs.values() if not slab.occupied])
