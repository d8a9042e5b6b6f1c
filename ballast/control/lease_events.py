"""Define what goes into the state machine of leases and what comes out, and what it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ballast.control.migration_events import DeviceLostEvent, LookEvent
from ballast.core.actions import Lend, Recall
from ballast.core.fleet_state import CommandOutcome
from ballast.core.lease import (
    PagesLentEvent,
    PagesRecalledEvent,
    PagesReturnedEvent,
    PeerMetReport,
    PeerOverdueReport,
    PeerReleasedReport,
)

LeaseMessage = PagesLentEvent | PagesRecalledEvent | PagesReturnedEvent


@dataclass(frozen=True, slots=True)
class MemoryOpenedEvent:
    """A worker serves, and other devices can map its memory by `address`."""

    device: str
    address: str
    epoch: int = 0
    """Last epoch in which it knew another worker, under an earlier controller."""


@dataclass(frozen=True, slots=True)
class LeaseMessageEvent:
    """A worker has sent a message about a lease to the worker at its other end."""

    sender: str
    message: LeaseMessage


@dataclass(frozen=True, slots=True)
class PeerReportEvent:
    """A worker has reported about the worker of another device."""

    device: str
    report: PeerMetReport | PeerOverdueReport | PeerReleasedReport


@dataclass(frozen=True, slots=True)
class DeviceReapedEvent:
    """A worker that had died has been reaped, and with it its mappings of others' memory."""

    device: str


@dataclass(frozen=True, slots=True)
class LeaseOrderEvent:
    """Have a device lend pages, or recall them; `OrderEnded` follows (a recall: when they are
    back)."""

    number: int
    lender: str
    command: Lend | Recall
    by_operator: bool


@dataclass(frozen=True, slots=True)
class ReleasePairEvent:
    """An operator leaves what one device lends to another to the fleet policy again. Pages that are
    lent stay lent until the policy, or the lender, recalls them."""

    lender: str
    borrower: str


@dataclass(frozen=True, slots=True)
class OrderAnsweredEvent:
    """A lender has carried out an order, or refused it."""

    number: int
    outcome: CommandOutcome


LeaseEvent = (
    MemoryOpenedEvent
    | LeaseMessageEvent
    | PeerReportEvent
    | DeviceLostEvent
    | DeviceReapedEvent
    | LeaseOrderEvent
    | ReleasePairEvent
    | OrderAnsweredEvent
    | LookEvent
)


@dataclass(frozen=True, slots=True)
class IntroducePeer:
    """Have a worker import the memory of another one."""

    device: str
    peer: str
    epoch: int
    address: str


@dataclass(frozen=True, slots=True)
class PassLeaseMessage:
    """Pass a message about a lease on to a worker."""

    device: str
    message: LeaseMessage


@dataclass(frozen=True, slots=True)
class AnnouncePeerEnd:
    """Notify a worker that the worker of another device has ended."""

    device: str
    peer: str
    epoch: int


@dataclass(frozen=True, slots=True)
class KillWorker:
    """End a worker that keeps pages which are not its own; another one takes its place."""

    device: str
    why: str


@dataclass(frozen=True, slots=True)
class ReplaceWorker:
    """Nobody maps the memory of a device's dead worker any more: its successor may start."""

    device: str


@dataclass(frozen=True, slots=True)
class OrderDevice:
    """Have a lender carry out an order; `OrderAnsweredEvent` follows unless it dies."""

    number: int
    device: str
    command: Lend | Recall
    by: str
    """Who ordered it: `operator` or `policy`."""


@dataclass(frozen=True, slots=True)
class OrderEnded:
    """An order has been carried out, or refused."""

    number: int
    outcome: CommandOutcome


LeaseInstruction = (
    IntroducePeer
    | PassLeaseMessage
    | AnnouncePeerEnd
    | KillWorker
    | ReplaceWorker
    | OrderDevice
    | OrderEnded
)


class LendingDevices(Protocol):
    """What the machine of leases reads of the devices, as of now."""

    def is_up(self, device: str) -> bool:
        """Return whether a worker serves."""

    def objection(self, lender: str, borrower: str) -> str | None:
        """Return why a device can never lend to another; None if it can."""
