"""Move running requests off a device: activate their weights elsewhere, then migrate their KV.

Used by drains and withdrawals (`FleetCommands`, `FleetPolicyRunner`), and after the first token of
requests on prefill devices. Chooses targets by the router; `Migrations` moves each request.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from ballast.cluster.device import DeviceObserver, RemoteDevice
from ballast.cluster.device_set import DeviceSet
from ballast.cluster.migrations import Migrations
from ballast.cluster.request_router import RequestRouter
from ballast.core.actions import Activate
from ballast.core.errors import Unavailable
from ballast.core.model import ModelSpec
from ballast.core.request import Submission
from ballast.core.settings import Role

ACTIVATION_SECONDS = 30.0
"""Time for weights to arrive at a device, before requests of their model are moved there."""
REFUSED_SECONDS = 2.0
"""The same where their activation was refused, as it is while they are being loaded already."""
POLL_SECONDS = 0.05
"""Interval at which reports are checked for their arrival."""


class Relocation(DeviceObserver):
    """Moves running requests between devices with their KV, also from prefill to decode devices."""

    def __init__(self, devices: DeviceSet, router: RequestRouter, migrations: Migrations) -> None:
        self._devices = devices
        self._router = router
        self._migrations = migrations
        self._tasks: set[asyncio.Future[None]] = set()
        """Moves from prefill devices that are in progress."""

    async def move_requests(self, device: RemoteDevice, model: str) -> int:
        """Move a model's running requests, with their KV, to other devices that have its weights;
        return how many moved."""
        base = device.specs.get(model)
        running = [] if base is None else device.requests.running(base)

        def choose(submission: Submission) -> RemoteDevice | None:
            able = [d for d in self._devices.others(device, model) if d.has_weights(model)]
            return self._router.choose(submission, able) if able else None

        return await self._migrations.move_all(running, device, choose) if running else 0

    async def activate_elsewhere(self, base: ModelSpec, device: RemoteDevice) -> None:
        """Activate a model on another device while its requests run on this one, unless some other
        device has its weights."""
        others = self._devices.others(device, base.name)
        if others and not any(d.has_weights(base.name) for d in others):
            await self._activate(base, others[0], device)

    def first_token(self, device: RemoteDevice, request_id: str) -> None:
        """Start to move a request from a prefill device, after its first token, to one that
        decodes."""
        if device.fleet.device.role is not Role.PREFILL:
            return
        task = asyncio.ensure_future(self._decode_elsewhere(device, request_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self) -> None:
        """Cancel the moves from prefill devices."""
        for task in self._tasks:
            task.cancel()

    async def _decode_elsewhere(self, device: RemoteDevice, request_id: str) -> None:
        """Move a request to a device that decodes. It stays if there is none, or if its weights or
        KV do not fit there."""
        request = device.requests.get(request_id)
        base = None if request is None else device.base_of(request.submission.model)
        if request is None or base is None:
            return
        others = self._devices.others(device, base.name)
        target = self._router.choose_for_decode(request.submission, others)
        if target is None:
            return
        await self._activate(base, target, device)
        if target.has_weights(base.name):
            await self._migrations.move_all([request_id], device, lambda submission: target)

    async def _activate(self, base: ModelSpec, target: RemoteDevice, source: RemoteDevice) -> None:
        """Have `target` activate a model. Returns when its weights are resident, when no request of
        it runs at `source` any more, or after a timeout."""
        if target.has_weights(base.name):
            return
        with suppress(Unavailable, TimeoutError):
            why = f"its requests come from {source.name}"
            outcome = await target.command(Activate(base.name, why))
            # If it is refused, they may be being loaded already.
            seconds = ACTIVATION_SECONDS if outcome.code is None else REFUSED_SECONDS
            async with asyncio.timeout(seconds):
                while source.requests.running(base) and not target.has_weights(base.name):
                    await asyncio.sleep(POLL_SECONDS)
