"""The process of one device: `python -m ballast.cluster.worker --dir DIR --parent PID`.

Two threads of our own: the main thread owns the socket, the device's thread builds the device and
runs its loop. They meet in two queues, so that the loop never waits for the socket.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol

from ballast.cluster.flight import FlightRecorder
from ballast.cluster.logs import FORMAT_VARIABLE, set_up
from ballast.cluster.outgoing_queue import OutgoingQueue
from ballast.cluster.peers import Lends, Peers
from ballast.cluster.segments import SegmentClient
from ballast.cluster.tensor_parallel.remote_rank import start_ranks
from ballast.core import migration
from ballast.core.capability import GpuReach
from ballast.core.clock import Clock
from ballast.core.command import CommandOutcome, DeviceCommand
from ballast.core.errors import BallastError
from ballast.core.event import (
    ArrivalEvent,
    CancelEvent,
    DrainEvent,
    Event,
    Output,
    PauseEvent,
    ResumeEvent,
    StopEvent,
)
from ballast.core.lease import LendingMessage
from ballast.core.model import ModelSpec
from ballast.core.report import DeviceReport
from ballast.core.settings import FleetSettings, ModelSettings
from ballast.isolation.orphan import die_with
from ballast.transport.page_descriptors import fetch_pages
from ballast.transport.sockets import WorkerSocket
from ballast.transport.worker_messages.admin_messages import CommandDoneMsg, CommandMsg
from ballast.transport.worker_messages.codec import ToWorker
from ballast.transport.worker_messages.lending_messages import (
    LeaseMsg,
    MeetPeerMsg,
    PeerEndedMsg,
    lending_message,
)
from ballast.transport.worker_messages.lifecycle_messages import (
    ConfigureMsg,
    DrainedMsg,
    DrainMsg,
    HeartbeatMsg,
    HelloMsg,
    NotReadyMsg,
    ReadyMsg,
    StatusMsg,
    StopMsg,
)
from ballast.transport.worker_messages.migration_messages import (
    MigrationAnswerMsg,
    MigrationOrderMsg,
)
from ballast.transport.worker_messages.request_messages import (
    FlowControlMsg,
    SubmitMsg,
    WithdrawMsg,
)

log = logging.getLogger(__name__)

REPORT_SECONDS = 0.1
"""A changed report is sent this often at most."""
HEARTBEAT_SECONDS = 0.5
SERVING, SPARE, PREPARING = "ballast-worker", "ballast-spare", "ballast-prepare"
"""Names of processes, as operators see them."""
_LOWEST_PRIORITY = 19
STALE_SECONDS = 1.0
"""An unchanged one is repeated this often, so that its age tells whether the process lives."""


class Device(Lends, Protocol):
    """What a worker runs; `ballast.live.device.LiveDevice` in earnest."""

    @property
    def specs(self) -> dict[str, ModelSpec]: ...

    @property
    def failed(self) -> dict[str, str]: ...

    @property
    def reach(self) -> GpuReach | None: ...

    def run(self) -> None: ...

    def set_lending_outbox(self, say: Callable[[LendingMessage], None]) -> None: ...

    def migrate(self, order: migration.MigrationStep) -> None: ...

    def set_migration_outbox(self, say: Callable[[migration.MigrationAnswer], None]) -> None: ...

    def command(self, order: DeviceCommand, done: Callable[[CommandOutcome], None]) -> None: ...

    def snapshot(self) -> DeviceReport: ...

    def decisions(self) -> tuple[dict[str, Any], ...]: ...

    def busy(self) -> tuple[float, float]: ...

    def close(self) -> None: ...


Outbox = Callable[[list[Output]], None]
Record = Callable[[Iterable[str]], object]
"""Is told the ids of the requests in flight, before anything that they could break."""
Progress = Callable[[], object]
"""Is called whenever some more is loaded, by any thread."""
MakeDevice = Callable[[FleetSettings, Outbox, Record, Progress, SegmentClient | None], Device]


class Worker:
    """Joins a device to the socket. `run` returns the exit code of the process."""

    def __init__(
        self,
        socket: WorkerSocket,
        make_device: MakeDevice,
        record: Record,
        clock: Clock,
        segments: SegmentClient | None = None,
    ) -> None:
        """`segments`: where to ask for weights that other workers have."""
        self._socket = socket
        self._make_device = make_device
        self._record = record
        self._clock = clock
        self._segments = segments
        self._outgoing = OutgoingQueue()
        self._peers = Peers(self._use, lambda word: self._outgoing.put(lending_message(word)))
        self._thread: threading.Thread | None = None
        self._device: Device | None = None
        self._lock = threading.Lock()
        """Held while `_device` changes or is used by any thread but its own."""
        self._serving = False
        """There is a device, or there was."""
        self._progress_at = 0.0
        """When the device that is being built last loaded something."""
        self._code = 0
        self.abandoned = False
        """The device's thread was left behind, loading."""
        self._reported: DeviceReport | None = None
        self._reported_at = float("-inf")
        self._beat_at = float("-inf")

    def run(self) -> int:
        """Serve until the device's loop has returned and all it said is sent."""
        socket, outgoing = self._socket, self._outgoing
        socket.also_wake_on(outgoing.fd)
        socket.also_wake_on(self._peers.socket.fileno())
        socket.send(HelloMsg(os.getpid()))
        while not self.abandoned:
            # Asked before the queue is emptied: what a dead thread has said is in the queue.
            over = self._thread is not None and not self._thread.is_alive()
            messages = outgoing.take()
            if any(isinstance(message, CommandDoneMsg) for message in messages):
                self._report(at_once=True)  # whoever is told that it is done can see it done
            for message in messages:
                socket.send(message)
            if over:
                break
            self._report()
            if self._device is not None:
                self._peers.give()
            if self._thread is not None:
                self._beat()  # nobody listens to a spare
            socket.wait(HEARTBEAT_SECONDS if self._device is None else REPORT_SECONDS)
            socket.receive_all(self._handle)
        return self._code

    def _handle(self, message: ToWorker) -> None:
        match message:
            case ConfigureMsg():
                logging.getLogger("ballast").setLevel(message.log_level)
                _name_process(SERVING)
                self._progress()
                self._thread = threading.Thread(
                    target=self._serve, args=(message.fleet,), name="device", daemon=True
                )
                self._thread.start()
            case SubmitMsg():
                for submission in message.unwrap():
                    self._post(ArrivalEvent(submission))
            case WithdrawMsg():
                for request_id in message.request_ids:
                    self._post(CancelEvent(request_id))
            case FlowControlMsg():
                for request_id in message.paused:
                    self._post(PauseEvent(request_id))
                for request_id in message.resumed:
                    self._post(ResumeEvent(request_id))
            case DrainMsg():
                self._post(DrainEvent())
            case StopMsg():
                self._post(StopEvent(message.reason))
            case CommandMsg():
                self._command(message)
            case MeetPeerMsg():
                self._peers.meet(message)
            case PeerEndedMsg():
                self._peers.gone(message)
            case LeaseMsg():
                self._peers.hear(message.event)
            case MigrationOrderMsg():
                self._migrate(message)

    def _post(self, event: Event) -> None:
        with self._lock:
            if self._device is not None:
                self._device.post(event)
            elif isinstance(event, DrainEvent | StopEvent):
                self.abandoned = True  # still loading: nothing was accepted, nothing is lost

    @contextmanager
    def _use(self) -> Iterator[Device | None]:
        with self._lock:
            yield self._device

    def _command(self, command: CommandMsg) -> None:
        def done(outcome: CommandOutcome) -> None:
            self._outgoing.put(CommandDoneMsg(command.id, outcome))

        with self._lock:
            if self._device is not None:
                self._device.command(command.order, done)
                return
        done(CommandOutcome("unavailable", "the device is not serving"))

    def _migrate(self, message: MigrationOrderMsg) -> None:
        with self._lock:
            if self._device is not None:
                self._device.migrate(message.order)

    def _serve(self, fleet: FleetSettings) -> None:
        """The device's thread."""
        try:
            try:
                device = self._make_device(
                    fleet, self._outgoing.put, self._record, self._progress, self._segments
                )
            except (BallastError, OSError, MemoryError) as error:
                log.error("the device could not be built: %s", error)
                self._code = 1
                self._outgoing.put(NotReadyMsg(f"{error}" or type(error).__name__))
                return
            device.set_lending_outbox(lambda word: self._outgoing.put(lending_message(word)))
            device.set_migration_outbox(
                lambda word: self._outgoing.put(MigrationAnswerMsg.of(word))
            )
            with self._lock:
                pages = "" if device.export() is None else self._peers.socket.address
                ready = ReadyMsg(
                    device.specs, device.failed, device.snapshot(), pages, device.reach
                )
                self._outgoing.put(ready)
                self._device = device
                self._serving = True
            device.run()
            with self._lock:
                self._device = None
            self._outgoing.put(DrainedMsg())
            device.close()
        except BaseException:
            self._code = 1
            raise
        finally:
            self._outgoing.wake()

    def _report(self, *, at_once: bool = False) -> None:
        now = self._clock.now()
        with self._lock:
            soon = now - self._reported_at < REPORT_SECONDS
            if self._device is None or (soon and not at_once):
                return
            report, decisions = self._device.snapshot(), self._device.decisions()
        same = self._reported is not None and report == replace(self._reported, now=report.now)
        if same and not decisions and now - self._reported_at < STALE_SECONDS:
            return
        self._reported, self._reported_at = report, now
        self._socket.send(StatusMsg(report, decisions))

    def _beat(self) -> None:
        now = self._clock.now()
        if now - self._beat_at < HEARTBEAT_SECONDS:
            return
        self._beat_at = now
        with self._lock:
            if self._device is not None:
                beat = HeartbeatMsg(*self._device.busy())
            elif self._serving:
                beat = HeartbeatMsg()
            else:
                beat = HeartbeatMsg(load_seconds=now - self._progress_at)
        self._socket.send(beat)

    def _progress(self) -> None:
        self._progress_at = self._clock.now()


