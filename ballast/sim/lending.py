"""Simulate page lending between devices of a host: the driver of `control.leases`.

All devices are peers from the start; messages take as long as `sim.peer_costs` says. KV on borrowed
pages is read and written where it is: a job transfers its part of that over the links between the
two devices, beside its work, and ends when both are done. Moving blocks back to the borrower's
own pages takes its loop the time of the copy. Used by `sim.cluster`, for orders of operators and of
the fleet policy.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf

from ballast.control.lease_events import (
    AnnouncePeerEnd,
    DeviceReapedEvent,
    IntroducePeer,
    KillWorker,
    LeaseEvent,
    LeaseInstruction,
    LeaseMessageEvent,
    LeaseOrderEvent,
    MemoryOpenedEvent,
    OrderAnsweredEvent,
    OrderDevice,
    OrderEnded,
    PassLeaseMessage,
    PeerReportEvent,
    ReplaceWorker,
)
from ballast.control.leases import Leases
from ballast.control.migration_events import DeviceLostEvent, LookEvent
from ballast.core.actions import Lend, Recall
from ballast.core.errors import ConfigError
from ballast.core.fleet import LeaseView
from ballast.core.fleet_state import CommandOutcome
from ballast.core.lease import (
    LendingMessage,
    PeerGoneEvent,
    PeerMetEvent,
    PeerMetReport,
    PeerOverdueReport,
    PeerReleasedReport,
)
from ballast.sim.device import SimDevice
from ballast.sim.layer_passes import Pass
from ballast.sim.link import Stream
from ballast.sim.peer_costs import WorkerStarts, slowest
from ballast.sim.topology import HostPlace, PeerLinks, SimHost


class SimLeases:
    """Lends pages between devices of one host. Implements `control.lease_events.LendingDevices`
    and `sim.world.Reaching`."""

    def __init__(self, host: SimHost, devices: Mapping[str, tuple[SimDevice, HostPlace]]) -> None:
        """`devices`: by name, with where they are; their pages are of one size."""
        self._devices = {name: device for name, (device, _) in devices.items()}
        self._places = {name: place for name, (_, place) in devices.items()}
        self._agenda, self._fluid = host.world.agenda, host.fluid
        self._costs = slowest(device.peers for device in self._devices.values())
        self._starts = WorkerStarts(self._costs)
        self._machine = Leases(self)
        self._numbers = itertools.count(1)
        self._ended: dict[int, Callable[[CommandOutcome], object]] = {}
        self._looks_at = 0.0
        """Time of the last `LookEvent` that has been scheduled."""
        self.on_crash: list[Callable[[float, str], None]] = []
        """Called with (time, device) when a worker is killed."""
        for name, device in self._devices.items():
            self._connect(name)
            device.on_restart.append(partial(self._connect, name))
        for name in self._devices:
            self._handle(0.0, MemoryOpenedEvent(name, name))
        host.world.reaching.append(self)

    @property
    def standing(self) -> tuple[LeaseView, ...]:
        """All that is lent, by lender and borrower."""
        return self._machine.standing

    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Return the devices that can lend to each other, and whose lending is up to policies."""
        return self._machine.free_pairs(self._devices)

    def serves(self, device: str) -> bool:
        """Return whether it is one of these devices."""
        return device in self._devices

    def order(
        self,
        now: float,
        lender: str,
        command: Lend | Recall,
        ended: Callable[[CommandOutcome], object] = lambda outcome: None,
        *,
        by_operator: bool = False,
    ) -> None:
        """Have a device lend pages or recall them; `ended` is called when that has been done, or
        refused."""
        number = next(self._numbers)
        self._ended[number] = ended
        self._handle(now, LeaseOrderEvent(number, lender, command, by_operator))

    def horizon(self, now: float, near: float) -> float:
        """Time before which no message that has not been sent yet can reach a device; `near`: the
        earliest next turn of any other device."""
        if self._ended or self._machine.due < inf or self._machine.standing:
            return near + self._costs.message
        if any(d.state.lending.lent or d.state.lending.borrowed for d in self._devices.values()):
            return near + self._costs.message
        return inf

    # -- `LendingDevices` -------------------------------------------------------------------------

    def is_up(self, device: str) -> bool:
        return not self._devices[device].down

    def objection(self, lender: str, borrower: str) -> str | None:
        known = lender in self._devices and borrower in self._devices
        return None if known else f"there is no lending from {lender!r} to {borrower!r}"

    # -- messages ---------------------------------------------------------------------------------

    def _connect(self, name: str) -> None:
        """Let a device's worker send messages about leases, and read what lies on borrowed
        pages."""
        device, place = self._devices[name], self._places[name]
        device.state.lending.send = partial(self._hear, name)
        streams, rate = {}, inf
        if place.host.joints.peers is not PeerLinks.MEMORY:
            for other, there in self._places.items():
                if other != name:
                    ways = there.to_peer(place), place.to_peer(there)
                    read, write = (Stream(device.link, self._fluid, way) for way in ways)
                    streams[other] = read, write
                    rate = min(rate, *(side.capacity for side in ways[0]))
        device.state.lending.bytes_per_second = rate
        device.moves.bytes_per_second = min(rate, device.peers.home)
        if streams:
            device.borrows_over(partial(SimBorrowed, device, streams))

    def _hear(self, name: str, word: LendingMessage) -> None:
        now = self._devices[name].clock.now()
        if isinstance(word, PeerMetReport | PeerOverdueReport | PeerReleasedReport):
            self._handle(now, PeerReportEvent(name, word))
        else:
            self._handle(now, LeaseMessageEvent(name, word))

    def _handle(self, now: float, event: LeaseEvent) -> None:
        for instruction in self._machine.handle(now, event):
            self._do(now, instruction)
        due = self._machine.due
        if due < inf and not now < self._looks_at <= due:
            self._looks_at = due
            self._agenda.schedule(due, lambda at: self._handle(at, LookEvent()))

    def _do(self, now: float, instruction: LeaseInstruction) -> None:
        at = now + self._costs.message
        match instruction:
            case IntroducePeer(device, peer, epoch, _):
                exported = self._devices[peer].state.pool.vm.export(())
                self._devices[device].state.lending.exports[peer, epoch] = exported
                met = PeerMetEvent(peer, epoch, exported.n_pages)
                self._devices[device].receive(now, met)
            case PassLeaseMessage(device, message):
                self._devices[device].receive(at, message)
            case AnnouncePeerEnd(device, peer, epoch):
                self._devices[device].receive(at, PeerGoneEvent(peer, epoch))
            case KillWorker(device, _):
                self._agenda.schedule(at, partial(self._kill, device))
            case ReplaceWorker(device):
                starts = now + self._starts.seconds(now)
                self._agenda.schedule(starts, partial(self._restart, device))
            case OrderDevice(number, device, command, by):
                answered = partial(self._answered, number, device)
                self._devices[device].order(at, f"lending-{number}", command, answered, by)
            case OrderEnded(number, outcome):
                self._ended.pop(number)(outcome)

    def _answered(self, number: int, device: str, refused: str | None) -> None:
        now = self._devices[device].clock.now()
        outcome = CommandOutcome() if refused is None else CommandOutcome("refused", refused)
        self._handle(now, OrderAnsweredEvent(number, outcome))

    def _kill(self, device: str, now: float) -> None:
        if self._devices[device].down:
            return
        self._devices[device].crash()
        for crashed in self.on_crash:
            crashed(now, device)
        self._handle(now, DeviceLostEvent(device))
        self._handle(now, DeviceReapedEvent(device))

    def _restart(self, device: str, now: float) -> None:
        self._devices[device].restart(now)
        self._starts.served(now)
        self._handle(now, MemoryOpenedEvent(device, device))


