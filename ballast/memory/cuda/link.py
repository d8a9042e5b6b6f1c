"""Transfer bytes between host memory and a GPU: the `Link` of a GPU, on one stream each way.

Used by the GPU machine to activate models' weights; the engine sees it as `Link` only.
"""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ballast.core.clock import Clock
from ballast.core.errors import DeviceError
from ballast.core.event import TransferDoneEvent
from ballast.core.link import Direction
from ballast.core.units import MiB
from ballast.memory.copies import Copy, batches
from ballast.memory.cuda.calls import Driver
from ballast.memory.cuda.fences import EventPool
from ballast.memory.fair_queueing import StartTimeFairQueues
from ballast.memory.transfer import (
    ACTIVATIONS,
    PRIOR_BYTES_PER_SECOND,
    STOPPED,
    Transfer,
    stop_queued,
)


class CudaLink:
    """Implements `Link`. Each direction has its own CUDA stream and thread.

    A few batches are queued on the stream ahead, so that it never waits for the thread. Batches are
    ordered as by `HostLink`, so that streams of transfers share each direction by bytes. Host
    memory that is not pinned (`pinning`) goes through the driver's buffers, at a lower rate.
    """

    def __init__(
        self,
        driver: Driver,
        ordinal: int,
        clock: Clock,
        on_done: Callable[[TransferDoneEvent], None],
        chunk_bytes: int = 8 * MiB,
        ahead: int = 3,
    ) -> None:
        """`ahead`: batches of `chunk_bytes` given to a stream at once. `on_done` is called in the
        link's threads, after the last byte has landed. Raises DeviceError."""
        if chunk_bytes < 1 or ahead < 1:
            raise DeviceError("link", "chunk_bytes and ahead are positive")
        self._driver, self._device = driver, driver.device(ordinal)
        self._closed = False
        self._context = driver.retain_context(self._device)
        driver.set_current(self._context)
        self._sides: dict[Direction, _Side] = {}
        atexit.register(self.close)
        try:
            for way in Direction:
                self._sides[way] = _Side(
                    driver, self._context, way, clock, on_done, chunk_bytes, ahead
                )
        except DeviceError:
            self.close()
            raise

    paced = True

    @property
    def bytes_per_second(self) -> float:
        return self._sides[Direction.TO_DEVICE].bytes_per_second

    def start(
        self,
        transfer_id: int,
        copies: Sequence[Copy],
        stream: str = ACTIVATIONS,
        direction: Direction = Direction.TO_DEVICE,
    ) -> None:
        self._sides[direction].start(transfer_id, copies, stream)

    def stop(self, transfer_id: int) -> None:
        self._sides[Direction.TO_DEVICE].stop(transfer_id)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for side in self._sides.values():
            side.close()
        atexit.unregister(self.close)
        self._driver.release_context(self._device)


@dataclass(frozen=True, slots=True)
class _Flight:
    """A batch of copies in flight on the stream."""

    transfer: Transfer
    event: int | None
    """Event after the batch; None: it could not be recorded."""
    n_bytes: int
    issued: float
    last: bool


