"""Migrate running requests between the devices of a server: the driver of `control.migrations`.

Turns workers' messages into events of the state machine, and its instructions into messages and
changes of the devices' records. Used by the parts of `ballast.cluster` that change the fleet.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from functools import partial
from math import inf
from typing import Generic

from ballast.control.device_observer import DeviceObserver
from ballast.control.migration_events import (
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
    OpenAtSource,
    OrderActivation,
    SendStep,
)
from ballast.control.migrations import Migrations
from ballast.control.request_router import RequestRouter, S
from ballast.control.routed_devices import D, RoutedDevices
from ballast.control.timers import Alarm, Timers
from ballast.core.actions import ActivateCommand
from ballast.core.fleet_state import CommandOutcome
from ballast.core.migration import MigrationAnswer, Piece
from ballast.core.order import MoveRequests
from ballast.core.request import Submission
from ballast.core.settings import Role
from ballast.transport.worker_messages.migration_messages import MigrationOrderMsg


class RequestMigrations(DeviceObserver[D], Generic[D, S]):
    """Migrates running requests with their KV, also from prefill to decode devices.

    Implements `control.migrations.Devices`.
    """

    def __init__(
        self, devices: RoutedDevices[D], router: RequestRouter[D, S], timers: Timers
    ) -> None:
        self._devices, self._router, self._timers = devices, router, timers
        self._machine = Migrations(self)
        self._numbers = itertools.count(1)
        self._ended: dict[int, Callable[[int], object]] = {}
        """By batch, what to call when it has ended."""
        self._alarm = Alarm(timers, partial(self._handle, LookEvent()))

    @property
    def busy(self) -> bool:
        """Whether any request may yet move."""
        return self._machine.busy

    def move_requests(self, step: MoveRequests, ended: Callable[[int], object]) -> None:
        """Migrate a model's running requests to other devices that have its weights; `ended` is
        called with the number of those that have left."""
        number = next(self._numbers)
        self._ended[number] = ended
        self._handle(MigrateEvent(number, step.device, step.model, step.bring, step.target))

    def close(self) -> None:
        """Await nothing any more."""
        self._alarm.set(inf)

    # -- messages of workers ----------------------------------------------------------------------

    def first_token(self, device: D, request_id: str) -> None:
        if device.fleet.device.role is Role.PREFILL:
            self._handle(BlockFilledEvent(device.name, request_id))

    def migration_message(self, device: D, word: MigrationAnswer) -> None:
        self._handle(AnsweredEvent(device.name, word))

    def worker_died(self, device: D, in_flight: Collection[str]) -> None:
        self._handle(DeviceLostEvent(device.name))

    def reported(self, device: D) -> None:
        if self._machine.awaits_weights:
            self._handle(LookEvent())

    # -- `Devices` --------------------------------------------------------------------------------

    def is_up(self, device: str) -> bool:
        return self._devices[device].down is None

    def offer(self, source: str, target: str, pieces: Sequence[Piece]) -> str | None:
        return self._devices[source].offer(target, pieces)

    def has_weights(self, device: str, model: str) -> bool:
        return self._devices[device].has_weights(model)

    def others(self, device: str, model: str) -> Sequence[str]:
        here = self._devices[device]
        others = self._devices.others(here, model)
        return [d.name for d in sorted(others, key=lambda other: other.host != here.host)]

    def leaves(self, device: str, model: str) -> bool:
        here = self._devices[device]
        return model in here.leaving or model not in here.specs

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
        now = self._timers.now()
        for instruction in self._machine.handle(now, event):
            self._do(instruction)
        self._alarm.set(self._machine.due)

    def _activated(self, device: str, model: str, outcome: CommandOutcome) -> None:
        if outcome.code is not None:
            self._handle(ActivationRefusedEvent(device, model))

    def _do(self, instruction: Instruction) -> None:
        match instruction:
            case SendStep(device, step):
                self._devices[device].tell(MigrationOrderMsg.of(step))
            case OrderActivation(device, model, why):
                answered = partial(self._activated, device, model)
                self._devices[device].order(ActivateCommand(model, why), answered)
            case MarkDeparting(source, request_id):
                request = self._devices[source].requests.get(request_id)
                assert request is not None, "it is open"
                request.departing = True
            case ContinueRequest(request_id, source, target, with_kv, departed):
                here = self._devices[source].requests
                gone = here.remove([request_id]) if departed else [here.take_back(request_id)]
                for request in gone:
                    request.kv_waits = with_kv
                self._devices[target].moved_in += with_kv
                self._devices[target].requests.add(gone)
            case BatchEnded(batch, left):
                self._ended.pop(batch)(left)
