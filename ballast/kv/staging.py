"""Stage blocks in use: copy them to the host beside a job, and bring them home in the same way.

Part of `KvCache`. The engine orders moves before a job, for blocks that its sequences use, and ends
them with the job. A full block never changes, so block tables name the source until then, and a
job that fails changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from ballast.core.actions import Short
from ballast.core.errors import BrokenPromise
from ballast.kv.book import BlockBook
from ballast.kv.staged import BlockMoves


class BlockStaging:
    """Moves of used blocks between the device and the host."""

    def __init__(self, book: BlockBook, grow: Callable[[list[int], int], Short | None]) -> None:
        """`grow`: as `KvCache.grow`."""
        self._book, self._grow = book, grow

    def slab_by_slab(self, blocks: Iterable[int]) -> list[int]:
        """Return used blocks in the order in which to store them: slabs that hold nothing else come
        first, which frees their pages; otherwise in the order of their first blocks."""
        groups: dict[int, dict[int, None]] = {}
        for block in blocks:
            groups.setdefault(block // self._book.size, {})[block] = None
        of = self._book.slabs.of
        ordered = sorted(groups.items(), key=lambda group: of[group[0]].occupied > len(group[1]))
        return [block for _, group in ordered for block in group]

    def begin_moves(self, stores: Sequence[int], homes: Sequence[int]) -> BlockMoves:
        """Order the copies of the next job: as many as possible, in order, of device blocks to the
        host (`stores`) and of staged ones to blocks of the device (`homes`). All are in use, and
        the job uses them. Returns the moves."""
        book, staged = self._book, self._book.staged
        if book.moves:
            raise BrokenPromise(f"{book.owner}: the moves of a job have not ended")
        stores = stores[: staged.room]
        pairs = tuple(zip(stores, staged.allocate(len(stores)), strict=True))
        brought: list[int] = []
        while homes and self._grow(brought, len(homes) * book.spec.block_tokens) is not None:
            homes = homes[: len(homes) // 2]
        book.moves = BlockMoves(pairs, tuple(zip(homes, brought, strict=True)))
        if book.moves:
            book.version.n += 1
        return book.moves

    def end_moves(self, tables: Iterable[list[int]], *, done: bool) -> bool:
        """End the moves of a job; `done`: it has succeeded. `tables` must be all tables with
        references; they are changed in place. Returns whether all moves count: none does after a
        failure, nor stores for whose staged blocks there would be no slots."""
        book, staged = self._book, self._book.staged
        moves, book.moves = book.moves, BlockMoves()
        if not moves:
            if len(staged.pages) > staged.pages_for(len(staged)):
                book.set_slots(staged.pages_for(len(staged)))
            return True
        book.version.n += 1
        stores, homes = moves.stores, moves.homes
        if done and not self._has_slots(stores, len(homes)):
            stores = ()
        elif not done:
            stores = homes = ()
        staged.free(host for _, host in moves.stores[len(stores) :])
        book.release([block for _, block in moves.homes[len(homes) :]])
        moved = dict((*stores, *homes))
        for table in tables:
            if not moved.keys().isdisjoint(table):
                table[:] = [moved.get(block, block) for block in table]
        for source, target in moved.items():  # the target has at most one reference
            book.rename(source, target)
        book.relocations += bool(moved)
        book.freed.n += 1
        staged.free(block for block, _ in homes)
        book.vacate([block for block, _ in stores])
        if moved and not book.set_slots(staged.pages_for(len(staged))):
            raise BrokenPromise(f"{book.owner}: slots were to be on the pages of staged blocks")
        return (stores, homes) == (moves.stores, moves.homes)

    def _has_slots(self, stores: Sequence[tuple[int, int]], homes: int) -> bool:
        """Return whether slots for all staged blocks, with `stores` and without `homes`, fit what
        is free and what the stores leave."""
        book, borrowed_slabs = self._book, self._book.backing.borrowed_slabs
        left = Counter(block // book.size for block, _ in stores)
        of = book.slabs.of
        emptied = sum(of[i].occupied == n and i not in borrowed_slabs for i, n in left.items())
        wanted = book.staged.pages_for(len(book.staged) - homes)
        return wanted <= emptied + book.backing.slot_room
