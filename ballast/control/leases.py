"""Track which devices lend pages to each other, and end leases that are not honoured.

A pure state machine, run by the server (`control.device_leases`) and by the simulator
(`sim.lending`). Which pages are lent is up to lenders; who lends to whom, to fleet policies and
operators.

::

    both serve        ─IntroducePeer─> both ─PeerMetReport─>  a pair, in an epoch of its own
    Lend              ─OrderDevice─> lender ─PagesLentEvent─> borrower        lent
    Recall            ─OrderDevice─> lender ─PagesRecalledEvent─> borrower    recalled, due
                      borrower ─PagesReturnedEvent─> lender                   free
    due has passed    ─KillWorker─> borrower
    one has died      ─AnnouncePeerEnd─> the other ─PeerReleasedReport─>      ─ReplaceWorker─>

An operator's order stands: between two devices between which an operator has lent or recalled, no
fleet policy lends or recalls until the operator releases the pair (`ReleasePairEvent`). Lenders'
own memory policies recall whatever is lent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from math import inf

from ballast.control.lease_events import (
    AnnouncePeerEnd,
    DeviceReapedEvent,
    IntroducePeer,
    KillWorker,
    LeaseEvent,
    LeaseInstruction,
    LeaseMessage,
    LeaseMessageEvent,
    LeaseOrderEvent,
    LendingDevices,
    MemoryOpenedEvent,
    OrderAnsweredEvent,
    OrderDevice,
    OrderEnded,
    PassLeaseMessage,
    PeerReportEvent,
    ReleasePairEvent,
    ReplaceWorker,
)
from ballast.control.migration_events import DeviceLostEvent, LookEvent
from ballast.core.actions import Lend
from ballast.core.fleet import LeaseView
from ballast.core.fleet_state import OPERATOR, POLICY, CommandOutcome
from ballast.core.lease import (
    Lease,
    PagesLentEvent,
    PagesRecalledEvent,
    PagesReturnedEvent,
    PeerMetReport,
    PeerReleasedReport,
)

RELEASE_SECONDS = 30.0
"""Time for borrowers to unmap a dead worker's memory; then they are killed, so that its successor
can start."""
GRACE_SECONDS = 5.0
"""Time after a recall's deadline in which the lender reports that it has passed. Then its borrower
is killed without a report: the lender may be in a long job."""


@dataclass(slots=True)
class _Pair:
    """Two workers that know each other, or are about to."""

    epoch: int
    met: set[str] = field(default_factory=set)
    leases: dict[tuple[str, int], dict[int, float]] = field(default_factory=dict)
    """By lender and lease, its pages, each with the time at which its return is overdue."""
    condemned: bool = False
    """Whether one of the two is being killed."""


@dataclass(slots=True)
class _DeadMemory:
    """The memory of a worker that has ended."""

    users: set[str]
    """Devices that may map it still."""
    until: float
    """When they are killed."""


class Leases:
    """The leases between one server's devices; `handle` has to be called with `LookEvent` at
    `due`."""

    def __init__(self, devices: LendingDevices) -> None:
        self._devices = devices
        self._addresses: dict[str, str] = {}
        """Address of the memory of each device whose worker serves and may lend."""
        self._pairs: dict[frozenset[str], _Pair] = {}
        self._epochs = 0
        self._dead: dict[str, _DeadMemory] = {}
        """By device whose worker has been reaped and not been replaced."""
        self._orders: dict[int, LeaseOrderEvent] = {}
        """Orders that lenders have not answered."""
        self._operators: set[tuple[str, str]] = set()
        """Lenders and borrowers between which operators have ordered something."""
        self._reasons: dict[tuple[str, str], str] = {}
        """By lender and borrower, the reason of the last order to lend that was carried out."""
        self._free: dict[tuple[str, ...], tuple[tuple[str, str], ...]] = {}
        """Results of `free_pairs`, by devices, since the last event that may have changed them."""
        self._now = 0.0
        self._out: list[LeaseInstruction] = []

    @property
    def due(self) -> float:
        """Time of the next `LookEvent`; inf: none is needed."""
        overdue = (_overdue(pair) for pair in self._pairs.values() if not pair.condemned)
        kills = (dead.until for dead in self._dead.values())
        return min(min(overdue, default=inf), min(kills, default=inf))

    @property
    def standing(self) -> tuple[LeaseView, ...]:
        """All that is lent, by lender and borrower."""
        found = []
        for names, pair in self._pairs.items():
            if not pair.leases:
                continue
            for lender in sorted(names):
                (borrower,) = names - {lender}
                pages = _lent(pair, lender)
                if pages:
                    recalled = sum(due < inf for due in pages)
                    way = lender, borrower
                    why, held = self._reasons.get(way, ""), way in self._operators
                    found.append(LeaseView(*way, len(pages), recalled, why, held))
        return tuple(found)

    def can_lend(self, lender: str, borrower: str) -> bool:
        """Return whether pages can be lent between two devices now."""
        return self._met(lender, borrower) is not None

    def free_pairs(self, names: Iterable[str]) -> tuple[tuple[str, str], ...]:
        """Return (lender, borrower) of all devices that can lend now, and whose lending is up to
        policies, in the order of `names`."""
        key = tuple(names)
        if key not in self._free:
            met = (way for way in permutations(key, 2) if self.can_lend(*way))
            self._free[key] = tuple(way for way in met if not self.reserved(*way))
        return self._free[key]

    def reserved(self, lender: str, borrower: str) -> bool:
        """Return whether an operator has ordered what is lent, so that policies leave it alone."""
        return (lender, borrower) in self._operators

    def handle(self, now: float, event: LeaseEvent) -> list[LeaseInstruction]:
        """Handle an event at `now`, in seconds of any clock that does not go back."""
        self._now, self._out = now, []
        policy_order = isinstance(event, LeaseOrderEvent) and not event.by_operator
        if not policy_order and not isinstance(event, LeaseMessageEvent | OrderAnsweredEvent):
            self._free.clear()
        match event:
            case MemoryOpenedEvent(device, address, epoch):
                self._epochs = max(self._epochs, epoch)
                self._introduce(device, address)
            case LeaseMessageEvent(sender, message):
                self._pass_on(sender, message)
            case PeerReportEvent():
                self._reported(event)
            case LeaseOrderEvent():
                self._order(event)
            case OrderAnsweredEvent(number, outcome):
                order = self._orders.pop(number, None)
                if order is not None:
                    if isinstance(order.command, Lend) and outcome.code is None:
                        self._reasons[order.lender, order.command.to] = order.command.why
                    self._out.append(OrderEnded(number, outcome))
            case ReleasePairEvent(lender, borrower):
                self._operators.discard((lender, borrower))
            case DeviceLostEvent(device):
                self._lose(device)
            case DeviceReapedEvent(device):
                self._reap(device)
            case LookEvent():
                self._look()
        return self._out

    # -- orders -----------------------------------------------------------------------------------

    def _order(self, order: LeaseOrderEvent) -> None:
        lender, command = order.lender, order.command
        refused = None
        if not order.by_operator and self.reserved(lender, command.to):
            refused = f"an operator has ordered what {lender} lends to {command.to}"
        if isinstance(command, Lend):
            refused = self._devices.objection(lender, command.to) or refused
            if refused is None and not self.can_lend(lender, command.to):
                refused = f"{lender} and {command.to} do not know each other yet"
        if refused is None and order.by_operator:
            self._operators.add((lender, command.to))
        if refused is not None:
            self._out.append(OrderEnded(order.number, CommandOutcome("refused", refused)))
        elif self._devices.is_up(lender):
            self._orders[order.number] = order
            by = OPERATOR if order.by_operator else POLICY
            self._out.append(OrderDevice(order.number, lender, command, by))
        else:
            down = CommandOutcome("unavailable", f"no worker of {lender} serves")
            self._out.append(OrderEnded(order.number, down))

    # -- messages of workers ----------------------------------------------------------------------

    def _introduce(self, device: str, address: str) -> None:
        self._addresses[device] = address
        for peer in self._addresses:
            names = frozenset((device, peer))
            if len(names) < 2 or names in self._pairs:
                continue
            ways = (device, peer), (peer, device)
            if all(self._devices.objection(*way) is not None for way in ways):
                continue
            self._epochs += 1
            self._pairs[names] = _Pair(self._epochs)
            for a, b in ways:
                self._out.append(IntroducePeer(a, b, self._epochs, self._addresses[b]))

    def _pass_on(self, sender: str, message: LeaseMessage) -> None:
        """Note and pass on a message of the present pair, from the end that may send it."""
        lease = message.lease
        returned = isinstance(message, PagesReturnedEvent)
        allowed, receiver = lease.lender, lease.borrower
        if returned:
            allowed, receiver = receiver, allowed
        pair = self._pairs.get(frozenset((lease.lender, lease.borrower)))
        if sender != allowed or pair is None or pair.epoch != lease.epoch:
            return
        self._note(pair, lease, message)
        if self._devices.is_up(receiver):
            self._out.append(PassLeaseMessage(receiver, message))

    def _note(self, pair: _Pair, lease: Lease, message: LeaseMessage) -> None:
        """Note what a message changes of a lease."""
        key = lease.lender, lease.id
        pages = pair.leases.setdefault(key, {})
        match message:
            case PagesLentEvent():
                pages.update(dict.fromkeys(lease.pages, inf))
            case PagesRecalledEvent(_, seconds):
                overdue = self._now + seconds + GRACE_SECONDS
                pages.update({p: min(overdue, pages[p]) for p in lease.pages if p in pages})
            case PagesReturnedEvent():
                for page in lease.pages:
                    pages.pop(page, None)
        if not pages:
            del pair.leases[key]

    def _reported(self, event: PeerReportEvent) -> None:
        device, report = event.device, event.report
        if isinstance(report, PeerReleasedReport):
            self._release(report.peer, device)
            return
        names = frozenset((device, report.peer))
        pair = self._pairs.get(names)
        if pair is None or pair.epoch != report.epoch:
            return
        if isinstance(report, PeerMetReport):
            pair.met.add(device)
        else:
            self._condemn(pair, device, report.peer)

    # -- deadlines and deaths ---------------------------------------------------------------------

    def _condemn(self, pair: _Pair, lender: str, borrower: str) -> None:
        """Kill a borrower that has not returned pages in time, so that they become free."""
        if not pair.condemned:
            pair.condemned = True
            why = f"{lender} waits in vain for pages it has lent"
            self._out.append(KillWorker(borrower, why))

    def _look(self) -> None:
        for names, pair in self._pairs.items():
            for (lender, _), pages in pair.leases.items():
                if min(pages.values()) <= self._now:
                    (borrower,) = names - {lender}
                    self._condemn(pair, lender, borrower)
        for device, dead in self._dead.items():
            if dead.until <= self._now:
                dead.until = inf
                why = f"it uses the memory of {device}, which has ended"
                self._out += [KillWorker(user, why) for user in sorted(dead.users)]

    def _lose(self, device: str) -> None:
        """A worker has died: its mappings of others' memory have ended with it."""
        self._addresses.pop(device, None)
        for names, pair in self._pairs.items():
            pair.condemned |= device in names
        for number, order in list(self._orders.items()):
            if order.lender == device:
                del self._orders[number]
                gone = CommandOutcome("unavailable", f"the worker of {device} is gone")
                self._out.append(OrderEnded(number, gone))
        for dead in list(self._dead):
            self._release(dead, device)

    def _reap(self, device: str) -> None:
        users = set()
        for names in [names for names in self._pairs if device in names]:
            pair = self._pairs.pop(names)
            (other,) = names - {device}
            if self._devices.is_up(other):
                self._out.append(AnnouncePeerEnd(other, device, pair.epoch))
                users.add(other)
        self._dead[device] = _DeadMemory(users, self._now + RELEASE_SECONDS)
        self._replace_if_free(device)

    def _release(self, dead: str, user: str) -> None:
        if dead in self._dead:
            self._dead[dead].users.discard(user)
            self._replace_if_free(dead)

    def _replace_if_free(self, dead: str) -> None:
        if not self._dead[dead].users:
            del self._dead[dead]
            self._out.append(ReplaceWorker(dead))

    def _met(self, a: str, b: str) -> _Pair | None:
        """Return the pair of two devices that know each other and serve."""
        names = frozenset((a, b))
        pair = self._pairs.get(names)
        return pair if pair is not None and pair.met == names and not pair.condemned else None


def _overdue(pair: _Pair) -> float:
    pages = (due for lease in pair.leases.values() for due in lease.values())
    return min(pages, default=inf)


def _lent(pair: _Pair, lender: str) -> Sequence[float]:
    """Return the times at which pages lent by one of a pair are overdue."""
    leases = (pages for (by, _), pages in pair.leases.items() if by == lender)
    return [due for pages in leases for due in pages.values()]
