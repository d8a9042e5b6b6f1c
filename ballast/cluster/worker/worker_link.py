"""Define the protocols of a worker process, and of where workers come from, for the controller.

Implemented by `SupervisedWorker`; used by `Controller` and `RemoteDevice`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ballast.cluster.worker.liveness_watch import Activity
from ballast.core.migration import Piece
from ballast.core.settings import FleetSettings, ServerSettings
from ballast.transport.worker_messages.codec import ToServer, ToWorker
from ballast.transport.worker_messages.lifecycle_messages import ReadyMsg


class WorkerLink(Protocol):
    """A worker process; `ballast.cluster.worker.supervised_worker.SupervisedWorker` is one."""

    @property
    def waits(self) -> bool: ...

    def activity(self) -> Activity | None: ...

    async def prepare(self) -> None: ...

    async def begin(self) -> None: ...

    async def start(self, fleet: FleetSettings) -> ReadyMsg: ...

    def send(self, message: ToWorker) -> None: ...

    async def receive(self) -> ToServer | None: ...

    def kill(self, why: str) -> None: ...

    def exit_reason(self) -> str: ...

    def in_flight(self) -> frozenset[str] | None: ...

    async def close(self, patience: float = 0.0) -> None: ...


class WorkerSource(Protocol):
    """Where the workers of devices come from; `LocalWorkers` is one, `HostedWorkers` another."""

    def first(self, device: str) -> WorkerLink:
        """Return the first worker of a device, which has not been started."""

    def host_of(self, device: str) -> str:
        """Return the name of a device's host; empty: the server's, or none now."""

    def offer_kv(
        self, device: str, reader: str, address: str, pieces: Sequence[Piece]
    ) -> str | None:
        """Have the worker of `reader` read pieces of a device's memory, which is exported at
        `address`; as of `migration_events.Devices.offer`."""

    def stands_by(self, device: str) -> bool:
        """Return whether a device has no worker because it is not wanted."""

    def want(self, device: str, wanted: bool) -> None:
        """Have a device that was on standby get a worker, or be on standby once its worker has
        ended; then its host's room is free."""

    def waits(self, device: str) -> bool:
        """Return whether a device waits for a host that has room, for as long as it takes."""

    async def set_drained(self, host: str, drained: bool) -> list[str] | None:
        """Have no device come to a host any more, or again; return the devices concerned: those
        that it has, and those that it had when it was drained. None: there is no such host. Raises
        Unavailable."""

    async def next(self, device: str) -> WorkerLink:
        """Return a worker to take the place of a device's worker that has ended: a spare, if one is
        ready. Raises Unavailable and OSError."""

    async def prepare(self, limits: ServerSettings) -> None:
        """Keep spares from now on; those whose preparation hangs, by `limits`, are replaced."""

    async def close(self) -> None:
        """End what no device has taken."""
