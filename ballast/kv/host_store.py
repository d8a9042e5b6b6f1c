"""Keep KV blocks of all devices of a host in its memory, for workers that map it.

One store per host, in the server's process (`cluster.kv_broker`), or in the only process there is.
It owns the directory and the cells; workers copy. A worker that dies leaves no lock: cells that it
was to write are freed, and what it was reading may make way again.

Virtual devices use the same class over cells without memory.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from ballast.kv.directory import BlockDirectory, Tier
from ballast.kv.tier_shelf import KvBlock
from ballast.memory.cell_book import CELL_BYTES, CellBook, Runs

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Slot:
    """A block in the host tier."""

    runs: Runs
    n_bytes: int
    checksum: int


@dataclass(slots=True)
class _Held:
    """Cells of a block, freed when nobody uses them and it is not listed."""

    runs: Runs
    users: Counter[Hashable] = field(default_factory=Counter)
    """By owner, uses: one writing it, or any number reading it."""
    is_listed: bool = True
    is_secret: bool = False
    """Whether it was scrubbed: its bytes are overwritten when it is freed."""


@dataclass(slots=True)
class StoreCounts:
    """What has happened since the store was made, in blocks."""

    stored: int = 0
    refused: int = 0
    """Blocks that found no room."""
    fetched: int = 0
    corrupt: int = 0
    """Fetched, with a wrong checksum: computed again."""
    evicted: int = 0
    scrubbed: int = 0


class HostStore:
    """Blocks in the host's memory, found by name. Used by one thread at a time."""

    def __init__(self, directory: BlockDirectory, cells: CellBook) -> None:
        self.directory, self.cells = directory, cells
        self.counts = StoreCounts()
        self._held: dict[bytes, _Held] = {}
        self._outlived: list[tuple[bytes, _Held]] = []
        """Cells of blocks that are not listed any more, which are still used."""
        self._budget = directory.shelves[Tier.HOST].capacity
        """Bytes for kept blocks and for what owners `occupy`."""
        self._occupied: dict[Hashable, int] = {}
        self._said: set[str] = set()
        self._refused: set[tuple[str | None, str | None]] = set()
        """(model, tenant) that are gone, one of them None."""

    # -- storing ----------------------------------------------------------------------------------

    def reserve(self, owner: Hashable, blocks: Iterable[KvBlock]) -> list[Runs | None]:
        """Reserve cells for blocks of `owner`, which writes them; None: not to be stored. `land` or
        `abandon` must follow for each that has cells."""
        return [self._reserve(owner, block) for block in blocks]

    def land(self, owner: Hashable, name: bytes, checksum: int) -> None:
        """List a block that `owner` has written."""
        held = self._unuse(owner, name)
        if held is not None and held.is_listed:
            self.directory.land(name, Tier.HOST, checksum)
            self.counts.stored += 1

    def abandon(self, owner: Hashable, name: bytes) -> None:
        """Free the cells of a block that `owner` was to write."""
        held = self._held.get(name)
        if held is not None and held.users[owner]:
            self.directory.drop(name, Tier.HOST)
            self._unlisted(name)
        self._unuse(owner, name)

    # -- fetching ---------------------------------------------------------------------------------

    def look_up(self, model: str, names: Sequence[bytes]) -> str:
        """As `BlockDirectory.look_up`."""
        return self.directory.look_up(model, names)

    def fetch(self, owner: Hashable, model: str, names: Sequence[bytes]) -> list[Slot]:
        """Return where the beginning of a chain is, for `owner` to read; `release` must follow for
        the names of as many."""
        slots: list[Slot] = []
        for name, checksum in self.directory.promote(model, names, Tier.HOST):
            runs = self._use(owner, name)
            slots.append(Slot(runs, self.directory.block(name).n_bytes, checksum))
        self.counts.fetched += len(slots)
        return slots

    def release(self, owner: Hashable, names: Iterable[bytes], corrupt: bytes = b"") -> None:
        """End reads of blocks. `corrupt`: one whose checksum was wrong, which is dropped."""
        for name in names:
            held = self._unuse(owner, name)
            if held is not None and held.is_listed:
                self.directory.unpin(name, Tier.HOST)
        if corrupt and self.directory.drop(corrupt, Tier.HOST):
            self._unlisted(corrupt)
            self.counts.corrupt += 1
            self.say("a block of KV in host memory had changed: it is computed again")

    # -- ends -------------------------------------------------------------------------------------

    def end(self, owner: Hashable) -> None:
        """Forget an owner that writes and reads no more: its process has ended."""
        for name in [n for n, held in self._held.items() if held.users[owner]]:
            if self.directory.has(name, Tier.HOST):
                for _ in range(self._held[name].users[owner]):
                    self.release(owner, (name,))
            else:
                self.abandon(owner, name)
        for name, held in list(self._outlived):
            while held.users[owner]:
                self._unuse(owner, name)
        self.occupy(owner, 0)

    def scrub(self, *, model: str | None = None, tenant: str | None = None) -> int:
        """Remove all blocks of a model (by its fingerprint) or tenant from all tiers, and overwrite
        their bytes; return their number."""
        return len(self._scrub(model, tenant))

    def refuse(self, *, model: str | None = None, tenant: str | None = None) -> None:
        """Scrub all blocks of a model or tenant that is gone, and take no more: what its last
        requests were storing comes late."""
        self._refused.add((model, tenant))
        self.scrub(model=model, tenant=tenant)

    def accept(self, *, model: str | None = None, tenant: str | None = None) -> None:
        """Undo `refuse`."""
        self._refused.discard((model, tenant))

    def resize(self, n_bytes: int) -> None:
        """Lower or raise the capacity, up to the memory that the store was made with."""
        self._budget = n_bytes
        self._fit()

    def occupy(self, owner: Hashable, n_bytes: int) -> None:
        """Note how much host memory `owner` has beside the store for KV that its passes read there:
        it counts in the tier's bytes, kept blocks make way, and as much memory is given back."""
        more = n_bytes - self._occupied.pop(owner, 0)
        if n_bytes:
            self._occupied[owner] = n_bytes
        self._fit()
        if more > 0:
            self.cells.trim(more)

    def say(self, what: str) -> None:
        """Log a fault once."""
        if what not in self._said:
            self._said.add(what)
            log.warning("%s", what)

    def validate(self) -> None:
        """Raises BrokenPromise unless directory and cells agree."""
        self.directory.validate()
        held = [*self._held.values(), *(held for _, held in self._outlived)]
        cells = [c for h in held for first, n in h.runs for c in range(first, first + n)]
        assert len(cells) == len(set(cells)) == self.cells.used, "a cell is lost, or has two blocks"
        assert set(self._held) == set(self.directory.shelves[Tier.HOST]), "a block has no cells"

    # -- inside -----------------------------------------------------------------------------------

    def _scrub(self, model: str | None, tenant: str | None) -> list[bytes]:
        gone = self.directory.scrub(model=model, tenant=tenant)
        for block in gone:
            self._unlisted(block.name, secret=True)
        self.counts.scrubbed += len(gone)
        return [block.name for block in gone]

    def _use(self, owner: Hashable, name: bytes) -> Runs:
        """Note that `owner` reads a block that it has promoted; return its cells."""
        held = self._held[name]
        held.users[owner] += 1
        return held.runs

    def _reserve(self, owner: Hashable, block: KvBlock) -> Runs | None:
        if block.name in self._held or self._is_refused(block):
            return None
        demotion = self.directory.demote(block, Tier.HOST)
        for gone in demotion.gone:
            self._unlisted(gone.name)
        self.counts.evicted += len(demotion.gone)
        runs = self.cells.allocate(block.n_bytes) if demotion.room else None
        if runs is None:
            self.counts.refused += 1
            if demotion.room:
                self.directory.drop(block.name, Tier.HOST)
                self._fit()
            return None
        self._held[block.name] = _Held(runs, Counter({owner: 1}))
        return runs

    def _fit(self) -> None:
        """Bound the tier by its bytes, by the memory that the machine had for it, and by what is
        occupied, so that blocks make way."""
        most = min(self._budget, self.cells.n_cells * CELL_BYTES)
        left = max(0, most - sum(self._occupied.values()))
        for block in self.directory.resize(Tier.HOST, left):
            self._unlisted(block.name)

    def _is_refused(self, block: KvBlock) -> bool:
        if not self._refused:
            return False
        models = {(model, None) for model in block.model.split(":")}
        return (None, block.tenant) in self._refused or not models.isdisjoint(self._refused)

    def _unuse(self, owner: Hashable, name: bytes) -> _Held | None:
        """End one use of a block's cells; returns them, None if `owner` does not use them."""
        found = [held for gone, held in self._outlived if gone == name]
        if (held := self._held.get(name)) is not None:
            found.append(held)
        for held in found:
            if held.users[owner]:
                held.users[owner] -= 1
                self._free_unused(name, held)
                return held
        return None

    def _unlisted(self, name: bytes, secret: bool = False) -> None:
        """Free a block that has left the host tier, now or when its last use ends."""
        held = self._held.pop(name, None)
        if held is None:
            return
        held.is_listed, held.is_secret = False, secret
        self._outlived.append((name, held))
        self._free_unused(name, held)

    def _free_unused(self, name: bytes, held: _Held) -> None:
        if held.is_listed or held.users.total():
            return
        self._outlived = [(n, h) for n, h in self._outlived if h is not held]
        if held.is_secret:
            self.cells.wipe(held.runs)
        self.cells.release(held.runs)