class SimBorrowed:
    """Transfers of KV that jobs of one model read and write on borrowed pages. Implements
    `sim.layer_passes.LayerSource`. What decode steps write, a token each, takes no time."""

    stops: Sequence[int] = ()

    def __init__(
        self, device: SimDevice, streams: Mapping[str, tuple[Stream, Stream]], model: str
    ) -> None:
        """`streams`: by lender, those over which its pages are read and written."""
        self._state, self._streams, self._model = device.state, streams, model
        self._job: Pass | None = None
        self._moving = 0

    @property
    def waits(self) -> bool:
        return self._state.models[self._model].kv.borrowed.pages > 0

    @property
    def open(self) -> bool:
        return self._moving > 0

    def begin(self, now: float, job: Pass, read: int, written: int) -> None:
        self._job = job
        m, lenders = self._state.models[self._model], self._state.lending.borrowed
        reading = [r for r in m.running if r.in_flight] or list(m.running)
        prefills = m.job is not None and written > len(reading)
        new = {w.request_id: len(w.tokens) for w in m.job.work} if prefills and m.job else {}
        work = [(r.blocks, r.computed, r.computed + new.get(r.id, 0)) for r in reading]
        blocks, tokens = m.kv.borrowed.use(work)
        n_bytes = blocks * m.spec.block_bytes, tokens * m.spec.block_bytes // m.spec.block_tokens
        for lender, pages in lenders.items() if blocks else ():
            for way, whole in enumerate(n_bytes):
                if part := whole * pages // sum(lenders.values()):
                    self._moving += 1
                    ended = partial(self._ended, way) if prefills else self._moved
                    self._streams[lender][way].carry(now, part, ended)

    def lacks(self, layer: int) -> bool:
        return False

    def used(self, now: float, layer: int) -> None:
        """Do nothing: no room is made at a layer."""

    def stalls(self, layer: int) -> None:
        """Do nothing: it never lacks a layer."""

    def waited(self, seconds: float) -> None:
        """Do nothing: the wait is in the job's `stall`."""

    def _ended(self, way: int, now: float, seconds: float) -> None:
        """What a prefill reads (`way` 0) or writes (1) on a lender's pages has been carried."""
        assert self._job is not None
        self._job.carried(*((0.0, seconds) if way else (seconds, 0.0)))
        self._moved(now, seconds)

    def _moved(self, now: float, seconds: float) -> None:
        self._moving -= 1
        assert self._job is not None
        if not self._moving:
            self._job.closed(now)


