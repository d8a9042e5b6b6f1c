"""Which workers know each other, whose words are passed on, which orders are refused, and when
borrowers are killed and dead workers replaced."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import permutations
from types import SimpleNamespace
from typing import Any

from ballast.control.device_leases import DeviceLeases
from ballast.control.leases import GRACE_SECONDS, RELEASE_SECONDS
from ballast.core.actions import Lend, Recall
from ballast.core.capability import Lendable, capabilities
from ballast.core.command import CommandOutcome, DeviceCommand
from ballast.core.fleet import LeaseView
from ballast.core.lease import Lease, PagesLentEvent, PagesRecalledEvent, PagesReturnedEvent
from ballast.transport.worker_messages.codec import ToWorker
from ballast.transport.worker_messages.lending_messages import (
    LeaseMsg,
    MeetPeerMsg,
    PeerEndedMsg,
    PeerReportMsg,
)
from benchmarks.fault_world import VirtualTimers

ABLE = {
    (c.lender, c.borrower): c.why or None
    for c in capabilities(
        [Lendable("a", 64), Lendable("b", 64), Lendable("c", 128), Lendable("d", 64)]
    )
}
"""Why a device can never lend to another."""


class Device:
    """What it was told, and why it was killed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.pages = f"at-{name}"
        self.epoch = 0
        self.down: str | None = None
        self.report = SimpleNamespace(total=100)
        self.received: list[ToWorker] = []
        self.killed: list[str] = []
        self.orders: list[tuple[DeviceCommand, Callable[[CommandOutcome], object]]] = []

    def tell(self, message: ToWorker) -> None:
        assert self.down is None
        self.received.append(message)

    def order(
        self, command: DeviceCommand, answered: Callable[[CommandOutcome], object], by: str
    ) -> None:
        self.orders.append((command, answered))

    def kill(self, why: str) -> None:
        self.killed.append(why)

    def take(self) -> list[ToWorker]:
        received, self.received = self.received, []
        return received


class World:
    def __init__(self) -> None:
        self.devices = {name: Device(name) for name in "abcd"}
        self.timers = VirtualTimers()
        objection = lambda a, b: ABLE[a, b]  # noqa: E731
        self.leases: Any = DeviceLeases(self.devices, objection, self.timers)  # type: ignore[arg-type]
        self.replaced: list[str] = []
        self.ended: list[CommandOutcome] = []

    def serving(self, *names: str) -> None:
        for name in names:
            self.devices[name].down = None
            self.leases.worker_ready(self.devices[name])

    def say(self, name: str, what: str, peer: str, epoch: int) -> None:
        self.leases.lending_message(self.devices[name], PeerReportMsg(what, peer, epoch))  # type: ignore[arg-type]

    def send(self, name: str, word: Any) -> None:
        self.leases.lending_message(self.devices[name], LeaseMsg.of(word))

    def meet(self, a: str, b: str) -> int:
        """Their epoch."""
        (epoch,) = {
            m.epoch for m in self.devices[a].take() if isinstance(m, MeetPeerMsg) and m.peer == b
        }
        self.devices[b].take()
        self.say(a, "met", b, epoch)
        assert not self.leases.pairs.can_lend(a, b)
        self.say(b, "met", a, epoch)
        assert self.leases.pairs.can_lend(b, a)
        return epoch

    def die(self, name: str) -> None:
        self.devices[name].down = "it is dead"
        self.leases.worker_died(self.devices[name], ())
        self.leases.reaped(self.devices[name], partial(self.replaced.append, name))

    def order(self, lender: str, command: Lend | Recall, *, operator: bool = False) -> None:
        self.leases.order(lender, command, self.ended.append, by_operator=operator)

    def why(self) -> str | None:
        """The reason why the last order was refused."""
        outcome = self.ended.pop()
        return None if outcome.code is None else outcome.reason


def paired() -> tuple[World, int]:
    world = World()
    world.serving("a", "b")
    return world, world.meet("a", "b")


