"""Lend pages between the devices of a server: the driver of `control.leases`.

Turns workers' messages and operators' orders into events of the state machine, and its instructions
into messages. The memory itself is mapped by workers (`cluster.lending.lending_peers`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from functools import partial
from math import inf
from typing import Generic

from ballast.control.device_observer import DeviceObserver
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
    ReleasePairEvent,
    ReplaceWorker,
)
from ballast.control.leases import Leases
from ballast.control.migration_events import DeviceLostEvent, LookEvent
from ballast.control.routed_devices import D, RoutedDevices
from ballast.control.timers import Alarm, Timers
from ballast.core.actions import Lend, Recall
from ballast.core.fleet_state import CommandOutcome
from ballast.transport.worker_messages.lending_messages import (
    LeaseMsg,
    MeetPeerMsg,
    PeerEndedMsg,
    PeerReportMsg,
)

Objection = Callable[[str, str], str | None]
"""Returns why one device can never lend to another; None: it can."""


class DeviceLeases(DeviceObserver[D], Generic[D]):
    """Lends pages between one server's devices. Implements `lease_events.LendingDevices`."""

    def __init__(self, devices: RoutedDevices[D], objection: Objection, timers: Timers) -> None:
        self._devices, self._objection, self._timers = devices, objection, timers
        self.pairs = Leases(self)
        """What each pair of devices has lent, and who can lend now."""
        self._numbers = itertools.count(1)
        self._ended: dict[int, Callable[[CommandOutcome], object]] = {}
        """By order, what to call when it has ended."""
        self._replaced: dict[str, Callable[[], object]] = {}
        """By device whose worker has been reaped, what starts its successor."""
        self._alarm = Alarm(timers, partial(self._handle, LookEvent()))

    def order(
        self,
        lender: str,
        command: Lend | Recall,
        ended: Callable[[CommandOutcome], object],
        *,
        by_operator: bool = False,
    ) -> None:
        """Have a device lend pages or recall them; `ended` is called when that has been done (a
        recall: when the pages are back), or refused."""
        number = next(self._numbers)
        self._ended[number] = ended
        self._handle(LeaseOrderEvent(number, lender, command, by_operator))

    def release(self, lender: str, borrower: str) -> bool:
        """Leave what a device lends to another to the fleet policy again; returns whether an
        operator had ordered it."""
        held = self.pairs.reserved(lender, borrower)
        self._handle(ReleasePairEvent(lender, borrower))
        return held

    def close(self) -> None:
        """Await nothing any more."""
        self._alarm.set(inf)

    # -- events of workers ------------------------------------------------------------------------

    def worker_ready(self, device: D) -> None:
        if device.pages:
            self._handle(MemoryOpenedEvent(device.name, device.pages, device.epoch))

    def lending_message(self, device: D, message: LeaseMsg | PeerReportMsg) -> None:
        if isinstance(message, LeaseMsg):
            self._handle(LeaseMessageEvent(device.name, message.event))
        else:
            self._handle(PeerReportEvent(device.name, message.report))

    def worker_died(self, device: D, in_flight: Collection[str]) -> None:
        self._handle(DeviceLostEvent(device.name))

    def reaped(self, device: D, replace: Callable[[], object]) -> None:
        """End the pairs of a worker that has been reaped; pages that it had borrowed are free.
        `replace` is called when no other worker uses its memory any more."""
        self._replaced[device.name] = replace
        self._handle(DeviceReapedEvent(device.name))

    # -- `LendingDevices` -------------------------------------------------------------------------

    def is_up(self, device: str) -> bool:
        return self._devices[device].down is None

    def objection(self, lender: str, borrower: str) -> str | None:
        return self._objection(lender, borrower)

    # -- instructions -----------------------------------------------------------------------------

    def _handle(self, event: LeaseEvent) -> None:
        now = self._timers.now()
        for instruction in self.pairs.handle(now, event):
            self._do(instruction)
        self._alarm.set(self.pairs.due)

    def _do(self, instruction: LeaseInstruction) -> None:
        match instruction:
            case IntroducePeer(device, peer, epoch, address):
                self._devices[device].tell(MeetPeerMsg(peer, epoch, address))
            case PassLeaseMessage(device, message):
                self._devices[device].tell(LeaseMsg.of(message))
            case AnnouncePeerEnd(device, peer, epoch):
                self._devices[device].tell(PeerEndedMsg(peer, epoch))
            case KillWorker(device, why):
                self._devices[device].kill(why)
            case ReplaceWorker(device):
                self._replaced.pop(device)()
            case OrderDevice(number, device, command, by):
                self._devices[device].order(command, partial(self._answered, number), by)
            case OrderEnded(number, outcome):
                self._ended.pop(number)(outcome)

    def _answered(self, number: int, outcome: CommandOutcome) -> None:
        self._handle(OrderAnsweredEvent(number, outcome))
