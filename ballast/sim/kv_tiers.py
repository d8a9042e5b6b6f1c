"""Keep KV of simulated devices in a virtual host tier and on a disk: the live store, without bytes.

Implements `engine.kv_tiers.KvTierCopies`. Copies take the device's link, beside its other traffic.
Devices of one host share a store.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from ballast.core.clock import Clock
from ballast.core.kv_tiers import DISK_BYTES_PER_SECOND, KvFetchedEvent, KvFoundEvent
from ballast.core.link import Direction, LinkRates
from ballast.engine.kv_tiers import BlockToStore
from ballast.kv.directory import BlockDirectory, Tier, TierSettings
from ballast.kv.host_store import HostStore
from ballast.kv.tier_shelf import KvBlock
from ballast.memory.cell_book import CELL_BYTES, CellBook
from ballast.sim.event_heap import EventHeap
from ballast.sim.fluid import Fluid, Wire
from ballast.sim.link import Route, SimLink

LOOK_SECONDS = 3e-4
"""From a look-up to its answer: two messages between processes of a host."""
STREAM = "kv tiers"


_DISK = "disk"
"""Owner of cells that are read from disk."""


class VirtualStore(HostStore):
    """The store of a simulated host, with a disk behind it. Writes to the disk take no time: live
    they are made behind everything else."""

    def __init__(self, host_bytes: int, disk_bytes: int = 0) -> None:
        tiers = {Tier.HOST: TierSettings(host_bytes, unit=CELL_BYTES)}
        if disk_bytes:
            tiers[Tier.DISK] = TierSettings(disk_bytes, DISK_BYTES_PER_SECOND)
        super().__init__(BlockDirectory(tiers), CellBook(host_bytes // CELL_BYTES))
        self.disk = Wire(LinkRates.even(DISK_BYTES_PER_SECOND))
        """Wire that bytes read by all devices of the host cross."""

    def land(self, owner: Hashable, name: bytes, checksum: int) -> None:
        super().land(owner, name, checksum)
        block = self.directory.block(name) if self.directory.has(name, Tier.HOST) else None
        if block is not None and self.directory.demote(block, Tier.DISK).room:
            self.directory.land(name, Tier.DISK, checksum)

    def stage(self, model: str, names: Sequence[bytes]) -> list[KvBlock]:
        """Reserve cells for the blocks of a chain that are on disk alone, as far as there is room;
        `staged` must follow."""
        reading: list[KvBlock] = []
        for block in list(self.directory.stage(model, names, Tier.DISK)):
            if self.reserve(_DISK, (block,)) == [None]:
                break
            self.directory.promote(model, (block.name,), Tier.DISK)
            reading.append(block)
        return reading

    def staged(self, blocks: Sequence[KvBlock]) -> None:
        """List blocks that have been read from disk."""
        for block in blocks:
            self.directory.unpin(block.name, Tier.DISK)
            HostStore.land(self, _DISK, block.name, 0)


def virtual_store(host_bytes: int, disk_bytes: int = 0) -> VirtualStore | None:
    """Make the store of a simulated host; None: it keeps no KV."""
    return VirtualStore(host_bytes, disk_bytes) if host_bytes else None


class SimKvTiers:
    """Look-ups, fetches and stores of one simulated device."""

    def __init__(
        self, store: VirtualStore, heap: EventHeap, clock: Clock, link: SimLink, fluid: Fluid
    ) -> None:
        self._store, self._heap, self._clock, self._link = store, heap, clock, link
        route = Route(fluid, {way: [store.disk.side(way)] for way in Direction})
        self._disk = SimLink(heap, clock, store.disk.rates, route=route)
        self._fetches: dict[str, int] = {}
        """Attempt of each fetch that has not been stopped, by request."""
        self._storing: dict[tuple[str, int], int] = {}
        """Number of each block's store that is not void, by owner and block."""
        self._stores = 0

    def look_up(self, request_id: str, attempt: int, model: str, names: Sequence[bytes]) -> None:
        found = KvFoundEvent(request_id, attempt, self._store.look_up(model, names))
        self._heap.schedule(self._clock.now() + LOOK_SECONDS, found)

    def fetch(
        self,
        request_id: str,
        attempt: int,
        model: str,
        names: Sequence[bytes],
        targets: Sequence[tuple[int, int]],
    ) -> None:
        self._fetches[request_id] = attempt
        reading = self._store.stage(model, names)

        def staged(at: float, seconds: float) -> None:
            self._store.staged(reading)
            self._copy(at, request_id, attempt, model, names)

        if not reading:
            self._copy(self._clock.now(), request_id, attempt, model, names)
            return
        n_bytes = sum(block.n_bytes for block in reading)
        self._disk.stream(STREAM, Direction.TO_DEVICE).carry(self._clock.now(), n_bytes, staged)

    def _copy(
        self, now: float, request_id: str, attempt: int, model: str, names: Sequence[bytes]
    ) -> None:
        """Begin to copy blocks from the host tier to the device, unless that was stopped."""
        if self._fetches.get(request_id) != attempt:
            return
        slots = self._store.fetch(self, model, names)

        def ended(at: float, seconds: float) -> None:
            self._store.release(self, names[: len(slots)])
            if self._fetches.get(request_id) == attempt:
                del self._fetches[request_id]
                self._heap.schedule(at, KvFetchedEvent(request_id, attempt, len(slots)))

        if not slots:
            del self._fetches[request_id]
            self._heap.schedule(now + LOOK_SECONDS, KvFetchedEvent(request_id, attempt, 0))
            return
        n_bytes = sum(slot.n_bytes for slot in slots)
        self._link.stream(STREAM, Direction.TO_DEVICE).carry(now, n_bytes, ended)

    def stop(self, request_id: str) -> None:
        self._fetches.pop(request_id, None)

    def store(self, owner: str, blocks: Sequence[BlockToStore]) -> None:
        cells = self._store.reserve(self, [b.of for b in blocks])
        taken = [b for b, runs in zip(blocks, cells, strict=True) if runs is not None]
        if not taken:
            return
        self._stores = number = self._stores + 1
        for b in taken:
            self._storing[owner, b.block] = number

        def ended(at: float, seconds: float) -> None:
            for b in taken:
                if self._storing.get((owner, b.block)) == number:
                    del self._storing[owner, b.block]
                    self._store.land(self, b.of.name, 0)
                else:
                    self._store.abandon(self, b.of.name)

        n_bytes = sum(b.of.n_bytes for b in taken)
        self._link.stream(STREAM, Direction.TO_HOST).carry(self._clock.now(), n_bytes, ended)

    def void(self, owner: str, block: int) -> None:
        self._storing.pop((owner, block), None)

    def occupy(self, n_bytes: int) -> None:
        self._store.occupy(self, n_bytes)

    def close(self) -> None:
        """Nothing to end."""


def sim_tiers(
    store: VirtualStore | None, heap: EventHeap, clock: Clock, link: SimLink, fluid: Fluid
) -> SimKvTiers | None:
    """Connect a simulated device to its host's store; None: it has none. `fluid`: the host's."""
    return None if store is None else SimKvTiers(store, heap, clock, link, fluid)
