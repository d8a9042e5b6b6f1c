"""Simulate page lending between devices of a host: the driver of `control.leases`.

All devices are peers from the start; a message arrives `WAY` seconds later. KV on borrowed pages is
read where it is: a job transfers its part of the KV that it reads over the links between the two
devices, beside its work, and ends when both are done. Moving blocks back to the borrower's own
pages costs nothing here. Used by `sim.cluster`, for orders of operators and of the fleet policy.
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
    LendOrder,
    MemoryOpenedEvent,
    OrderAnsweredEvent,
    OrderDevice,
    OrderEnded,
    PassLeaseMessage,
    PeerReportEvent,
    RecallOrder,
    ReplaceWorker,
)
from ballast.control.leases import Leases
from ballast.control.migration_events import DeviceLostEvent, LookEvent
from ballast.core.actions import Lend, Recall
from ballast.core.errors import ConfigError
from ballast.core.fleet import LeaseView
from ballast.core.lease import (
    LendingMessage,
    PeerGoneEvent,
    PeerMetEvent,
    PeerMetReport,
    PeerOverdueReport,
    PeerReleasedReport,
)
from ballast.core.units import format_bytes
from ballast.sim.cluster_files import LendingOrder, device_named
from ballast.sim.device import SimDevice
from ballast.sim.layer_passes import Pass
from ballast.sim.link import Stream
from ballast.sim.topology import HostPlace, PeerLinks
from ballast.sim.world import World

WAY = 3e-4
"""Delay of a message between devices, in seconds: half of a recall as measured live, including a
message each way and the unmapping between them."""
START_SECONDS = 2.0
"""Time from the end of a killed worker until its successor serves; an assumption: a spare process
stands ready, and the weights are in host memory still."""
Ended = Callable[[str | None], object]


class SimLeases:
    """Lends pages between devices of one world. Implements `control.lease_events.LendingDevices`
    and `sim.world.Reaching`."""

    def __init__(self, world: World, devices: Mapping[str, tuple[SimDevice, HostPlace]]) -> None:
        """`devices`: by name, with where they are. Raises ConfigError for devices that cannot lend
        to each other."""
        self._devices = {name: device for name, (device, _) in devices.items()}
        self._places = {name: place for name, (_, place) in devices.items()}
        self._agenda, self._fluid = world.agenda, world.fluid
        self._machine = Leases(self)
        self._numbers = itertools.count(1)
        self._ended: dict[int, Ended] = {}
        self._orders: list[float] = []
        """Times of operators' orders, ascending."""
        self._looks_at = 0.0
        """Time of the last `LookEvent` that has been scheduled."""
        self.on_crash: list[Callable[[float, str], None]] = []
        """Called with (time, device) when a worker is killed."""
        sizes = {device.state.settings.page_bytes for device in self._devices.values()}
        if len(sizes) > 1:
            raise ConfigError("orders", sorted(sizes), "devices that lend have pages of one size")
        for name, device in self._devices.items():
            self._connect(name)
            device.on_restart.append(partial(self._connect, name))
        for name in self._devices:
            self._handle(0.0, MemoryOpenedEvent(name, name))
        world.reaching.append(self)

    @property
    def standing(self) -> tuple[LeaseView, ...]:
        """All that is lent, by lender and borrower."""
        return self._machine.standing

    def pairs(self) -> list[tuple[str, str]]:
        """Return the devices that can lend to each other, and whose lending is up to policies."""
        names, machine = list(self._devices), self._machine
        able = [(a, b) for a in names for b in names if a != b and machine.can_lend(a, b)]
        return [pair for pair in able if not machine.reserved(*pair)]

    def serves(self, device: str) -> bool:
        """Return whether it is one of these devices."""
        return device in self._devices

    def schedule(self, at: float, lender: str, command: Lend | Recall) -> None:
        """Let an operator order something of a device at `at`."""
        self._orders = sorted([*self._orders, at])
        self._agenda.schedule(at, lambda now: self.order(now, lender, command, by_operator=True))

    def order(
        self,
        now: float,
        lender: str,
        command: Lend | Recall,
        ended: Ended = lambda refused: None,
        *,
        by_operator: bool = False,
    ) -> None:
        """Have a device lend pages or recall them; `ended` is called when that has been done, or
        with the reason why not."""
        number, borrower, why = next(self._numbers), command.to, command.why
        self._ended[number] = ended
        event: LendOrder | RecallOrder
        if isinstance(command, Lend):
            event = LendOrder(number, lender, borrower, command.pages, why, by_operator)
        else:
            pages, seconds = command.pages, command.seconds
            event = RecallOrder(number, lender, borrower, pages, seconds, why, by_operator)
        self._handle(now, event)

    def horizon(self, now: float, near: float) -> float:
        """Time before which no message that has not been sent yet can reach a device; `near`: the
        earliest next turn of any other device."""
        if self._ended or self._machine.due < inf or self._machine.standing:
            return near + WAY
        if any(d.state.lending.lent or d.state.lending.borrowed for d in self._devices.values()):
            return near + WAY
        while self._orders and self._orders[0] < now:
            del self._orders[0]
        return self._orders[0] + WAY if self._orders else inf

    # -- `LendingDevices` -------------------------------------------------------------------------

    def is_up(self, device: str) -> bool:
        return not self._devices[device].down

    def objection(self, lender: str, borrower: str) -> str | None:
        known = lender in self._devices and borrower in self._devices
        return None if known else f"there is no lending from {lender!r} to {borrower!r}"

    def own_pages(self, device: str) -> int:
        return self._devices[device].state.pool.total

    # -- messages ---------------------------------------------------------------------------------

    def _connect(self, name: str) -> None:
        """Let a device's worker send messages about leases, and read what lies on borrowed
        pages."""
        device, place = self._devices[name], self._places[name]
        device.state.lending.send = partial(self._hear, name)
        streams = {}
        if place.host.joints.peers is not PeerLinks.MEMORY:
            for other, there in self._places.items():
                if other != name:
                    streams[other] = Stream(device.link, self._fluid, there.to_peer(place))
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
        at = now + WAY
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
                self._agenda.schedule(now + START_SECONDS, partial(self._restart, device))
            case OrderDevice(number, device, command):
                answered = partial(self._answered, number, device)
                self._devices[device].order(at, f"lending-{number}", command, answered)
            case OrderEnded(number, refused):
                self._ended.pop(number)(refused)

    def _answered(self, number: int, device: str, refused: str | None) -> None:
        now = self._devices[device].clock.now()
        self._handle(now, OrderAnsweredEvent(number, refused))

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
        self._handle(now, MemoryOpenedEvent(device, device))


