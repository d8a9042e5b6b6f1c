"""Choose which KV blocks of one tier make way: by shares of tenants, kind of use, and recency.

Used by `BlockDirectory`, one for each tier. Pure: counts bytes, moves none.

Blocks that were asked for again since they came are *kept*, others are *new*, as in S3-FIFO (Yang
et al., SOSP 2023): while new ones hold more than `NEW_SHARE` of a tenant's bytes they make way
first, so that prefixes used once do not flush those used often. Names of blocks that made way are
remembered for a while: one that comes again is kept at once. Within each kind the least recently
used goes first. A block goes before the one that it continues, without which it cannot be found.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ballast.core.errors import BrokenPromise
from ballast.core.units import ceil_div

NEW_SHARE = 0.1
"""Share of a tenant's bytes that new blocks have before kept ones make way for them."""
LEAST_GHOSTS = 1024
"""Names of blocks that made way are remembered for at least so many."""


@dataclass(frozen=True, slots=True)
class KvBlock:
    """A full block of KV, by its name in the prefix cache."""

    name: bytes
    parent: bytes
    """Name of the block that it continues; empty: it is the first of its chain."""
    n_bytes: int
    model: str
    """Byte format (`kv.extents.form`) and, after a colon, the adapter's fingerprint, if any."""
    tenant: str = ""
    seconds: float = 0.0
    """What it takes to compute it again; 0: unknown."""


@dataclass(slots=True)
class _Shelved:
    block: KvBlock
    used: int
    kept: bool
    pins: int = 0


@dataclass(slots=True)
class _TenantLine:
    """Blocks of one tenant: bytes by kind, and heaps of (last use, name) of possible victims.

    Heap entries may be stale: one counts if the block is still there, is of that kind, was not used
    since, and nothing continues it."""

    n_bytes: int = 0
    kept_bytes: int = 0
    new: list[tuple[int, bytes]] = field(default_factory=list)
    kept: list[tuple[int, bytes]] = field(default_factory=list)


