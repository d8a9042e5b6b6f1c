"""Keep the state of one model's KV blocks: references, slabs, names, and the pages behind them.

`KvCache` and its parts share one, and change it by these steps. A block is *used* (in at least one
block table), *cached* (in no table, but holding a prefix that may match again) or free. Slabs of
blocks are backed by pages when a table grows, and their pages are released as soon as no block of
the slab is used or cached.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set

from ballast.core.change_counter import ChangeCounter
from ballast.core.errors import BrokenPromise
from ballast.core.model import ModelSpec
from ballast.kv.backing import Backing
from ballast.kv.group_prefix import prefixes_of
from ballast.kv.slabs import Slab, Slabs
from ballast.kv.staged import BlockMoves, StagedBlocks
from ballast.kv.windows import GONE


class BlockBook:
    """Blocks of one model's KV cache, and their pages."""

    def __init__(self, spec: ModelSpec, backing: Backing, prefix: bool, host_blocks: int) -> None:
        """`prefix`, `host_blocks`: as of `KvCache`."""
        self.spec, self.backing = spec, backing
        self.owner, self.layout = backing.owner, backing.layout
        self.move: Callable[[int, int], None] | None = None
        """Copies the bytes of a block onto another."""
        self.freed = backing.bounds.freed
        """Counts changes after which a refused growth of a table may succeed."""
        self.relocations = 0
        """Number of times that used blocks were moved or their pages were replaced."""
        self.size = self.layout.blocks_per_slab
        self.slabs = Slabs(self.size)
        self.staged = StagedBlocks(self.layout, host_blocks, backing.addresses.n_bytes)
        """Used blocks that lie on the host: their numbers are below zero."""
        self.moves = BlockMoves()
        """Blocks that the job in flight moves."""
        self.refs: dict[int, int] = {}
        """References of each used block, at least 1."""
        self.shared = 0
        """Number of used blocks with more than one reference."""
        self.prefix = prefixes_of(spec) if prefix else None

    @property
    def version(self) -> ChangeCounter:
        return self.backing.bounds.version

    def tokens(self, blocks: Sequence[int]) -> int:
        """Return the tokens of a table of full blocks."""
        return len(blocks) // self.spec.kv_groups * self.spec.block_tokens

    def release(self, blocks: Sequence[int], surrender: bool = False) -> None:
        """Drop references like `KvCache.free`, without counting a change."""
        refs, size = self.refs, self.size
        lost: dict[int, list[int]] = {}
        # From the end: the tail of a prefix is less worth keeping than its beginning.
        for block in reversed(blocks):
            n = refs.get(block, 0)
            if n > 1:
                refs[block] = n - 1
                self.shared -= n == 2
            elif n == 1 and block < 0:
                del refs[block]
                self.forget((block,))
                self.staged.free((block,))
            elif n == 1:
                del refs[block]
                group = lost.pop(block // size, None) or []
                group.append(block)
                lost[block // size] = group
            elif block != GONE:
                raise BrokenPromise(f"{self.owner}: block {block} is freed but nobody uses it")
        emptied = []
        for index, group in lost.items():
            slab = self.slabs.of[index]
            self._unuse(slab, group)
            if surrender and not slab.used:
                self._uncache(slab)
            if not slab.occupied:
                emptied.append(slab)
        self.give_back(emptied)
        if self.backing.slots and not self.staged.blocks:
            self.set_slots(0)  # whatever job is in flight, it reads none

    def set_slots(self, pages: int) -> bool:
        """Have `pages` for slots; False, without a change: they are short."""
        self.freed.n += pages < len(self.backing.slots)
        done = self.backing.set_slots(pages)
        self.staged.pages = tuple(self.backing.slots)
        return done

    def back(self, n: int) -> bool:
        """Back `n` more slabs with pages, or none; return whether it succeeded."""
        freed = self.freed.n
        indices = self.backing.back(n)
        if indices is None:
            self.freed.n = freed  # pages given back were leased by the same attempt
            return False
        self.slabs.open(indices)
        return True

    def back_some(self, n: int) -> list[int]:
        """Back up to `n` slabs of one page; return their indices."""
        indices: list[int] = []
        while len(indices) < n and (more := self.backing.back(1)):
            indices += more
        self.slabs.open(indices)
        return indices

    def give_back(self, slabs: list[Slab]) -> int:
        """Return the pages of empty slabs to the pool; returns their number."""
        if not slabs:
            return 0
        self.freed.n += 1  # borrowed pages as well, which the pool does not count
        for slab in slabs:
            self.slabs.close(slab)
        return self.backing.release([slab.index for slab in slabs])

    def _unuse(self, slab: Slab, blocks: list[int]) -> None:
        """Turn blocks of one slab without references into cached or free ones."""
        slab.used -= len(blocks)
        self.slabs.survival.now += len(blocks)
        slab.since = self.slabs.survival.now
        for block in blocks:
            if self.prefix is not None and self.prefix.keep(block):
                slab.cached[block] = None
                slab.tenant = self.prefix.tenant(block)
            else:
                self.forget((block,))
                slab.free.append(block)
        self.slabs.settle(slab, touched=True)

    def drop(self, slab: Slab) -> None:
        """Turn all cached blocks of a slab into free ones, to make room."""
        self.slabs.survival.dropped(slab.since, len(slab.cached))
        self._uncache(slab)

    def _uncache(self, slab: Slab) -> None:
        lost = list(slab.cached)
        self.lose(lost)
        self.slabs.uncache(slab, lost)

    def lose(self, blocks: Sequence[int]) -> None:
        """Forget blocks to make room: they are missed if they are computed again."""
        if self.prefix is not None:
            self.prefix.lose(blocks)
        self.forget(blocks)

    def forget(self, blocks: Iterable[int]) -> None:
        if self.prefix is not None:
            for block in blocks:
                self.prefix.forget(block)

    def carry_out(self, moves: Sequence[tuple[int, int]], tables: Iterable[list[int]]) -> int:
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
            sources = {self.slabs.home(source).index for source in moved}
            homes = [self.slabs.of[index] for index in sources]
            freed = self.give_back([slab for slab in homes if not slab.occupied])
        return freed

    def _check_references(self, blocks: Set[int], tables: Iterable[Sequence[int]]) -> None:
        shown = Counter(block for table in tables for block in table if block in blocks)
        for block in blocks:
            if shown[block] != self.refs.get(block, 0):
                raise BrokenPromise(
                    f"{self.owner}: block {block} has {self.refs.get(block, 0)} references, "
                    f"the tables show {shown[block]}"
                )

    def _relocate(self, source: int, target: int) -> None:
        if self.move is not None:
            self.move(source, target)
        self.slabs.relocate(source, target)
        self.rename(source, target)

    def rename(self, source: int, target: int) -> None:
        """Transfer references and name of a block to another."""
        if source in self.refs:
            self.refs[target] = self.refs.pop(source)
        if self.prefix is not None:
            self.prefix.move(source, target)

    def vacate(self, blocks: Sequence[int]) -> None:
        """Turn device blocks whose contents have moved into free ones."""
        slabs = {self.slabs.home(block).index: self.slabs.home(block) for block in blocks}
        for block in blocks:
            slab = slabs[block // self.size]
            slab.used -= 1
            slab.free.append(block)
        for slab in slabs.values():
            self.slabs.settle(slab)
        self.give_back([slab for slab in slabs.values() if not slab.occupied])

    # -- checks -----------------------------------------------------------------------------------

    def validate(self, tables: Iterable[Sequence[int]]) -> None:
        """Raises BrokenPromise unless references, slabs, names and pages agree.

        `tables`: all tables that hold references.
        """
        held = (*tables, self.moves.coming)
        if Counter(block for table in held for block in table if block != GONE) != self.refs:
            raise BrokenPromise(f"{self.owner}: references are not those of the tables")
        if self.shared != sum(n > 1 for n in self.refs.values()):
            raise BrokenPromise(f"{self.owner}: {self.shared} blocks shared is a miscount")
        slabs = self.slabs
        slabs.validate()
        used = Counter(block // self.size for block in self.refs)
        if any(slab.used != used[index] for index, slab in slabs.of.items()):
            raise BrokenPromise(f"{self.owner}: a slab counts its used blocks wrongly")
        dormant = {block for slab in slabs.of.values() for block in (*slab.cached, *slab.free)}
        if not dormant.isdisjoint(self.refs):
            raise BrokenPromise(f"{self.owner}: a used block is also cached or free")
        self._validate_names({block for slab in slabs.of.values() for block in slab.cached})
        leaving = {staged for _, staged in self.moves.stores}
        if {block for block in self.refs if block < 0} != self.staged.blocks - leaving:
            raise BrokenPromise(f"{self.owner}: {len(self.staged)} blocks are staged")
        self.staged.validate(self.backing.slots, len(leaving))
        self.backing.validate(slabs.of.keys())

    def _validate_names(self, cached: set[int]) -> None:
        named: set[int] = set()
        kept: set[int] = set()
        if self.prefix is not None:
            self.prefix.validate()
            named, kept = self.prefix.named(), self.prefix.kept()
        if not cached <= kept or not named <= cached | self.refs.keys():
            raise BrokenPromise(f"{self.owner}: the prefix cache names blocks that hold nothing")
