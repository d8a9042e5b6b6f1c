"""Extend the host store by a disk: blocks are written behind, and staged for those who need them.

Used by the server's broker and by `live.own_store`. Without a disk it is the host store alone.

A block that waits for its write stays on the host until then, unless half of the tier waits: so
what leaves the host is on disk, or the disk had no time or no room for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from pathlib import Path

from ballast.core.errors import DeviceError
from ballast.core.kv_tiers import DISK_BYTES_PER_SECOND, KvTierSettings
from ballast.kv.directory import BlockDirectory, Tier, TierSettings
from ballast.kv.disk_file import DiskFile, is_left
from ballast.kv.disk_tier import BATCH, DiskBlock, DiskTier, Post
from ballast.kv.host_store import HostStore
from ballast.kv.tier_shelf import KvBlock
from ballast.memory.cell_book import CELL_BYTES, Runs
from ballast.memory.host_cells import HostCells

log = logging.getLogger(__name__)

_DISK = "disk"
"""Owner of cells that the disk's thread reads or writes."""
LAST_SECONDS = 5.0
"""Bound of the seconds for which a store that closes goes on writing."""


class _WaitingWrites:
    """Blocks that have landed on the host and are to be written, in this order."""

    def __init__(self) -> None:
        self.kept_bytes = 0
        """Bytes of those that stay on the host until they are written."""
        self._kept: dict[bytes, int] = {}
        """Bytes of each that stays there, 0 for others."""

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._kept)

    def add(self, name: bytes, kept_bytes: int) -> bool:
        """Add a block; returns False if it waits already."""
        if name in self._kept:
            return False
        self._kept[name] = kept_bytes
        self.kept_bytes += kept_bytes
        return True

    def remove(self, name: bytes) -> bool:
        """Remove a block, if it waits; returns whether it was to stay on the host."""
        n_bytes = self._kept.pop(name, 0)
        self.kept_bytes -= n_bytes
        return n_bytes > 0


