"""The machine of orders: one door for operators and policies, and one order at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ballast.control.migration_events import DeviceLostEvent, LookEvent
from ballast.control.orders import POLL_SECONDS
from ballast.core.actions import ActivateCommand, EvictCommand, ReleaseMemory
from ballast.core.command import Add, Remove
from ballast.core.fleet import FleetAction, FleetDecision, FleetView, Place, Withdraw
from ballast.core.fleet_orders import Drain, DrainHost, Migrate, Rehome, Uncordon
from ballast.core.order import (
    DONE,
    HandOver,
    MoveRequests,
    Order,
    SendCommand,
    Step,
)
from ballast.core.settings import ModelSettings
from ballast.policy.base import FleetPolicy
from tests.control.order_fleet import OrderFleet


class Script(FleetPolicy):
    """Decides on given actions, some at each call, a second apart."""

    def __init__(self, *turns: Sequence[FleetAction]) -> None:
        self.turns = list(turns)
        self.memos: list[object] = []

    @property
    def moves(self) -> bool:
        return True

    def __call__(self, view: FleetView, memo: object) -> FleetDecision:
        self.memos.append(memo)
        actions = tuple(self.turns.pop(0)) if self.turns else ()
        return FleetDecision(actions, len(self.memos), view.now + 1.0)


def is_serving(step: Step) -> bool:
    return isinstance(step, SendCommand) and isinstance(step.command, Add)


def fleet(*turns: Sequence[FleetAction]) -> OrderFleet:
    script = Script(*turns) if turns else None
    return OrderFleet({"a": ["x"], "b": ["y"]}, ["x", "y", "z"], script)


def serving(device: str, model: str) -> SendCommand:
    return SendCommand(device, Add(ModelSettings(name=model, path=model)))


def look(of: OrderFleet, now: float) -> None:
    of.time = now
    of.handle(LookEvent())


def outcome(of: OrderFleet, number: int) -> tuple[str | None, str]:
    return of.ended[number].code, of.ended[number].reason


def test_a_policy_moves_a_model_by_placing_and_withdrawing_it() -> None:
    of = fleet([Place("a", "y", "pressure", activate=True), Withdraw("a", "x")])
    of.fleet["x"].open["a"] = 1
    look(of, 0.0)
    assert [(done.epoch, done.refused) for done in of.actions] == [(0, None), (1, None)]
    activated = SendCommand("y", ActivateCommand("a", "pressure"), awaited=False)
    assert of.did == [serving("y", "a"), activated]
    assert of.machine.due == 0.0
    look(of, 0.0)
    assert of.did[2:] == [MoveRequests("x", "a")]
    assert (of.fleet.serving("a"), of.fleet.taking("a")) == (["x", "y"], ["y"])
    assert of.machine.due == POLL_SECONDS
    of.fleet["x"].open.clear()
    look(of, POLL_SECONDS)
    assert of.did[4:] == [SendCommand("x", Remove("a", 30.0))]
    assert of.fleet.serving("a") == ["y"]
    assert of.machine.due == 1.0
    assert not of.machine.busy
    of.give(1, EvictCommand("a"), "y")
    assert of.fleet["y"].ordered_by == ["policy", "policy", "operator"]


def test_a_model_stays_where_it_was_to_leave_once_no_other_has_it() -> None:
    of = fleet([Place("a", "y"), Withdraw("a", "x")])
    look(of, 0.0)
    of.fleet["y"].serve(["b"])
    look(of, 0.0)
    assert of.fleet.taking("a") == ["x"]
    assert not of.machine.busy


def test_what_cannot_be_done_is_refused_with_the_reason() -> None:
    turn = [Place("a", "x"), Withdraw("a", "x"), Withdraw("a", "y"), Place("c", "x")]
    of = fleet(turn)
    look(of, 0.0)
    assert [done.refused for done in of.actions] == [
        "x serves a already",
        "a is on no other device",
        "a is not on 'y'",
        "there is no model 'c'",
    ]
    of.fleet["z"].down = "the worker is gone"
    of.give(1, Place("a", "z"))
    assert outcome(of, 1) == ("unavailable", "the worker is gone")
    of.give(2, Place("a", "w"))
    assert outcome(of, 2) == ("refused", "there is no device 'w'; devices: x, y, z")


def test_an_action_decided_before_an_operators_order_is_refused() -> None:
    of = fleet([Place("a", "y"), Place("b", "x")])
    of.held = is_serving
    look(of, 0.0)
    of.give(1, Place("b", "z"))
    of.give(2, Place("b", "x"))
    of.release()  # the policy's first action; operators' orders overtake its second
    of.held = lambda step: False
    of.release()
    assert [outcome(of, n)[0] for n in (1, 2)] == [None, None]
    assert [done.refused for done in of.actions] == [
        None,
        "it was decided in epoch 1, and this is 3",
    ]
    assert of.fleet.serving("b") == ["x", "y", "z"]


def test_the_policy_is_called_when_its_actions_have_ended() -> None:
    of = fleet([Place("a", "y")], [])
    of.held = is_serving
    look(of, 0.0)
    look(of, 5.0)
    assert of.machine.due == float("inf")
    of.release()
    assert of.machine.due == 1.0
    look(of, 5.0)
    assert of.machine.due == 6.0


def test_a_worker_that_dies_ends_the_order_that_waits_for_it() -> None:
    of = fleet()
    of.held = is_serving
    of.give(1, Place("a", "z"))
    of.give(2, Place("b", "x"))
    of.fleet["z"].down = "the worker is gone (signal 9)"
    of.handle(DeviceLostEvent("z"))
    assert outcome(of, 1) == ("unavailable", "add was not done: the worker is gone (signal 9)")
    assert of.waiting[-1].step == serving("x", "b"), "the next one has begun"
    of.release()  # an answer of the dead worker is not taken for anything
    assert of.ended[2] == DONE


def test_an_order_is_done_by_all_devices_or_undone() -> None:
    of = fleet()
    of.fleet["z"].refusing = "it is full"
    of.give(1, Add(ModelSettings(name="c", path="c")))
    assert outcome(of, 1) == ("refused", "it is full")
    assert of.fleet.serving("c") == []
    undo = [s for s in of.did if isinstance(s, SendCommand) and s.undoes]
    assert undo == [SendCommand(d, Remove("c", 0.0), undoes=True) for d in ("x", "y")]


def test_a_drain_places_moves_and_evicts() -> None:
    of = fleet()
    of.fleet["y"].refusing = "it is full"
    of.give(1, Drain("x"))
    assert of.ended[1] == DONE
    assert of.did[0] == serving("z", "a")
    assert [s for s in of.did if isinstance(s, MoveRequests)] == [
        MoveRequests("x", "a", bring=True)
    ]
    assert [type(s) for s in of.did[-2:]] == [HandOver, SendCommand]
    assert of.did[-1] == SendCommand("x", EvictCommand("a", "its device is drained"))
    assert of.fleet.taking("a") == ["z"]
    of.give(2, Place("b", "x"))
    assert outcome(of, 2) == ("refused", "x is drained; uncordon it first")
    of.give(3, Uncordon("x"))
    assert of.fleet.taking("a") == ["x", "z"]


def test_a_drain_that_cannot_be_done_leaves_nothing_behind() -> None:
    of = OrderFleet({"a": ["x"], "b": ["x"]}, ["x", "y"])
    of.held = is_serving
    of.give(1, Drain("x"))
    of.release()
    of.fleet["y"].refusing = "it is full"
    of.release()
    assert outcome(of, 1) == ("refused", "b stays on x: y: it is full")
    found = [(list(d.specs), d.leaving, d.cordoned) for d in of.fleet.values()]
    assert found == [(["a", "b"], set(), False), ([], set(), False)]


def test_requests_of_a_lost_host_go_on_as_soon_as_their_model_is_served() -> None:
    of = OrderFleet({"a": ["x"], "b": ["x"], "c": ["x", "y"]}, ["x", "y"])
    of.fleet["x"].open["b"] = 1
    of.fleet["x"].down = "its host is gone"
    of.held = is_serving
    of.give(1, Rehome("x"))
    assert of.did == [HandOver("x"), serving("y", "b")], "another serves c; a has no requests"
    of.release()
    assert of.did[2:] == [HandOver("x"), serving("y", "a")]
    of.fleet["x"].down = None
    of.fleet["y"].refusing = "it is full"
    of.release()
    assert of.did[4:] == []
    assert of.ended[1] == DONE


def test_a_host_is_drained_with_all_its_devices_or_none() -> None:
    of = OrderFleet({"a": ["w"], "b": ["x"]}, ["w", "x", "y"])
    of.held = is_serving
    of.give(1, DrainHost(("w", "x")))
    assert of.waiting[-1].step == serving("y", "a"), "not on x, which is drained with it"
    of.release()
    of.fleet["y"].refusing = "it is full"
    of.release()
    assert outcome(of, 1) == ("refused", "b stays on x: y: it is full")
    assert [d.cordoned for d in of.fleet.values()] == [False, False, False]
    of.fleet["y"].refusing, of.held = None, lambda step: False
    for number in (2, 3):
        of.give(number, DrainHost(("w", "x")))
        assert of.ended[number] == DONE
        assert [d.cordoned for d in of.fleet.values()] == [True, True, False]
        assert (of.fleet.taking("a"), of.fleet.taking("b")) == (["y"], ["y"])


def test_a_command_to_one_device_waits_for_no_other_order() -> None:
    of = fleet()
    of.held = is_serving
    of.give(1, Place("a", "y"))
    of.give(2, EvictCommand("a"), "x")
    assert of.ended == {2: DONE}
    of.give(3, EvictCommand("a"), "z")
    assert outcome(of, 3) == ("refused", "a is not on 'z'")


def test_requests_are_moved_by_operators_and_policies_alike() -> None:
    orders: list[Order] = [Migrate("a", "x", "y", "by an operator"), Migrate("a", "x", "z")]
    of = fleet([Migrate("a", "x", "y", "pressure"), Migrate("a", "x", "z")])
    of.fleet["y"].serve(["b", "a"])
    look(of, 0.0)
    for number, order in enumerate(orders):
        of.give(number, order)
    moved = MoveRequests("x", "a", bring=True, target="y")
    assert of.did == [moved, moved]
    assert {done.refused for done in of.actions} == {None, "a is not on 'z'"}
    assert [outcome(of, n)[1] for n in (0, 1)] == ["", "a is not on 'z'"]


def test_memory_is_given_back_on_the_device_that_is_named() -> None:
    of = fleet()
    release = ReleaseMemory(1024, "by an operator")
    of.give(1, release, "y")
    assert of.did == [SendCommand("y", release)]
    assert of.ended[1] == DONE
    assert of.fleet["y"].ordered_by == ["operator"]
    of.give(2, release, "w")
    assert of.ended[2].reason == "no device 'w'; devices: x, y, z"
    device = of.fleet["z"].fleet.device
    of.fleet["z"].fleet = replace(of.fleet["z"].fleet, device=replace(device, tensor_parallel=2))
    of.give(3, release, "z")
    assert of.ended[3].reason == "its 2 ranks keep their memory"
    of.fleet["x"].down = "it starts"
    of.give(4, release, "x")
    assert (of.ended[4].code, of.ended[4].reason) == ("unavailable", "it starts")
