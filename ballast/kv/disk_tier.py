"""Copy KV blocks between the host tier and a disk, on a thread of their own.

Part of `TieredStore`. What has landed on the host is written behind; what a request's fetch needs
is read into host cells first. A disk that fails is given up, once, and said: KV is computed.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from ballast.kv.disk_file import DiskFile
from ballast.kv.tier_shelf import KvBlock
from ballast.memory.cell_book import Runs
from ballast.memory.host_cells import HostCells

log = logging.getLogger(__name__)

BATCH = 32
"""Blocks that are written in one transaction."""
T = TypeVar("T")
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
        self.has_room = True
        """False: the last write found too little."""
        self.is_removed = True
        """Whether a disk that was given up keeps no KV."""

    def write(
        self, blocks: Sequence[DiskBlock], ended: Callable[[Collection[bytes]], object]
    ) -> None:
        """Write blocks; `ended` is called with the names of those that are there now."""

        def work() -> Collection[bytes]:
            rows: list[tuple[KvBlock, int, bytes]] = []
            for b in blocks:
                data = self._cells.read(b.runs, b.block.n_bytes)
                if zlib.crc32(data) == b.checksum:  # one that has changed is not kept for longer
                    rows.append((b.block, b.checksum, data))
            if not self._file.write(rows):
                self.has_room = False
                return ()
            return [block.name for block, _, _ in rows]

        nothing: Collection[bytes] = ()
        self._run(work, nothing, ended)

    def read(self, blocks: Sequence[DiskBlock], ended: Callable[[int], object]) -> None:
        """Read blocks into their cells; `ended` is called with how many of them, from the first,
        have the right checksum."""

        good: list[DiskBlock] = []

        def work() -> None:
            for b in blocks:
                data = self._file.read(b.block.name)
                if data is None or len(data) != b.block.n_bytes or zlib.crc32(data) != b.checksum:
                    break
                self._cells.write(b.runs, data)
                good.append(b)

        # Those before a fault are as good as without it.
        self._run(work, None, lambda _: ended(len(good)))

    def delete(self, names: Sequence[bytes], ended: Callable[[], object]) -> None:
        """Delete blocks, and overwrite their bytes; then `ended` is called."""
        self._run(lambda: self._file.delete(names), None, lambda _: ended())

    def close(self, seconds: float) -> bool:
        """End what was begun, in `seconds` at most; returns False if the thread still reads cells,
        or writes them, as it ends the last call."""
        until = time.monotonic() + seconds
        ended = self._thread.submit(self._file.close)
        while not ended.done() and time.monotonic() < until:
            time.sleep(0.01)
        in_time = ended.done()
        self._thread.shutdown(wait=in_time, cancel_futures=True)
        return in_time

    def give_up(self, why: str) -> None:
        """Use the disk no more: the calls that follow fail at once. Said once."""
        if not self.fault:
            self.fault, self.is_removed = why, False
            log.warning("KV is kept on disk no longer, and computed instead: %s", why)

    def _run(self, work: Callable[[], T], failed: T, ended: Callable[[T], object]) -> None:
        """Have the thread do `work`, and the store's `ended` called with its result, or with
        `failed`. The first failure is the last call: the file is removed."""

        def call() -> None:
            result = failed
            try:
                if not self.fault:
                    result = work()
            except Exception as error:  # noqa: BLE001 - whatever it was, somebody waits for the end
                self.give_up(str(error))
            if self.fault and not self.is_removed:
                self.is_removed = self._file.discard()
            self._post(lambda: ended(result))

        self._thread.submit(call)
