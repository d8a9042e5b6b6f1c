"""Models that move between devices while requests go on, as a scripted policy says."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from ballast.cluster.controller import Controller
from ballast.core.command import Remove
from ballast.core.fleet import FleetAction, FleetDecision, FleetView, Place, Withdraw
from ballast.core.settings import ModelSettings
from ballast.policy.base import FleetPolicy
from tests.cluster import test_devices
from tests.cluster.fake_device import HOLD
from tests.cluster.test_devices import asked, kill, until, where
from tests.cluster.worker.test_worker import all_of, running

FLEET = replace(
    test_devices.FLEET,
    models=(
        ModelSettings(name="a", path="a"),
        ModelSettings(name="b", path="b"),
        ModelSettings(name="fixed", path="x", devices=("cpu:0",)),
    ),
)
"""Of equal sizes as far as is known: a is placed on cpu:1, as cpu:0 has one already; b beside."""


class Script(FleetPolicy):
    """Decides on given actions, a turn of them at each question."""

    def __init__(self, *turns: Sequence[FleetAction]) -> None:
        self.turns = list(turns)
        self.views: list[FleetView] = []

    @property
    def moves(self) -> bool:
        return True

    def __call__(self, view: FleetView, memo: object) -> FleetDecision:
        self.views.append(view)
        return FleetDecision(tuple(self.turns.pop(0)) if self.turns else (), memo, None)


def begin(controller: Controller, *turns: Sequence[FleetAction]) -> Script:
    """Let the controller follow a script from now on."""
    script = Script(*turns)
    controller.devices.fleet_policy = script
    controller.commands.follow_policy()
    return script


async def until_decided(controller: Controller, n: int) -> None:
    await until(lambda: len(fleet_decisions(controller)) == n)


def fleet_decisions(controller: Controller) -> list[dict[str, object]]:
    """What was decided about devices."""
    return [
        what for _, what in controller.devices.decisions if what.get("by") == "the fleet's policy"
    ]


def homes(controller: Controller, model: str) -> list[str]:
    return [d.name for d in controller.devices.values() if d.serves(model)]


def test_a_model_moves_and_its_open_requests_end_where_they_are() -> None:
    async def scenario() -> None:
        async with running(FLEET) as (controller, _):
            (old,) = homes(controller, "a")
            (new,) = set(controller.devices) - {old}
            held = controller.router.submit([asked("held", "a", HOLD)])
            await held.take()
            script = begin(controller, [Place("a", new, "a test"), Withdraw("a", old)])
            await until_decided(controller, 2)
            assert [m.model for m in script.views[0].needs] == ["a", "b"]
            assert homes(controller, "a") == ["cpu:0", "cpu:1"]
            fields = ("action", "device", "epoch", "refused")
            assert [tuple(map(what.get, fields)) for what in fleet_decisions(controller)] == [
                ("Place", new, 0, None),
                ("Withdraw", old, 1, None),
            ]
            late = [controller.router.submit([asked(f"{i}", "a", HOLD)]) for i in range(2)]
            assert where(controller) == {"held": old, "0": new, "1": new}
            held.close()
            await until(lambda: homes(controller, "a") == [new])
            assert list(controller.devices.specs) == ["a", "b", "fixed"]
            assert controller.devices.fleet == FLEET
            for stream in late:
                stream.close()

    asyncio.run(scenario())


def test_what_cannot_be_done_comes_back_with_the_reason() -> None:
    async def scenario() -> None:
        async with running(FLEET) as (controller, _):
            (there,) = homes(controller, "a")
            (elsewhere,) = set(controller.devices) - {there}
            kill(controller, elsewhere)
            await until(lambda: elsewhere in controller.devices.missing)
            begin(controller, [Place("fixed", "cpu:1"), Place("a", elsewhere)])
            await until_decided(controller, 2)
            fixed, gone = (str(what["refused"]) for what in fleet_decisions(controller))
            assert fixed == "there is no model 'fixed'"
            assert "the worker is gone" in gone
            assert homes(controller, "a") == [there]

    asyncio.run(scenario())


def test_a_model_stays_where_it_was_to_leave_once_nobody_else_has_it() -> None:
    async def scenario() -> None:
        async with running(FLEET) as (controller, _):
            (old,) = homes(controller, "a")
            (new,) = set(controller.devices) - {old}
            held = controller.router.submit([asked("held", "a", HOLD)])
            begin(controller, [Place("a", new), Withdraw("a", old)])
            await until_decided(controller, 2)
            kill(controller, new)
            await until(lambda: new in controller.devices.missing)
            # Its next worker serves what it served; meanwhile requests wait for it.
            waiting = controller.router.submit([asked("waits", "a")])
            assert where(controller)["waits"] == new
            assert await all_of(waiting)
            assert homes(controller, "a") == ["cpu:0", "cpu:1"]
            gone = controller.devices[new]
            assert (await gone.command(Remove("a", 1.0))).code is None
            await until(lambda: not controller.devices[old].leaving)
            assert homes(controller, "a") == [old]
            held.close()

    asyncio.run(scenario())
