"""Transfer bytes between host and device in the background: the `Link` protocol and `HostLink`.

Used for activations, rotating layers and swapped KV. `HostLink` is the link of a CPU device;
`CudaLink`, `GroupLink` and the simulator's link implement the same protocol. Ends of transfers
reach the engine as `TransferDoneEvent`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Protocol

from ballast.core.clock import Clock
from ballast.core.errors import BallastError, DeviceError
from ballast.core.event import TransferDoneEvent
from ballast.core.link import Direction, LinkRates
from ballast.core.units import MiB
from ballast.memory import syscalls
from ballast.memory.copies import Copy, CopyBytes, batches, copy_checked
from ballast.memory.fair_queueing import StartTimeFairQueues

if TYPE_CHECKING:
    from ballast.memory.shared_pace import SharedPace

PRIOR_BYTES_PER_SECOND = 4e9
"""Assumed bandwidth of an unpaced link until it has copied something."""


MOST_THREADS = 4
"""Most threads of an unpaced link: no CPU's memory that we know of carries more than they copy."""


def copy_threads(cpus: int) -> int:
    """Return the number of threads of an unpaced link: half of the CPUs, since jobs run beside it,
    but both of two: one core rarely saturates the memory."""
    return min(cpus, max(2, cpus // 2), MOST_THREADS)


ACTIVATIONS = "activations"
"""The stream of whole models' weights. Sharing the link would bring none of them sooner, and in
this order what several models have in common arrives before the second needs it."""

STOPPED = "link: the transfer was stopped"
"""Error of a transfer that was stopped."""


class Link(Protocol):
    """A bandwidth between host and device, shared by all transfers.

    Transfers of one direction and `stream` are served in the order they were started; streams of
    one direction get equal shares of its bytes per second, whatever they carry.
    `core.link.LinkRates` has the rates of one direction alone, and of both together.
    """

    @property
    def bytes_per_second(self) -> float:
        """To the device: as paced, else as measured so far; before that a sane prior."""

    @property
    def paced(self) -> bool:
        """Whether reading host memory takes its time: not where that is the device's."""

    def start(
        self,
        transfer_id: int,
        copies: Sequence[Copy],
        stream: str = ACTIVATIONS,
        direction: Direction = Direction.TO_DEVICE,
    ) -> None:
        """Begin a transfer and return at once. Its end is posted as a `TransferDoneEvent`."""

    def stop(self, transfer_id: int) -> None:
        """Stop a transfer of `ACTIVATIONS` after what is in flight of it; it ends as failed, with
        the error STOPPED. Does nothing where no more of it is to come."""

    def close(self) -> None:
        """End after the chunk in flight; transfers not finished end as failed."""


OnDone = Callable[[TransferDoneEvent], None]


class TransferWatch(Protocol):
    """Follows one transfer while it lands; called in the link's thread."""

    def landed(self, n_bytes: int) -> None:
        """The first `n_bytes`, in the order of the copies, have landed; there are more to come."""

    def ended(self, error: str | None) -> None:
        """Nothing more will land; the end has been posted. `error` is None if all has landed."""


class CopyGate:
    """Lets a transfer's copies through until it is shut, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Held while a batch is being written."""
        self._is_shut = False

    def shut(self) -> None:
        """Let no more copies through; none is being written when this returns."""
        with self._lock:
            self._is_shut = True

    @property
    def is_shut(self) -> bool:
        return self._is_shut

    def passing(self, copy: Callable[[], None]) -> None:
        """Make copies, which `shut` waits for. Raises DeviceError if the gate is shut."""
        with self._lock:
            if self._is_shut:
                raise DeviceError("link", "the transfer was stopped")
            copy()


class Transfer:
    """A transfer that waits or is in flight; its copies are cut into batches as needed."""

    def __init__(
        self,
        transfer_id: int,
        stream: str,
        batches: Iterator[list[Copy]],
        on_done: OnDone | None = None,
        watch: TransferWatch | None = None,
        gate: CopyGate | None = None,
        in_place: bool = False,
    ) -> None:
        self.gate, self.in_place = gate, in_place
        self.id, self.stream, self.on_done, self.watch = transfer_id, stream, on_done, watch
        self._batches = batches
        self.coming = next(batches, None)
        """The next batch; None: everything has been copied."""
        self.began: float | None = None
        """Begin of its first batch, in seconds of the link's clock."""
        self.n_bytes = 0
        """Copied so far."""
        self.seconds = 0.0
        """Seconds of copying, without waiting."""
        self.error: str | None = None
        """Why it failed."""
        self.is_begun = False
        """Whether a batch has been taken."""

    def next_batch(self) -> list[Copy]:
        batch, self.coming = self.coming or [], next(self._batches, None)
        self.is_begun = True
        return batch

    def stop(self) -> None:
        """Fail, with no batch to come."""
        self.error, self.coming, self._batches = STOPPED, None, iter(())


def stop_queued(queues: StartTimeFairQueues[str, Transfer], transfer_id: int) -> Transfer | None:
    """Stop a transfer of `ACTIVATIONS`. Returns it if none of it has begun: then it has left its
    queue, and its end is to be posted."""
    for transfer in queues.items():
        if transfer.id != transfer_id or transfer.stream != ACTIVATIONS:
            continue
        if not transfer.is_begun:
            queues.remove(ACTIVATIONS, transfer)
            return transfer
        if transfer.coming is not None:
            transfer.stop()
    return None


class HostLink:
    """Implements `Link` by copying in a background thread, batch by batch, transfers interleaved.

    A paced link sleeps after each batch until the time by which it was due to have carried all
    batches since it was last idle, so that errors of single sleeps do not add up. Directions share
    the link as streams do. `on_done` is called in its thread, after the last byte has landed.
    """

    def __init__(
        self,
        clock: Clock,
        on_done: OnDone,
        pace: LinkRates | None = None,
        threads: int | None = None,
        chunk_bytes: int = 4 * MiB,
        copy_bytes: CopyBytes = ctypes.memmove,
        shared: SharedPace | None = None,
    ) -> None:
        """`shared`: paces it together with other processes' links, which are one; closed with it.

        `threads`: threads that copy the chunks of a batch, the link's own among them; None: one
        for a paced link, which has nothing to gain from more, else `copy_threads`."""
        if threads is None:
            threads = copy_threads(syscalls.usable_cpus()) if pace is None else 1
        if threads < 1 or chunk_bytes < 1 or (pace is not None and not pace.positive):
            raise DeviceError("link", "threads, chunk_bytes and the pace are positive")
        self._clock, self._on_done = clock, on_done
        self._pace, self._chunk_bytes, self._threads = pace, chunk_bytes, threads
        self._copy_bytes, self._shared = copy_bytes, shared
        self.paced = pace is not None
        self._measured = PRIOR_BYTES_PER_SECOND
        self._due = 0.0
        """Time by which a paced link should have carried all batches so far."""
        self._sides: StartTimeFairQueues[Direction, StartTimeFairQueues[str, Transfer]] = (
            StartTimeFairQueues()
        )
        """Streams by direction, those in which a transfer waits or is in flight."""
        self._wake = threading.Condition()
        self._closing = threading.Event()
        self._helpers = ThreadPoolExecutor(threads - 1, "ballast-copy") if threads > 1 else None
        self._thread = threading.Thread(target=self._run, name="ballast-link", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @property
    def threads(self) -> int:
        """Threads that copy."""
        return self._threads

    @property
    def bytes_per_second(self) -> float:
        return self._measured if self._pace is None else self._pace.to_device

    def reserve(self, stream: str, bytes_per_second: float) -> None:
        """Have at least this rate of a link that processes share, for a stream; 0: no more."""
        if self._shared is not None and self._pace is not None:
            self._shared.reserve(bytes_per_second / self._pace.to_device, stream)

    def start(
        self,
        transfer_id: int,
        copies: Sequence[Copy],
        stream: str = ACTIVATIONS,
        direction: Direction = Direction.TO_DEVICE,
        on_done: OnDone | None = None,
        watch: TransferWatch | None = None,
        gate: CopyGate | None = None,
        in_place: bool = False,
    ) -> None:
        """Begin a transfer, as `Link.start`. `on_done`, if given, receives its end in place of the
        link's own; both are called in the link's thread. A transfer whose `gate` was shut fails.
        `in_place`: a pass reads the bytes where they are; the link is paced, and copies nothing.

        `watch` is called after each batch but the last, and after `on_done`.
        """
        cut = batches(copies, self._chunk_bytes, self._threads)
        transfer = Transfer(transfer_id, stream, cut, on_done, watch, gate, in_place)
        with self._wake:
            if self._closing.is_set():
                raise DeviceError("link", "it is closed")
            if not self._sides:
                # Never before it was asked for, never before the link was due to be free.
                self._due = max(self._due, self._clock.now())
            side = (
                self._sides.first(direction) if direction in self._sides else StartTimeFairQueues()
            )
            side.add(stream, transfer)
            if direction not in self._sides:
                self._sides.add(direction, side)
            self._wake.notify()

    def stop(self, transfer_id: int) -> None:
        with self._wake:
            if Direction.TO_DEVICE not in self._sides:
                return
            side = self._sides.first(Direction.TO_DEVICE)
            stopped = stop_queued(side, transfer_id)
            if not side:
                self._sides.pop(Direction.TO_DEVICE)
        if stopped is not None:
            end = TransferDoneEvent(transfer_id, 0, 0.0, STOPPED)
            (stopped.on_done or self._on_done)(end)
            if stopped.watch is not None:
                stopped.watch.ended(STOPPED)

    def close(self) -> None:
        with self._wake:
            self._closing.set()
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()
            if self._shared is not None:
                self._shared.close()
                self._shared = None
        if self._helpers is not None:
            self._helpers.shutdown()
        atexit.unregister(self.close)

    def _run(self) -> None:
        while True:
            with self._wake:
                if not self._sides and self._shared is not None:
                    self._shared.rest()
                while not self._sides and not self._closing.is_set():
                    self._wake.wait()
                if not self._sides:
                    return
                direction = self._sides.next()
                side = self._sides.first(direction)
                transfer = side.first(side.next())
                batch = transfer.next_batch()
                self._charge(direction, transfer.stream, batch)
            slept, error = self._carry(transfer, batch)
            if error is None and transfer.coming is not None:
                if transfer.watch is not None:
                    transfer.watch.landed(transfer.n_bytes)
                continue
            with self._wake:
                error = error or transfer.error
                side.pop(transfer.stream)
                if not side:
                    self._sides.pop(direction)
            (transfer.on_done or self._on_done)(self._end(transfer, direction, slept, error))
            if transfer.watch is not None:
                transfer.watch.ended(error)

    def _charge(self, direction: Direction, stream: str, batch: Sequence[Copy]) -> None:
        """Charge a batch to its stream and direction, and to the time by which it is due."""
        n_bytes = sum(max(0, copy.n_bytes) for copy in batch)
        pace = self._pace or LinkRates.even(1.0)
        self._sides.first(direction).charge(stream, n_bytes)
        self._sides.charge(direction, n_bytes / pace.of(direction, mixed=True))
        if self._pace is not None:
            mixed = len(self._sides) > 1
            seconds = n_bytes / (pace.mixed if mixed else pace.of(direction, mixed=False))
            if self._shared is None:
                self._due += seconds
            else:
                self._due = self._shared.charge(seconds, self._clock.now())

    def _carry(self, transfer: Transfer, batch: Sequence[Copy]) -> tuple[bool, str | None]:
        """Copy a batch at the link's pace; returns whether it slept, and the error, if any."""
        began = self._clock.now()
        if transfer.began is None:
            transfer.began = began
        try:
            if self._closing.is_set():
                raise DeviceError("link", "it was closed during the transfer")
            if transfer.in_place:
                pass
            elif transfer.gate is None:
                self._move(batch)
            else:
                transfer.gate.passing(lambda: self._move(batch))
        except (BallastError, ctypes.ArgumentError, OverflowError) as failure:
            return False, str(failure)
        transfer.n_bytes += sum(copy.n_bytes for copy in batch)
        transfer.seconds += self._clock.now() - began
        return self._sleep_until_due(), None

    def _end(
        self, transfer: Transfer, direction: Direction, slept: bool, error: str | None
    ) -> TransferDoneEvent:
        ended = self._clock.now()
        assert transfer.began is not None, "it was carried"
        if self._pace is not None and not slept:
            # Sleeping too long is made good by the next transfer; copying too slowly is not.
            self._due = ended
        big = direction is Direction.TO_DEVICE and transfer.n_bytes >= self._chunk_bytes
        if self._pace is None and big and transfer.seconds > 0:
            self._measured += (transfer.n_bytes / transfer.seconds - self._measured) / 4
        return TransferDoneEvent(transfer.id, transfer.n_bytes, ended - transfer.began, error)

    def _move(self, batch: Sequence[Copy]) -> None:
        """Copy a batch. When this returns, or raises, none of it is being written any more."""
        left = iter(batch)  # each copy goes to one thread: `next` of it holds the GIL

        def copy_what_is_left() -> None:
            for copy in left:
                copy_checked(copy, self._copy_bytes)

        helping = min(self._threads, len(batch)) - 1
        if self._helpers is None or helping < 1:
            copy_what_is_left()
            return
        helps = []
        try:
            with contextlib.suppress(RuntimeError):  # no thread can be started: there are fewer
                for _ in range(helping):
                    helps.append(self._helpers.submit(copy_what_is_left))
            copy_what_is_left()
        finally:
            wait(helps)
        for help_ in helps:
            help_.result()

    def _sleep_until_due(self) -> bool:
        """Sleep until a paced link has been due to carry all so far; returns whether it slept."""
        slept = False
        if self._pace is not None:
            while (left := self._due - self._clock.now()) > 0:
                slept = True
                if self._closing.wait(left):
                    break
        return slept
