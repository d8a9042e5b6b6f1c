"""Migrate requests with their KV between simulated devices: the driver of `control.migrations`.

Devices of one host whose links join them exchange requests, and devices of hosts that a network
joins. Their steps and answers are messages in virtual time, and the bytes are flows on the links.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial

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
from ballast.core.actions import ActivateCommand
from ballast.core.event import ArrivalEvent, CancelEvent, Output, TokenOutput
from ballast.core.link import Direction, LinkRates
from ballast.core.migration import KvReadEvent, MigrationAnswer, Piece, too_long
from ballast.core.order import MoveRequests
from ballast.core.request import Request, RequestState, Submission
from ballast.core.settings import Role
from ballast.core.view import Residency
from ballast.policy.base import FleetPolicy
from ballast.policy.fleet.replica_choice import for_decode, for_prefill
from ballast.sim.device import SimDevice
from ballast.sim.fluid import Wire
from ballast.sim.link import Stream
from ballast.sim.peer_costs import slowest
from ballast.sim.roles import replica_of, role_of
from ballast.sim.topology import HostPlace, PeerLinks

REPORT_SECONDS = 0.1
"""Interval of checks whether weights or a first block are there: that of live reports."""
Homes = Callable[[str], Sequence[str]]
"""Returns the devices that serve a model."""


class SimMigrations:
    """Migrations between devices of one world. Implements `control.migrations.Devices` and
    `sim.world.Reaching`."""

    def __init__(
        self,
        devices: Mapping[str, tuple[SimDevice, HostPlace]],
        homes: Homes,
        policy: FleetPolicy,
    ) -> None:
        """`devices`: by name, with where they are; `policy` chooses among devices."""
        self._devices = {name: device for name, (device, _) in devices.items()}
        self._places = {name: place for name, (_, place) in devices.items()}
        self._homes, self._policy = homes, policy
        self._machine = Migrations(self)
        self._numbers = itertools.count(1)
        self._ended: dict[int, Callable[[int], object]] = {}
        """By batch, what to call when it has ended."""
        self._departing: dict[str, Request] = {}
        self.moved = 0
        """Requests that have gone with their KV."""
        self._hands_over = any(role_of(d) is Role.PREFILL for d in self._devices.values())
        (world,) = {place.host.world for _, place in devices.values()}
        self._agenda = world.agenda
        self.way = slowest(device.peers for device in self._devices.values()).message
        """Seconds of a message from device to device."""
        self._looks_at = 0.0
        """Time of the last `LookEvent` that has been scheduled."""
        for name, (device, place) in devices.items():
            connect = partial(self._connect, name, device, place, devices)
            connect()
            device.on_restart.append(connect)
        world.reaching.append(self)

    def _connect(
        self,
        name: str,
        device: SimDevice,
        place: HostPlace,
        devices: Mapping[str, tuple[SimDevice, HostPlace]],
    ) -> None:
        """Let a device's worker export its requests and read those of others."""
        migration = device.state.migration
        migration.exports = True
        migration.bytes = SimBytes(device, _streams(name, device, place, devices))
        migration.send = partial(self._hear, name)
        device.unsaid = self._machine.under_way

    def lose(self, now: float, device: str) -> None:
        """Note that a device's worker has crashed."""
        if device in self._devices:
            self._handle(now, DeviceLostEvent(device))

    @property
    def busy(self) -> bool:
        """Whether any request may yet move."""
        prefilling = (d for d in self._devices.values() if role_of(d) is Role.PREFILL)
        return self._machine.busy or any(device.open_requests for device in prefilling)

    def serves(self, device: str) -> bool:
        """Return whether it is one of these devices."""
        return device in self._devices

    def move_requests(self, now: float, step: MoveRequests, ended: Callable[[int], object]) -> None:
        """Migrate the running requests of a model off a device; `ended` is called with the number
        of those that have left."""
        number = next(self._numbers)
        self._ended[number] = ended
        self._handle(now, MigrateEvent(number, step.device, step.model, step.bring, step.target))

    def on_output(self, name: str, output: Output) -> None:
        """Handle an output that a device has just produced: a first token of one that prefills
        hands the request over, once a block of its KV is full."""
        device = self._devices.get(name)
        if device is None or role_of(device) is not Role.PREFILL:
            return
        if isinstance(output, TokenOutput) and output.index == 0:
            self._await_block(name, output.request_id, device.clock.now())

    def horizon(self, now: float, near: float) -> float:
        """Time before which no message that has not been sent yet can reach a device; `near`: the
        earliest next turn of any other device."""
        may_send = self._machine.busy or self._hands_over
        return near + self.way if may_send else float("inf")

    # -- `Devices` --------------------------------------------------------------------------------

    def is_up(self, device: str) -> bool:
        return not self._devices[device].down

    def offer(self, source: str, target: str, pieces: Sequence[Piece]) -> str | None:
        there, here = self._places[source].host, self._places[target].host
        if there is here:
            return None if here.joints.peers is PeerLinks.NONE else source
        return None if too_long(pieces, here.joints.network) else source

    def has_weights(self, device: str, model: str) -> bool:
        m = self._devices[device].state.models.get(model)
        return m is not None and m.residency is Residency.RESIDENT

    def others(self, device: str, model: str) -> Sequence[str]:
        here = self._places[device].host
        others = [d for d in self._homes(model) if d != device and d in self._devices]
        return sorted(others, key=lambda other: self._places[other].host is not here)

    def leaves(self, device: str, model: str) -> bool:
        return model not in self._devices[device].state.named

    def running(self, device: str, model: str) -> Sequence[str]:
        m = self._devices[device].state.models.get(model)
        return [] if m is None else [request.id for request in m.running]

    def open_at(self, device: str, request_id: str) -> OpenAtSource | None:
        request = self._departing.get(request_id)
        if request is None:
            request = self._devices[device].state.requests.get(request_id)
        if request is None or request.state in (RequestState.FINISHED, RequestState.FAILED):
            return None
        return OpenAtSource(request.submission, request.output)

    def base_of(self, device: str, name: str) -> str | None:
        specs = (m.spec for m in self._devices[device].state.models.values())  # also leaving ones
        return next((s.name for s in specs if any(name == own.name for own in s.served)), None)

    def choose(self, submission: Submission, devices: Sequence[str]) -> str:
        replicas = [replica_of(d, self._devices[d], submission) for d in devices]
        return self._policy.route(for_prefill(replicas))

    def choose_for_decode(self, submission: Submission, devices: Sequence[str]) -> str | None:
        replicas = for_decode([replica_of(d, self._devices[d], submission) for d in devices])
        return self._policy.decodes(replicas) if replicas else None

    # -- messages ---------------------------------------------------------------------------------

    def _await_block(self, name: str, request_id: str, now: float) -> None:
        request = self._devices[name].state.requests.get(request_id)
        if request is None:
            return
        m = self._devices[name].state.models[request.model]
        if request.computed >= m.spec.block_tokens:
            self._handle(now, BlockFilledEvent(name, request_id))
        else:
            again = partial(self._await_block, name, request_id)
            self._agenda.schedule(now + REPORT_SECONDS, again)

    def _hear(self, name: str, answer: MigrationAnswer) -> None:
        self._handle(self._devices[name].clock.now(), AnsweredEvent(name, answer))

    def _handle(self, now: float, event: Event) -> None:
        for instruction in self._machine.handle(now, event):
            self._do(now, instruction)
        under_way = self._machine.under_way
        self._departing = {i: r for i, r in self._departing.items() if i in under_way}
        due = self._machine.due
        if self._machine.awaits_weights:
            due = min(due, now + REPORT_SECONDS)
        if due < float("inf") and not now < self._looks_at <= due:
            self._looks_at = due
            self._agenda.schedule(due, lambda at: self._handle(at, LookEvent()))

    def _do(self, now: float, instruction: Instruction) -> None:
        at = now + self.way
        match instruction:
            case SendStep(device, step):
                self._devices[device].receive(at, step)
            case OrderActivation(device, model, why):
                answered = partial(self._activated, device, model)
                id = f"migration-{next(self._numbers)}"
                self._devices[device].order(
                    at + self.way, id, ActivateCommand(model, why), answered
                )
            case MarkDeparting(source, request_id):
                self._departing[request_id] = self._devices[source].state.requests[request_id]
            case ContinueRequest():
                self._continue(at, instruction)
            case BatchEnded(batch, left):
                self._ended.pop(batch)(left)

    def _activated(self, device: str, model: str, refused: str | None) -> None:
        if refused is not None:
            now = self._devices[device].clock.now()
            self._handle(now, ActivationRefusedEvent(device, model))

    def _continue(self, at: float, order: ContinueRequest) -> None:
        request = self._departing[order.request_id]
        if not order.departed:
            self._devices[order.source].receive(at, CancelEvent(order.request_id))
        self.moved += order.with_kv
        self._devices[order.target].receive(at, ArrivalEvent(request.continued(at)))