class TierShelf:
    """Blocks in one tier, at most `capacity` bytes. A block takes whole units of `unit` bytes."""

    def __init__(self, capacity: int, unit: int = 1) -> None:
        self.capacity, self.unit = capacity, unit
        self.n_bytes = 0
        self._on: dict[bytes, _Shelved] = {}
        self._children: Counter[bytes] = Counter()
        """Number of blocks here that continue a block, which may be elsewhere."""
        self._lines: dict[str, _TenantLine] = {}
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._clock = 0

    def __len__(self) -> int:
        return len(self._on)

    def __contains__(self, name: bytes) -> bool:
        return name in self._on

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._on)

    def bytes_of(self) -> dict[str, int]:
        """Return the bytes of each tenant that has any."""
        return {tenant: line.n_bytes for tenant, line in self._lines.items()}

    def add(self, block: KvBlock) -> tuple[bool, list[bytes]]:
        """Add a block, pinned once, if it is not here and finds room; returns whether it was added,
        and the names of blocks that made way."""
        size = self._size(block)
        if block.name in self._on or size > self.capacity:
            return False, []
        self._children[block.parent] += 1  # what it continues does not make way for it
        gone: list[bytes] = []
        while self.n_bytes + size > self.capacity:
            victim = self._victim(block)
            if victim is None:
                self._lose_child(block.parent)
                return False, gone
            self._remove(victim)
            self._remember(victim)
            gone.append(victim)
        self._clock += 1
        kept = block.name in self._ghosts
        self._ghosts.pop(block.name, None)
        self._on[block.name] = _Shelved(block, self._clock, kept, pins=1)
        line = self._lines.setdefault(block.tenant, _TenantLine())
        line.n_bytes += size
        line.kept_bytes += kept * size
        self.n_bytes += size
        return True, gone

    def touch(self, names: Iterable[bytes]) -> None:
        """Note that blocks, in the order of their chain, were asked for again."""
        for name in names:
            shelved = self._on.get(name)
            if shelved is None:
                continue
            self._clock += 1
            shelved.used = self._clock
            if not shelved.kept:
                shelved.kept = True
                self._lines[shelved.block.tenant].kept_bytes += self._size(shelved.block)
            self._offer(name)

    def pin(self, name: bytes) -> None:
        """Keep a block from making way until `unpin`."""
        self._on[name].pins += 1

    def unpin(self, name: bytes) -> None:
        """Undo one `pin`, or that of `add`; does nothing for a block that was dropped."""
        shelved = self._on.get(name)
        if shelved is not None:
            shelved.pins -= 1
            self._offer(name)

    def drop(self, name: bytes) -> bool:
        """Remove a block, pinned or not; return whether it was here."""
        if name not in self._on:
            return False
        self._remove(name)
        self._ghosts.pop(name, None)
        return True

    def resize(self, capacity: int) -> list[bytes]:
        """Change the capacity; return the blocks that make way. Pinned ones stay until later."""
        self.capacity = capacity
        gone: list[bytes] = []
        while self.n_bytes > capacity and (victim := self._victim(None)) is not None:
            self._remove(victim)
            gone.append(victim)
        return gone

    def validate(self) -> None:
        """Raises BrokenPromise unless all counts follow from the blocks."""
        shelved = self._on.values()
        if self.n_bytes != sum(self._size(s.block) for s in shelved):
            raise BrokenPromise(f"{self.n_bytes} bytes on a shelf is a miscount")
        if +self._children != Counter(s.block.parent for s in shelved):
            raise BrokenPromise("a block on a shelf has a wrong number of successors")
        for tenant, line in self._lines.items():
            own = [s for s in shelved if s.block.tenant == tenant]
            kept = sum(self._size(s.block) for s in own if s.kept)
            if (line.n_bytes, line.kept_bytes) != (sum(self._size(s.block) for s in own), kept):
                raise BrokenPromise(f"the bytes of tenant {tenant!r} are a miscount")

    # -- inside -----------------------------------------------------------------------------------

    def _size(self, block: KvBlock) -> int:
        return ceil_div(block.n_bytes, self.unit) * self.unit

    def _victim(self, newcomer: KvBlock | None) -> bytes | None:
        """Return the block that makes way next: of the tenant with the most bytes, the newcomer's
        included; None if all that could go are pinned or continued."""
        sizes = {tenant: line.n_bytes for tenant, line in self._lines.items()}
        if newcomer is not None:
            sizes[newcomer.tenant] = sizes.get(newcomer.tenant, 0) + self._size(newcomer)
        for tenant in sorted(sizes, key=lambda t: (-sizes[t], t)):
            line = self._lines.get(tenant)
            if line is None:
                return None  # it is the newcomer's, which makes none of the others smaller
            new_bytes = line.n_bytes - line.kept_bytes
            heaps = (line.new, line.kept)
            for heap in heaps if new_bytes > NEW_SHARE * line.n_bytes else heaps[::-1]:
                victim = self._least_used(heap, kept=heap is line.kept)
                if victim is not None:
                    return victim
            if newcomer is not None and tenant == newcomer.tenant:
                return None  # others have no more than it
        return None

    def _least_used(self, heap: list[tuple[int, bytes]], *, kept: bool) -> bytes | None:
        """Pop entries until one counts; return its block."""
        while heap:
            used, name = heapq.heappop(heap)
            shelved = self._on.get(name)
            if shelved is None or (shelved.used, shelved.kept) != (used, kept):
                continue
            if not shelved.pins and not self._children[name]:
                return name
        return None

    def _offer(self, name: bytes) -> None:
        """Put a block that may make way into its heap; others are offered when they may."""
        shelved = self._on.get(name)
        if shelved is None or shelved.pins or self._children[name]:
            return
        line = self._lines[shelved.block.tenant]
        heap = line.kept if shelved.kept else line.new
        heapq.heappush(heap, (shelved.used, name))
        if len(heap) > 4 * len(self._on) + LEAST_GHOSTS:
            heap[:] = [e for e in set(heap) if self._is_current(e, kept=shelved.kept)]
            heapq.heapify(heap)

    def _is_current(self, entry: tuple[int, bytes], *, kept: bool) -> bool:
        shelved = self._on.get(entry[1])
        return shelved is not None and (shelved.used, shelved.kept) == (entry[0], kept)

    def _remove(self, name: bytes) -> None:
        shelved = self._on.pop(name)
        block = shelved.block
        line = self._lines[block.tenant]
        size = self._size(block)
        line.n_bytes -= size
        line.kept_bytes -= shelved.kept * size
        if not line.n_bytes:
            del self._lines[block.tenant]
        self.n_bytes -= size
        self._lose_child(block.parent)

    def _lose_child(self, parent: bytes) -> None:
        self._children[parent] -= 1
        if not self._children[parent]:
            del self._children[parent]
            self._offer(parent)

    def _remember(self, name: bytes) -> None:
        self._ghosts[name] = None
        while len(self._ghosts) > max(LEAST_GHOSTS, len(self._on)):
            self._ghosts.popitem(last=False)
