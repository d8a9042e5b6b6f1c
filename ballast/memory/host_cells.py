"""Allocate cells of one memfd that all workers of a host map: memory of the KV host tier.

Used by `kv.host_store` in the process that owns the store. The file cannot change its size, so that
no mapping of it can break; its memory is allocated before cells are handed out, so that a lack of
it is an answer and not a signal. A cell is written by one process at a time: the one it was given.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading

from ballast.core.errors import DeviceError
from ballast.core.units import MiB, format_bytes
from ballast.memory import syscalls
from ballast.memory.cell_book import CELL_BYTES, CellBook, Runs
from ballast.memory.host_memory import available
from ballast.memory.runs import runs_of

log = logging.getLogger(__name__)

AHEAD_BYTES = 256 * MiB
"""Bytes that have memory before they are used, so that nobody waits for fresh memory."""
STEP_BYTES = 4 * MiB
"""Bytes that get memory at a time."""
LEAST_LEFT = 256 * MiB
"""Bytes of the machine's memory that are left to others."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class HostCells(CellBook):
    """Cells with memory: a memfd, whose descriptor is passed to the processes that map it."""

    def __init__(self, n_bytes: int, threaded: bool = True) -> None:
        """`threaded`: memory is allocated ahead by a thread; else all of it, now. Raises
        DeviceError."""
        super().__init__(n_bytes // CELL_BYTES)
        self.ready = 0
        self.n_bytes = self.n_cells * CELL_BYTES
        try:
            self.fd = os.memfd_create("ballast kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, self.n_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as error:
            raise DeviceError("memfd_create", error.strerror or str(error)) from error
        self._unbacked: set[int] = set()
        """Free cells whose memory was given back."""
        self._wanted = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._run, name="kv-host", daemon=True)
            self._thread.start()
        else:
            while self.ready < self.n_cells and self._prepare():
                pass

    def allocate(self, n_bytes: int) -> Runs | None:
        runs = super().allocate(n_bytes)
        if self._lacks_ahead:
            with self._wanted:
                self._wanted.notify()
        if runs is not None and self._unbacked and not self._repopulate(runs):
            self.release(runs)
            return None
        return runs

    def read(self, runs: Runs, n_bytes: int) -> bytes:
        """Return the first `n_bytes` in cells."""
        parts = [os.pread(self.fd, n * CELL_BYTES, first * CELL_BYTES) for first, n in runs]
        return b"".join(parts)[:n_bytes]

    def write(self, runs: Runs, data: bytes) -> None:
        at = 0
        for first, n in runs:
            part = data[at : at + n * CELL_BYTES]
            os.pwrite(self.fd, part, first * CELL_BYTES)
            at += len(part)

    def wipe(self, runs: Runs) -> None:
        """Overwrite cells with zeros."""
        for first, n in runs:
            os.pwrite(self.fd, bytes(n * CELL_BYTES), first * CELL_BYTES)

    def trim(self, n_bytes: int) -> None:
        """Give back the memory of `n_bytes` of free cells: of those that have some, the ones that
        would be handed out last."""
        mode = syscalls.FALLOC_PUNCH_HOLE | syscalls.FALLOC_KEEP_SIZE
        at = len(self._unbacked)
        cells = sorted(self._free[at : at + n_bytes // CELL_BYTES])
        self._unbacked.update(cells)
        for first, n in runs_of(cells):
            with contextlib.suppress(OSError):
                syscalls.fallocate(self.fd, mode, first * CELL_BYTES, n * CELL_BYTES)

    def close(self) -> None:
        """Give the memory back, once no process maps it."""
        with self._wanted:
            self._closing = True
            self._wanted.notify()
        if self._thread is not None:
            self._thread.join()
        os.close(self.fd)

    def _repopulate(self, runs: Runs) -> bool:
        """Allocate memory for cells that gave theirs back; False: the machine has none."""
        lacking = self._unbacked.intersection(
            c for first, n in runs for c in range(first, first + n)
        )
        try:
            for first, n in runs_of(sorted(lacking)):
                os.posix_fallocate(self.fd, first * CELL_BYTES, n * CELL_BYTES)
        except OSError:
            return False
        self._unbacked -= lacking
        return True

    @property
    def _lacks_ahead(self) -> bool:
        return self.ready < min(self.n_cells, self.end + AHEAD_BYTES // CELL_BYTES)

    def _run(self) -> None:
        while True:
            with self._wanted:
                while not self._lacks_ahead and not self._closing:
                    self._wanted.wait()
                if self._closing:
                    return
            if not self._prepare():
                return

    def _prepare(self) -> bool:
        """Give the next cells memory; False, said once: the machine has no more."""
        at = self.ready * CELL_BYTES
        n = min(STEP_BYTES, self.n_bytes - at)
        try:
            if available()[0] < n + LEAST_LEFT:
                raise OSError(None, "the machine has no more memory")
            os.posix_fallocate(self.fd, at, n)
        except OSError as error:
            log.warning("kv_host has %s: %s", format_bytes(at), error.strerror)
            self.n_cells = self.ready
            return False
        self.ready += n // CELL_BYTES
        return True
