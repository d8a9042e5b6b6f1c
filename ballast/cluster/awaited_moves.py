"""Await the end of migrations, in a coroutine of the server's event loop."""

from __future__ import annotations

import asyncio

from ballast.cluster.device import RemoteDevice
from ballast.cluster.output_stream import OutputStream
from ballast.control.request_migrations import RequestMigrations

Moves = RequestMigrations[RemoteDevice, OutputStream]


async def move_requests(
    migrations: Moves, device: RemoteDevice, model: str, *, bring: bool = False
) -> int:
    """Migrate a model's running requests off a device; return how many have left. `bring`: whether
    to activate the model elsewhere first, unless another device has its weights."""
    left: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def ended(n: int) -> None:
        if not left.done():  # its caller may have been cancelled
            left.set_result(n)

    migrations.move_requests(device, model, ended, bring=bring)
    return await left
