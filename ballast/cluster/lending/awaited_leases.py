"""Await orders to lend and recall, and the release of a dead worker's memory, on an event loop."""

from __future__ import annotations

import asyncio

from ballast.cluster.device import RemoteDevice
from ballast.control.device_leases import DeviceLeases
from ballast.control.lease_events import OrderEnded
from ballast.core.actions import Lend, Recall


class AwaitedLeases(DeviceLeases[RemoteDevice]):
    """The leases of one server. All calls on its event loop."""

    async def worker_reaped(self, device: RemoteDevice) -> None:
        """Return when no other worker uses the memory of the worker that has been reaped."""
        free = asyncio.Event()
        self.reaped(device, free.set)
        await free.wait()

    async def carry_out(
        self, lender: str, command: Lend | Recall, *, by_operator: bool
    ) -> OrderEnded:
        """Have a device lend pages or recall them; returns when that has ended."""
        ended: asyncio.Future[OrderEnded] = asyncio.get_running_loop().create_future()

        def end(order: OrderEnded) -> None:
            if not ended.done():  # its caller may have been cancelled
                ended.set_result(order)

        self.order(lender, command, end, by_operator=by_operator)
        return await ended
