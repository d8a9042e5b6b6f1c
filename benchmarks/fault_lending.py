"""Workers of `benchmarks.fault_world` that lend pages to each other, by the engine's own code.

Each worker has a pool without memory (`vm_null`), `engine.lending.Lending`, and uses pages at
random: its own ones, and those that it has borrowed. Some workers never return what they use.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ballast.control.leases import GRACE_SECONDS
from ballast.core.actions import Lend, Recall, Short
from ballast.core.command import CommandOutcome
from ballast.core.lease import LendingMessage, PeerGoneEvent, PeerMetEvent
from ballast.engine.lending import Lending
from ballast.memory.lending.borrower import Borrower
from ballast.memory.lending.lender import OWNER
from ballast.memory.pool import Pool
from ballast.memory.vm_null import NullVm
from ballast.transport.worker_messages.lending_messages import (
    LeaseMsg,
    MeetPeerMsg,
    PeerEndedMsg,
)

N_PAGES = 24
LATE_SECONDS = 20.0
"""Longest delay of messages in these worlds, and of a worker's step: so much later than at its
deadline may a lease end."""
Answered = Callable[[CommandOutcome], object]


class LendingProcess(Protocol):
    """What checks read of a worker."""

    @property
    def alive(self) -> bool: ...

    @property
    def memory(self) -> WorkerMemory: ...


@dataclass
class WorkerMemory:
    """The pages of one worker: its own, lent and borrowed ones."""

    name: str
    address: str
    rng: random.Random
    known: dict[str, WorkerMemory]
    """The memory of all workers that there ever were, by address."""
    stuck: bool = False
    """Whether it never returns what it uses."""
    ahead: float = 0.0
    """By how much the worker's clock is ahead, in seconds."""
    rate: float = 1.0
    """Its seconds per second."""
    lending: Lending = field(init=False)
    changed: bool = False
    """Whether pages may have been lent or returned, or may be late, since the last check."""
    _own: list[int] = field(default_factory=list)
    _used: list[int] = field(default_factory=list)
    _recalls: list[tuple[str, Answered]] = field(default_factory=list)

    def __post_init__(self) -> None:
        vm = NullVm(1, N_PAGES)
        self.pool = Pool(vm, N_PAGES)
        self.lending = Lending(self.pool, Borrower(self.pool, vm, self.name), self.name)
        self.known[self.address] = self

    def clock(self, now: float) -> float:
        """Return the time on the worker's clock."""
        return self.rate * now + self.ahead

    def connect(self, send: Callable[[LendingMessage], None]) -> None:
        """Send messages to the controller by `send`."""
        self.lending.send = send

    def order(self, command: Lend | Recall, now: float, answered: Answered) -> None:
        """Carry out an order of the controller; a recall ends when the pages are back."""
        self.changed = True
        if isinstance(command, Lend):
            lease = self.lending.lend(command.to, command.pages)
            refused = isinstance(lease, str)
            answered(CommandOutcome("refused", str(lease)) if refused else CommandOutcome())
        elif self.lending.recall(command.to, command.pages, self.clock(now), command.seconds):
            self._recalls.append((command.to, answered))
        else:
            answered(CommandOutcome("refused", "nothing is lent"))

    def handle(self, message: MeetPeerMsg | PeerEndedMsg | LeaseMsg) -> None:
        """Handle a message of the controller."""
        self.changed = True
        match message:
            case MeetPeerMsg(peer=peer, epoch=epoch, address=address):
                exported = self.known[address].pool.vm.export(())
                self.lending.exports[peer, epoch] = exported
                self.lending.handle(PeerMetEvent(peer, epoch, exported.n_pages))
            case PeerEndedMsg(peer=peer, epoch=epoch):
                self.lending.handle(PeerGoneEvent(peer, epoch))
            case LeaseMsg():
                self.lending.handle(message.event)
        self.lending.answer()

    def step(self, now: float) -> None:
        """Take and release pages, return what is recalled, and look for borrowers that are late."""
        rng, borrower = self.rng, self.lending.borrower
        if rng.random() < 0.3:
            pages = self.pool.allocate("own", rng.randrange(1, 4))
            self._own += () if isinstance(pages, Short) else pages
        if self._own and rng.random() < 0.3:
            self.pool.give_back("own", [self._own.pop()])
        if rng.random() < 0.5:
            taken = borrower.take("kv", rng.randrange(1, 4))
            self._used += () if isinstance(taken, Short) else taken
        wanted = {page.page for page in borrower.wanted()}
        self.changed |= bool(wanted) or self.lending.awaiting
        for page in list(self._used):
            if not self.stuck and rng.random() < (0.5 if page in wanted else 0.1):
                self._used.remove(page)
                borrower.release("kv", [page])
        self.lending.check(self.clock(now))
        self.lending.answer()
        for peer, answered in list(self._recalls):
            if not self.lending.awaits(peer):
                self._recalls.remove((peer, answered))
                answered(CommandOutcome())
        if self.changed:
            self.lending.validate()

    def mapped(self) -> dict[tuple[int, int], set[int]]:
        """Return the pages of other workers' memory that are mapped here, by the device that its
        exports name."""
        found: dict[tuple[int, int], set[int]] = {}
        for peer in self.lending.borrower._peers:
            pages = found.setdefault(peer.memory, set())
            pages.update(page - peer.first for page in peer.lease_of)
        return found

    @property
    def exported(self) -> tuple[int, int]:
        """The device that exports of this memory name."""
        return self.pool.vm.export(()).device

    def lent_to(self, name: str) -> dict[int, float]:
        """Return the pages that are lent to a device, with the times at which they are due."""
        found = self.lending._lender._peers.get(name)
        leases = [] if found is None else found.leases.values()
        return {page: due for lease in leases for page, due in lease.items()}


def check_pages(workers: Mapping[str, LendingProcess], now: float) -> tuple[int, int, int]:
    """Return the pages with two owners, those with none, and those lent beyond their deadline.

    A page that a live borrower maps has to be lent to it by its live lender; a page that is lent
    while no borrower maps it is on its way, or has none; no borrower that lives has a page later
    than LATE_SECONDS, and the controller's own, after it was due.
    """
    twice = without = late = 0
    live = {name: worker.memory for name, worker in workers.items() if worker.alive}
    mapped_by = {name: memory.mapped() for name, memory in live.items()}
    for name, lender in live.items():
        exported = lender.exported
        for other in live:
            if other == name:
                continue
            mapped = mapped_by[other].get(exported, set())
            lent = lender.lent_to(other)
            twice += len(mapped - lent.keys())
            without += len(lent.keys() - mapped)
            longest, there = GRACE_SECONDS + LATE_SECONDS, lender.clock(now)
            late += sum(lent[p] + longest < there for p in mapped & lent.keys())
        ledger = lender.pool.ledger
        lent_pages = {p for other in workers for p in lender.lent_to(other)}
        assert all(ledger.owner_of(p) == OWNER for p in lent_pages)
    return twice, without, late


def still_maps(workers: Mapping[str, LendingProcess], gone: WorkerMemory) -> int:
    """Return the pages of a dead worker that live ones map."""
    memories = [w.memory for w in workers.values() if w.alive and w.memory is not gone]
    exported = gone.exported
    return sum(len(m.mapped().get(exported, ())) for m in memories)