def leases_of(
    pairs: Sequence[tuple[str, str]],
    devices: Mapping[str, tuple[SimDevice, HostPlace]],
    lends: bool,
) -> list[SimLeases]:
    """Build the leases of each host whose devices lend: `pairs`, between which an operator will
    lend; if the fleet policy `lends`, all that reach each other and have pages of one size.

    `devices`: by name, those that serve, with their places. Raises ConfigError for a pair that
    cannot lend.
    """
    for pair in pairs:
        for name in pair:
            if name not in devices:
                raise ConfigError("orders", name, "a device that serves a model")
        if len({devices[name][1].host for name in pair}) > 1 or len(set(pair)) < 2:
            raise ConfigError("orders", pair, "two devices of one host: see `per_host`")
        sizes = {_page_bytes(devices[name][0]) for name in pair}
        if len(sizes) > 1:
            raise ConfigError("orders", sorted(sizes), "devices that lend have pages of one size")
    lending = {name for pair in pairs for name in pair}
    if lends:
        apart = PeerLinks.NONE
        lending |= {n for n, (_, at) in devices.items() if at.host.joints.peers is not apart}
    able = {n: (d, at.host, _page_bytes(d)) for n, (d, at) in devices.items() if n in lending}
    leases = []
    for host, size in dict.fromkeys((host, size) for _, host, size in able.values()):
        there = {n: devices[n] for n, (_, *at) in able.items() if at == [host, size]}
        if len(there) > 1:
            leases.append(SimLeases(host, there))
    return leases


def _page_bytes(device: SimDevice) -> int:
    return device.state.settings.page_bytes
