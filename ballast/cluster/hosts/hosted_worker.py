"""A worker on a host of many, whose agent keeps its process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from ballast.cluster.hosts.host_connection import HostConnection, HostedProcess
from ballast.cluster.worker.supervised_worker import SupervisedWorker
from ballast.core.settings import FleetSettings
from ballast.transport.curve import CurveKeys, CurveLink, CurveServer
from ballast.transport.sockets import PrivateDirectory, ServerSocket

FindHost = Callable[[], Awaitable[tuple[HostConnection, int | None]]]


class HostedWorker(SupervisedWorker):
    """Owns a worker's socket; its process is the agent's. Its host is chosen when it is started."""

    def __init__(self, find_host: FindHost) -> None:
        """`find_host`: returns the host, and `threads`. Raises Unavailable."""
        super().__init__()
        self._find_host = find_host
        self.host: HostConnection | None = None
        self.threads: int | None = None
        """Threads of its device; None: the device's own setting."""
        self._process: HostedProcess | None = None
        self._to_worker: ServerSocket | None = None
        self._directory: PrivateDirectory | None = None

    def __str__(self) -> str:
        return f"a worker on {self.host}"

    @property
    def _handle(self) -> HostedProcess:
        assert self._process is not None
        return self._process

    @property
    def _socket(self) -> ServerSocket:
        assert self._to_worker is not None
        return self._to_worker

    @property
    def started(self) -> bool:
        return self._process is not None

    async def _spawn(self, *options: str) -> None:
        self.host, self.threads = await self._find_host()
        spare, host = "--spare" in options, self.host
        if host.is_servers:
            self._directory = PrivateDirectory()
            self._to_worker = ServerSocket(self._directory.path)
            keys, place = None, str(self._directory.path)
        else:
            own = CurveKeys.new()
            end = CurveServer(host.server_ip, own.public)
            self._to_worker = ServerSocket(end)
            keys, place = CurveLink(end.address, end.keys.public, own), ""
        self._process = host.start_worker(
            self._to_worker.wake, keys=keys, directory=place, spare=spare
        )

    async def _connect(self) -> None:
        await super()._connect()
        if self._directory is not None:
            self._directory.close()

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
        if self._directory is not None:
            self._directory.close()
        if self._process is not None:
            await super().close(patience)
        elif self._to_worker is not None:
            self._to_worker.close()