class TieredStore(HostStore):
    """Blocks in the host's memory and on its disk. Used by one thread at a time."""

    def __init__(
        self,
        directory: BlockDirectory,
        cells: HostCells,
        disk: DiskTier | None,
        unopened: tuple[Path, str] | None = None,
    ) -> None:
        """`unopened`: directory of a disk that could not be used from the start, and why."""
        super().__init__(directory, cells)
        self._unopened = unopened
        self._disk, self._memory = disk, cells
        self._behind = _WaitingWrites()
        self._is_writing = False
        shelf = directory.shelves.get(Tier.DISK)
        self._most_disk = 0 if shelf is None else shelf.capacity

    @classmethod
    def create(
        cls,
        settings: KvTierSettings,
        post: Post,
        tenants: Collection[str] | None = None,
        *,
        threaded: bool = True,
    ) -> TieredStore:
        """Create a host's store.

        `post` has a function called in the store's thread; `tenants`: those whose blocks on disk
        are kept (None: all). Raises DeviceError where memory is short. A disk
        that cannot be used is left out, with a warning in the log."""
        cells = HostCells(settings.host_bytes, threaded)
        tiers = {Tier.HOST: TierSettings(cells.n_bytes, unit=CELL_BYTES)}
        if not settings.disk_bytes:
            return cls(BlockDirectory(tiers), cells, None)
        path = Path(settings.disk_path)
        try:
            file = DiskFile(path, settings.disk_bytes)
        except DeviceError as error:
            log.warning("no KV is kept on disk: %s", error)
            return cls(BlockDirectory(tiers), cells, None, (path, str(error)))
        if file.found_unusable:
            log.warning("KV on disk is not used, and computed: %s", file.found_unusable)
        tiers[Tier.DISK] = TierSettings(settings.disk_bytes, DISK_BYTES_PER_SECOND)
        store = cls(BlockDirectory(tiers), cells, DiskTier(file, cells, post))
        store._find_again(file.found, tenants)
        return store

    def land(self, owner: Hashable, name: bytes, checksum: int) -> None:
        super().land(owner, name, checksum)
        if self._uses_disk and self.directory.has(name, Tier.HOST):
            self._keep_until_written(name)
            self._write_behind()

    def stage(self, model: str, names: Sequence[bytes], ended: Callable[[], object]) -> None:
        """Bring the blocks of a chain that are on disk alone to the host, as far as there is room;
        then call `ended`: at once where there is nothing to bring."""
        wanted = list(self.directory.stage(model, names, Tier.DISK)) if self._uses_disk else []
        if not wanted or self._disk is None:
            ended()
            return
        reading: list[DiskBlock] = []
        for block in wanted:
            checksum = self.directory.checksum(block.name, Tier.DISK)
            (runs,) = self.reserve(_DISK, (block,))
            if runs is None or checksum is None:
                break  # no room, or it is on its way: what is asked for next waits for that
            self.directory.promote(model, (block.name,), Tier.DISK)
            reading.append(DiskBlock(block, runs, checksum))

        def read(good: int) -> None:
            self._staged(reading, good)
            ended()

        self._disk.read(reading, read)

    def scrub(self, *, model: str | None = None, tenant: str | None = None) -> int:
        names = self._scrub(model, tenant)
        for name in names:
            self._unqueue(name)
        self._delete(names)
        return len(names)

    def scrub_others(self, models: Collection[str]) -> int:
        """Scrub all blocks of models and adapters but these, by their fingerprints; return their
        number."""
        return sum(self.scrub(model=one) for one in self.directory.models() - set(models))

    def resize_disk(self, n_bytes: int) -> None:
        """Lower or raise the disk's capacity, up to what the file was made for; does nothing where
        no disk is used."""
        if self._uses_disk:
            self._fit_disk(min(n_bytes, self._most_disk))

    def close(self) -> None:
        """Write what can be written in a few seconds, and give the memory back, unless a slow disk
        still reads it: then it goes with the process."""
        ended = True
        if self._disk is not None:
            while self._uses_disk and (batch := self._next_batch()):
                self._disk.write(batch, lambda names: None)
            ended = self._disk.close(LAST_SECONDS)
        if ended:
            self._memory.close()

    def give_up_disk(self, why: str) -> None:
        """Use the disk no more: it does not answer."""
        if self._disk is not None:
            self._disk.give_up(why)
        self._lose_failed()

    @property
    def disk_fault(self) -> str:
        """Why the disk is not used, or not any more; empty: it is, or there is none."""
        if self._disk is None:
            return "" if self._unopened is None else self._unopened[1]
        return self._disk.fault

    @property
    def disk_keeps(self) -> bool:
        """Whether KV is left on a disk that was given up, or could not be used from the start, so
        that no order reaches it."""
        if self._disk is None:
            return self._unopened is not None and is_left(self._unopened[0])
        return not self._disk.is_removed

    # -- inside -----------------------------------------------------------------------------------

    @property
    def _uses_disk(self) -> bool:
        return self._disk is not None and not self._disk.fault

    def _find_again(
        self, found: Iterable[tuple[KvBlock, int]], tenants: Collection[str] | None
    ) -> None:
        """List what an earlier server has written; remove what there is no room for, and blocks of
        tenants that there are no longer."""
        gone: list[bytes] = []
        for block, checksum in found:
            if tenants is not None and block.tenant and block.tenant not in tenants:
                gone.append(block.name)
                continue
            demotion = self.directory.demote(block, Tier.DISK)
            gone += [other.name for other in demotion.gone]
            if demotion.room:
                self.directory.land(block.name, Tier.DISK, checksum)
            else:
                gone.append(block.name)
        self._delete(gone)
        log.info("%d blocks of KV are on disk", len(self.directory))

    def _keep_until_written(self, name: bytes) -> None:
        """Have a block that has landed written, and keep it on the host until then, unless half of
        the tier is kept so: what comes next needs room, too."""
        block = self.directory.block(name)
        half = self.directory.shelves[Tier.HOST].capacity // 2
        kept = block.n_bytes if self._behind.kept_bytes + block.n_bytes <= half else 0
        if self._behind.add(name, kept) and kept:
            self._read_for_disk(block)

    def _unqueue(self, name: bytes) -> None:
        """Let a block make way that was kept until it is written."""
        if self._behind.remove(name):
            self.release(_DISK, (name,))

    def _read_for_disk(self, block: KvBlock) -> Runs:
        """Keep a block on the host until `release`; returns its cells."""
        self.directory.promote(block.model, (block.name,), Tier.HOST)
        return self._use(_DISK, block.name)

    def _write_behind(self) -> None:
        """Begin to write the next blocks that have landed, unless a write is under way."""
        if self._is_writing or self._disk is None:
            return
        batch = self._next_batch()
        if batch:
            self._is_writing = True
            self._disk.write(batch, lambda names: self._written(batch, names))

    def _next_batch(self) -> list[DiskBlock]:
        """Take the next blocks that are to be written, and for which the disk has room."""
        batch: list[DiskBlock] = []
        while self._behind and len(batch) < BATCH:
            name = next(iter(self._behind))
            checksum = self.directory.checksum(name, Tier.HOST)
            if checksum is not None:  # else it has made way, as too many waited
                block = self.directory.block(name)
                demotion = self.directory.demote(block, Tier.DISK)
                self._delete([gone.name for gone in demotion.gone])
                if demotion.room:
                    batch.append(DiskBlock(block, self._read_for_disk(block), checksum))
            self._unqueue(name)
        return batch

    def _written(self, batch: Sequence[DiskBlock], names: Collection[bytes]) -> None:
        """End a write, of which the blocks `names` are on disk."""
        self._is_writing = False
        for b in batch:
            name = b.block.name
            self.release(_DISK, (name,))
            if name in names:
                self.directory.land(name, Tier.DISK, b.checksum)
            else:
                self.directory.drop(name, Tier.DISK)
        self._fit()  # the host tier may have been made smaller than what waited
        if self._disk is not None and not self._disk.has_room:
            self._disk.has_room = True
            self._shrink_disk(sum(b.block.n_bytes for b in batch))
        self._lose_failed()
        if self._uses_disk:
            self._write_behind()

    def _shrink_disk(self, n_bytes: int) -> None:
        """Bound a disk that has less room than it was given by what it holds, less `n_bytes`, which
        others may take."""
        shelf = self.directory.shelves[Tier.DISK]
        self.say("kv_disk has no room for more KV than it holds: some makes way for other")
        self._fit_disk(max(0, shelf.n_bytes - n_bytes))

    def _fit_disk(self, capacity: int) -> None:
        gone = self.directory.resize(Tier.DISK, capacity)
        self._delete([block.name for block in gone])

    def _delete(self, names: Sequence[bytes]) -> None:
        """Delete blocks from the disk, in its order of work."""
        if names and self._disk is not None:
            self._disk.delete(names, self._lose_failed)

    def _staged(self, reading: Sequence[DiskBlock], good: int) -> None:
        for i, b in enumerate(reading):
            name = b.block.name
            self.directory.unpin(name, Tier.DISK)
            if i < good:
                HostStore.land(self, _DISK, name, b.checksum)
            else:
                self.abandon(_DISK, name)
        if good < len(reading) and self._uses_disk:
            self._drop_from_disk(reading[good].block.name)
        self._lose_failed()

    def _drop_from_disk(self, name: bytes) -> None:
        """Remove a block whose bytes are wrong, or gone."""
        if self.directory.drop(name, Tier.DISK):
            self._delete([name])
            self.counts.corrupt += 1
            self.say("a block of KV on disk had changed: it is computed again")

    def _lose_failed(self) -> None:
        """List nothing on a disk that was given up."""
        if self._disk is not None and self._disk.fault:
            for name in list(self._behind):
                self._unqueue(name)
            for name in list(self.directory.shelves[Tier.DISK]):
                self.directory.drop(name, Tier.DISK)
