"""Simulate page lending between devices of a host: messages, borrowed KV, recalls.

All devices are peers from the start; a message arrives `WAY` seconds later. KV on borrowed pages is
read where it is: a job transfers its part of the KV that it reads over the links between the two
devices, beside its work, and ends when both are done. Moving blocks back to the borrower's own
pages costs nothing here. Used by `sim.cluster`, which passes the orders to lend and recall.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import inf

from ballast.core.actions import Lend, LoopCommand, Recall
from ballast.core.errors import BrokenPromise, ConfigError
from ballast.core.lease import (
    LendingMessage,
    PagesLentEvent,
    PagesRecalledEvent,
    PagesReturnedEvent,
    PeerMetEvent,
    PeerOverdueReport,
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


class Lenders:
    """Deliver lending messages between devices of one world. Implements `sim.world.Reaching`."""

    def __init__(self, world: World, devices: Mapping[str, tuple[SimDevice, HostPlace]]) -> None:
        """`devices`: by name, with where they are. Raises ConfigError for devices that cannot lend
        to each other."""
        self._devices = {name: device for name, (device, _) in devices.items()}
        self._orders: list[float] = []
        """Times of operators' orders, ascending."""
        self._ids = 0
        sizes = {device.state.settings.page_bytes for device in self._devices.values()}
        if len(sizes) > 1:
            raise ConfigError("orders", sorted(sizes), "devices that lend have pages of one size")
        for epoch, (name, (device, place)) in enumerate(devices.items(), 1):
            device.state.lending.send = partial(self._pass_on, name)
            streams = {}
            for other, (lender, there) in devices.items():
                if other == name:
                    continue
                pair = min(epoch, list(devices).index(other) + 1)
                exported = lender.state.pool.vm.export(())
                device.state.lending.exports[other, pair] = exported
                device.receive(0.0, PeerMetEvent(other, pair, exported.n_pages))
                if place.host.joints.peers is not PeerLinks.MEMORY:
                    fluid = place.host.world.fluid
                    streams[other] = Stream(device.link, fluid, there.to_peer(place))
            if streams:
                device.borrows_over(partial(SimBorrowed, device, streams))
        world.reaching.append(self)

    def order(self, at: float, device: str, operation: LoopCommand) -> None:
        """Let an operator order something of a device at `at`."""
        self._ids += 1
        self._orders = sorted([*self._orders, at])
        self._devices[device].order(at, f"order-{self._ids}", operation)

    def horizon(self, now: float, near: float) -> float:
        """Time before which no message that has not been sent yet can reach a device; `near`: the
        earliest next turn of any other device."""
        if any(d.state.lending.lent or d.state.lending.borrowed for d in self._devices.values()):
            return near + WAY
        while self._orders and self._orders[0] < now:
            del self._orders[0]
        return self._orders[0] + WAY if self._orders else inf

    def _pass_on(self, name: str, word: LendingMessage) -> None:
        now = self._devices[name].clock.now()
        match word:
            case PagesLentEvent(lease) | PagesRecalledEvent(lease):
                self._devices[lease.borrower].receive(now + WAY, word)
            case PagesReturnedEvent(lease):
                self._devices[lease.lender].receive(now + WAY, word)
            case PeerOverdueReport(peer, _):
                why = f"{peer} did not return what {name} had lent it; live it would be killed"
                raise BrokenPromise(why)


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


def carry_out(
    orders: Sequence[LendingOrder],
    devices: Mapping[str, tuple[SimDevice, HostPlace]],
    names: Sequence[str],
) -> None:
    """Schedule the lending orders of a user's file.

    `devices`: by name, those that serve, with their places; `names`: all of the cluster, in order.
    Raises ConfigError for an order that devices cannot carry out.
    """
    pairs = [[device_named("orders", at, names) for at in (o.lender, o.borrower)] for o in orders]
    lenders: dict[World, Lenders] = {}
    for pair in pairs:
        for name in pair:
            if name not in devices:
                raise ConfigError("orders", name, "a device that serves a model")
        if len({devices[name][1].host for name in pair}) > 1 or len(set(pair)) < 2:
            raise ConfigError("orders", pair, "two devices of one host: see `per_host`")
    named = {name for pair in pairs for name in pair}
    for world in dict.fromkeys(place.host.world for _, place in devices.values()):
        there = {n: at for n, at in devices.items() if n in named and at[1].host.world is world}
        if there:
            lenders[world] = Lenders(world, there)
    for order, (lender, borrower) in zip(orders, pairs, strict=True):
        device, place = devices[lender]
        page, n_bytes = device.state.settings.page_bytes, order.lend or order.recall
        pages = n_bytes // page if isinstance(n_bytes, int) else None
        if pages == 0:
            raise ConfigError("orders", n_bytes, f"a page or more, of {format_bytes(page)}")
        if order.lend is None or pages is None:
            operation: LoopCommand = Recall(borrower, pages, order.seconds, "ordered")
        else:
            operation = Lend(borrower, pages, "ordered")
        lenders[place.host.world].order(order.at, lender, operation)