def _streams(
    name: str,
    device: SimDevice,
    place: HostPlace,
    devices: Mapping[str, tuple[SimDevice, HostPlace]],
) -> dict[str, Stream]:
    """Return the stream over which a device reads the KV of each other one that it reaches. Those
    that are joined by memory have one, as one thread reads."""
    streams: dict[str, Stream] = {}
    memory: Stream | None = None
    read = device.peers.read
    if read is not None:
        wire = Wire(LinkRates.even(read))
        memory = Stream(device.link, place.host.fluid, [wire.side(Direction.TO_DEVICE)])
    for other, (_, there) in devices.items():
        if other == name:
            continue
        if there.host is not place.host:
            path = there.over_network(place)
            streams[other] = Stream(device.link, place.host.world.fluid, path)
        elif place.host.joints.peers is PeerLinks.MEMORY:
            streams[other] = memory or device.link.stream("kv", Direction.TO_DEVICE)
        elif place.host.joints.peers is not PeerLinks.NONE:
            streams[other] = Stream(device.link, place.host.fluid, there.to_peer(place))
    return streams


def migrations_of(
    devices: Mapping[str, tuple[SimDevice, HostPlace]], policy: FleetPolicy, homes: Homes
) -> list[SimMigrations]:
    """Build the migrations of each world whose devices reach each other."""
    found = []
    for world in dict.fromkeys(place.host.world for _, place in devices.values()):
        there = {name: at for name, at in devices.items() if at[1].host.world is world}
        hosts = dict.fromkeys(place.host for _, place in there.values())
        joined = any(host.joints.peers is not PeerLinks.NONE for host in hosts)
        if len(there) > 1 and (joined or len(hosts) > 1):
            found.append(SimMigrations(there, homes, policy))
    return found


class SimBytes:
    """Implements `ballast.engine.migration.KvBytes`."""

    def __init__(self, device: SimDevice, streams: Mapping[str, Stream]) -> None:
        """`streams`: by source."""
        self._device, self._streams = device, streams

    def start(
        self,
        request_id: str,
        source: str,
        pieces: Sequence[Piece],
        targets: Sequence[tuple[int, int]],
        attempt: int,
    ) -> None:
        def ended(at: float, seconds: float) -> None:
            self._device.receive(at, KvReadEvent(request_id, attempt=attempt))

        n_bytes = sum(n for _, n in pieces)
        self._streams[source].carry(self._device.clock.now(), n_bytes, ended)

    def stop(self, request_id: str) -> None:
        """Do nothing: transfers in flight continue without a waiter."""

    def load(self, address: int, n_bytes: int) -> bytes:
        return b""

    def store(self, address: int, data: bytes) -> None:
        """There are no bytes."""

    def close(self) -> None:
        """Nothing to end."""
