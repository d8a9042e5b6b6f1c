"""Start a worker process on this host, exchange messages with it, watch it, and end it.

The server's end of a worker: implements `WorkerLink` for `RemoteDevice` and `SpareWorker`. It does
not interpret messages beyond the start of the process and its heartbeats.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ballast.cluster.kv_broker import KvBroker
from ballast.cluster.segment_broker import SegmentBroker
from ballast.cluster.worker.flight_recorder import FlightRecorder, flight_memory
from ballast.cluster.worker.liveness_watch import LivenessWatch, process_activity
from ballast.core.errors import Unavailable
from ballast.core.settings import FleetSettings, ServerSettings
from ballast.isolation.environment import child_environment
from ballast.transport.sockets import PrivateDirectory, ServerSocket
from ballast.transport.worker_messages.codec import ToServer, ToWorker
from ballast.transport.worker_messages.lifecycle_messages import (
    ConfigureMsg,
    HeartbeatMsg,
    HelloMsg,
    NotReadyMsg,
    ReadyMsg,
)

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "ballast.cluster.worker.process")
LAST_MESSAGE_SECONDS = 0.2
"""Time during which messages of an ended process may still arrive."""


class LocalWorker:
    """Owns a worker's process, socket and directory, on the running event loop.

    The thread of the event loop must live as long as the worker: the kernel ends the worker with
    the thread that started it. While the process runs, the owner must `receive`: a message that is
    not received counts as silence, and a silent worker is killed.
    """

    def __init__(
        self,
        command: Sequence[str] = COMMAND,
        broker: SegmentBroker | None = None,
        kv_broker: KvBroker | None = None,
    ) -> None:
        """`broker`: shares segments of weights between the workers of this host; None: weights are
        not shared. `kv_broker`: keeps their KV; None: it goes with them."""
        self._command = tuple(command)
        self._broker = broker
        self._brokers: dict[str, SegmentBroker | KvBroker | None] = {
            "--segments": broker,
            "--kv": kv_broker,
        }
        self._connections: list[tuple[SegmentBroker | KvBroker, socket.socket]] = []
        with contextlib.ExitStack() as undo:
            self._directory = PrivateDirectory()
            undo.callback(self._directory.close)
            self._flight_fd = flight_memory()
            undo.callback(os.close, self._flight_fd)
            self._flight = FlightRecorder(self._flight_fd)
            self._socket = ServerSocket(self._directory.path)
            undo.pop_all()
        self._process: asyncio.subprocess.Process | None = None
        self._exited: asyncio.Task[int] | None = None
        self._watch = LivenessWatch(self.kill, lambda: process_activity(self.pid))
        self._connected = False
        self._killed_for = ""
        self._closed = False

    @property
    def directory(self) -> Path:
        """The directory of the socket; removed once the worker has connected, or by `close`."""
        return self._directory.path

    @property
    def started(self) -> bool:
        """Whether the process has been started."""
        return self._exited is not None

    @property
    def pid(self) -> int:
        """Process id; only after `start` or `prepare`."""
        assert self._process is not None
        return self._process.pid

    @property
    def waits(self) -> bool:
        """Whether a prepared process runs and waits for `start`."""
        return self._connected and not self._watch.started and self._runs

    @property
    def _runs(self) -> bool:
        return self._exited is not None and not self._exited.done()

    async def prepare(self) -> None:
        """Start the process ahead of time, as a spare; returns when it has warmed up, at the lowest
        CPU priority. Raises Unavailable.
        """
        await self._spawn("--spare")
        await self._connect()

    async def start(self, fleet: FleetSettings) -> ReadyMsg:
        """Start the process unless it was prepared, and have it build the device of `fleet`;
        returns when it has loaded the models.

        From now on it is watched, with the limits of `fleet.server`. Raises Unavailable, with the
        reason, if it cannot start.
        """
        if self._exited is None:
            await self._spawn()
        self._watch.start(fleet.server)
        if not self._connected:
            await self._connect()
        device_fleet = replace(fleet, server=ServerSettings())
        if self._broker is not None:
            device_fleet = replace(device_fleet, link=self._broker.sharing(fleet.link))
        self.send(ConfigureMsg(device_fleet, logging.getLogger("ballast").getEffectiveLevel()))
        while True:
            message = await self._expect()
            if isinstance(message, ReadyMsg):
                self._watch.note_ready()
                return message
            if isinstance(message, NotReadyMsg):
                raise Unavailable(f"the worker cannot start: {message.reason}")

    async def _spawn(self, *options: str) -> None:
        fds = {"--flight": self._flight_fd}
        worker_ends: list[socket.socket] = []
        for option, broker in self._brokers.items():
            if broker is not None:
                ours, theirs = broker.open()
                self._connections.append((broker, ours))
                worker_ends.append(theirs)
                fds[option] = theirs.fileno()
        arguments = ["--dir", str(self._directory.path), "--parent", str(os.getpid())]
        for name, fd in fds.items():
            arguments += (name, str(fd))
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                *arguments,
                *options,
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=tuple(fds.values()),
                env=child_environment(),
            )
        finally:
            for end in worker_ends:
                end.close()  # else the worker's death would go unnoticed
        self._exited = asyncio.create_task(self._process.wait())
        self._exited.add_done_callback(lambda _: self._socket.wake())

    async def _connect(self) -> None:
        while not isinstance(await self._expect(), HelloMsg):
            pass
        self._connected = True
        # The connection outlives its path: without a path no file is left to clean up later.
        self._directory.close()

    async def _expect(self) -> ToServer:
        """Return the next message while the worker starts. Raises Unavailable if it ends."""
        message = await self.receive()
        if message is None:
            raise Unavailable(f"the worker ended while it started: {self.epitaph()}")
        return message

    def send(self, message: ToWorker) -> None:
        """Queue a message; never waits. It is lost if the worker has ended."""
        self._socket.send(message)

    async def receive(self) -> ToServer | None:
        """Return the next message; None once the process has ended and all are received."""
        while isinstance(message := await self._next(), HeartbeatMsg):
            self._watch.check(message)
        return message

    async def _next(self) -> ToServer | None:
        assert self._exited is not None
        socket = self._socket
        if socket.has_message:
            # A backlog: other work of the loop goes between two messages.
            await asyncio.sleep(0)
        while not socket.has_message and not self._exited.done():
            await socket.change()
        if not socket.has_message:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(socket.change(), LAST_MESSAGE_SECONDS)
        self._watch.note_message()
        return socket.take() if socket.has_message else None

    def kill(self, why: str) -> None:
        """Kill the process at once; `epitaph` includes `why`."""
        assert self._process is not None
        if self._process.returncode is None and not self._killed_for:
            log.error("worker %d is killed: %s", self.pid, why)
            self._killed_for = why
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    def epitaph(self) -> str:
        """Describe how the process ended."""
        code = None if self._process is None else self._process.returncode
        if code is None:
            return "it runs"
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return f"{how}: {self._killed_for}" if self._killed_for else how

    def in_flight(self) -> frozenset[str]:
        """Return the requests of the job in flight when the process ended; empty: none is known."""
        return self._flight.read()

    async def close(self, patience: float = 0.0) -> None:
        """End the process, forcibly after `patience` seconds, and remove its directory."""
        if self._closed:
            return
        self._closed = True
        self._watch.stop()
        try:
            if self._exited is not None:
                await asyncio.wait({self._exited}, timeout=patience)
                if not self._exited.done():
                    assert self._process is not None
                    if self._watch.started:  # a spare has nothing to finish
                        log.warning("worker %d is killed", self.pid)
                    self._process.kill()
                await self._exited
        finally:
            for broker, connection in self._connections:
                broker.close(connection)
            self._socket.close()
            self._directory.close()
            self._flight.close()
            os.close(self._flight_fd)