def live_device(
    fleet: FleetSettings,
    outbox: Outbox,
    record: Record,
    progress: Progress,
    segments: SegmentClient | None,
) -> Device:
    """The real thing; imported only here, so that the process answers before it has loaded."""
    ranks = start_ranks(fleet)  # first: they take as long to start as what follows
    from ballast.cluster.machine_choice import machine_of
    from ballast.live.device import LiveDevice
    from ballast.memory.peer_reader import PeerReader
    from ballast.models.tokenizer_trial import vet_tokenizer
    from ballast.weights.manifest import fork_zygote

    # From here, where all is imported and nothing runs yet: the other threads only wait for
    # messages, and the zygote has nothing to do with these. It ends with this process.
    isolation = fork_zygote()

    def vet(settings: ModelSettings) -> None:
        vet_tokenizer(Path(settings.path), isolation)
        progress()

    own = fleet.device
    readable = own.gpu is None and own.tensor_parallel == 1
    return LiveDevice(
        fleet,
        outbox,
        record=record,
        progress=progress,
        exchange=segments,
        isolation=isolation,
        vet=vet,
        make_machine=partial(machine_of, ranks=ranks),
        make_kv_bytes=partial(PeerReader, fetch_pages) if readable else None,
    )


def rehearse_live() -> None:
    """What takes a start longest, but for large models."""
    from ballast.live.warmup import rehearse

    rehearse()


