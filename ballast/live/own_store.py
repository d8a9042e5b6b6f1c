"""Give the only process of a fleet a KV store of its own: benchmarks and tests without a server.

Implements `live.kv_tiers.KvConnection` by calls; workers of a server use `cluster.kv_client`.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable, Sequence

from ballast.core.kv_tiers import KvTierSettings
from ballast.kv.host_store import Slot
from ballast.kv.tier_shelf import KvBlock
from ballast.kv.tiered_store import TieredStore
from ballast.memory.cell_book import Runs
from ballast.memory.host_cells import HostCells


class MappedCells:
    """The cells of a store in this process."""

    def __init__(self, fd: int, n_bytes: int) -> None:
        """Map the file `fd`, which the caller keeps."""
        self._map = mmap.mmap(fd, n_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.memory = memoryview(self._map)


class OwnConnection:
    """Access to a store of this process; several may share one."""

    def __init__(
        self, store: TieredStore, lock: threading.RLock | None = None, *, owns: bool = False
    ) -> None:
        """`lock`: held by all who use the store. `owns`: the store closes with the connection."""
        assert isinstance(store.cells, HostCells), "a store with memory"
        self._store, self._lock, self._owns = store, lock or threading.RLock(), owns
        cells = MappedCells(store.cells.fd, store.cells.n_bytes)
        self.address, self.memory = cells.address, cells.memory

    def look_up(
        self, model: str, names: Sequence[bytes], answered: Callable[[str], object]
    ) -> None:
        with self._lock:
            found = self._store.look_up(model, names)
        answered(found)

    def fetch(
        self, model: str, names: Sequence[bytes], answered: Callable[[Sequence[Slot]], object]
    ) -> None:
        def staged() -> None:
            answered(self._store.fetch(self, model, names))

        with self._lock:
            self._store.stage(model, names, staged)

    def release(self, names: Sequence[bytes], corrupt: bytes = b"") -> None:
        with self._lock:
            self._store.release(self, names, corrupt)

    def reserve(
        self, blocks: Sequence[KvBlock], answered: Callable[[Sequence[Runs | None]], object]
    ) -> None:
        with self._lock:
            cells = self._store.reserve(self, blocks)
        answered(cells)

    def land(self, written: Sequence[tuple[bytes, int | None]]) -> None:
        with self._lock:
            for name, checksum in written:
                if checksum is None:
                    self._store.abandon(self, name)
                else:
                    self._store.land(self, name, checksum)

    def occupy(self, n_bytes: int) -> None:
        with self._lock:
            self._store.occupy(self, n_bytes)

    def close(self) -> None:
        with self._lock:
            self._store.end(self)
        if self._owns:
            self._store.close()


def own_connection(settings: KvTierSettings) -> OwnConnection:
    """Make a store for this process alone, and connect to it. Raises DeviceError."""
    lock = threading.RLock()

    def post(call: Callable[[], object]) -> None:
        with lock:
            call()

    return OwnConnection(TieredStore.create(settings, post), lock, owns=True)
