"""Manage one model's paged KV cache on one device: allocate, cache, free and compact blocks.

`KvCache` is what the engine uses, live and in virtual time; `ModelState` holds one for each model.
It allocates and grows block tables, with automatic prefix caching; its parts count, bound, stage
and borrow. Running out of pages is a result (`Short`), never an exception. Never touches KV bytes
itself: blocks are moved by a callable that the caller passes in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set

from ballast.core.actions import Short
from ballast.core.errors import BrokenPromise
from ballast.core.model import ModelSpec
from ballast.core.units import ceil_div
from ballast.kv import compaction, windows
from ballast.kv.backing import PageBacking, backing_of
from ballast.kv.book import BlockBook
from ballast.kv.borrowed import BorrowedBlocks
from ballast.kv.counts import BlockCounts
from ballast.kv.prefix import NamedBlock
from ballast.kv.prefixes import CachedPrefixes
from ballast.kv.staging import BlockStaging
from ballast.kv.windows import GONE
from ballast.memory.lending.borrower import Borrower
from ballast.memory.pool import Pool
from ballast.memory.vm import Vm


class KvCache:
    """KV cache of one model. It owns its pages in the pool as ``kv:NAME``.

    Block tables are lists of block numbers owned by the caller; each entry counts as one reference
    to its block. Their methods cost O(1) for each block, plus the operating system's time to map
    and unmap pages. Callers must not free, compact or clear blocks that a job in flight uses.
    """

    def __init__(
        self,
        spec: ModelSpec,
        pool: Pool,
        vm: Vm,
        *,
        prefix: bool = True,
        move: Callable[[int, int], None] | None = None,
        capacity_blocks: int | None = None,
        borrower: Borrower | None = None,
        host_blocks: int = 0,
    ) -> None:
        """`prefix`: whether prefixes are cached. `move(source, target)` copies one block's bytes;
        None in virtual time, where there are none. `capacity_blocks` is a permanent bound, in
        whole slabs; None: the cache may take all pages of the pool. `borrower` holds pages of
        other devices, which back slabs of one page where the pool is short. `host_blocks`: most
        blocks that can be staged, in host memory."""
        backing = backing_of(spec, pool, vm, capacity_blocks, borrower)
        self.book = book = BlockBook(spec, backing, prefix, host_blocks)
        """State that the parts share."""
        book.move = move
        self.spec, self.owner, self.layout = spec, book.owner, book.layout
        self.staged = book.staged
        self.bounds = backing.bounds
        self.addresses = backing.addresses
        """Addresses in which blocks lie: the device's window, or a range of the cache's own."""
        self.in_window = isinstance(backing, PageBacking)
        """Whether blocks lie in the device's window, whose addresses are always mapped."""
        self.base = self.addresses.base
        """Address of block 0; never changes."""
        self.counts = BlockCounts(book)
        self.prefixes = CachedPrefixes(book)
        self.borrowed = BorrowedBlocks(book)
        self.staging = BlockStaging(book, self.grow)

    def block_address(self, block: int) -> int:
        return self.base + block * self.layout.stride_bytes

    @property
    def pages(self) -> int:
        """Pages of the pool that back blocks now."""
        return self.book.backing.pages

    # -- tables -----------------------------------------------------------------------------------

    def match(self, tokens: Sequence[int], salt: str = "") -> list[int]:
        """Return a new table of the longest cached prefix: whole blocks, never the last token.

        The caller owns its references and must `free` them.
        """
        return self._match(tokens, salt)[0]

    def _match(self, tokens: Sequence[int], salt: str) -> tuple[list[int], list[int]]:
        """Return the table of `match`, and since when each block of it that nobody else uses was
        cached (`Slab.since`)."""
        book, again = self.book, list[int]()
        if book.prefix is None:
            return [], again
        self.book.version.n += 1
        found = book.prefix.find(tokens, salt)
        refs, slabs = book.refs, book.slabs
        for block in found:
            if block == GONE:
                continue
            n = refs.get(block, 0)
            refs[block] = n + 1
            if n == 1:
                book.shared += 1
            elif n == 0:
                slab = slabs.home(block)
                again.append(slab.since)
                del slab.cached[block]
                slab.used += 1
                slabs.settle(slab, touched=True)
        self.prefixes.asked_tokens += len(tokens)
        self.prefixes.hit_tokens += book.tokens(found)
        return found, again

    def grow(
        self, blocks: list[int], n_tokens: int, computed: int = 0, *, ahead: bool = False
    ) -> Short | None:
        """Extend a table to cover `n_tokens`, or change nothing and return the shortage.

        Groups with a window get blocks from `computed` on; `ahead`: as far as the window alone.

        Free blocks of partly used slabs come first, then new slabs. Where the pool or the limit is
        short, the model's own cached prefixes are re-used for the rest. `Short.pages` is
        `BlockCounts.pages_for` the growth; free pages are not deducted.
        """
        places = None
        if self.spec.kv_windows:
            places = windows.lacking(self.spec, blocks, n_tokens, computed, ahead=ahead)
            n = len(places)
        else:
            n = ceil_div(n_tokens, self.spec.block_tokens) - len(blocks)
        if n <= 0:
            return None
        self.book.version.n += 1
        book, slabs = self.book, self.book.slabs
        missing = ceil_div(n - slabs.free, book.size)
        if missing > 0:
            beyond = n - slabs.at_hand - len(slabs.idle) * book.size
            fresh = max(ceil_div(beyond, book.size), min(missing, book.backing.room))
            if fresh > 0 and not book.back(fresh):
                return Short(self.counts.pages_for(n), max(0, n - slabs.at_hand))
        if n > slabs.free:
            book.lose(slabs.free_cached(n - slabs.free))
        new_blocks = slabs.allocate(n)
        book.refs.update(dict.fromkeys(new_blocks, 1))
        if places is None:
            blocks += new_blocks
        else:
            windows.fill(self.spec, blocks, places, new_blocks)
        return None

    def admit(
        self, n_tokens: int, prefix: Sequence[int], salt: str = ""
    ) -> tuple[list[int], int] | Short:
        """Return a new table for `n_tokens`, and how many of them have KV already: the longest
        cached prefix of `prefix`. Or return the shortage of `grow`: then no block has changed its
        state and `freed` is unchanged, but the look-up counts in the prefixes' tokens.
        """
        blocks, again = self._match(prefix, salt)
        cached = self.book.tokens(blocks)
        short = self.grow(blocks, n_tokens, cached, ahead=True)
        survival = self.book.slabs.survival
        if short is None:
            for since, n in Counter(again).items():
                survival.used(since, n)
            return blocks, cached
        now = survival.now
        self.book.release(blocks)
        survival.now = now
        return short

    def free(self, blocks: Sequence[int], *, surrender: bool = False) -> None:
        """Drop a table's references. Blocks that hold a prefix stay cached, others become free.

        `surrender` (for preemption): also forget cached prefixes in slabs that are no longer used,
        so that their pages become free at once. The list itself is not changed.
        """
        self.book.version.n += 1
        self.book.freed.n += bool(blocks)
        self.book.release(blocks, surrender)

    def remember(
        self,
        tokens: Sequence[int],
        blocks: list[int],
        computed: int,
        salt: str = "",
        tenant: str = "",
    ) -> list[NamedBlock]:
        """Add a table's full blocks to the prefix cache, in the share of `tenant`; KV exists for
        `tokens[:computed]`. Returns the blocks that were added. Blocks behind the windows of all
        their layers leave the table.

        May be called after every step: if no block has filled since, it costs one look-up. Of two
        blocks with equal contents the first is cached; the other stays private meanwhile.
        """
        named: list[NamedBlock] = []
        if self.book.prefix is not None:
            self.book.version.n += 1
            full = computed // self.spec.block_tokens
            named = self.book.prefix.name(tokens, blocks, full, salt, tenant)
        if self.spec.kv_windows and (behind := windows.leave(self.spec, blocks, computed)):
            self.free(behind)
        return named

    # -- giving memory up -------------------------------------------------------------------------

    def compact(
        self, tables: Iterable[list[int]], pages: int, *, fixed: Set[int] = frozenset()
    ) -> int:
        """Move blocks together to empty whole slabs, until `pages` are freed; return pages freed.

        `tables` must be all tables with references; they are changed in place. Blocks in `fixed`
        (those of jobs in flight) do not move. If moves into free blocks empty too few slabs,
        cached blocks of slabs in use are forgotten first. Raises BrokenPromise, before anything
        moves, if a block that would move has references that are not in `tables`.
        """
        book, wanted = self.book, ceil_div(pages, self.layout.slab_pages)
        moves = compaction.plan(book.slabs, wanted, fixed)
        missing = wanted - len({source // book.size for source, _ in moves})
        if missing > 0 and self._forget_scattered(missing * book.size):
            moves = compaction.plan(book.slabs, wanted, fixed)
        return book.carry_out(moves, tables) if moves else 0

    def _forget_scattered(self, blocks: int) -> bool:
        """Forget at least `blocks` cached blocks of slabs in use, in the order of
        `CachedPrefixes.drop`. Returns whether there were any."""
        forgotten = 0
        for slab in list(self.book.slabs.to_thin()):
            if forgotten >= blocks:
                break
            forgotten += len(slab.cached)
            self.book.drop(slab)
        self.book.version.n += forgotten > 0
        return forgotten > 0

    def clear(self) -> None:
        """Forget all prefixes and free all pages. Raises BrokenPromise if a block is in use."""
        if self.book.refs:
            used = len(self.book.refs)
            raise BrokenPromise(f"{self.owner} is cleared while {used} blocks are used")
        self.prefixes.drop(self.pages + self.borrowed.pages)

    def close(self) -> None:
        """Free all pages and the reserved addresses."""
        self.clear()
        self.book.backing.close()

    def validate(self, tables: Iterable[Sequence[int]]) -> None:
        """As `BlockBook.validate`."""
        self.book.validate(tables)
