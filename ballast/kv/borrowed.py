"""Keep KV blocks on pages that another device has lent, and clear these again.

Part of `KvCache`. A borrowed page backs one slab, whose index is the page's number.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import islice

from ballast.core.units import ceil_div
from ballast.kv.book import BlockBook
from ballast.kv.slabs import Slab


class BorrowedBlocks:
    """Blocks of one cache on borrowed pages. Those that a job in flight uses must stay."""

    def __init__(self, book: BlockBook) -> None:
        self._book = book

    @property
    def pages(self) -> int:
        """Borrowed pages that back blocks now."""
        return len(self._book.backing.borrowed_slabs) * self._book.layout.slab_pages

    def use(self, work: Iterable[tuple[Sequence[int], int, int]]) -> tuple[int, int]:
        """Return the blocks on borrowed pages that a job reads, those that sequences share once,
        and the tokens whose KV it writes there. `work`: by sequence, its block table, and the
        positions from and up to which KV is computed. Safe from any thread while the job runs."""
        book, borrowed_slabs = self._book, self._book.backing.borrowed_slabs
        size, tokens, groups = book.size, book.spec.block_tokens, book.spec.kv_groups
        if not borrowed_slabs:
            return 0, 0
        read: set[int] = set()
        written = 0
        for blocks, start, end in work:
            for place, block in enumerate(blocks[: ceil_div(end, tokens) * groups]):
                if block // size in borrowed_slabs:
                    read.add(block)
                    i = place // groups
                    written += max(0, min(end, (i + 1) * tokens) - max(start, i * tokens))
        return len(read), written

    def read_alone(self, work: Iterable[tuple[Sequence[int], int]]) -> list[int]:
        """Return the blocks on borrowed pages that a job reads and does not write, each once.
        `work`: by sequence, its block table and the position from which KV is computed; of caches
        with one group. Safe from any thread while the job runs."""
        tokens = self._book.spec.block_tokens
        full = (block for blocks, start in work for block in blocks[: start // tokens])
        return list(dict.fromkeys(self.among(full)))

    def among(self, blocks: Iterable[int]) -> list[int]:
        """Return those of these blocks that lie on borrowed pages."""
        borrowed_slabs, size = self._book.backing.borrowed_slabs, self._book.size
        return (
            [block for block in blocks if block // size in borrowed_slabs] if borrowed_slabs else []
        )

    def holds(self, page: int) -> bool:
        """Return whether a borrowed page backs blocks now."""
        return page in self._book.backing.borrowed_slabs

    def used_on(self, page: int) -> list[int]:
        """Return the used blocks on a borrowed page."""
        return [b for b in self._blocks_of(page) if b in self._book.refs]

    def drop(self, page: int) -> bool:
        """Forget the prefixes cached on a borrowed page, and release it.

        Returns False, without a change, if a block of it is used."""
        slab = self._book.slabs.of[page]
        if slab.used:
            return False
        self._book.version.n += 1
        self._book.drop(slab)
        self._book.give_back([slab])
        return True

    def clear(self, pages: Collection[int]) -> tuple[int, int]:
        """Release borrowed pages on which no block is used. Their prefixes move to unused pages, or
        take the places of those that would be dropped before them, which are forgotten; returns the
        number of pages whose prefixes moved, and that were forgotten."""
        book, slabs = self._book, self._book.slabs
        leaving = {page for page in pages if not slabs.of[page].used}
        if not leaving:
            return 0, 0
        book.version.n += 1
        order, homes = list(slabs.idle), book.back_some(len(leaving))
        coldest = list(islice(slabs.to_drop(()), len(leaving) - len(homes)))
        for slab in coldest:
            book.drop(slab)
        homes += [slab.index for slab in coldest if slab.index not in leaving]
        staying = [i for i in order if i in leaving and slabs.of[i].cached]
        twins = dict(zip(staying, homes, strict=True))
        book.carry_out(
            [
                (block, block + (home - page) * book.size)
                for page, home in twins.items()
                for block in slabs.of[page].cached
            ],
            (),
        )
        book.give_back([slab for slab in coldest if not slab.occupied])
        slabs.reorder(twins.get(i, i) for i in order)
        return len(twins), len(coldest)

    def bring_home(self, page: int, tables: Iterable[list[int]]) -> bool:
        """Move the blocks of a borrowed page to one of the pool, and release it.

        `tables` must be all tables with references; they are changed in place. No job in flight may
        use the blocks. Returns False, without moving anything, if pages are short."""
        book, home = self._book, self._book.backing.back_at_home()
        if home is None:
            return False
        free = set(book.slabs.of[page].free)
        book.slabs.open([home])
        held = [b for b in self._blocks_of(page) if b not in free]
        book.carry_out([(b, b + (home - page) * book.size) for b in held], tables)
        return True

    def bring_near(self, pages: Sequence[int], tables: Iterable[list[int]]) -> int:
        """Move the blocks of borrowed pages home, as `bring_home`; where no page is free, that of
        the coldest prefixes makes room. They move to an unused borrowed page, as is each that was
        emptied before, or are forgotten. Returns the number of pages that have moved."""
        slabs, borrowed_slabs = self._book.slabs, self._book.backing.borrowed_slabs
        tables, order = list(tables), list(slabs.idle)
        coldest = iter([slab for slab in slabs.to_drop(()) if slab.index not in borrowed_slabs])
        twins: dict[int, int] = {}
        moved = 0
        for page in pages:
            if not self.bring_home(page, tables):
                slab = next(coldest, None)
                if slab is None:
                    break
                twins[slab.index] = self._put_away(slab)
                if not self.bring_home(page, tables):
                    break
            moved += 1
        slabs.reorder(twins.get(i, i) for i in order)
        return moved

    def _put_away(self, slab: Slab) -> int:
        """Move the prefixes of an idle slab to another that can be backed, or forget them; release
        its page. Returns the slab in which they are, or were."""
        book = self._book
        twins = book.back_some(1)
        if not twins:
            book.drop(slab)
            book.give_back([slab])
            return slab.index
        by = (twins[0] - slab.index) * book.size
        book.carry_out([(block, block + by) for block in slab.cached], ())
        return twins[0]

    def _blocks_of(self, page: int) -> Sequence[int]:
        """Return all blocks of a slab of one page."""
        return range(page * self._book.size, (page + 1) * self._book.size)