class _Side:
    def __init__(
        self,
        driver: Driver,
        context: int,
        direction: Direction,
        clock: Clock,
        on_done: Callable[[TransferDoneEvent], None],
        chunk_bytes: int,
        ahead: int,
    ) -> None:
        self._driver, self._context = driver, context
        to_device = direction is Direction.TO_DEVICE
        self._copy = driver.copy_to_device if to_device else driver.copy_to_host
        self._clock, self._on_done = clock, on_done
        self._chunk_bytes, self._ahead = chunk_bytes, ahead
        self.bytes_per_second = PRIOR_BYTES_PER_SECOND
        self._stream = driver.new_stream()
        self._events = EventPool(driver)
        self._landed = 0.0
        """Time at which the last batch landed, in seconds of the link's clock."""
        self._turns: StartTimeFairQueues[str, Transfer] = StartTimeFairQueues()
        """Transfers with batches that have not been queued on the stream yet."""
        self._flying: deque[_Flight] = deque()
        self._wake = threading.Condition()
        self._closing = False
        name = f"ballast-link-{direction.value}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def start(self, transfer_id: int, copies: Sequence[Copy], stream: str) -> None:
        transfer = Transfer(transfer_id, stream, batches(copies, self._chunk_bytes, 1))
        with self._wake:
            if self._closing:
                raise DeviceError("link", "it is closed")
            self._turns.add(stream, transfer)
            self._wake.notify()

    def stop(self, transfer_id: int) -> None:
        with self._wake:
            stopped = stop_queued(self._turns, transfer_id)
        if stopped is not None:
            self._on_done(TransferDoneEvent(transfer_id, 0, 0.0, STOPPED))

    def close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        with suppress(DeviceError):
            # Where this fails, so does every copy, and says why.
            self._driver.set_current(self._context)
        while True:
            with self._wake:
                while not (self._turns or self._flying or self._closing):
                    self._wake.wait()
                if self._closing or len(self._flying) == self._ahead or not self._turns:
                    batch = None
                else:
                    batch = self._next_batch()
            if batch is not None:
                self._issue(*batch)
            elif self._flying:
                self._land(self._flying.popleft())
            else:
                break
        for transfer in self._turns.items():
            transfer.error = transfer.error or "link: it was closed during the transfer"
            self._tell(transfer)
        with suppress(DeviceError):
            # All ends are posted, and nothing is in flight. The rest goes with the context.
            self._events.close()
            self._driver.destroy_stream(self._stream)

    def _next_batch(self) -> tuple[Transfer, list[Copy], bool]:
        """Return (transfer, batch, whether it is the transfer's last batch)."""
        transfer = self._turns.first(self._turns.next())
        batch = transfer.next_batch() if transfer.error is None else []
        self._turns.charge(transfer.stream, sum(max(0, copy.n_bytes) for copy in batch))
        last = transfer.coming is None or transfer.error is not None
        if last:
            self._turns.pop(transfer.stream)
        return transfer, batch, last

    def _issue(self, transfer: Transfer, batch: Sequence[Copy], last: bool) -> None:
        now = self._clock.now()
        if transfer.began is None:
            transfer.began = now
        try:
            for copy in batch:
                if copy.n_bytes < 0 or copy.dst <= 0 or copy.src <= 0:
                    raise DeviceError("cuMemcpyAsync", f"{copy.n_bytes} bytes to {copy.dst:#x}")
                if copy.n_bytes:
                    self._copy(copy.dst, copy.src, copy.n_bytes, self._stream)
        except (DeviceError, OverflowError) as error:
            transfer.error = str(error)
        # After an error, too: what was given to the stream before it is still under way.
        event: int | None = None
        try:
            event = self._events.acquire()
            self._driver.record(event, self._stream)
        except DeviceError as error:
            event, transfer.error = None, transfer.error or str(error)
        n_bytes = sum(copy.n_bytes for copy in batch)
        self._flying.append(_Flight(transfer, event, n_bytes, now, last))

    def _land(self, flight: _Flight) -> None:
        transfer = flight.transfer
        try:
            if flight.event is None:
                self._driver.finish(self._stream)
            else:
                self._driver.wait(flight.event)
                self._events.release(flight.event)
        except DeviceError as error:
            transfer.error = transfer.error or str(error)
        now = self._clock.now()
        transfer.seconds += now - max(flight.issued, self._landed)
        self._landed = now
        if transfer.error is None:
            transfer.n_bytes += flight.n_bytes
        if flight.last:
            self._tell(transfer)

    def _tell(self, transfer: Transfer) -> None:
        now = self._clock.now()
        if transfer.error is None and transfer.n_bytes >= self._chunk_bytes and transfer.seconds:
            rate = transfer.n_bytes / transfer.seconds
            self.bytes_per_second += (rate - self.bytes_per_second) / 4
        began = now if transfer.began is None else transfer.began
        self._on_done(TransferDoneEvent(transfer.id, transfer.n_bytes, now - began, transfer.error))
