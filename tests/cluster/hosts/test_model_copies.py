"""Which host sends a model to which."""

from __future__ import annotations

import random

import pytest

from ballast.cluster.hosts.model_copies import SEGMENTS, ModelCopies, Orders
from ballast.transport.host_messages import (
    ModelDroppedMsg,
    ModelFailedMsg,
    ModelKeptMsg,
    ReadFilesMsg,
    ReceiveModelMsg,
    SenderReadyMsg,
    SendModelMsg,
    WantModelMsg,
)

MODEL = ("a model", "a kind")


class World:
    """Hosts that do at once what they are ordered."""

    def __init__(self, *hosts: str) -> None:
        self.copies = ModelCopies()
        self.senders: dict[str, str] = {}
        """Of each host that receives."""
        self.kept = set[str]()
        self.reads = list[str]()
        for host in hosts:
            self.join(host)

    def join(self, host: str, machine: str = "x86") -> None:
        self.copies.join(host, f"ip of {host}", machine)

    def keep(self, host: str, listing: str = "files") -> None:
        self.senders.pop(host, None)
        self.kept.add(host)
        self.do(self.copies.handle(host, ModelKeptMsg(*MODEL, listing)))

    def want(self, host: str, listing: str = "") -> None:
        self.do(self.copies.handle(host, WantModelMsg(*MODEL, listing, f"key of {host}")))

    def fail(self, host: str) -> None:
        del self.senders[host]
        self.do(self.copies.handle(host, ModelFailedMsg(*MODEL, "a test")))

    def leave(self, host: str) -> None:
        self.senders.pop(host, None)
        self.kept.discard(host)
        self.do(self.copies.leave(host))
        self.stop(host)

    def do(self, orders: Orders) -> None:
        for host, order in orders:
            match order:
                case SendModelMsg():
                    assert order.ip == f"ip of {host}"
                    ready = SenderReadyMsg(order.id, host, f"key {order.id}")
                    ((to, receive),) = self.copies.handle(host, ready)
                    assert order.receiver == f"key of {to}"
                    assert isinstance(receive, ReceiveModelMsg)
                    assert receive.sender == f"key {order.id}"
                    assert receive.address == host
                    self.senders[to] = host
                case ReadFilesMsg():
                    self.reads.append(host)
                    self.stop(host)

    def stop(self, host: str) -> None:
        """A host passes nothing on any more."""
        for receiver in [to for to, sender in self.senders.items() if sender == host]:
            self.fail(receiver)

    def chain(self, host: str) -> list[str]:
        """A host, the one it receives from, and so on; ends."""
        found = [host]
        while (sender := self.senders.get(found[-1])) is not None:
            assert sender not in found, "they wait for each other"
            found.append(sender)
        return found


def test_a_host_without_files_gets_the_model_from_one_that_has_it() -> None:
    of = World("a", "b", "c")
    of.want("b")
    assert (of.senders, of.reads) == ({}, ["b"])  # nobody has it: it says itself what is missing
    of.keep("a")
    of.want("b")
    of.want("c", "others")  # all serve the same weights
    assert of.senders == {"b": "a", "c": "b"}


def test_files_that_are_the_same_are_read() -> None:
    of = World("a", "b", "c")
    of.keep("a")
    of.want("b", "files")
    assert (of.senders, of.reads) == ({}, ["b"])


def test_hosts_that_ask_at_once_are_a_chain() -> None:
    hosts = [f"{i}" for i in range(10)]
    of = World("a", *hosts)
    of.keep("a")
    for host in hosts:
        of.want(host)
    assert sorted(of.senders.values()) == sorted(["a", *hosts[:-1]]), "each sends to one"
    # Passed on segment by segment: the last one has it a segment later for each host before it.
    longest = max(len(of.chain(host)) - 1 for host in hosts)
    assert (SEGMENTS + longest - 1) / SEGMENTS < 1.6
    for host in hosts:
        of.keep(host)
    of.join("late")
    of.want("late")
    assert len(of.chain("late")) == 2


def test_a_busy_host_sends_to_one_more_before_a_chain_is_longer_than_a_copy() -> None:
    hosts = [f"{i:02}" for i in range(3 * SEGMENTS)]
    of = World("a", *hosts)
    of.keep("a")
    for host in hosts:
        of.want(host)
    receivers = [*of.senders.values()]
    assert 1 < max(map(receivers.count, receivers)) <= 3
    assert max(len(of.chain(host)) for host in hosts) <= 2 * SEGMENTS


def test_another_host_sends_what_the_first_does_not() -> None:
    of = World("a", "b", "c")
    of.keep("a")
    of.keep("b")
    of.want("c")
    assert of.senders == {"c": "a"}
    of.fail("c")
    assert of.senders == {"c": "b"}
    of.fail("c")
    assert (of.senders, of.reads) == ({}, ["c"])


def test_a_host_that_dies_before_it_listens_is_replaced() -> None:
    of = World("a", "b", "c")
    of.keep("a")
    of.keep("b")
    ((sender, _),) = of.copies.handle("c", WantModelMsg(*MODEL, "", "key of c"))
    assert sender == "a"
    of.leave("a")
    assert of.senders == {"c": "b"}


def test_weights_are_not_sent_to_another_kind_of_machine() -> None:
    of = World("a")
    of.join("b", "arm")
    of.keep("a")
    of.want("b")
    assert of.reads == ["b"]


def test_what_is_dropped_is_not_sent() -> None:
    of = World("a", "b")
    of.keep("a")
    of.copies.handle("a", ModelDroppedMsg(*MODEL))
    of.want("b")
    assert of.reads == ["b"]


@pytest.mark.parametrize("seed", range(20))
def test_every_host_that_asks_is_answered_whatever_dies(seed: int) -> None:
    draw = random.Random(seed)
    hosts = [f"{i}" for i in range(6)]
    of = World(*hosts)
    alive, asked = set(hosts), list[str]()
    of.keep("0")
    for _ in range(200):
        host = draw.choice(hosts)
        what = draw.random()
        if host not in alive:
            alive.add(host)
            of.join(host)
        elif host in of.senders:
            if what < 0.3:
                of.fail(host)
            elif of.chain(host)[1] in of.kept:
                of.keep(host)
        elif what < 0.2:
            alive.discard(host)
            of.leave(host)
        elif host not in of.kept:
            asked, reads = [*asked, host], len(of.reads)
            of.want(host)
            assert host in of.senders or of.reads[reads:] == [host]
        for receiver in of.senders:
            assert of.chain(receiver)[-1] in of.kept, "nobody in its chain has the model"
    assert asked
