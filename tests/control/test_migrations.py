"""Migrations between devices, with every order of messages and every fault of a small world."""

from __future__ import annotations

import random

import pytest

from ballast.control.migration_events import ActivationRefusedEvent, BlockFilledEvent, MigrateEvent
from ballast.control.migrations import ACTIVATION_SECONDS, ANSWER_SECONDS, REFUSED_SECONDS
from tests.control.migration_world import BLOCK, Worker, World


def world(*, weights: bool = True, n: int = 1) -> World:
    found = World({"a": Worker({"m"}), "b": Worker({"m"} if weights else set())}, decode=["b"])
    for i in range(n):
        found.add(f"r{i}", "a", prompt=5 + i)
    return found


def test_a_request_goes_on_with_all_of_its_kv() -> None:
    w = world()
    w.tell(MigrateEvent(1, "a", "m"))
    w.settle()
    w.validate()
    assert w.ended[0].left == 1
    request = w.requests["r0"]
    assert request.device == "b"
    adopted = w.workers["b"].adopted["r0"]
    assert adopted % BLOCK == 0
    assert 6 <= adopted <= len(request.submission.prompt) + len(request.output)


def test_requests_stay_where_no_other_device_has_the_weights() -> None:
    w = world(weights=False, n=3)
    w.tell(MigrateEvent(1, "a", "m"))
    w.settle()
    assert w.ended[0].left == 0
    assert {r.device for r in w.requests.values()} == {"a"}


def test_weights_are_brought_first_where_that_is_asked() -> None:
    w = world(weights=False, n=3)
    w.tell(MigrateEvent(1, "a", "m", bring=True))
    assert w.machine.awaits_weights
    w.settle()
    w.validate()
    assert w.ended[0].left == 3


@pytest.mark.parametrize("refused", [False, True])
def test_weights_that_do_not_come_are_given_up(refused: bool) -> None:
    w = world(weights=False)
    w.workers["b"].mute = True
    w.tell(BlockFilledEvent("a", "r0"))
    w.to_device["b"].clear()
    if refused:
        w.tell(ActivationRefusedEvent("b", "m"))
    assert w.machine.due == (REFUSED_SECONDS if refused else ACTIVATION_SECONDS)
    w.pass_time()
    assert not w.machine.busy
    assert w.requests["r0"].device == "a"


def test_a_first_block_hands_a_request_to_a_device_that_decodes() -> None:
    w = world(weights=False)
    w.tell(BlockFilledEvent("a", "r0"))
    w.settle()
    w.validate()
    assert w.requests["r0"].device == "b"


def test_an_order_for_a_request_on_its_way_does_not_disturb_it() -> None:
    w = world()
    w.tell(BlockFilledEvent("a", "r0"))
    w.tell(MigrateEvent(1, "a", "m"))
    w.settle()
    w.validate()
    assert w.requests["r0"].device == "b"


def test_a_source_that_never_lets_go_is_not_waited_for() -> None:
    w = world()
    w.tell(MigrateEvent(1, "a", "m"))
    w.deliver("a")
    w.hear("a")
    w.deliver("b")
    w.hear("b")
    w.to_device["a"].clear()  # the order to depart is lost
    w.now += ANSWER_SECONDS
    w.pass_time()
    w.settle()
    w.validate()
    assert w.requests["r0"].device == "b"
    assert w.workers["b"].adopted["r0"] == 0, "what followed the export is not there"


def test_at_most_a_few_are_under_way_at_a_time() -> None:
    w = world(n=20)
    w.tell(MigrateEvent(1, "a", "m"))
    assert len(w.machine.under_way) == 4
    w.settle()
    w.validate()
    assert w.ended[0].left == 20


STEPS = (
    *("to a", "to b", "from a", "from b", "compute a", "compute b"),
    *("end a", "end b", "time", "kill a", "kill b", "migrate a", "migrate b"),
)
WEIGHTS = (8, 8, 8, 8, 4, 4, 1, 1, 1, 1, 1, 1, 1)


def run(choices: list[str], n: int = 1, *, weights: bool = True) -> World:
    """Take the steps that are possible, in order, then settle."""
    w = world(n=n, weights=weights)
    w.tell(MigrateEvent(1, "a", "m", bring=True))
    orders = 1
    for what in choices:
        step, _, name = what.partition(" ")
        if step == "to" and w.to_device[name]:
            w.deliver(name)
        elif step == "from" and w.to_controller[name]:
            w.hear(name)
        elif step == "compute":
            w.compute(name)
        elif step == "end":
            w.finish(name)
        elif step == "time":
            w.pass_time()
        elif step == "kill":
            w.kill(name)
        elif step == "migrate":
            orders += 1
            w.tell(MigrateEvent(orders, name, "m"))
    w.settle()
    w.validate()
    assert len(w.ended) == orders
    assert not w.machine.busy
    return w


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_messages_and_faults_loses_no_request(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(100):
        choices = rng.choices(STEPS, WEIGHTS, k=rng.randrange(1, 60))
        run(choices, rng.randrange(1, 7), weights=rng.random() < 0.7)
