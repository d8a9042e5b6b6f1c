"""Start a worker's process on this host, connect it with the host's brokers, and end it.

Used by `LocalWorker` in the server, and by the agent of a host for workers whose server is on
another one. It exchanges no messages with the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ballast.cluster.kv_broker import KvBroker
from ballast.cluster.segment_broker import SegmentBroker
from ballast.cluster.worker.early_process import COMMAND, EarlyProcess
from ballast.cluster.worker.flight_recorder import FlightRecorder, flight_memory
from ballast.cluster.worker.liveness_watch import Activity, process_activity
from ballast.cluster.worker.renewals import Renewal, RenewalPipe
from ballast.isolation.environment import child_environment


class LocalProcess:
    """Owns a worker's process, its flight record and its connections, on the running event loop.

    The thread of the event loop must live as long as the process: the kernel ends it with the
    thread that started it.
    """

    def __init__(
        self,
        command: Sequence[str] = COMMAND,
        broker: SegmentBroker | None = None,
        kv_broker: KvBroker | None = None,
        early: EarlyProcess | None = None,
    ) -> None:
        """`broker`: shares segments of weights between the workers of this host; None: weights are
        not shared. `kv_broker`: keeps their KV; None: it goes with them. `early`: becomes the
        process, if it can."""
        self._command = tuple(command)
        self._early = early
        self._brokers: dict[str, SegmentBroker | KvBroker | None] = {
            "--segments": broker,
            "--kv": kv_broker,
        }
        self._connections: list[tuple[SegmentBroker | KvBroker, socket.socket]] = []
        self._renewals: RenewalPipe | None = None
        self._flight_fd = flight_memory()
        self._flight = FlightRecorder(self._flight_fd)
        self._process: asyncio.subprocess.Process | EarlyProcess | None = None
        self._closed = False
        self._recorded: frozenset[str] | None = None
        """What the flight record held when it was freed."""
        self.exited: asyncio.Future[Any] | None = None
        """Done once the process has ended; None: it has not been started."""
        self.killed_for = ""

    @property
    def pid(self) -> int:
        """Process id; only after `spawn`."""
        assert self._process is not None
        return self._process.pid

    def activity(self) -> Activity | None:
        """Return what the process has used so far; None if it cannot be read."""
        return process_activity(self.pid)

    async def spawn(
        self,
        *options: str,
        link: int | None = None,
        renewable: bool = False,
        ended: Callable[[], object],
    ) -> None:
        """Start the process. `link`: descriptor that it inherits as `--link`. `renewable`: whether
        `renew` can connect it with further servers. `ended`: called once it has ended. Raises
        OSError."""
        fds = {"--flight": self._flight_fd}
        if renewable:
            self._renewals = RenewalPipe()
            fds["--renewals"] = self._renewals.reader
        if link is not None:
            fds["--link"] = link
        worker_ends: list[socket.socket] = []
        for option, broker in self._brokers.items():
            if broker is not None:
                ours, theirs = broker.open()
                self._connections.append((broker, ours))
                worker_ends.append(theirs)
                fds[option] = theirs.fileno()
        arguments = ["--parent", str(os.getpid()), *options]
        try:
            if self._early is not None and self._early.order(arguments, fds):
                self._process = self._early
            else:
                self._process = await self._executed(arguments, fds)
        finally:
            for end in worker_ends:
                end.close()  # else the worker's death would go unnoticed
            if self._renewals is not None:
                self._renewals.close_reader()
        self.exited = asyncio.ensure_future(self._process.wait())
        self.exited.add_done_callback(lambda _: ended())

    async def _executed(
        self, arguments: Sequence[str], fds: Mapping[str, int]
    ) -> asyncio.subprocess.Process:
        """Start a process; `fds`: descriptors that it inherits, by option. Raises OSError."""
        inherited = (text for name, fd in fds.items() for text in (name, str(fd)))
        return await asyncio.create_subprocess_exec(
            *self._command,
            *arguments,
            *inherited,
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=tuple(fds.values()),
            env=child_environment(),
        )

    def renew(self, renewal: Renewal) -> None:
        """Send word of its server to a process that is renewable."""
        if self._renewals is not None:
            self._renewals.write(renewal)

    def kill(self, why: str) -> bool:
        """Kill the process at once; `exit_reason` includes `why`. Returns whether it ran."""
        assert self._process is not None
        if self._process.returncode is not None or self.killed_for:
            return False
        self.killed_for = why
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        return True

    def exit_reason(self) -> str:
        """Describe how the process ended."""
        code = None if self._process is None else self._process.returncode
        if code is None:
            return "it runs"
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return f"{how}: {self.killed_for}" if self.killed_for else how

    def in_flight(self) -> frozenset[str]:
        """Return the requests of the job in flight when the process ended; empty: none is known."""
        return self._flight.read() if self._recorded is None else self._recorded

    async def close(self, patience: float, late: Callable[[], object] = lambda: None) -> None:
        """End the process, forcibly after `patience` seconds (`late` is called then), and free what
        belongs to it."""
        if self._closed:
            return
        self._closed = True
        try:
            if self.exited is not None:
                await asyncio.wait({self.exited}, timeout=patience)
                if not self.exited.done():
                    assert self._process is not None
                    late()
                    with contextlib.suppress(ProcessLookupError):  # ended, and not yet waited for
                        self._process.kill()
                await self.exited
        finally:
            self._recorded = self._flight.read()
            for broker, connection in self._connections:
                broker.close(connection)
            if self._renewals is not None:
                self._renewals.close()
            self._flight.close()
            os.close(self._flight_fd)
