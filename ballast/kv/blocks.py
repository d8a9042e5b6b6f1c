"""The KV cache of one model on one device: blocks, who uses them, and the pages beneath.

A block is *used* (in at least one block table), *cached* (in none, but it holds a prefix that may
be asked for again) or free. Slabs of blocks are backed by pages of the pool when a table grows and
go back the moment no block of them is used or cached. No bytes are touched here; the one thing that
needs it, moving a block, is a callable handed in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from itertools import islice

from ballast.core.actions import Short
from ballast.core.errors import BrokenPromise
from ballast.core.model import ModelSpec
from ballast.core.rotation import WHOLE, Rotation
from ballast.core.units import ceil_div
from ballast.kv import compaction
from ballast.kv.backing import Backing
from ballast.kv.layered import LayeredBacking, LayeredLayout
from ballast.kv.layout import Layout
from ballast.kv.prefix import PrefixIndex
from ballast.kv.slabs import Slab, Slabs
from ballast.memory.borrow import Borrower
from ballast.memory.pool import Pool
from ballast.memory.range import BackedRange
from ballast.memory.vm import Vm


class KvCache:
    """Block tables are lists of block numbers owned by the caller, one reference for each entry.

    The owner's name in the pool is ``kv:NAME``. Everything in the step path (`grow`, `free`,
    `remember`) costs O(1) a block, plus what the operating system takes to map and unmap pages.
    Nobody may free, drop, compact or clear blocks that a job in flight uses.
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
        layered: bool = False,
    ) -> None:
        """`prefix`: whether prefixes are cached. `move(source, target)` copies one block's bytes;
        None where there are none (in virtual time). `capacity_blocks` bounds the cache for ever, in
        whole slabs; None: every page of the pool may become this model's. `borrower` has pages of
        other devices, which back slabs where the pool is short. `layered`: it lies layer by layer,
        so that layers can share pages (`turn`); such a cache has no capacity and no borrower."""
        self.spec = spec
        self.move = move
        self.fixed = False
        """While it is, what is cached stays where it is."""
        self.hit_tokens = 0
        """Tokens whose KV `match` has found, and, below, those it was asked for; since start."""
        self.asked_tokens = 0
        self._layered: LayeredBacking | None = None
        if layered:
            planes = LayeredLayout.over(spec, vm.page_bytes, pool.total)
            self._layered = LayeredBacking(spec.name, planes, pool, vm)
        self._backing = self._layered or _block_major(spec, pool, vm, capacity_blocks, borrower)
        self._size = self.layout.blocks_per_slab
        self._slabs = Slabs(self._size)
        self._refs: dict[int, int] = {}
        """References of each used block, at least 1."""
        self._shared = 0
        """Used blocks with more than one."""
        self._prefix = PrefixIndex(spec.fingerprint, spec.block_tokens) if prefix else None

    # -- sizes ------------------------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        return self._backing.layout

    @property
    def rotation(self) -> Rotation:
        """Layers that share pages."""
        return WHOLE if self._layered is None else self._layered.rotation

    @property
    def layer_pages(self) -> int:
        """Pages of one layer that shares its own with none; 0 where no layer can."""
        layered = self._layered
        return 0 if layered is None else len(self._slabs.of) * layered.layout.plane_pages

    @property
    def slabs(self) -> tuple[int, ...]:
        """Those that are backed, ascending."""
        return tuple(sorted(self._slabs.of))

    @property
    def owner(self) -> str:
        return self._backing.owner

    @property
    def base(self) -> int:
        """Address of block 0; never changes."""
        return self._backing.range.base

    @property
    def range(self) -> BackedRange:
        return self._backing.range

    @property
    def pages(self) -> int:
        """Pages of the pool that back blocks now."""
        return self._backing.pages

    @property
    def borrowed_pages(self) -> int:
        """Borrowed pages that do."""
        return len(self._backing.abroad) * self.layout.slab_pages

    @property
    def limit(self) -> int | None:
        """Most pages of the pool that growth may reach (None: no bound); lowering it takes nothing
        away."""
        return self._backing.limit

    @limit.setter
    def limit(self, pages: int | None) -> None:
        self._backing.limit = pages

    @property
    def cached_pages(self) -> int:
        """Pages of the pool that dropping all cached prefixes would free."""
        if self.fixed:
            return 0
        return len(self._slabs.idle) * self.layout.slab_pages - self.cached_borrowed_pages

    @property
    def cached_borrowed_pages(self) -> int:
        """Borrowed pages that it would free."""
        idle = self._slabs.idle
        abroad = tuple(self._backing.abroad)  # reports are made by another thread
        return sum(index in idle for index in abroad) * self.layout.slab_pages

    @property
    def loose_pages(self) -> int:
        """Pages that `compact` would free if every block could be moved."""
        return self._slabs.holes // self._size * self.layout.slab_pages

    @property
    def at_hand(self) -> int:
        """Blocks that a table can have without any page more."""
        return self._slabs.at_hand

    @property
    def used_blocks(self) -> int:
        return len(self._refs)

    @property
    def cached_blocks(self) -> int:
        """Blocks no table uses that hold a prefix."""
        return len(self._slabs.of) * self._size - self._slabs.free - len(self._refs)

    def block_address(self, block: int) -> int:
        return self.base + block * self.layout.stride_bytes

    def most_pages(self, n_blocks: int) -> int:
        """Pages that a table of `n_blocks` takes if it is alone, and layers share none."""
        return ceil_div(n_blocks, self._size) * self.layout.whole_pages

    def pages_for(self, n_blocks: int) -> int:
        """Pages that growth by `n_blocks` would need now, from the pool or from `cached_pages`.

        Growth succeeds if and only if the pool can lease so many, less `cached_pages`, within the
        limit, or borrowed pages make up for it. Cached prefixes scattered over slabs in use count
        as room: re-using them is free.
        """
        return self.layout.pages(max(0, n_blocks - self._slabs.at_hand))

    def if_freed(self, blocks: Sequence[int]) -> tuple[int, int]:
        """What `free(blocks, surrender=True)` would free now: pages, and blocks in slabs that stay.

        The pages are apart from `cached_pages`: doing both frees the sum. The blocks are this
        cache's own, beside the pages; those on borrowed pages are among them.
        """
        if self._shared:
            refs = self._refs
            blocks = [b for b in blocks if refs[b] == 1]
        if self._size == 1:
            n = sum(b in self._backing.abroad for b in blocks) if self._backing.abroad else 0
            return (len(blocks) - n) * self.layout.slab_pages, n
        of, emptied, stay = self._slabs.of, 0, 0
        for index, n in Counter(map(self._size.__rfloordiv__, blocks)).items():
            if of[index].used == n and index not in self._backing.abroad:
                emptied += 1
            else:
                stay += n
        return emptied * self.layout.slab_pages, stay

    def limited(self, short: Short) -> bool:
        """Whether a growth just refused with `short` would exceed the limit, whatever is free."""
        most = self._backing.most
        return most is not None and self.pages - self.cached_pages + short.pages > most

    # -- the step path ----------------------------------------------------------------------------

    def held_tokens(self, tokens: Sequence[int], salt: str = "") -> int:
        """How many of `tokens` `match` would find; nothing changes."""
        if self._prefix is None:
            return 0
        return len(self._prefix.find(tokens, salt)) * self.spec.block_tokens

    def match(self, tokens: Sequence[int], salt: str = "") -> list[int]:
        """A new table of the longest cached prefix: whole blocks, never the last token.

        Its references are the caller's, to be freed like any others.
        """
        if self._prefix is None:
            return []
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
        """Extend a table to cover `n_tokens`, or change nothing and say how many pages it needs.

        Free blocks of partly used slabs come first, then new slabs. Where the pool or the limit is
        short, the model's own cached prefixes are re-used first, and only the rest is asked of the
        pool. `Short.pages` is `pages_for` the growth: what it asked for, free pages not deducted.
        """
        n = ceil_div(n_tokens, self.spec.block_tokens) - len(blocks)
        if n <= 0:
            return None
        slabs = self._slabs
        missing = n - slabs.free
        if missing > 0 and not self._back(ceil_div(missing, self._size)):
            beyond = n - slabs.at_hand - len(slabs.idle) * self._size
            fresh = ceil_div(max(0, beyond), self._size)
            if fresh and not self._back(fresh):
                return Short(self.pages_for(n), max(0, n - slabs.at_hand))
            self._forget(slabs.sacrifice(n - slabs.free))
        taken = slabs.take(n)
        self._refs.update(dict.fromkeys(taken, 1))
        blocks += taken
        return None

    def free(self, blocks: Sequence[int], *, surrender: bool = False) -> None:
        """Drop a table's references. Blocks that hold a prefix stay cached, others become free.

        `surrender`: where that empties a slab, what is cached in it goes too, so that pages come
        free at once (for a preemption); prefixes in other slabs stay. The list is left as it is.
        """
        refs, size = self._refs, self._size
        lost: dict[int, list[int]] = {}
        # From the end: the tail of a prefix is less worth keeping than its beginning.
        for block in reversed(blocks):
            n = refs.get(block, 0)
            if n > 1:
                refs[block] = n - 1
                self._shared -= n == 2
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

    def remember(
        self, tokens: Sequence[int], blocks: Sequence[int], computed: int, salt: str = ""
    ) -> None:
        """Offer a table's full blocks to the prefix cache; KV exists for `tokens[:computed]`.

        May be called after every step: if no block has filled since, it costs one look-up. Of two
        blocks with equal contents the first is cached; the other stays private while the first is.
        """
        if self._prefix is not None:
            self._prefix.name(tokens, blocks, computed // self.spec.block_tokens, salt)

    # -- giving memory up -------------------------------------------------------------------------

    def drop_cached(self, pages: int) -> int:
        """Forget cached prefixes until `pages` are free, or no more can be; pages freed.

        Least recently used slab first, those on borrowed pages last; prefixes whose slab others
        keep in use are left alone, as forgetting them would free no page.
        """
        if self.fixed:
            return 0
        idle: Iterable[Slab] = self._slabs.idle.values()
        if self._backing.abroad:
            idle = sorted(idle, key=lambda slab: slab.index in self._backing.abroad)
        dropped = list(islice(idle, max(0, ceil_div(pages, self.layout.slab_pages))))
        for slab in dropped:
            self._drop(slab)
        return self._give_back(dropped)

    def compact(
        self, tables: Iterable[list[int]], pages: int, *, fixed: Set[int] = frozenset()
    ) -> int:
        """Move blocks together so that whole slabs go back; pages freed, `pages` being enough.

        `tables` are all tables with references, and are changed in place; blocks in `fixed` (those
        of jobs in flight) stay. Raises BrokenPromise, before anything moves, if a block that would
        move has references that `tables` do not show.
        """
        if self.fixed:
            return 0
        moves = compaction.plan(self._slabs, ceil_div(pages, self.layout.slab_pages), fixed)
        if not moves:
            return 0
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

    def clear(self) -> None:
        """Forget everything and give all pages back. Raises BrokenPromise if a block is in use."""
        if self._refs:
            raise BrokenPromise(f"{self.owner} is cleared while {len(self._refs)} blocks are used")
        self.drop_cached(self.pages + self.borrowed_pages)
        self.turn(WHOLE)

    def turn(self, wanted: Rotation) -> bool:
        """Let other layers share pages; False, and no change, where the pool is short.

        No job may be under way. What lies in layers that have shared pages before is undefined
        after, as is what lies in those that do then. Raises DeviceError, with contents lost, if
        the operating system refuses to map.
        """
        if self._layered is None or wanted == self.rotation:
            return wanted == self.rotation
        return self._layered.turn(wanted, self._slabs.of)

    def close(self) -> None:
        """Clear, and give the addresses back."""
        self.clear()
        self._backing.range.close()

    # -- borrowed pages ---------------------------------------------------------------------------

    def used_with(self, at: int) -> list[int]:
        """Used blocks of the slab to which the page at index `at` of the range belongs."""
        return [b for b in self._blocks_with(at) if b in self._refs]

    def forsake(self, at: int) -> bool:
        """Give up what is cached in that slab; whether that has given the slab back."""
        slab = self._slabs.home(self._blocks_with(at)[0])
        if slab.used:
            return False
        self._drop(slab)
        self._give_back([slab])
        return True

    def bring_home(self, at: int) -> bool:
        """Put pages of the pool beneath that slab, which is on borrowed ones; blocks keep their
        numbers and addresses. False, and no change, where pages are short. Nothing in flight may
        use the slab."""
        here = self._blocks_with(at)
        slab = self._slabs.home(here[0])
        free = set(slab.free)

        def copy(other: int) -> None:
            if self.move is not None:
                for block in here:
                    if block not in free:
                        self.move(block, block + (other - slab.index) * self._size)

        return self._backing.bring_home(slab.index, copy)

    def _blocks_with(self, at: int) -> Sequence[int]:
        first = at // self.layout.slab_pages * self._size
        return range(first, first + self._size)

    # -- checks -----------------------------------------------------------------------------------

    def validate(self, tables: Iterable[Sequence[int]]) -> None:
        """Raises BrokenPromise unless references, slabs, names and pages agree.

        `tables`: all tables that hold references.
        """
        if Counter(block for table in tables for block in table) != self._refs:
            raise BrokenPromise(f"{self.owner}: references are not those of the tables")
        if self._shared != sum(n > 1 for n in self._refs.values()):
            raise BrokenPromise(f"{self.owner}: {self._shared} blocks shared is a miscount")
        slabs = self._slabs
        slabs.validate()
        used = Counter(block // self._size for block in self._refs)
        if any(slab.used != used[index] for index, slab in slabs.of.items()):
            raise BrokenPromise(f"{self.owner}: a slab counts its used blocks wrongly")
        dormant = {block for slab in slabs.of.values() for block in (*slab.cached, *slab.free)}
        if not dormant.isdisjoint(self._refs):
            raise BrokenPromise(f"{self.owner}: a used block is also cached or free")
        self._validate_names({block for slab in slabs.of.values() for block in slab.cached})
        self._backing.validate(slabs.of.keys())

    def _validate_names(self, cached: set[int]) -> None:
        named: set[int] = set()
        kept: set[int] = set()
        if self._prefix is not None:
            self._prefix.validate()
            named, kept = self._prefix.named(), self._prefix.kept()
        if not cached <= kept or not named <= cached | self._refs.keys():
            raise BrokenPromise(f"{self.owner}: the prefix cache names blocks that hold nothing")

    # -- inside -----------------------------------------------------------------------------------

    def _back(self, n: int) -> bool:
        """`n` more slabs, or none."""
        indices = self._backing.back(n)
        if indices is None:
            return False
        self._slabs.open(indices)
        return True

    def _give_back(self, slabs: list[Slab]) -> int:
        """Pages of empty slabs go to the pool; how many."""
        if not slabs:
            return 0
        for slab in slabs:
            self._slabs.close(slab)
        return self._backing.release([slab.index for slab in slabs])

    def _unused(self, slab: Slab, blocks: list[int]) -> None:
        """The last references of these blocks of one slab are gone."""
        slab.used -= len(blocks)
        for block in blocks:
            if self._prefix is not None and self._prefix.keep(block):
                slab.cached[block] = None
            else:
                self._forget((block,))
                slab.free.append(block)
        self._slabs.settle(slab, touched=True)

    def _drop(self, slab: Slab) -> None:
        """What is cached in a slab becomes free."""
        lost = list(slab.cached)
        self._forget(lost)
        self._slabs.uncache(slab, lost)

    def _forget(self, blocks: Iterable[int]) -> None:
        if self._prefix is not None:
            for block in blocks:
                self._prefix.forget(block)

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


def _block_major(
    spec: ModelSpec, pool: Pool, vm: Vm, capacity_blocks: int | None, borrower: Borrower | None
) -> Backing:
    layout = Layout.of(spec, vm.page_bytes)
    # As much again may be borrowed.
    n_slabs = pool.total // layout.slab_pages * (1 if borrower is None else 2)
    if capacity_blocks is not None:
        n_slabs = min(n_slabs, ceil_div(capacity_blocks, layout.blocks_per_slab))
    backing = Backing(f"kv:{spec.name}", layout, pool, vm, n_slabs, borrower)
    if capacity_blocks is not None:
        backing.bound = n_slabs * layout.slab_pages
    return backing
