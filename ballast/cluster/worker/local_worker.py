"""A worker on the server's host: its process is a child of the server."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ballast.cluster.kv_broker import KvBroker
from ballast.cluster.segment_broker import SegmentBroker
from ballast.cluster.worker.early_process import COMMAND, EarlyProcess
from ballast.cluster.worker.local_process import LocalProcess
from ballast.cluster.worker.supervised_worker import SupervisedWorker
from ballast.core.settings import FleetSettings
from ballast.transport.sockets import PrivateDirectory, ServerSocket


class LocalWorker(SupervisedWorker):
    """Owns a worker's process, socket and directory, on the running event loop.

    The thread of the event loop must live as long as the worker: the kernel ends the worker with
    the thread that started it.
    """

    def __init__(
        self,
        command: Sequence[str] = COMMAND,
        broker: SegmentBroker | None = None,
        kv_broker: KvBroker | None = None,
        early: EarlyProcess | None = None,
    ) -> None:
        """`broker`, `kv_broker`, `early`: as of `LocalProcess`."""
        super().__init__()
        self._broker = broker
        with contextlib.ExitStack() as undo:
            self._directory = PrivateDirectory()
            self.directory: Path = self._directory.path
            """The directory of the socket; removed once the worker has connected, or by `close`."""
            undo.callback(self._directory.close)
            self._process = LocalProcess(command, broker, kv_broker, early)
            self._to_worker = ServerSocket(self._directory.path)
            undo.pop_all()

    def __str__(self) -> str:
        return f"worker {self.pid}"

    @property
    def _handle(self) -> LocalProcess:
        return self._process

    @property
    def _socket(self) -> ServerSocket:
        return self._to_worker

    @property
    def pid(self) -> int:
        """Process id; only after `start` or `prepare`."""
        return self._process.pid

    async def _spawn(self, *options: str) -> None:
        place = ("--dir", str(self._directory.path))
        await self._process.spawn(*place, *options, ended=self._socket.wake)

    async def _connect(self) -> None:
        await super()._connect()
        # The connection outlives its path: without a path no file is left to clean up later.
        self._directory.close()

    def _fleet_there(self, fleet: FleetSettings) -> FleetSettings:
        broker = self._broker
        return fleet if broker is None else replace(fleet, link=broker.sharing(fleet.link))

    async def close(self, patience: float = 0.0) -> None:
        try:
            await super().close(patience)
        finally:
            self._directory.close()
