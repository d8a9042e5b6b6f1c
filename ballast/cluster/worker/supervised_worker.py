"""Exchange messages with a worker's process and watch it, wherever it runs.

The server's end of a worker: implements `WorkerLink` for `RemoteDevice` and `SpareWorker`. It does
not interpret messages beyond the start of the process and its heartbeats.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from ballast.cluster.worker.liveness_watch import Activity, LivenessWatch
from ballast.core.errors import Unavailable
from ballast.core.settings import FleetSettings, ServerSettings
from ballast.transport.sockets import ServerSocket
from ballast.transport.worker_messages.codec import ToServer, ToWorker
from ballast.transport.worker_messages.lifecycle_messages import (
    ConfigureMsg,
    HeartbeatMsg,
    HelloMsg,
    NotReadyMsg,
    ReadyMsg,
)

log = logging.getLogger(__name__)

LAST_MESSAGE_SECONDS = 10.0
"""Bound of the wait for the end of an ended process's connection, before which messages may come:
another process may have the connection open."""
END_SECONDS = 10.0
"""Time to hear of the end of a process whose connection was lost, before it is killed."""


class ProcessHandle(Protocol):
    """A worker's process; `LocalProcess` is one, `HostedProcess` another."""

    @property
    def exited(self) -> asyncio.Future[Any] | None: ...

    def activity(self) -> Activity | None: ...

    def kill(self, why: str) -> bool: ...

    def exit_reason(self) -> str: ...

    def in_flight(self) -> frozenset[str] | None: ...

    async def close(self, patience: float, late: Callable[[], object]) -> None: ...


class SupervisedWorker(ABC):
    """Owns a worker's process and socket, on the running event loop.

    While the process runs, the owner must `receive`: a message that is not received counts as
    silence, and a silent worker is killed.
    """

    end_seconds = END_SECONDS

    def __init__(self) -> None:
        self._watch = LivenessWatch(self.kill, lambda: self._handle.activity())
        self._connected = False
        self._closed = False
        self.hello: HelloMsg | None = None
        """The first message of the process."""

    @property
    @abstractmethod
    def _handle(self) -> ProcessHandle:
        """The process; only once it has been opened."""

    @property
    @abstractmethod
    def _socket(self) -> ServerSocket:
        """The socket; only once it has been opened."""

    @abstractmethod
    async def _spawn(self, *options: str) -> None:
        """Open the socket and start the process. Raises Unavailable and OSError."""

    @abstractmethod
    def _fleet_there(self, fleet: FleetSettings) -> FleetSettings:
        """Return the settings of a device as the worker's host needs them."""

    @property
    def started(self) -> bool:
        """Whether the process has been started."""
        return self._handle.exited is not None

    @property
    def waits(self) -> bool:
        """Whether a prepared process runs and waits for `start`."""
        exited = self._handle.exited if self._connected else None
        return exited is not None and not exited.done() and not self._watch.started

    def activity(self) -> Activity | None:
        """Return what the process has used so far; None if it has not been started, or cannot be
        read."""
        return self._handle.activity() if self.started else None

    async def prepare(self) -> None:
        """Start the process ahead of time, as a spare; returns when it has warmed up, at the lowest
        CPU priority. Raises Unavailable.
        """
        await self._spawn("--spare")
        await self._connect()

    async def begin(self) -> None:
        """Start the process: it imports what devices need, until it is configured. Raises
        Unavailable and OSError."""
        if not self.started:
            await self._spawn()

    async def start(self, fleet: FleetSettings) -> ReadyMsg:
        """Start the process unless it has been started, and have it build the device of `fleet`;
        returns when it has loaded the models.

        From now on it is watched, with the limits of `fleet.server`. Raises Unavailable, with the
        reason, if it cannot start.
        """
        await self.begin()
        self._watch.start(fleet.server)
        if not self._connected:
            await self._connect()
        there = self._fleet_there(replace(fleet, server=ServerSettings()))
        self.send(ConfigureMsg(there, logging.getLogger("ballast").getEffectiveLevel()))
        while True:
            message = await _expect(self)
            if isinstance(message, ReadyMsg):
                self._watch.note_ready()
                return message
            if isinstance(message, NotReadyMsg):
                raise Unavailable(f"the worker cannot start: {message.reason}")

    async def _connect(self) -> None:
        while not isinstance(message := await _expect(self), HelloMsg):
            pass
        self.hello = message
        self._connected = True

    def send(self, message: ToWorker) -> None:
        """Queue a message; never waits. It is lost if the worker has ended."""
        self._socket.send(message)

    async def receive(self) -> ToServer | None:
        """Return the next message; None once the process has ended and all are received."""
        while isinstance(message := await self._next(), HeartbeatMsg):
            self._watch.check(message)
        return message

    async def _next(self) -> ToServer | None:
        exited, socket = self._handle.exited, self._socket
        assert exited is not None
        if socket.has_message:
            # A backlog: other work of the loop goes between two messages.
            await asyncio.sleep(0)
        while not socket.has_message and not exited.done():
            if socket.lost:
                await asyncio.wait({exited}, timeout=self.end_seconds)
                if not exited.done():
                    self.kill("its connection was lost")
                    await asyncio.wait({exited})
                break
            await socket.change()
        if not socket.has_message:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_MESSAGE_SECONDS):
                    while socket.connected and not socket.has_message:
                        await socket.change()
        self._watch.note_message()
        return socket.take() if socket.has_message else None

    def kill(self, why: str) -> None:
        """Kill the process at once; `exit_reason` includes `why`."""
        if self._handle.kill(why):
            log.error("%s is killed: %s", self, why)

    def exit_reason(self) -> str:
        """Describe how the process ended."""
        return self._handle.exit_reason()

    def in_flight(self) -> frozenset[str] | None:
        """Return the requests of the job in flight when the process ended; empty: none is known;
        None: its host is gone, and no request is to blame."""
        return self._handle.in_flight()

    async def close(self, patience: float = 0.0) -> None:
        """End the process, forcibly after `patience` seconds, and free what belongs to it."""
        if self._closed:
            return
        self._closed = True
        self._watch.stop()
        try:
            # A spare has nothing to finish.
            warn = log.warning if self._watch.started else log.debug
            await self._handle.close(patience, lambda: warn("%s is killed", self))
        finally:
            self._socket.close()


async def _expect(worker: SupervisedWorker) -> ToServer:
    """Return the next message while a worker starts. Raises Unavailable if it ends."""
    message = await worker.receive()
    if message is None:
        raise Unavailable(f"the worker ended while it started: {worker.exit_reason()}")
    return message
