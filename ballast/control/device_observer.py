"""Define the events of devices' workers to which parts of the controller react."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Generic

from ballast.control.routed_devices import D
from ballast.core.fleet_state import Command
from ballast.core.migration import MigrationAnswer
from ballast.transport.worker_messages.lending_messages import LeaseMsg, PeerReportMsg


class DeviceObserver(Generic[D]):
    """Base class for parts of the controller that react to events of workers.

    Observers override the methods that they need, and are called in the order in which the device
    was given them.
    """

    def worker_ready(self, device: D) -> None:
        """A worker of the device serves now."""

    def worker_died(self, device: D, in_flight: Collection[str]) -> None:
        """The device's worker has died while it ran the requests `in_flight`; or restarts have
        failed LOST_AFTER times (`device.lost`), with `in_flight` empty."""

    async def worker_reaped(self, device: D) -> None:
        """The device's worker has been reaped; returns when another may take its place."""

    def command_done(self, device: D, command: Command) -> None:
        """The device has carried out an operator's command."""

    def lending_message(self, device: D, message: LeaseMsg | PeerReportMsg) -> None:
        """The worker has sent a message about lent pages."""

    def migration_message(self, device: D, word: MigrationAnswer) -> None:
        """The worker has sent a message about a request that moves from it or to it."""

    def first_token(self, device: D, request_id: str) -> None:
        """A request has been given its first token by this device, which has a full block of its
        KV."""

    def reported(self, device: D) -> None:
        """The device has sent a report, which is its last one now."""

    def decision_made(self, device: D, moment: float, decision: dict[str, Any]) -> None:
        """The device's policy has decided something, at `moment` on the event loop's clock."""
