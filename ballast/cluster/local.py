"""One worker process on this host: started, listened to, and, at the end, gone."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ballast.core.errors import Unavailable
from ballast.core.settings import FleetSettings, ServerSettings
from ballast.transport.messages import Configure, NotReady, Ready, ToServer, ToWorker
from ballast.transport.zmq import PrivateDirectory, ServerSocket

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "ballast.cluster.worker")
LAST_WORDS_SECONDS = 0.2
"""After a process has ended, what it sent may still be on its way for so long."""


class LocalWorker:
    """Owns the process, its socket and their directory, on the running event loop.

    The thread of the event loop must live as long as the worker: the kernel ends the worker with
    the thread that started it.
    """

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        self._command = tuple(command)
        self._directory = PrivateDirectory()
        try:
            self._socket = ServerSocket(self._directory.path)
        except BaseException:
            self._directory.close()
            raise
        self._process: asyncio.subprocess.Process | None = None
        self._exited: asyncio.Task[int] | None = None

    @property
    def directory(self) -> Path:
        """Holds the socket; gone once the worker has connected, or after `close`."""
        return self._directory.path

    @property
    def started(self) -> bool:
        """Whether there is, or was, a process."""
        return self._exited is not None

    @property
    def pid(self) -> int:
        """Of the process; only after `start`."""
        assert self._process is not None
        return self._process.pid

    async def start(self, fleet: FleetSettings) -> Ready:
        """Start the process and have it build the device of `fleet`; takes as long as loading.

        Raises Unavailable, with the reason, if it cannot.
        """
        arguments = ("--dir", str(self._directory.path), "--parent", str(os.getpid()))
        self._process = await asyncio.create_subprocess_exec(
            *self._command, *arguments, stdin=asyncio.subprocess.DEVNULL
        )
        self._exited = asyncio.create_task(self._process.wait())
        configured = False
        while True:
            message = await self.receive()
            if message is None:
                raise Unavailable(f"the worker ended while it started: {self.epitaph()}")
            if not configured:  # any first message tells that it listens
                # Connected for good: without a path there is nothing left to clean up later.
                self._directory.close()
                told = replace(fleet, server=ServerSettings())
                self.send(Configure(told, logging.getLogger().getEffectiveLevel()))
                configured = True
            if isinstance(message, Ready):
                return message
            if isinstance(message, NotReady):
                raise Unavailable(f"the worker cannot start: {message.reason}")

    def send(self, message: ToWorker) -> None:
        """Queue a message; never waits. To a worker that is gone it is lost."""
        self._socket.send(message)

    async def receive(self) -> ToServer | None:
        """The next message; None once the process has ended and all it said was taken."""
        assert self._exited is not None
        words = asyncio.ensure_future(self._socket.receive())
        try:
            await asyncio.wait({words, self._exited}, return_when=asyncio.FIRST_COMPLETED)
            if not words.done():
                await asyncio.wait({words}, timeout=LAST_WORDS_SECONDS)
            return words.result() if words.done() else None
        finally:
            words.cancel()

    def epitaph(self) -> str:
        """How the process ended, in words."""
        code = None if self._process is None else self._process.returncode
        if code is None:
            return "it runs"
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}"

    async def close(self, patience: float = 0.0) -> None:
        """End the process, forcibly after `patience` seconds, and remove its directory."""
        try:
            if self._exited is not None:
                await asyncio.wait({self._exited}, timeout=patience)
                if not self._exited.done():
                    assert self._process is not None
                    log.warning("worker %d is killed", self.pid)
                    self._process.kill()
                await self._exited
        finally:
            self._socket.close()
            self._directory.close()
