"""Copy KV blocks between the host tier and a disk, on a thread of their own.

Part of `HostStore`. What has landed on the host is written behind; what a request's fetch needs is
read into host cells first. A disk that fails is given up, once, and said: KV is computed.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ballast.core.errors import DeviceError
from ballast.kv.disk_file import DiskFile
from ballast.kv.tier_shelf import KvBlock
from ballast.memory.cell_book import Runs
from ballast.memory.host_cells import HostCells

log = logging.getLogger(__name__)

BATCH = 32
"""Blocks that are written in one transaction."""
Post = Callable[[Callable[[], object]], object]
"""Has a function called in the store's thread."""


@dataclass(frozen=True, slots=True)
class DiskBlock:
    """A block to be copied between cells and disk."""

    block: KvBlock
    runs: Runs
    checksum: int


class DiskTier:
    """Writes, reads and deletes blocks in the order of the calls, without waiting."""

    def __init__(self, file: DiskFile, cells: HostCells, post: Post) -> None:
        self._file, self._cells, self._post = file, cells, post
        self._thread = ThreadPoolExecutor(1, "kv-disk")
        self.fault = ""
        """Why the disk was given up; empty: it is used."""

    def write(self, blocks: Sequence[DiskBlock], ended: Callable[[bool], object]) -> None:
        """Write blocks; `ended` is called with whether they are there now."""

        def work() -> None:
            read = self._cells.read
            rows = [(b.block, b.checksum, read(b.runs, b.block.n_bytes)) for b in blocks]
            # A block that changed in host memory is not kept for longer.
            good = all(zlib.crc32(data) == checksum for _, checksum, data in rows)
            done = good and self._does(lambda: self._file.write(rows))
            self._post(lambda: ended(done))

        self._thread.submit(work)

    def read(self, blocks: Sequence[DiskBlock], ended: Callable[[int], object]) -> None:
        """Read blocks into their cells; `ended` is called with how many of them, from the first,
        have the right checksum."""

        def work() -> None:
            good = 0
            for b in blocks:
                if not self._reads(b):
                    break
                good += 1
            self._post(lambda: ended(good))

        self._thread.submit(work)

    def delete(self, names: Sequence[bytes]) -> None:
        if names:
            self._thread.submit(self._does, lambda: self._file.delete(names))

    def close(self, seconds: float) -> None:
        """End what was begun, for so many seconds at most."""
        until = time.monotonic() + seconds
        ended = self._thread.submit(self._file.close)
        while not ended.done() and time.monotonic() < until:
            time.sleep(0.01)
        self._thread.shutdown(wait=ended.done(), cancel_futures=True)

    def _reads(self, b: DiskBlock) -> bool:
        """Read a block into its cells; return whether its checksum was right."""
        found: list[bytes | None] = []
        self._does(lambda: found.append(self._file.read(b.block.name)))
        data = found[0] if found else None
        if data is None or len(data) != b.block.n_bytes or zlib.crc32(data) != b.checksum:
            return False
        self._cells.write(b.runs, data)
        return True

    def _does(self, call: Callable[[], object]) -> bool:
        """Call, and return whether it succeeded; the first failure is the last call."""
        if self.fault:
            return False
        try:
            call()
        except DeviceError as error:
            self.fault = str(error)
            log.warning("KV is kept on disk no longer, and computed instead: %s", error)
            return False
        return True
