"""Build a device and run its loop, on a thread of its own in the worker's process.

Used by `Worker`, whose main thread posts events to the device's inbox. The loop never waits for the
socket: all that the device sends goes to the outgoing queue.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from ballast.cluster.lending.lending_peers import LendingDevice
from ballast.cluster.segment_broker import SegmentClient
from ballast.cluster.worker.outgoing_queue import OutgoingQueue
from ballast.core import migration
from ballast.core.capability import GpuReach
from ballast.core.clock import Clock
from ballast.core.command import CommandOutcome, DeviceCommand
from ballast.core.errors import BallastError
from ballast.core.event import DrainEvent, Event, Output, StopEvent
from ballast.core.lease import LendingMessage
from ballast.core.model import ModelSpec
from ballast.core.report import DeviceReport
from ballast.core.settings import FleetSettings, ModelSettings
from ballast.transport.worker_messages.lending_messages import lending_message
from ballast.transport.worker_messages.lifecycle_messages import (
    DrainedMsg,
    NotReadyMsg,
    ReadyMsg,
)
from ballast.transport.worker_messages.migration_messages import MigrationAnswerMsg

log = logging.getLogger(__name__)


class WorkerDevice(LendingDevice, Protocol):
    """The device that a worker runs; `ballast.live.device.LiveDevice` is one."""

    @property
    def specs(self) -> dict[str, ModelSpec]: ...

    @property
    def failed(self) -> dict[str, str]: ...

    @property
    def reach(self) -> GpuReach | None: ...

    def run(self) -> None: ...

    def set_lending_outbox(self, send: Callable[[LendingMessage], None]) -> None: ...

    def migrate(self, step: migration.MigrationStep) -> None: ...

    def set_migration_outbox(self, send: Callable[[migration.MigrationAnswer], None]) -> None: ...

    def command(
        self, command: DeviceCommand, done: Callable[[CommandOutcome], None], by: str
    ) -> None: ...

    def snapshot(self) -> DeviceReport: ...

    def decisions(self) -> tuple[dict[str, Any], ...]: ...

    def busy(self) -> tuple[float, float]: ...

    def close(self) -> None: ...


Outbox = Callable[[list[Output]], None]
Record = Callable[[Iterable[str]], object]
"""Records the ids of the requests in flight, before anything runs that they could break."""
Progress = Callable[[], object]
"""Called by any thread whenever loading the device has made progress."""
MakeDevice = Callable[[FleetSettings, Outbox, Record, Progress, SegmentClient | None], WorkerDevice]


class DeviceThread:
    """Owns the device of a worker and its thread; used by the main thread.

    The device's messages go to the outgoing queue, from the first (`ReadyMsg` or `NotReadyMsg`) to
    the last (`DrainedMsg`).
    """

    def __init__(
        self,
        make_device: MakeDevice,
        record: Record,
        clock: Clock,
        outgoing: OutgoingQueue,
        segments: SegmentClient | None,
    ) -> None:
        """`segments`: shares weights with other workers; None: nothing is shared."""
        self._make_device = make_device
        self._record = record
        self._clock = clock
        self._outgoing = outgoing
        self._segments = segments
        self._thread: threading.Thread | None = None
        self._device: WorkerDevice | None = None
        self._lock = threading.Lock()
        """Held while `_device` changes, or is used by any thread but its own."""
        self._has_served = False
        self._pages_address = ""
        self._progress_at = 0.0
        """Time of the last progress of loading, seconds."""
        self.exit_code = 0
        """Exit code of the process."""
        self.abandoned = False
        """Whether the worker is to exit though the thread still loads."""

    @property
    def started(self) -> bool:
        return self._thread is not None

    @property
    def ended(self) -> bool:
        """Whether the thread has ended; all that it sent is in the outgoing queue by then."""
        return self._thread is not None and not self._thread.is_alive()

    @property
    def serves(self) -> bool:
        """Whether the device has been built and its loop has not returned."""
        return self._device is not None

    def start(self, fleet: FleetSettings, pages_address: str) -> None:
        """Build the device of `fleet` and run it until its loop returns.

        `pages_address`: where other workers get the device's memory, if it lends any.
        """
        self._note_progress()
        self._thread = threading.Thread(
            target=self._run, args=(fleet, pages_address), name="device", daemon=True
        )
        self._thread.start()

    @contextmanager
    def use(self) -> Iterator[WorkerDevice | None]:
        """Return a context in which the device stays alive; None: there is no device now."""
        with self._lock:
            yield self._device

    def post(self, event: Event) -> None:
        """Post an event to the device's inbox. While it loads, a `DrainEvent` or `StopEvent`
        abandons it, and other events are dropped."""
        with self._lock:
            if self._device is not None:
                self._device.post(event)
            elif isinstance(event, DrainEvent | StopEvent):
                self.abandoned = True  # still loading: nothing was accepted, nothing is lost

    def ready(self, kept: tuple[ModelSettings, ...], epoch: int) -> ReadyMsg | None:
        """Return what a further server needs to know, as in `ReadyMsg`; None: there is no device
        now."""
        with self._lock:
            return None if self._device is None else self._ready(self._device, kept, epoch)

    def _ready(
        self, device: WorkerDevice, kept: tuple[ModelSettings, ...] = (), epoch: int = 0
    ) -> ReadyMsg:
        specs, report, pages = device.specs, device.snapshot(), self._pages_address
        return ReadyMsg(specs, device.failed, report, pages, device.reach, kept, epoch)

    def load_seconds(self, now: float) -> float:
        """Return the seconds since loading last made progress; 0 once the device has served."""
        return 0.0 if self._has_served else now - self._progress_at

    def _run(self, fleet: FleetSettings, pages_address: str) -> None:
        try:
            device = self._build(fleet)
            if device is None:
                return
            device.set_lending_outbox(lambda word: self._outgoing.put(lending_message(word)))
            device.set_migration_outbox(lambda a: self._outgoing.put(MigrationAnswerMsg.of(a)))
            with self._lock:
                self._pages_address = "" if device.export() is None else pages_address
                self._outgoing.put(self._ready(device))
                self._device = device
                self._has_served = True
            device.run()
            with self._lock:
                self._device = None
            self._outgoing.put(DrainedMsg())
            device.close()
        except BaseException:
            self.exit_code = 1
            raise
        finally:
            self._outgoing.wake()

    def _build(self, fleet: FleetSettings) -> WorkerDevice | None:
        """Build and return the device; on failure send the reason and return None."""
        try:
            return self._make_device(
                fleet, self._outgoing.put, self._record, self._note_progress, self._segments
            )
        except (BallastError, OSError, MemoryError) as error:
            log.error("the device could not be built: %s", error)
            self.exit_code = 1
            self._outgoing.put(NotReadyMsg(f"{error}" or type(error).__name__))
            return None

    def _note_progress(self) -> None:
        self._progress_at = self._clock.now()
