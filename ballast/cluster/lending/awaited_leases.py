"""Await the release of a dead worker's memory, on an event loop."""

from __future__ import annotations

import asyncio

from ballast.cluster.device import RemoteDevice
from ballast.control.device_leases import DeviceLeases


class AwaitedLeases(DeviceLeases[RemoteDevice]):
    """The leases of one server. All calls on its event loop."""

    async def worker_reaped(self, device: RemoteDevice) -> None:
        """Return when no other worker uses the memory of the worker that has been reaped."""
        free = asyncio.Event()
        self.reaped(device, free.set)
        await free.wait()
