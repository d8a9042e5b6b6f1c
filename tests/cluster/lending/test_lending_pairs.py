"""Which workers know each other, whose words are passed on, and when a dead one is replaced."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ballast.cluster.lending import lending_pairs
from ballast.cluster.lending.lending_pairs import LendingPairs
from ballast.core.capability import Lendable, capabilities
from ballast.core.lease import Lease, PagesLentEvent, PagesRecalledEvent, PagesReturnedEvent
from ballast.transport.worker_messages.codec import ToWorker
from ballast.transport.worker_messages.lending_messages import (
    LeaseMsg,
    MeetPeerMsg,
    PeerEndedMsg,
    PeerReportMsg,
)

ABLE = capabilities([Lendable("a", 64), Lendable("b", 64), Lendable("c", 128), Lendable("d", 64)])


class Device:
    """What it was told, and why it was killed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.pages = f"at-{name}"
        self.down: str | None = None
        self.received: list[ToWorker] = []
        self.killed: list[str] = []

    def tell(self, message: ToWorker) -> None:
        assert self.down is None
        self.received.append(message)

    def kill(self, why: str) -> None:
        self.killed.append(why)

    def take(self) -> list[ToWorker]:
        received, self.received = self.received, []
        return received


class Devices(dict[str, Device]):
    lending = ABLE


class World:
    def __init__(self) -> None:
        self.devices = Devices({name: Device(name) for name in "abcd"})
        self.pairs: Any = LendingPairs(self.devices)  # type: ignore[arg-type]

    def serving(self, *names: str) -> None:
        for name in names:
            self.pairs.worker_ready(self.devices[name])

    def say(self, name: str, what: str, peer: str, epoch: int) -> None:
        self.pairs.lending_message(self.devices[name], PeerReportMsg(what, peer, epoch))  # type: ignore[arg-type]

    def meet(self, a: str, b: str) -> int:
        """Their epoch."""
        (epoch,) = {
            m.epoch for m in self.devices[a].take() if isinstance(m, MeetPeerMsg) and m.peer == b
        }
        self.devices[b].take()
        self.say(a, "met", b, epoch)
        assert not self.pairs.can_lend(a, b)
        self.say(b, "met", a, epoch)
        assert self.pairs.can_lend(b, a)
        return epoch

    def die(self, name: str) -> asyncio.Task[None]:
        self.devices[name].down = "it is dead"
        self.pairs.worker_died(self.devices[name], ())
        return asyncio.ensure_future(self.pairs.worker_reaped(self.devices[name]))


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
    assert not world.pairs.can_lend("a", "b")


def test_words_of_the_present_epoch_are_passed_on() -> None:
    world = World()
    world.serving("a", "b")
    epoch = world.meet("a", "b")
    a, b = world.devices["a"], world.devices["b"]
    lease = Lease(0, epoch, "a", "b", (1, 2))
    for word in (PagesLentEvent(lease), PagesRecalledEvent(lease)):
        world.pairs.lending_message(a, LeaseMsg.of(word))
        assert b.take() == [LeaseMsg.of(word)]
        world.pairs.lending_message(b, LeaseMsg.of(word))  # it is not the borrower's to say
        assert (a.take(), b.take()) == ([], [])
    world.pairs.lending_message(b, LeaseMsg.of(PagesReturnedEvent(lease)))
    assert a.take() == [LeaseMsg.of(PagesReturnedEvent(lease))]
    world.pairs.lending_message(a, LeaseMsg.of(PagesLentEvent(Lease(1, epoch + 1, "a", "b", (1,)))))
    world.pairs.lending_message(a, LeaseMsg.of(PagesLentEvent(Lease(1, epoch, "a", "c", (1,)))))
    assert b.take() == world.devices["c"].take() == []
    world.say("a", "overdue", "b", epoch + 1)
    assert b.killed == []
    world.say("a", "overdue", "b", epoch)
    assert b.killed == ["a waits in vain for pages it has lent"]


def test_a_successor_waits_until_the_memory_is_let_go_of_and_meets_anew() -> None:
    async def scenario() -> None:
        world = World()
        world.serving("a", "b")
        epoch = world.meet("a", "b")
        buried = world.die("a")
        await asyncio.sleep(0)
        assert world.devices["b"].take() == [PeerEndedMsg("a", epoch)]
        assert not world.pairs.can_lend("a", "b")
        assert not buried.done()
        world.say("b", "released", "a", epoch)
        await buried
        world.devices["a"].down = None
        world.serving("a")
        assert world.meet("b", "a") > epoch

    asyncio.run(scenario())


def test_both_may_die_at_once() -> None:
    async def scenario() -> None:
        world = World()
        world.serving("a", "b")
        world.meet("a", "b")
        first = world.die("a")
        await asyncio.sleep(0)
        second = world.die("b")
        await asyncio.wait_for(asyncio.gather(first, second), 240)
        assert not world.pairs.can_lend("a", "b")

    asyncio.run(scenario())


def test_whoever_does_not_let_go_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending_pairs, "RELEASE_SECONDS", 0.01)

    async def scenario() -> None:
        world = World()
        world.serving("a", "b")
        world.meet("a", "b")
        buried = world.die("a")
        while not world.devices["b"].killed:
            await asyncio.sleep(0)
        assert not buried.done()
        await world.die("b")
        await buried

    asyncio.run(scenario())