def _when_idle(do: Callable[[], None]) -> None:
    """Returns when `do` has: it ran when nobody else wanted the processor."""

    def run() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        do()

    # A thread cannot have its priority back.
    thread = threading.Thread(target=run, name="rehearsal", daemon=True)
    thread.start()
    thread.join()


def _name_process(name: str) -> None:
    """As `ps` and `top` show it."""
    Path("/proc/self/comm").write_text(name)


def main(
    argv: Sequence[str] | None = None,
    make_device: MakeDevice = live_device,
    rehearse: Callable[[], None] = rehearse_live,
) -> NoReturn:
    """The process. Only its server ends it: by a message, or by ending itself.

    A spare rehearses a start before it says that it is there.
    """
    parser = argparse.ArgumentParser(prog="ballast.cluster.worker")
    parser.add_argument("--dir", type=Path, required=True, help="holds the socket")
    parser.add_argument("--parent", type=int, required=True, help="process id of the server")
    parser.add_argument("--flight", type=int, required=True, help="descriptor of flight memory")
    parser.add_argument("--segments", type=int, help="descriptor of the socket of shared weights")
    parser.add_argument("--spare", action="store_true", help="prepare for a start to come")
    arguments = parser.parse_args(argv)
    die_with(arguments.parent)
    _name_process(PREPARING if arguments.spare else SERVING)
    # A terminal or a service manager signals the whole group; the server decides what that means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    set_up("worker", os.environ.get(FORMAT_VARIABLE, "text"), "warning")
    from ballast.live.inbox import MonotonicClock

    if arguments.spare:
        _when_idle(rehearse)
        _name_process(SPARE)
    with WorkerSocket(arguments.dir) as socket:
        flight = FlightRecorder(arguments.flight)
        segments = None if arguments.segments is None else SegmentClient(arguments.segments)
        worker = Worker(socket, make_device, flight.record, MonotonicClock(), segments)
        code = worker.run()
    logging.shutdown()
    # Nothing is left to tidy up; Python's own end takes seconds of a busy processor, and a thread
    # that was left behind cannot be asked to end.
    os._exit(code)


if __name__ == "__main__":
    main()
