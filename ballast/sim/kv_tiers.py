"""Keep KV of simulated devices in a virtual host tier: the same store as live, without bytes.

Implements `engine.kv_tiers.KvTierCopies`. Copies take the device's link, beside its other traffic.
Devices of one host share a store.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ballast.core.clock import Clock
from ballast.core.event import Event
from ballast.core.kv_tiers import KvFetchedEvent, KvFoundEvent
from ballast.core.link import Direction
from ballast.engine.kv_tiers import BlockToStore
from ballast.kv.directory import BlockDirectory, Tier, TierSettings
from ballast.kv.host_store import HostStore
from ballast.memory.cell_book import CELL_BYTES, CellBook
from ballast.sim.link import SimLink

LOOK_SECONDS = 3e-4
"""From a look-up to its answer: two messages between processes of a host."""
STREAM = "kv tiers"


class EventSchedule(Protocol):
    """A device's event heap."""

    def schedule(self, at: float, event: Event) -> object: ...


VirtualStore = HostStore
"""The store of a simulated host."""


def virtual_store(host_bytes: int) -> HostStore:
    """Make the store of a simulated host."""
    tiers = {Tier.HOST: TierSettings(host_bytes, unit=CELL_BYTES)}
    return HostStore(BlockDirectory(tiers), CellBook(host_bytes // CELL_BYTES))


class SimKvTiers:
    """Look-ups, fetches and stores of one simulated device."""

    def __init__(self, store: HostStore, heap: EventSchedule, clock: Clock, link: SimLink) -> None:
        self._store, self._heap, self._clock, self._link = store, heap, clock, link
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
        slots = self._store.fetch(self, model, names)
        self._fetches[request_id] = attempt

        def ended(at: float, seconds: float) -> None:
            self._store.release(self, names[: len(slots)])
            if self._fetches.get(request_id) == attempt:
                del self._fetches[request_id]
                self._heap.schedule(at, KvFetchedEvent(request_id, attempt, len(slots)))

        if not slots:
            del self._fetches[request_id]
            now = self._clock.now()
            self._heap.schedule(now + LOOK_SECONDS, KvFetchedEvent(request_id, attempt, 0))
            return
        n_bytes = sum(slot.n_bytes for slot in slots)
        self._link.stream(STREAM, Direction.TO_DEVICE).carry(self._clock.now(), n_bytes, ended)

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

    def close(self) -> None:
        """Nothing to end."""


def sim_tiers(
    store: VirtualStore | None, heap: EventSchedule, clock: Clock, link: SimLink
) -> SimKvTiers | None:
    """Connect a simulated device to its host's store; None: it has none."""
    return None if store is None else SimKvTiers(store, heap, clock, link)
