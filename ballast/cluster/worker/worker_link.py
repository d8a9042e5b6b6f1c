"""Define the protocol of a worker process that the controller uses.

Implemented by `LocalWorker`; used by `Controller` and `RemoteDevice`.
"""

from __future__ import annotations

from typing import Protocol

from ballast.core.settings import FleetSettings
from ballast.transport.worker_messages.codec import ToServer, ToWorker
from ballast.transport.worker_messages.lifecycle_messages import ReadyMsg


class WorkerLink(Protocol):
    """A worker process; `ballast.cluster.worker.local_worker.LocalWorker` is one."""

    @property
    def waits(self) -> bool: ...

    async def prepare(self) -> None: ...

    async def start(self, fleet: FleetSettings) -> ReadyMsg: ...

    def send(self, message: ToWorker) -> None: ...

    async def receive(self) -> ToServer | None: ...

    def kill(self, why: str) -> None: ...

    def epitaph(self) -> str: ...

    def in_flight(self) -> frozenset[str]: ...

    async def close(self, patience: float = 0.0) -> None: ...
