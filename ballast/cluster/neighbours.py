"""What a device needs of its worker, and of whoever knows the other devices."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Protocol

from ballast.core.command import DeviceOrder
from ballast.core.migration import Word
from ballast.core.settings import FleetSettings
from ballast.transport.messages import (
    OfLease,
    OfPeer,
    Ready,
    ToServer,
    ToWorker,
)

if TYPE_CHECKING:
    from ballast.cluster.device import RemoteDevice


class WorkerLink(Protocol):
    """A worker as its controller sees it; `ballast.cluster.local.LocalWorker` is one."""

    @property
    def waits(self) -> bool: ...

    async def prepare(self) -> None: ...

    async def start(self, fleet: FleetSettings) -> Ready: ...

    def send(self, message: ToWorker) -> None: ...

    async def receive(self) -> ToServer | None: ...

    def kill(self, why: str) -> None: ...

    def epitaph(self) -> str: ...

    def in_flight(self) -> frozenset[str]: ...

    async def close(self, patience: float = 0.0) -> None: ...


class Neighbours(Protocol):
    """Whoever knows the other devices."""

    def take_over(self, device: RemoteDevice, in_flight: Collection[str]) -> None:
        """Its worker has died: others may have its requests, but those that were `in_flight`."""

    def carried_out(self, device: RemoteDevice, order: DeviceOrder) -> None:
        """It has done what was ordered."""

    def serving(self, device: RemoteDevice, pages: str) -> None:
        """Its worker serves, and gives its memory to others at `pages`, if that is not empty."""

    def said(self, device: RemoteDevice, message: OfLease | OfPeer) -> None:
        """Of pages that are lent."""

    def prefilled(self, device: RemoteDevice, request_id: str) -> None:
        """A request has its first token at a device that only prefills."""

    def said_of_request(self, device: RemoteDevice, word: Word) -> None:
        """Of a request that moves from it or to it."""

    async def buried(self, device: RemoteDevice) -> None:
        """Its worker has died and been reaped; returns when another may take its place."""

    def decided(self, device: RemoteDevice, moment: float, what: dict[str, Any]) -> None:
        """What, and when on the event loop's clock."""
