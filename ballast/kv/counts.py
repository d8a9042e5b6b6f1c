"""Count a KV cache's used, cached and free blocks, and the pages that they take or would free.

Part of `KvCache`: the engine's planner, views and policies' offers read these counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ballast.core.actions import Short
from ballast.kv.book import BlockBook


class BlockCounts:
    """Block and page counts of one model's KV cache."""

    def __init__(self, book: BlockBook) -> None:
        self._book = book

    @property
    def cached_pages(self) -> int:
        """Pages of the pool that dropping all cached prefixes would free."""
        idle = len(self._book.slabs.idle)
        return idle * self._book.layout.slab_pages - self.cached_borrowed_pages

    @property
    def cached_chances(self) -> Callable[[], tuple[float, ...]]:
        """Computes the chances that equal parts of the cached prefixes, as they are now, are used
        again, in the order in which they would be dropped; none if nothing is known."""
        return self._book.slabs.chances()

    @property
    def cached_pages_of(self) -> Mapping[str, int]:
        """Pages of slabs that hold cached prefixes only, borrowed ones included, by tenant."""
        pages = self._book.layout.slab_pages
        return {tenant: n * pages for tenant, n in self._book.slabs.idle_of.items()}

    @property
    def cached_borrowed_pages(self) -> int:
        """Borrowed pages that dropping all cached prefixes would free."""
        idle = self._book.slabs.idle
        borrowed_slabs = tuple(
            self._book.backing.borrowed_slabs
        )  # reports are made by another thread
        return sum(index in idle for index in borrowed_slabs) * self._book.layout.slab_pages

    @property
    def loose_pages(self) -> int:
        """Pages that `KvCache.compact` would free if every block in use could be moved."""
        return self._book.slabs.at_hand // self._book.size * self._book.layout.slab_pages

    @property
    def at_hand(self) -> int:
        """Blocks that tables can be given without a further page and without idle slabs."""
        return self._book.slabs.at_hand

    @property
    def room(self) -> int:
        """Blocks that tables can be given without a further page, if all cached ones are reused."""
        return self._book.slabs.at_hand + len(self._book.slabs.idle) * self._book.size

    @property
    def used_blocks(self) -> int:
        """Used blocks on the device."""
        return len(self._book.refs) - len(self._book.staged) + len(self._book.moves.stores)

    @property
    def cached_blocks(self) -> int:
        """Number of blocks that hold a cached prefix and are in no table."""
        slabs = self._book.slabs
        return len(slabs.of) * self._book.size - slabs.free - self.used_blocks

    def pages_for(self, n_blocks: int) -> int:
        """Return the pages that growth by `n_blocks` would need, of the pool or `cached_pages`.

        Growth succeeds iff the pool can allocate this number, less `cached_pages`, within the
        limit, or borrowed pages make up for it. Cached prefixes in slabs in use count as free:
        re-using them needs no page.
        """
        return self._book.layout.pages(max(0, n_blocks - self._book.slabs.at_hand))

    def if_freed(self, blocks: Sequence[int]) -> tuple[int, int]:
        """Return (pages, blocks) that `KvCache.free(blocks, surrender=True)` would free now.

        The pages are not in `cached_pages`: freeing both frees the sum. The blocks are those in
        slabs that stay backed, for this cache's own use, and those on borrowed pages.
        """
        book, borrowed_slabs = self._book, self._book.backing.borrowed_slabs
        if book.staged.blocks or book.spec.kv_windows:
            blocks = [b for b in blocks if b >= 0]
        if book.shared:
            refs = book.refs
            blocks = [b for b in blocks if refs[b] == 1]
        if book.size == 1:
            n = sum(b in borrowed_slabs for b in blocks) if borrowed_slabs else 0
            return (len(blocks) - n) * book.layout.slab_pages, n
        size, of, emptied, stay = book.size, book.slabs.of, 0, 0
        counts: dict[int, int] = {}  # a Counter takes longer for tables of usual lengths
        for block in blocks:
            index = block // size
            counts[index] = counts.get(index, 0) + 1
        for index, n in counts.items():
            if of[index].used == n and index not in borrowed_slabs:
                emptied += 1
            else:
                stay += n
        return emptied * book.layout.slab_pages, stay

    def limited(self, short: Short) -> bool:
        """Return whether a growth refused with `short` would exceed the bounds even if pages were
        free."""
        return self.excess(short.pages - self.cached_pages) > 0

    def excess(self, pages: int) -> int:
        """Return the pages by which growth by `pages` would exceed the bounds."""
        most = self._book.backing.bounds.most
        return 0 if most is None else max(0, self._book.backing.pages + pages - most)