class SimBorrowed:
    """Transfers of KV that jobs of one model read on borrowed pages. Implements
    `sim.layer_passes.LayerSource`."""

    stops: Sequence[int] = ()

    def __init__(self, device: SimDevice, streams: Mapping[str, Stream], model: str) -> None:
        """`streams`: by lender, the stream over which its pages are read."""
        self._state, self._streams, self._model = device.state, streams, model
        self._job: Pass | None = None
        self._moving = 0

    @property
    def waits(self) -> bool:
        return self._state.models[self._model].kv.borrowed_pages > 0

    @property
    def open(self) -> bool:
        return self._moving > 0

    def begin(self, now: float, job: Pass, read: int, written: int) -> None:
        self._job = job
        kv, lenders = self._state.models[self._model].kv, self._state.lending.borrowed
        n_bytes = read * kv.spec.kv_bytes_per_token * kv.borrowed_pages
        n_bytes //= kv.borrowed_pages + kv.pages
        for lender, pages in lenders.items():
            self._moving += 1
            part = n_bytes * pages // sum(lenders.values())
            self._streams[lender].carry(now, part, self._ended)

    def lacks(self, layer: int) -> bool:
        return False

    def used(self, now: float, layer: int) -> None:
        """Do nothing: no room is made at a layer."""

    def stalls(self, layer: int) -> None:
        """Do nothing: it never lacks a layer."""

    def waited(self, seconds: float) -> None:
        """Do nothing: the wait is in the job's `stall`."""

    def _ended(self, now: float, seconds: float) -> None:
        self._moving -= 1
        assert self._job is not None
        if not self._moving:
            self._job.closed(now)


def leases_of(
    orders: Sequence[LendingOrder],
    devices: Mapping[str, tuple[SimDevice, HostPlace]],
    names: Sequence[str],
    lends: bool,
) -> list[SimLeases]:
    """Build the leases of each host whose devices lend: those that a user's file of orders names
    or, if the fleet policy `lends`, all that reach each other; and schedule the orders.

    `devices`: by name, those that serve, with their places; `names`: all of the cluster, in order.
    Raises ConfigError for an order that devices cannot carry out.
    """
    pairs = [[device_named("orders", at, names) for at in (o.lender, o.borrower)] for o in orders]
    for pair in pairs:
        for name in pair:
            if name not in devices:
                raise ConfigError("orders", name, "a device that serves a model")
        if len({devices[name][1].host for name in pair}) > 1 or len(set(pair)) < 2:
            raise ConfigError("orders", pair, "two devices of one host: see `per_host`")
    lending = {name for pair in pairs for name in pair}
    if lends:
        apart = PeerLinks.NONE
        lending |= {n for n, (_, at) in devices.items() if at.host.joints.peers is not apart}
    leases: dict[World, SimLeases] = {}
    for world in dict.fromkeys(place.host.world for _, place in devices.values()):
        there = {n: at for n, at in devices.items() if n in lending and at[1].host.world is world}
        if len(there) > 1:
            leases[world] = SimLeases(world, there)
    for order, (lender, borrower) in zip(orders, pairs, strict=True):
        device, place = devices[lender]
        page, n_bytes = device.state.settings.page_bytes, order.lend or order.recall
        pages = n_bytes // page if isinstance(n_bytes, int) else None
        if pages == 0:
            raise ConfigError("orders", n_bytes, f"a page or more, of {format_bytes(page)}")
        if order.lend is None or pages is None:
            command: Lend | Recall = Recall(borrower, pages, order.seconds, "ordered")
        else:
            command = Lend(borrower, pages, "ordered")
        leases[place.host.world].schedule(order.at, lender, command)
    return list(leases.values())
