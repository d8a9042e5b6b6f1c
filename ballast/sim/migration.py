"""Simulate the migration of running requests, with their KV, between devices of one host.

The devices' engines run the live code (`ballast.engine.migration`). Each message between controller
and device takes `WAY` seconds, and KV crosses the links between the two devices together with all
other traffic. Live, a request that cannot move at once is retried
(`ballast.cluster.fleet_policy_runner`); here it finishes on its device. Used by `sim.controller`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ballast.core.event import ArrivalEvent
from ballast.core.link import Direction
from ballast.core.migration import (
    AT_ONCE,
    DepartedAnswer,
    DepartEvent,
    DropKvEvent,
    ExportKvEvent,
    ImportKvEvent,
    KvExportedAnswer,
    KvImportedAnswer,
    KvReadEvent,
    KvTailEvent,
    MigrationAnswer,
    Piece,
    wanted,
)
from ballast.core.request import Request, RequestState
from ballast.core.view import Residency
from ballast.sim.device import SimDevice
from ballast.sim.lending import WAY
from ballast.sim.link import Stream
from ballast.sim.topology import HostPlace, PeerLinks


@dataclass(slots=True)
class _Move:
    request: Request
    source: str
    target: str


class Movers:
    """Migrate requests between devices of one world. Implements `sim.world.Reaching`."""

    def __init__(self, devices: Mapping[str, tuple[SimDevice, HostPlace]]) -> None:
        """`devices`: by name, with where they are."""
        self._devices = {name: device for name, (device, _) in devices.items()}
        self._moves: dict[str, _Move] = {}
        """Under way, by request."""
        self._waiting: dict[str, deque[_Move]] = {name: deque() for name in devices}
        self.moved = 0
        """Requests that have gone with their KV."""
        self.any_time = False
        """Whether moves begin whenever a device turns, not only when a controller decides."""
        for name, (device, place) in devices.items():
            streams = {}
            for other, (_, there) in devices.items():
                if other == name:
                    continue
                if place.host.joints.peers is PeerLinks.MEMORY:
                    streams[other] = device.link.stream("kv", Direction.TO_DEVICE)
                else:
                    path = there.to_peer(place)
                    streams[other] = Stream(device.link, place.host.world.fluid, path)
            migration = device.state.migration
            migration.exports, migration.bytes = True, SimBytes(device, streams)
            migration.send = partial(self._hear, name)
            device.unsaid = self._moves
        (world,) = {place.host.world for _, place in devices.values()}
        world.reaching.append(self)
        self.agenda = world.agenda

    @property
    def names(self) -> tuple[str, ...]:
        """The devices."""
        return tuple(self._devices)

    @property
    def busy(self) -> bool:
        """Whether any request is on its way."""
        return bool(self._moves)

    def move_all(self, now: float, source: str, model: str, targets: Sequence[str]) -> None:
        """Let requests of a model that run on a device go on at others that have its weights."""
        here = self._devices.get(source)
        able = [t for t in targets if t in self._devices and self._has(t, model)]
        if here is None or not able:
            return
        running = [r for r in here.state.models[model].running if r.id not in self._moves]
        for i, request in enumerate(running):
            self._waiting[source].append(_Move(request, source, able[i % len(able)]))
        self._begin(now, source)

    def move(self, now: float, request: Request, source: str, target: str) -> None:
        """Let one request go on at a device that has the weights of its model."""
        self._waiting[source].append(_Move(request, source, target))
        self._begin(now, source)

    def horizon(self, now: float, near: float) -> float:
        """Time before which no message that has not been sent yet can reach a device; `near`: the
        earliest next turn of any other device."""
        return near + WAY if self._moves or self.any_time else float("inf")

    def _has(self, name: str, model: str) -> bool:
        m = self._devices[name].state.models.get(model)
        return m is not None and m.residency is Residency.RESIDENT

    def _begin(self, now: float, source: str) -> None:
        waiting = self._waiting[source]
        while waiting and sum(m.source == source for m in self._moves.values()) < AT_ONCE:
            move = waiting.popleft()
            if move.request.state is RequestState.RUNNING:
                self._moves[move.request.id] = move
                self._devices[source].receive(now + WAY, ExportKvEvent(move.request.id))

    def _hear(self, name: str, word: MigrationAnswer) -> None:
        move = self._moves.get(word.request_id)
        if move is None:
            return
        at = self._devices[name].clock.now() + WAY
        request, target = move.request, self._devices[move.target]
        match word:
            case KvExportedAnswer(_, tokens, form, pieces) if tokens:
                prefix = wanted(request.submission, request.output, tokens)
                target.receive(at, ImportKvEvent(prefix, form, move.source, pieces))
            case KvImportedAnswer(_, tokens) if tokens:
                self._devices[move.source].receive(at, DepartEvent(request.id))
            case DepartedAnswer(_, intact, tokens):
                self._arrive(at, move, tokens if intact else None)
            case _:
                self._end(at, move)

    def _arrive(self, at: float, move: _Move, tail: int | None) -> None:
        """Finish a move: resume a request that has departed on its target, or drop its KV there if
        it has ended. `tail`: tokens whose KV followed; None: that KV was lost."""
        request, target = move.request, self._devices[move.target]
        if request.state is not RequestState.CANCELLED:
            target.receive(at, DropKvEvent(request.id))
        else:
            self.moved += tail is not None
            target.receive(
                at, DropKvEvent(request.id) if tail is None else KvTailEvent(request.id, tail, b"")
            )
            first = request.first_token_at
            coming = replace(
                request.submission,
                resumed=tuple(request.output),
                age=at - request.submission.arrival,
                first_token_age=None if first is None else at - first,
            )
            target.receive(at, ArrivalEvent(coming))
        self._end(at, move)

    def _end(self, now: float, move: _Move) -> None:
        del self._moves[move.request.id]
        self._begin(now, move.source)


def movers_of(devices: Mapping[str, tuple[SimDevice, HostPlace]]) -> list[Movers]:
    """Build the movers of each host whose devices reach each other."""
    hosts = dict.fromkeys(place.host for _, place in devices.values())
    found = []
    for host in hosts:
        there = {name: at for name, at in devices.items() if at[1].host is host}
        if host.joints.peers is not PeerLinks.NONE and len(there) > 1:
            found.append(Movers(there))
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
    ) -> None:
        def ended(at: float, seconds: float) -> None:
            self._device.receive(at, KvReadEvent(request_id))

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
