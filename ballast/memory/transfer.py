"""Bytes travel over links, in the background. `HostLink` joins host tier and device on a CPU."""

from __future__ import annotations

import atexit
import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from ballast.core.clock import Clock
from ballast.core.errors import BallastError, DeviceError
from ballast.core.event import TransferDone
from ballast.core.units import KiB, MiB
from ballast.memory import syscalls

PRIOR_BYTES_PER_SECOND = 4e9
"""Taken for an unpaced link's bandwidth until it has copied something."""


@dataclass(frozen=True, slots=True)
class Copy:
    """`n_bytes` from address `src` to address `dst`; the two do not overlap."""

    dst: int
    src: int
    n_bytes: int


class Link(Protocol):
    """A bandwidth shared by all transfers; they are served in the order they were started."""

    @property
    def bytes_per_second(self) -> float:
        """As paced, else as measured so far; before that a sane prior."""

    def start(self, transfer_id: int, copies: Sequence[Copy]) -> None:
        """Begin a transfer and return at once. Its end is told as a `TransferDone`."""

    def close(self) -> None:
        """End after the chunk in flight; transfers not finished are told as failed."""


@dataclass(slots=True)
class _Transfer:
    id: int
    copies: tuple[Copy, ...]
    started: float
    """When `start` was called, in seconds of the link's clock."""

    @property
    def n_bytes(self) -> int:
        return sum(copy.n_bytes for copy in self.copies)


_PREFAULT_BYTES = 256 * KiB
"""The target of a copy is entered into the page tables so much at a time: a fresh mapping fills
about 1.5 times faster than by faults, and a missing one is an error instead of a fatal signal."""


def copy_now(dst: int, src: int, n_bytes: int) -> None:
    """Copy and return. The GIL is free meanwhile. Raises DeviceError for a senseless request.

    Both sides must be mapped: for pages that may have gone, use a link.
    """
    if n_bytes < 0 or dst <= 0 or src <= 0:
        raise DeviceError("memmove", f"{n_bytes} bytes from {src:#x} to {dst:#x}")
    ctypes.memmove(dst, src, n_bytes)


def _copy_checked(copy: Copy) -> None:
    """As `copy_now`, for a target that is freshly mapped, or, by someone's fault, not mapped."""
    if copy.n_bytes < 0 or copy.dst <= 0 or copy.src <= 0:
        raise DeviceError("memmove", f"{copy.n_bytes} bytes from {copy.src:#x} to {copy.dst:#x}")
    for at in range(0, copy.n_bytes, _PREFAULT_BYTES):
        n = min(_PREFAULT_BYTES, copy.n_bytes - at)
        try:
            syscalls.prefault(copy.dst + at, n)
        except OSError as error:
            raise DeviceError("madvise", f"{copy.dst + at:#x}: {error.strerror}") from error
        ctypes.memmove(copy.dst + at, copy.src + at, n)


class HostLink:
    """Implements `Link` by copying in background threads.

    Paced: after each chunk it sleeps until `bytes so far / bytes_per_second` since the transfer's
    start has passed, so that errors of single sleeps do not add up; a transfer that waited for
    another starts, for this purpose, when that one was due to end. `on_done` is called in the
    link's thread, after the last byte has landed.
    """

    def __init__(
        self,
        clock: Clock,
        on_done: Callable[[TransferDone], None],
        bytes_per_second: float | None = None,
        threads: int = 1,
        chunk_bytes: int = 4 * MiB,
    ) -> None:
        if (
            threads < 1
            or chunk_bytes < 1
            or (bytes_per_second is not None and bytes_per_second <= 0)
        ):
            raise DeviceError("link", "threads, chunk_bytes and bytes_per_second are positive")
        self._clock, self._on_done = clock, on_done
        self._pace, self._chunk_bytes, self._threads = bytes_per_second, chunk_bytes, threads
        self._measured = PRIOR_BYTES_PER_SECOND
        self._due = 0.0
        self._queue: deque[_Transfer] = deque()
        self._wake = threading.Condition()
        self._closing = threading.Event()
        self._helpers = ThreadPoolExecutor(threads) if threads > 1 else None
        self._thread = threading.Thread(target=self._run, name="ballast-link", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @property
    def bytes_per_second(self) -> float:
        return self._measured if self._pace is None else self._pace

    @property
    def queued(self) -> int:
        """Transfers that have not begun."""
        return len(self._queue)

    def start(self, transfer_id: int, copies: Sequence[Copy]) -> None:
        with self._wake:
            if self._closing.is_set():
                raise DeviceError("link", "it is closed")
            self._queue.append(_Transfer(transfer_id, tuple(copies), self._clock.now()))
            self._wake.notify()

    def close(self) -> None:
        with self._wake:
            self._closing.set()
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        if self._helpers is not None:
            self._helpers.shutdown()
        atexit.unregister(self.close)

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._queue and not self._closing.is_set():
                    self._wake.wait()
                if not self._queue:
                    return
                transfer = self._queue.popleft()
            self._on_done(self._carry(transfer))

    def _carry(self, transfer: _Transfer) -> TransferDone:
        began = self._clock.now()
        # Never before it was asked for, never before the link was due to be free.
        origin = max(transfer.started, self._due)
        done, slept, error = 0, False, None
        try:
            for batch in self._batches(transfer.copies):
                if self._closing.is_set():
                    raise DeviceError("link", "it was closed during the transfer")
                self._move(batch)
                done += sum(copy.n_bytes for copy in batch)
                slept = self._sleep_until(origin, done)
        except (BallastError, ctypes.ArgumentError, OverflowError) as failure:
            error = str(failure)
        ended = self._clock.now()
        seconds = ended - began
        if self._pace is not None:
            # Sleeping too long is made good by the next transfer; copying too slowly is not.
            self._due = origin + done / self._pace if slept else ended
        elif seconds > 0 and done >= self._chunk_bytes:
            self._measured += (done / seconds - self._measured) / 4
        return TransferDone(transfer.id, done, seconds, error)

    def _batches(self, copies: Sequence[Copy]) -> Iterator[list[Copy]]:
        """Cut copies into pieces of at most a chunk, and gather small ones up to a chunk each."""
        most = self._chunk_bytes * self._threads
        batch: list[Copy] = []
        size = 0
        for copy in copies:
            for at in range(0, max(copy.n_bytes, 1), self._chunk_bytes):
                n = min(self._chunk_bytes, copy.n_bytes - at)
                if batch and size + n > most:
                    yield batch
                    batch, size = [], 0
                batch.append(Copy(copy.dst + at, copy.src + at, n))
                size += n
        if batch:
            yield batch

    def _move(self, batch: Sequence[Copy]) -> None:
        if self._helpers is None or len(batch) == 1:
            for copy in batch:
                _copy_checked(copy)
            return
        jobs = [self._helpers.submit(_copy_checked, copy) for copy in batch]
        for job in jobs:
            job.result()

    def _sleep_until(self, origin: float, done: int) -> bool:
        """Whether there was anything to wait for."""
        slept = False
        if self._pace is not None:
            while (left := origin + done / self._pace - self._clock.now()) > 0:
                slept = True
                if self._closing.wait(left):
                    break
        return slept
