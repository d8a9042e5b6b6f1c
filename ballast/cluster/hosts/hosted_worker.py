"""A worker on a host of many, whose agent keeps its process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from ballast.cluster.hosts.host_connection import HostConnection, HostedProcess
from ballast.cluster.worker.supervised_worker import SupervisedWorker
from ballast.core.settings import FleetSettings, ServerSettings
from ballast.transport.curve import CurveKeys, CurveLink, CurveServer
from ballast.transport.sockets import PrivateDirectory, ServerSocket

FindHost = Callable[[], Awaitable[tuple[HostConnection, int | None]]]


class WorkerEnd:
    """The server's end of the connection to a worker on a host, which listens."""

    def __init__(self, host: HostConnection) -> None:
        self.keys: CurveLink | None = None
        """What a worker of another host needs to connect."""
        self.place = ""
        """The directory of the socket, for a worker of the server's own host."""
        self._directory: PrivateDirectory | None = None
        if host.is_servers:
            self._directory = PrivateDirectory()
            self.place = str(self._directory.path)
            self.socket = ServerSocket(self._directory.path)
        else:
            own = CurveKeys.new()
            end = CurveServer(host.server_ip, own.public)
            self.socket = ServerSocket(end)  # binds: the address is known from now on
            self.keys = CurveLink(end.address, end.keys.public, own)

    def hide(self) -> None:
        """Remove the directory: the worker has connected, or will not."""
        if self._directory is not None:
            self._directory.close()


class HostedWorker(SupervisedWorker):
    """Owns a worker's socket; its process is the agent's. Its host is chosen when it is started."""

    end_seconds = 1.0

    def __init__(self, find_host: FindHost, device: str = "") -> None:
        """`find_host`: returns the host, and `threads`. Raises Unavailable. `device`: which it is
        to serve; empty: that is not known yet."""
        super().__init__()
        self._find_host = find_host
        self._device = device
        self.host: HostConnection | None = None
        self.threads: int | None = None
        """Threads of its device; None: the device's own setting."""
        self._process: HostedProcess | None = None
        self._end: WorkerEnd | None = None

    def __str__(self) -> str:
        return f"a worker on {self.host}"

    @property
    def _handle(self) -> HostedProcess:
        assert self._process is not None
        return self._process

    @property
    def _socket(self) -> ServerSocket:
        assert self._end is not None
        return self._end.socket

    @property
    def started(self) -> bool:
        return self._process is not None

    def take(self, device: str, threads: int) -> None:
        """Have a spare serve a device."""
        assert self.host is not None
        self.threads = threads
        self.host.assign(self._handle.id, device)

    async def attach(
        self, host: HostConnection, id: int, threads: int, fleet: FleetSettings
    ) -> bool:
        """Connect with a worker that the host has kept; return whether it serves the device of
        `fleet`, whatever the models. Raises Unavailable if it has ended."""
        self.host, self.threads = host, threads
        end = self._end = WorkerEnd(host)
        self._process = host.attach_worker(id, end.socket.wake, keys=end.keys, directory=end.place)
        await self._connect()
        there = None if self.hello is None else self.hello.fleet
        wanted = self._fleet_there(replace(fleet, models=(), server=ServerSettings()))
        return there is not None and replace(there, models=()) == wanted

    async def _spawn(self, *options: str) -> None:
        self.host, self.threads = host, _ = await self._find_host()
        end = self._end = WorkerEnd(host)
        self._process = host.start_worker(
            end.socket.wake, keys=end.keys, directory=end.place, spare="--spare" in options
        )
        if self._device:
            host.assign(self._process.id, self._device)

    async def _connect(self) -> None:
        await super()._connect()
        if self._end is not None:
            self._end.hide()

    def _fleet_there(self, fleet: FleetSettings) -> FleetSettings:
        assert self.host is not None
        device = fleet.device
        if device.gpu is None and self.threads is not None:
            device = replace(device, threads=self.threads)
        return replace(fleet, device=device, link=self.host.sharing(fleet.link))

    def kill(self, why: str) -> None:
        if self._process is not None:
            super().kill(why)

    def exit_reason(self) -> str:
        return "it was not started" if self._process is None else super().exit_reason()

    def in_flight(self) -> frozenset[str] | None:
        return frozenset() if self._process is None else super().in_flight()

    async def close(self, patience: float = 0.0) -> None:
        if self._end is not None:
            self._end.hide()
        if self._process is not None:
            await super().close(patience)
        elif self._end is not None:
            self._end.socket.close()
