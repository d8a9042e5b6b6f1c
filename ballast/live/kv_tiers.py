"""Move KV between a live CPU device and the host tier, beside its jobs.

Implements `engine.kv_tiers.KvTierCopies`. Bytes pass the device's link, as all others between host
and device do, in a stream of their own. Every block has a checksum, made when it is stored, and
compared while it is fetched: what is checked is the store's copy, which does not change meanwhile.
"""

from __future__ import annotations

import itertools
import logging
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from ballast.core.errors import DeviceError
from ballast.core.event import Event, TransferDoneEvent
from ballast.core.kv_tiers import KvFetchedEvent, KvFoundEvent
from ballast.core.link import Direction
from ballast.core.settings import DeviceSettings, FleetSettings
from ballast.engine.kv_tiers import BlockToStore
from ballast.kv.host_store import Slot
from ballast.kv.tier_shelf import KvBlock
from ballast.live.own_store import own_connection
from ballast.memory.cell_book import CELL_BYTES, Runs
from ballast.memory.copies import Copy
from ballast.memory.transfer import CopyGate, HostLink, Link

log = logging.getLogger(__name__)

STREAM = "kv tiers"
"""Stream of the link; it shares the link's directions fairly with others."""
MOST_STORED = 64
"""Bound of the blocks stored at a time."""


class KvConnection(Protocol):
    """A process's access to the KV store of its host. Answers come by any thread, in order; the
    empty answer where the store is gone."""

    @property
    def memory(self) -> memoryview:
        """The cells, mapped."""

    @property
    def address(self) -> int:
        """Address of `memory`."""

    def look_up(
        self, model: str, names: Sequence[bytes], answered: Callable[[str], object]
    ) -> None:
        """As `HostStore.look_up`."""

    def fetch(
        self, model: str, names: Sequence[bytes], answered: Callable[[Sequence[Slot]], object]
    ) -> None:
        """As `HostStore.fetch`."""

    def release(self, names: Sequence[bytes], corrupt: bytes = b"") -> None:
        """As `HostStore.release`."""

    def reserve(
        self, blocks: Sequence[KvBlock], answered: Callable[[Sequence[Runs | None]], object]
    ) -> None:
        """As `HostStore.reserve`, for blocks of one model."""

    def land(self, written: Sequence[tuple[bytes, int | None]]) -> None:
        """List blocks with their checksums; None: abandon them."""

    def occupy(self, n_bytes: int) -> None:
        """As `HostStore.occupy`."""

    def close(self) -> None:
        """End the connection; nothing is answered after this has returned."""


@dataclass(slots=True)
class _Fetch:
    request_id: str
    attempt: int
    names: Sequence[bytes]
    targets: Sequence[tuple[int, int]]
    gate: CopyGate = field(default_factory=CopyGate)


@dataclass(slots=True, eq=False)
class _Store:
    """A block that is being stored."""

    owner: str
    block: BlockToStore
    gate: CopyGate
    """Shut when its device closes; that of a borrowed block, alone in its copy, when it is void."""
    is_void: bool = False


def tiers_of(
    fleet: FleetSettings,
    device: DeviceSettings,
    link: Link,
    store: KvConnection | None,
    post: Callable[[Event], None],
) -> LiveKvTiers | None:
    """Connect a device to the fleet's KV tiers: through `store`, or to a store of this process
    alone. None: the fleet has none, or the device cannot reach them. Raises DeviceError."""
    if not fleet.kv.host_bytes:
        return None
    if device.gpu is not None or device.tensor_parallel > 1 or not isinstance(link, HostLink):
        log.warning("%s keeps no KV in kv_host: only CPU devices of one rank do", device.name)
        return None
    return LiveKvTiers(store or own_connection(fleet.kv), link, post)


