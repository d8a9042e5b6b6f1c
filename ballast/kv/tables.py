"""Allocate, grow and free block tables, with automatic prefix caching: a KV cache's step path.

Base class of `KvCache`, through which the engine's planner, admissions and job ends call it.
Running out of pages is a result (`Short`), never an exception.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ballast.core.actions import Short
from ballast.core.errors import BrokenPromise
from ballast.core.units import ceil_div
from ballast.kv.books import BlockBooks
from ballast.kv.prefix import NamedBlock
from ballast.kv.slabs import Slab


class BlockTables(BlockBooks):
    """Block tables of sequences: lists of block numbers owned by the caller.

    Each entry counts as one reference to its block. All methods cost O(1) for each block, plus the
    operating system's time to map and unmap pages.
    """

    def find(self, tokens: Sequence[int], salt: str = "") -> list[int]:
        """Return the blocks that `match` would return, without a change."""
        return [] if self._prefix is None else self._prefix.find(tokens, salt)

    def names(self, tokens: Sequence[int], salt: str = "") -> list[bytes]:
        """Return the names of the blocks that `find` looks for."""
        return [] if self._prefix is None else self._prefix.chain(tokens, salt)

    def when_forgotten(self, call: Callable[[int], object]) -> None:
        """Set what is called with a named block whose contents are about to go, or to move."""
        if self._prefix is not None:
            self._prefix.forgotten = call

    def held_tokens(self, tokens: Sequence[int], salt: str = "") -> int:
        """Return the number of `tokens` whose KV is in the prefix cache."""
        return len(self.find(tokens, salt)) * self.spec.block_tokens

    def prefix_pages(self, tokens: Sequence[int], salt: str = "") -> int:
        """Return how many of `cached_pages` hold the cached prefix of `tokens`."""
        if self._fixed:
            return 0
        idle, abroad = self._slabs.idle, self._backing.abroad
        found = {block // self._size for block in self.find(tokens, salt)}
        return sum(i in idle and i not in abroad for i in found) * self.layout.slab_pages

    def match(self, tokens: Sequence[int], salt: str = "") -> list[int]:
        """Return a new table of the longest cached prefix: whole blocks, never the last token.

        The caller owns its references and must `free` them.
        """
        if self._prefix is None:
            return []
        self.version.n += 1
        found = self._prefix.find(tokens, salt)
        refs, slabs = self._refs, self._slabs
        for block in found:
            n = refs.get(block, 0)
            refs[block] = n + 1
            if n == 1:
                self._shared += 1
            elif n == 0:
                slab = slabs.home(block)
                del slab.cached[block]
                slab.used += 1
                slabs.settle(slab, touched=True)
        self.asked_tokens += len(tokens)
        self.hit_tokens += len(found) * self.spec.block_tokens
        return found

    def grow(self, blocks: list[int], n_tokens: int) -> Short | None:
        """Extend a table to cover `n_tokens`, or change nothing and return the shortage.

        Free blocks of partly used slabs come first, then new slabs. Where the pool or the limit is
        short, the model's own cached prefixes are re-used first, and only the rest is allocated
        from the pool. `Short.pages` is `pages_for` the growth; free pages are not deducted.
        """
        n = ceil_div(n_tokens, self.spec.block_tokens) - len(blocks)
        if n <= 0:
            return None
        self.version.n += 1
        slabs = self._slabs
        missing = n - slabs.free
        if missing > 0 and not self._back(ceil_div(missing, self._size)):
            beyond = n - slabs.at_hand - len(slabs.idle) * self._size
            fresh = ceil_div(max(0, beyond), self._size)
            if fresh and not self._back(fresh):
                return Short(self.pages_for(n), max(0, n - slabs.at_hand))
            lost = slabs.sacrifice(n - slabs.free)
            self.forgotten_blocks += len(lost)
            self._forget(lost)
        new_blocks = slabs.allocate(n)
        self._refs.update(dict.fromkeys(new_blocks, 1))
        blocks += new_blocks
        return None

    def admit(
        self, n_tokens: int, prefix: Sequence[int], salt: str = ""
    ) -> tuple[list[int], int] | Short:
        """Return a new table for `n_tokens`, and how many of them have KV already: the longest
        cached prefix of `prefix`. Or return the shortage of `grow`: then no block has changed its
        state and `freed` is unchanged, but the look-up counts in `asked_tokens` and `hit_tokens`.
        """
        blocks = self.match(prefix, salt)
        cached = len(blocks) * self.spec.block_tokens
        short = self.grow(blocks, n_tokens)
        if short is None:
            return blocks, cached
        self._release(blocks)
        return short

    def free(self, blocks: Sequence[int], *, surrender: bool = False) -> None:
        """Drop a table's references. Blocks that hold a prefix stay cached, others become free.

        `surrender` (for preemption): also forget cached prefixes in slabs that are no longer used,
        so that their pages become free at once. The list itself is not changed.
        """
        self.version.n += 1
        self.freed.n += bool(blocks)
        self._release(blocks, surrender)

    def remember(
        self,
        tokens: Sequence[int],
        blocks: Sequence[int],
        computed: int,
        salt: str = "",
        tenant: str = "",
    ) -> list[NamedBlock]:
        """Add a table's full blocks to the prefix cache, in the share of `tenant`; KV exists for
        `tokens[:computed]`. Returns the blocks that were added.

        May be called after every step: if no block has filled since, it costs one look-up. Of two
        blocks with equal contents the first is cached; the other stays private meanwhile.
        """
        if self._prefix is None:
            return []
        self.version.n += 1
        full = computed // self.spec.block_tokens
        return self._prefix.name(tokens, blocks, full, salt, tenant)

    # -- inside -----------------------------------------------------------------------------------

    def _release(self, blocks: Sequence[int], surrender: bool = False) -> None:
        """Drop references like `free`, without counting a change."""
        refs, size = self._refs, self._size
        lost: dict[int, list[int]] = {}
        # From the end: the tail of a prefix is less worth keeping than its beginning.
        for block in reversed(blocks):
            n = refs.get(block, 0)
            if n > 1:
                refs[block] = n - 1
                self._shared -= n == 2
            elif n == 1 and block < 0:
                del refs[block]
                self._forget((block,))
                self.staged.free((block,))
            elif n == 1:
                del refs[block]
                group = lost.pop(block // size, None) or []
                group.append(block)
                lost[block // size] = group
            else:
                raise BrokenPromise(f"{self.owner}: block {block} is freed but nobody uses it")
        emptied = []
        for index, group in lost.items():
            slab = self._slabs.of[index]
            self._unused(slab, group)
            if surrender and not slab.used:
                self._drop(slab)
            if not slab.occupied:
                emptied.append(slab)
        self._give_back(emptied)
        if self._backing.slots and not self.staged.blocks:
            self._set_slots(0)  # whatever job is in flight, it reads none

    def _set_slots(self, pages: int) -> bool:
        """Have `pages` for slots; False, without a change: they are short."""
        self.freed.n += pages < len(self._backing.slots)
        done = self._backing.set_slots(pages)
        self.staged.pages = tuple(self._backing.slots)
        return done

    def _back(self, n: int) -> bool:
        """Back `n` more slabs with pages, or none; return whether it succeeded."""
        freed = self.freed.n
        indices = self._backing.back(n)
        if indices is None:
            self.freed.n = freed  # pages given back were leased by the same attempt
            return False
        self._slabs.open(indices)
        return True

    def _give_back(self, slabs: list[Slab]) -> int:
        """Return the pages of empty slabs to the pool; returns their number."""
        if not slabs:
            return 0
        self.freed.n += 1  # borrowed pages as well, which the pool does not count
        for slab in slabs:
            self._slabs.close(slab)
        return self._backing.release([slab.index for slab in slabs])

    def _unused(self, slab: Slab, blocks: list[int]) -> None:
        """Turn blocks of one slab without references into cached or free ones."""
        slab.used -= len(blocks)
        for block in blocks:
            if self._prefix is not None and self._prefix.keep(block):
                slab.cached[block] = None
                slab.tenant = self._prefix.tenant(block)
            else:
                self._forget((block,))
                slab.free.append(block)
        self._slabs.settle(slab, touched=True)

    def _drop(self, slab: Slab) -> None:
        """Turn all cached blocks of a slab into free ones."""
        lost = list(slab.cached)
        self.forgotten_blocks += len(lost)
        self._forget(lost)
        self._slabs.uncache(slab, lost)

    def _forget(self, blocks: Iterable[int]) -> None:
        if self._prefix is not None:
            for block in blocks:
                self._prefix.forget(block)
