"""Migrate running requests between the devices of a server: the driver of `control.migrations`.

Turns workers' messages into events of the state machine, and its instructions into messages. Used
by `FleetCommands` and `FleetPolicyRunner`; runs on the server's event loop.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Collection, Sequence
from contextlib import suppress

from ballast.cluster.device import DeviceObserver, RemoteDevice
from ballast.cluster.device_set import DeviceSet
from ballast.cluster.request_router import RequestRouter
from ballast.control.migrations import (
    ActivationRefusedEvent,
    AnsweredEvent,
    BatchEnded,
    BlockFilledEvent,
    ContinueRequest,
    DeviceLostEvent,
    Event,
    Instruction,
    LookEvent,
    MarkDeparting,
    MigrateEvent,
    Migrations,
    OpenAtSource,
    OrderActivation,
    SendStep,
    WithdrawRequest,
)
from ballast.core.actions import Activate
from ballast.core.errors import Unavailable
from ballast.core.migration import MigrationAnswer
from ballast.core.request import Submission
from ballast.core.settings import Role
from ballast.transport.worker_messages.migration_messages import MigrationOrderMsg
from ballast.transport.worker_messages.request_messages import WithdrawMsg


class RequestMigrations(DeviceObserver):
    """Migrates running requests with their KV, also from prefill to decode devices.

    Implements `control.migrations.Devices`.
    """

    def __init__(self, devices: DeviceSet, router: RequestRouter) -> None:
        self._devices = devices
        self._router = router
        self._machine = Migrations(self)
        self._numbers = itertools.count(1)
        self._batches: dict[int, asyncio.Future[int]] = {}
        self._orders: set[asyncio.Future[None]] = set()
        """Activations that have not been answered."""
        self._timer: asyncio.TimerHandle | None = None

    async def move_requests(self, device: RemoteDevice, model: str, *, bring: bool = False) -> int:
        """Migrate a model's running requests to other devices that have its weights; return how
        many have left. `bring`: as of `MigrateEvent`."""
        number = next(self._numbers)
        batch: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._batches[number] = batch
        self._handle(MigrateEvent(number, device.name, model, bring))
        return await batch

    def close(self) -> None:
        """Order and await nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
        for order in self._orders:
            order.cancel()
        for batch in self._batches.values():
            batch.cancel()

    # -- messages of workers ----------------------------------------------------------------------

    def first_token(self, device: RemoteDevice, request_id: str) -> None:
        if device.fleet.device.role is Role.PREFILL:
            self._handle(BlockFilledEvent(device.name, request_id))

    def migration_message(self, device: RemoteDevice, word: MigrationAnswer) -> None:
        self._handle(AnsweredEvent(device.name, word))

    def worker_died(self, device: RemoteDevice, in_flight: Collection[str]) -> None:
        self._handle(DeviceLostEvent(device.name))

    def reported(self, device: RemoteDevice) -> None:
        if self._machine.awaits_weights:
            self._handle(LookEvent())

    # -- `Devices` --------------------------------------------------------------------------------

    def is_up(self, device: str) -> bool:
        return self._devices[device].down is None

    def memory_of(self, device: str) -> str:
        return self._devices[device].pages

    def has_weights(self, device: str, model: str) -> bool:
        return self._devices[device].has_weights(model)

    def others(self, device: str, model: str) -> Sequence[str]:
        return [d.name for d in self._devices.others(self._devices[device], model)]

    def running(self, device: str, model: str) -> Sequence[str]:
        base = self._devices[device].specs.get(model)
        return [] if base is None else self._devices[device].requests.running(base)

    def open_at(self, device: str, request_id: str) -> OpenAtSource | None:
        found = self._devices[device].requests.get(request_id)
        return None if found is None else OpenAtSource(found.submission, found.output_tokens)

    def base_of(self, device: str, name: str) -> str | None:
        base = self._devices[device].base_of(name)
        return None if base is None else base.name

    def choose(self, submission: Submission, devices: Sequence[str]) -> str:
        return self._router.choose(submission, [self._devices[name] for name in devices]).name

    def choose_for_decode(self, submission: Submission, devices: Sequence[str]) -> str | None:
        able = [self._devices[name] for name in devices]
        chosen = self._router.choose_for_decode(submission, able)
        return None if chosen is None else chosen.name

    # -- instructions -----------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        loop = asyncio.get_running_loop()
        for instruction in self._machine.handle(loop.time(), event):
            self._do(instruction)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if self._machine.busy:
            self._timer = loop.call_at(self._machine.due, self._handle, LookEvent())

    def _do(self, instruction: Instruction) -> None:
        match instruction:
            case SendStep(device, step):
                self._devices[device].tell(MigrationOrderMsg.of(step))
            case OrderActivation():
                order = asyncio.ensure_future(self._activate(instruction))
                self._orders.add(order)
                order.add_done_callback(self._orders.discard)
            case MarkDeparting(source, request_id):
                request = self._devices[source].requests.get(request_id)
                assert request is not None, "it is open"
                request.departing = True
            case WithdrawRequest(device, request_id):
                self._devices[device].tell(WithdrawMsg((request_id,)))
            case ContinueRequest(request_id, source, target, with_kv):
                gone = self._devices[source].requests.remove([request_id])
                self._devices[target].moved_in += with_kv
                self._devices[target].requests.add(gone)
            case BatchEnded(batch, left):
                future = self._batches.pop(batch)
                if not future.done():
                    future.set_result(left)

    async def _activate(self, order: OrderActivation) -> None:
        with suppress(Unavailable):
            device = self._devices[order.device]
            outcome = await device.command(Activate(order.model, order.why))
            if outcome.code is not None:
                self._handle(ActivationRefusedEvent(order.device, order.model))
