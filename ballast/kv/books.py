"""Count a KV cache's used, cached and free blocks, and the pages that they take or would free.

The read-only base of `BlockTables` and `KvCache`: the engine's planner, views and policies' offers
read these counts. Allocates and frees nothing; only the limit and `fixed` can be set here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from ballast.core.actions import Short
from ballast.core.change_counter import ChangeCounter
from ballast.core.errors import BrokenPromise
from ballast.core.model import ModelSpec
from ballast.core.rotation import WHOLE, Rotation
from ballast.core.units import ceil_div
from ballast.kv.backing import Backing, PageBacking, RangeBacking
from ballast.kv.layered import LayeredBacking, LayeredLayout
from ballast.kv.layout import Layout
from ballast.kv.prefix import PrefixIndex
from ballast.kv.slabs import Slabs
from ballast.kv.staged import BlockMoves, StagedBlocks
from ballast.memory.lending.borrower import Borrower
from ballast.memory.pool import Pool
from ballast.memory.vm import Range, Vm


class BlockBooks:
    """Block and page counts of one model's KV cache. Only `limit` and `fixed` can be changed."""

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
        host_blocks: int = 0,
    ) -> None:
        """`prefix`: whether prefixes are cached. `move(source, target)` copies one block's bytes;
        None in virtual time, where there are none. `capacity_blocks` is a permanent bound, in
        whole slabs; None: the cache may take all pages of the pool. `borrower` holds pages of
        other devices, which back slabs of one page where the pool is short. `layered`:
        layer-major, so that layers can share pages (`turn`); such a cache has no capacity.
        `host_blocks`: most blocks that can be staged, in host memory."""
        self.spec = spec
        self.move = move
        self.version = ChangeCounter()
        """Counts changes of the cache's contents and bounds."""
        self.freed = pool.freed
        """Counts changes after which a refused growth of a table may succeed."""
        self._fixed = False
        self.relocations = 0
        """Number of times that used blocks were moved or their pages were replaced."""
        self.hit_tokens = 0
        """Tokens whose KV `match` has found in the prefix cache, since start."""
        self.asked_tokens = 0
        """Tokens that `match` was called with, since start."""
        self.forgotten_blocks = 0
        """Blocks of cached prefixes that have been forgotten to make room, since start."""
        self._layered: LayeredBacking | None = None
        if layered:
            planes = LayeredLayout.over(spec, vm.page_bytes, pool.total)
            self._layered = LayeredBacking(spec.name, planes, pool, vm)
        self._backing = self._layered or _block_major(spec, pool, vm, capacity_blocks, borrower)
        self._size = self.layout.blocks_per_slab
        self._slabs = Slabs(self._size)
        self.staged = StagedBlocks(self.layout, host_blocks, self.addresses.n_bytes)
        """Used blocks that lie on the host: their numbers are below zero."""
        self.moves = BlockMoves()
        """Blocks that the job in flight moves."""
        self._refs: dict[int, int] = {}
        """References of each used block, at least 1."""
        self._shared = 0
        """Number of used blocks with more than one reference."""
        self._prefix = PrefixIndex(spec.fingerprint, spec.block_tokens) if prefix else None

    # -- sizes ------------------------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        return self._backing.layout

    @property
    def rotation(self) -> Rotation:
        """Rotation in force: the layers that share pages."""
        return WHOLE if self._layered is None else self._layered.rotation

    @property
    def layer_pages(self) -> int:
        """Pages of one layer that does not rotate; 0 if the cache is block-major."""
        layered = self._layered
        return 0 if layered is None else len(self._slabs.of) * layered.layout.plane_pages

    @property
    def slabs(self) -> tuple[int, ...]:
        """Indices of backed slabs, ascending."""
        return tuple(sorted(self._slabs.of))

    @property
    def owner(self) -> str:
        return self._backing.owner

    @property
    def base(self) -> int:
        """Address of block 0; never changes."""
        return self._backing.addresses.base

    @property
    def addresses(self) -> Range:
        """Addresses in which blocks lie: the device's window, or a range of the cache's own."""
        return self._backing.addresses

    def page_at(self, offset: int) -> int:
        """Return the number of the page with the byte at `offset` of `addresses`, of a backed
        block."""
        return self._backing.page_at(offset)

    @property
    def in_window(self) -> bool:
        """Whether blocks lie in the device's window, whose addresses are always mapped."""
        return isinstance(self._backing, PageBacking)

    def is_backed(self, block: int) -> bool:
        return block // self._size in self._slabs.of

    def os_backed(self) -> int:
        """Pages that the operating system shows where the cache's blocks are read."""
        return self._backing.os_backed()

    @property
    def pages(self) -> int:
        """Pages of the pool that back blocks now."""
        return self._backing.pages

    @property
    def borrowed_pages(self) -> int:
        """Borrowed pages that back blocks now."""
        return len(self._backing.abroad) * self.layout.slab_pages

    def borrowed_use(self, work: Iterable[tuple[Sequence[int], int, int]]) -> tuple[int, int]:
        """Return the blocks on borrowed pages that a job reads, those that sequences share once,
        and the tokens whose KV it writes there. `work`: by sequence, its block table, and the
        positions from and up to which KV is computed. Safe from any thread while the job runs."""
        abroad, size, tokens = self._backing.abroad, self._size, self.spec.block_tokens
        if not abroad:
            return 0, 0
        read: set[int] = set()
        written = 0
        for blocks, start, end in work:
            for i, block in enumerate(blocks[: ceil_div(end, tokens)]):
                if block // size in abroad:
                    read.add(block)
                    written += max(0, min(end, (i + 1) * tokens) - max(start, i * tokens))
        return len(read), written

    def lies_abroad(self, blocks: Iterable[int]) -> bool:
        """Return whether any of these backed blocks lies on borrowed pages."""
        abroad = self._backing.abroad
        return bool(abroad) and any(block // self._size in abroad for block in blocks)

    @property
    def limit(self) -> int | None:
        """Most pages of the pool that growth may reach (None: no bound). Lowering it frees
        nothing."""
        return self._backing.limit

    @limit.setter
    def limit(self, pages: int | None) -> None:
        self.version.n += 1
        self.freed.n += 1
        self._backing.limit = pages

    @property
    def fixed(self) -> bool:
        """Whether cached prefixes are kept from being dropped or moved."""
        return self._fixed

    @fixed.setter
    def fixed(self, fixed: bool) -> None:
        self.version.n += 1
        self._fixed = fixed

    @property
    def cached_pages(self) -> int:
        """Pages of the pool that dropping all cached prefixes would free."""
        if self._fixed:
            return 0
        return len(self._slabs.idle) * self.layout.slab_pages - self.cached_borrowed_pages

    @property
    def cached_pages_of(self) -> Mapping[str, int]:
        """Pages of slabs that hold cached prefixes only, borrowed ones included, by tenant."""
        pages = self.layout.slab_pages
        return {tenant: n * pages for tenant, n in self._slabs.idle_of.items()}

    @property
    def cached_borrowed_pages(self) -> int:
        """Borrowed pages that dropping all cached prefixes would free."""
        idle = self._slabs.idle
        abroad = tuple(self._backing.abroad)  # reports are made by another thread
        return sum(index in idle for index in abroad) * self.layout.slab_pages

    @property
    def loose_pages(self) -> int:
        """Pages that `compact` would free if every block in use could be moved."""
        return self._slabs.at_hand // self._size * self.layout.slab_pages

    @property
    def at_hand(self) -> int:
        """Blocks that tables can be given without a further page and without idle slabs."""
        return self._slabs.at_hand

    @property
    def room(self) -> int:
        """Blocks that tables can be given without a further page, if all cached ones are reused."""
        return self._slabs.at_hand + len(self._slabs.idle) * self._size

    @property
    def used_blocks(self) -> int:
        """Used blocks on the device."""
        return len(self._refs) - len(self.staged) + len(self.moves.stores)

    @property
    def cached_blocks(self) -> int:
        """Number of blocks that hold a cached prefix and are in no table."""
        return len(self._slabs.of) * self._size - self._slabs.free - self.used_blocks

    def block_address(self, block: int) -> int:
        return self.base + block * self.layout.stride_bytes

    def most_pages(self, n_blocks: int) -> int:
        """Return the pages of a table of `n_blocks` in otherwise empty slabs, without rotation."""
        return ceil_div(n_blocks, self._size) * self.layout.whole_pages

    def pages_for(self, n_blocks: int) -> int:
        """Return the pages that growth by `n_blocks` would need, of the pool or `cached_pages`.

        Growth succeeds iff the pool can allocate this number, less `cached_pages`, within the
        limit, or borrowed pages make up for it. Cached prefixes in slabs in use count as free:
        re-using them needs no page.
        """
        return self.layout.pages(max(0, n_blocks - self._slabs.at_hand))

    def if_freed(self, blocks: Sequence[int]) -> tuple[int, int]:
        """Return (pages, blocks) that `free(blocks, surrender=True)` would free now.

        The pages are not in `cached_pages`: freeing both frees the sum. The blocks are those in
        slabs that stay backed, for this cache's own use, and those on borrowed pages.
        """
        if self.staged.blocks:
            blocks = [b for b in blocks if b >= 0]
        if self._shared:
            refs = self._refs
            blocks = [b for b in blocks if refs[b] == 1]
        if self._size == 1:
            n = sum(b in self._backing.abroad for b in blocks) if self._backing.abroad else 0
            return (len(blocks) - n) * self.layout.slab_pages, n
        size, of, emptied, stay = self._size, self._slabs.of, 0, 0
        counts: dict[int, int] = {}  # a Counter takes longer for tables of usual lengths
        for block in blocks:
            index = block // size
            counts[index] = counts.get(index, 0) + 1
        for index, n in counts.items():
            if of[index].used == n and index not in self._backing.abroad:
                emptied += 1
            else:
                stay += n
        return emptied * self.layout.slab_pages, stay

    def limited(self, short: Short) -> bool:
        """Return whether a growth refused with `short` would exceed the limit even if pages were
        free."""
        most = self._backing.most
        return most is not None and self.pages - self.cached_pages + short.pages > most

    def excess(self, pages: int) -> int:
        """Return the pages by which growth by `pages` would exceed the limit."""
        most = self._backing.most
        return 0 if most is None else max(0, self.pages + pages - most)

    # -- checks -----------------------------------------------------------------------------------

    def validate(self, tables: Iterable[Sequence[int]]) -> None:
        """Raises BrokenPromise unless references, slabs, names and pages agree.

        `tables`: all tables that hold references.
        """
        held = (*tables, self.moves.coming)
        if Counter(block for table in held for block in table) != self._refs:
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
        leaving = {staged for _, staged in self.moves.stores}
        if {block for block in self._refs if block < 0} != self.staged.blocks - leaving:
            raise BrokenPromise(f"{self.owner}: {len(self.staged)} blocks are staged")
        self.staged.validate(self._backing.slots, len(leaving))
        self._backing.validate(slabs.of.keys())

    def _validate_names(self, cached: set[int]) -> None:
        named: set[int] = set()
        kept: set[int] = set()
        if self._prefix is not None:
            self._prefix.validate()
            named, kept = self._prefix.named(), self._prefix.kept()
        if not cached <= kept or not named <= cached | self._refs.keys():
            raise BrokenPromise(f"{self.owner}: the prefix cache names blocks that hold nothing")


def _block_major(
    spec: ModelSpec, pool: Pool, vm: Vm, capacity_blocks: int | None, borrower: Borrower | None
) -> Backing:
    layout = Layout.of(spec, vm.page_bytes)
    owner = f"kv:{spec.name}"
    n_slabs = pool.total // layout.slab_pages
    if capacity_blocks is not None:
        n_slabs = min(n_slabs, ceil_div(capacity_blocks, layout.blocks_per_slab))
    backing: Backing
    if layout.slab_pages == 1:
        backing = PageBacking(owner, layout, pool, vm, borrower)
    else:
        backing = RangeBacking(owner, layout, pool, vm, n_slabs)
    if capacity_blocks is not None:
        backing.bound = n_slabs * layout.slab_pages
    return backing