def test_all_that_can_lend_are_introduced_once() -> None:
    world = World()
    world.serving("a")
    world.devices["d"].pages = ""
    world.serving("d")
    assert world.devices["a"].take() == []
    world.serving("c", "b")
    assert world.devices["a"].received == [MeetPeerMsg("b", 1, "at-b")]
    assert world.devices["b"].received == [MeetPeerMsg("a", 1, "at-a")]
    assert world.devices["c"].received == world.devices["d"].received == []
    world.devices["d"].pages = "at-d"
    world.serving("d")
    assert world.devices["d"].received == [MeetPeerMsg("a", 2, "at-a"), MeetPeerMsg("b", 3, "at-b")]
    assert not world.leases.pairs.can_lend("a", "b")


def test_words_of_the_present_epoch_are_passed_on() -> None:
    world, epoch = paired()
    a, b = world.devices["a"], world.devices["b"]
    lease = Lease(0, epoch, "a", "b", (1, 2))
    for word in (PagesLentEvent(lease), PagesRecalledEvent(lease, 30.0)):
        world.send("a", word)
        assert b.take() == [LeaseMsg.of(word)]
        world.send("b", word)  # it is not the borrower's to say
        assert (a.take(), b.take()) == ([], [])
    world.send("b", PagesReturnedEvent(lease))
    assert a.take() == [LeaseMsg.of(PagesReturnedEvent(lease))]
    world.send("a", PagesLentEvent(Lease(1, epoch + 1, "a", "b", (1,))))
    world.send("a", PagesLentEvent(Lease(1, epoch, "a", "c", (1,))))
    assert b.take() == world.devices["c"].take() == []
    world.say("a", "overdue", "b", epoch + 1)
    assert b.killed == []
    world.say("a", "overdue", "b", epoch)
    assert b.killed == ["a waits in vain for pages it has lent"]
    assert not world.leases.pairs.can_lend("a", "b")


def test_a_borrower_that_is_late_is_killed_though_its_lender_says_nothing() -> None:
    world, epoch = paired()
    lease = Lease(0, epoch, "a", "b", (1, 2, 3))
    world.send("a", PagesLentEvent(lease))
    world.send("a", PagesRecalledEvent(lease.part((1, 2)), 10.0))
    assert world.leases.pairs.standing == (LeaseView("a", "b", 3, 2),)
    world.send("b", PagesReturnedEvent(lease.part((1,))))
    assert world.leases.pairs.standing == (LeaseView("a", "b", 2, 1),)
    assert world.timers.step()
    assert world.timers.now() == 10.0 + GRACE_SECONDS
    assert world.devices["b"].killed == ["a waits in vain for pages it has lent"]
    assert not world.timers.step()
    world.die("b")
    assert world.leases.pairs.standing == ()
    assert world.replaced == []  # a may still map its memory
    world.say("a", "released", "b", epoch)
    assert world.replaced == ["b"]


def test_a_borrower_that_returned_in_time_lives() -> None:
    world, epoch = paired()
    lease = Lease(0, epoch, "a", "b", (1, 2))
    world.send("a", PagesLentEvent(lease))
    world.send("a", PagesRecalledEvent(lease, 10.0))
    world.send("b", PagesReturnedEvent(lease))
    assert not world.timers.step()
    assert world.leases.pairs.standing == ()


def test_a_successor_waits_until_the_memory_is_let_go_of_and_meets_anew() -> None:
    world, epoch = paired()
    world.die("a")
    assert world.devices["b"].take() == [PeerEndedMsg("a", epoch)]
    assert not world.leases.pairs.can_lend("a", "b")
    assert world.replaced == []
    world.say("b", "released", "a", epoch)
    assert world.replaced == ["a"]
    world.serving("a")
    assert world.meet("b", "a") > epoch


def test_both_may_die_at_once() -> None:
    world, _ = paired()
    world.die("a")
    world.die("b")
    assert world.replaced == ["a", "b"]
    assert not world.leases.pairs.can_lend("a", "b")


def test_whoever_does_not_let_go_is_killed() -> None:
    world, _ = paired()
    world.die("a")
    assert world.timers.step()
    assert world.timers.now() == RELEASE_SECONDS
    assert world.devices["b"].killed == ["it uses the memory of a, which has ended"]
    assert world.replaced == []
    world.die("b")
    assert world.replaced == ["a", "b"]