class LiveKvTiers:
    """Look-ups, fetches and stores of one device's KV over a connection to its host's store."""

    def __init__(
        self, connection: KvConnection, link: HostLink, post: Callable[[Event], None]
    ) -> None:
        self._connection, self._link, self._post = connection, link, post
        self._checks = ThreadPoolExecutor(1, "kv-checks")
        self._lands = ThreadPoolExecutor(1, "kv-lands")
        """Checksums of what is stored, for which no request waits."""
        self._numbers = itertools.count(1)
        self._fetches: dict[str, _Fetch] = {}
        self._storing: dict[tuple[str, int], _Store] = {}
        self._open = CopyGate()
        """Shut when the device closes: no block is stored after that."""

    def look_up(self, request_id: str, attempt: int, model: str, names: Sequence[bytes]) -> None:
        def answered(tiers: str) -> None:
            self._post(KvFoundEvent(request_id, attempt, tiers))

        self._connection.look_up(model, names, answered)

    # -- fetching ---------------------------------------------------------------------------------

    def fetch(
        self,
        request_id: str,
        attempt: int,
        model: str,
        names: Sequence[bytes],
        targets: Sequence[tuple[int, int]],
    ) -> None:
        fetch = self._fetches[request_id] = _Fetch(request_id, attempt, names, targets)
        self._connection.fetch(model, names, lambda slots: self._copy_in(fetch, slots))

    def stop(self, request_id: str) -> None:
        fetch = self._fetches.pop(request_id, None)
        if fetch is not None:
            fetch.gate.shut()

    def _copy_in(self, fetch: _Fetch, slots: Sequence[Slot]) -> None:
        """Begin to copy blocks from their slots to the device, and to check them."""
        copies: list[Copy] = []
        for slot, (address, n_bytes) in zip(slots, fetch.targets, strict=False):
            at = 0
            for source, n in self._places(slot.runs, min(n_bytes, slot.n_bytes)):
                copies.append(Copy(address + at, source, n))
                at += n

        if not slots:
            self._end_fetch(fetch, 0)
            return
        try:
            checked = self._checks.submit(self._good, slots)
        except RuntimeError:  # the device closes
            return

        def copied(done: TransferDoneEvent) -> None:
            checked.add_done_callback(lambda good: self._fetched(fetch, slots, good, done.error))

        if not self._start(copies, Direction.TO_DEVICE, copied, fetch.gate):
            self._connection.release(fetch.names[: len(slots)])
            self._end_fetch(fetch, 0)

    def _good(self, slots: Sequence[Slot]) -> int:
        """Count the blocks, from the first, that are as they were stored."""
        wrong = (i for i, s in enumerate(slots) if self._checksum(s.runs, s.n_bytes) != s.checksum)
        return next(wrong, len(slots))

    def _fetched(
        self, fetch: _Fetch, slots: Sequence[Slot], checked: Future[int], error: str | None
    ) -> None:
        """Blocks have been copied, and checked, if the device does not close."""
        if checked.cancelled():
            return
        names, good = fetch.names[: len(slots)], 0 if error is not None else checked.result()
        corrupt = names[good] if error is None and good < len(names) else b""
        self._connection.release(names, corrupt)
        self._end_fetch(fetch, good)

    def _end_fetch(self, fetch: _Fetch, blocks: int) -> None:
        if self._fetches.get(fetch.request_id) is fetch:
            self._fetches.pop(fetch.request_id, None)
            self._post(KvFetchedEvent(fetch.request_id, fetch.attempt, blocks))

    # -- storing ----------------------------------------------------------------------------------

    def store(self, owner: str, blocks: Sequence[BlockToStore]) -> None:
        # One copy at a time: `void` must reach all that are made of a block.
        blocks = [block for block in blocks if (owner, block.block) not in self._storing]
        own = [_Store(owner, block, self._open) for block in blocks if not block.borrowed]
        for at in range(0, len(own), MOST_STORED):
            self._store(own[at : at + MOST_STORED])
        for block in blocks:
            if block.borrowed:
                self._store([_Store(owner, block, CopyGate())])

    def void(self, owner: str, block: int) -> None:
        store = self._storing.pop((owner, block), None)
        if store is not None:
            store.is_void = True
            if store.block.borrowed:
                store.gate.shut()

    def _store(self, stores: Sequence[_Store]) -> None:
        for store in stores:
            self._storing[store.owner, store.block.block] = store
        blocks = [store.block.of for store in stores]
        self._connection.reserve(blocks, lambda cells: self._copy_out(stores, cells))

    def _copy_out(self, stores: Sequence[_Store], cells: Sequence[Runs | None]) -> None:
        """Begin to copy blocks from the device to the cells that were reserved for them."""
        taken: list[tuple[_Store, Runs]] = []
        copies: list[Copy] = []
        for store, runs in itertools.zip_longest(stores, cells):
            if runs is None:
                self._forget(store)
                continue
            taken.append((store, runs))
            at = store.block.address
            for target, n in self._places(runs, store.block.of.n_bytes):
                copies.append(Copy(target, at, n))
                at += n

        def copied(done: TransferDoneEvent) -> None:
            with suppress(RuntimeError):
                self._lands.submit(self._land, taken, done.error)

        if taken and not self._start(copies, Direction.TO_HOST, copied, stores[0].gate):
            self._land(taken, "the link is closed")

    def _land(self, taken: Sequence[tuple[_Store, Runs]], error: str | None) -> None:
        """List the blocks whose contents stayed as they were until their copies had ended."""
        written: list[tuple[bytes, int | None]] = []
        for store, runs in taken:
            of = store.block.of
            # Set before the block's page changes hands: before a byte of the copy could be wrong.
            lost = error is not None or store.is_void
            written.append((of.name, None if lost else self._checksum(runs, of.n_bytes)))
            self._forget(store)
        self._connection.land(written)

    def _forget(self, store: _Store) -> None:
        key = store.owner, store.block.block
        if self._storing.get(key) is store:
            self._storing.pop(key, None)

    def occupy(self, n_bytes: int) -> None:
        self._connection.occupy(n_bytes)

    # -- both -------------------------------------------------------------------------------------

    def close(self) -> None:
        for gate in (self._open, *(store.gate for store in list(self._storing.values()))):
            gate.shut()
        for request_id in list(self._fetches):
            self.stop(request_id)
        for threads in (self._checks, self._lands):
            threads.shutdown(cancel_futures=True)
        self._connection.close()

    def _start(
        self,
        copies: Sequence[Copy],
        direction: Direction,
        copied: Callable[[TransferDoneEvent], None],
        gate: CopyGate,
    ) -> bool:
        try:
            self._link.start(next(self._numbers), copies, STREAM, direction, copied, gate=gate)
        except DeviceError:  # it is closed
            return False
        return True

    def _places(self, runs: Runs, n_bytes: int) -> list[tuple[int, int]]:
        """Return (address, bytes) of the cells that hold `n_bytes`."""
        places: list[tuple[int, int]] = []
        for first, cells in runs:
            n = min(n_bytes, cells * CELL_BYTES)
            if n:
                places.append((self._connection.address + first * CELL_BYTES, n))
            n_bytes -= n
        return places

    def _checksum(self, runs: Runs, n_bytes: int) -> int:
        found = 0
        for first, cells in runs:
            n = min(n_bytes, cells * CELL_BYTES)
            at = first * CELL_BYTES
            found = zlib.crc32(self._connection.memory[at : at + n], found)
            n_bytes -= n
        return found