def test_orders_are_refused_that_devices_cannot_carry_out() -> None:
    world = World()
    world.serving("a", "b", "c")
    world.order("a", Lend("c", 1))
    assert "pages differ" in (world.why() or "")
    world.order("a", Lend("b", 1))
    assert world.why() == "a and b do not know each other yet"
    epoch = world.meet("a", "b")
    world.order("a", Lend("b", 101))  # more than it has itself
    ((command, answered),) = world.devices["a"].orders
    assert command == Lend("b", 101)
    world.send("a", PagesLentEvent(Lease(0, epoch, "a", "b", tuple(range(60)))))
    answered(CommandOutcome())
    assert world.why() is None
    world.order("a", Recall("b", None, 5.0))
    assert not world.ended
    world.die("a")
    (end,) = world.ended
    assert end == CommandOutcome("unavailable", "the worker of a is gone")
    world.ended.clear()
    world.order("a", Recall("b", None, 5.0))
    assert world.ended[0].code == "unavailable"


def test_what_an_operator_has_ordered_no_policy_changes() -> None:
    world, _ = paired()
    world.order("a", Recall("b", None, 5.0))
    world.order("a", Lend("b", 1), operator=True)
    world.order("a", Recall("b", None, 5.0))
    assert world.why() == "an operator has ordered what a lends to b"
    world.order("b", Lend("a", 1))  # nothing was ordered of that
    world.order("a", Lend("b", 1), operator=True)
    assert not world.ended
    assert len(world.devices["a"].orders) == 3
    assert world.leases.pairs.reserved("a", "b")
    assert not world.leases.pairs.reserved("b", "a")
    assert world.leases.release("a", "b")
    world.order("a", Recall("b", None, 5.0))
    assert not world.ended
    assert not world.leases.release("a", "b")  # nobody holds it any more


def test_the_book_says_who_lends_to_whom_and_why() -> None:
    world, epoch = paired()
    world.order("a", Lend("b", 2, "b lacks 2 pages"))
    ((_, answered),) = world.devices["a"].orders
    world.send("a", PagesLentEvent(Lease(0, epoch, "a", "b", (1, 2))))
    answered(CommandOutcome())
    assert world.leases.pairs.standing == (LeaseView("a", "b", 2, 0, "b lacks 2 pages"),)
    world.order("a", Lend("b", 1, "by an operator"), operator=True)
    assert world.leases.pairs.standing == (LeaseView("a", "b", 2, 0, "b lacks 2 pages", True),)
    world.devices["a"].orders[1][1](CommandOutcome("refused", "short of 1 pages"))
    assert world.leases.pairs.standing[0].why == "b lacks 2 pages"


def test_pairs_that_policies_lend_between_follow_every_event() -> None:
    world = World()

    def free() -> set[tuple[str, str]]:
        found = world.leases.pairs.free_pairs(world.devices)
        ways = [w for w in permutations(world.devices, 2) if world.leases.pairs.can_lend(*w)]
        assert found == tuple(w for w in ways if not world.leases.pairs.reserved(*w))
        assert world.leases.pairs.free_pairs(world.devices) == found, "asked again"
        return set(found)

    assert free() == set()
    world.serving("a", "b")
    assert free() == set(), "they have not met"
    epoch = world.meet("a", "b")
    assert free() == {("a", "b"), ("b", "a")}
    world.order("a", Lend("b", 1))
    assert free() == {("a", "b"), ("b", "a")}
    world.order("a", Lend("b", 1), operator=True)
    assert free() == {("b", "a")}
    assert world.leases.release("a", "b")
    assert free() == {("a", "b"), ("b", "a")}
    world.serving("d")
    world.say("a", "met", "d", epoch + 1)
    assert len(free()) == 2
    world.say("d", "met", "a", epoch + 1)
    assert len(free()) == 4
    world.say("a", "overdue", "b", epoch)
    assert free() == {("a", "d"), ("d", "a")}
    world.die("a")
    assert free() == set()
