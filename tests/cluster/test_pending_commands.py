"""Operators' orders: what they do to the fleet, and what becomes of them when a worker dies."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from ballast.cluster.controller import Controller
from ballast.core.actions import ActivateCommand, Change
from ballast.core.command import Add, Remove
from ballast.core.errors import Unavailable
from ballast.core.event import FinishedOutput
from ballast.core.fleet_state import CommandOutcome
from ballast.core.settings import AdapterSettings, FleetSettings, ModelSettings, Slo
from tests.cluster.test_crash import kill, until_down
from tests.cluster.worker.test_worker import FLEET, all_of, running, submission


def model(name: str, path: str = "x", **more: object) -> ModelSettings:
    return ModelSettings(name=name, path=path, **more)  # type: ignore[arg-type]


def change(name: str, **more: object) -> Change:
    known = {"slo": Slo(ttft=9.0), "priority": 3, "max_waiting": 5, "queue_seconds": 7.0}
    return Change(model=name, **{**known, **more})  # type: ignore[arg-type]


def names(fleet: FleetSettings) -> list[str]:
    return [m.name for m in fleet.models]


async def until_restarted(controller: Controller) -> None:
    kill(controller)
    await until_down(controller)
    while controller.devices.down is not None:
        await asyncio.sleep(0.01)


def test_the_fleet_follows_orders() -> None:
    adapter = AdapterSettings(name="l", path="l")
    fleet = replace(FLEET, models=(model("a", adapters=(adapter,)), model("b")))
    assert names(Add(model("c")).applied(fleet)) == ["a", "b", "c"]
    assert Add(model("b", "y")).applied(fleet).models[1].path == "y"
    assert names(Remove("a", 1.0).applied(fleet)) == ["b"]
    assert ActivateCommand("a").applied(fleet) == fleet
    a, b = change("b", pinned=True, share=2.0, max_running=4).applied(fleet).models
    assert (a, b.slo.ttft, b.priority, b.share) == (fleet.models[0], 9.0, 3, 2.0)
    assert (b.pinned, b.max_running, b.max_waiting, b.queue_seconds) == (True, 4, 5, 7.0)
    a, b = change("l").applied(fleet).models
    assert (b, replace(a, adapters=(adapter,))) == (fleet.models[1], fleet.models[0])
    assert (a.adapters[0].priority, a.adapters[0].queue_seconds) == (3, 7.0)


def test_what_no_fleet_can_become_is_refused() -> None:
    fleet = replace(FLEET, models=(model("a", adapters=(AdapterSettings(name="l", path="l"),)),))
    assert "only model" in (Remove("a", 1.0).refusal(fleet, {"a"}) or "")
    assert "'l'" in (Add(model("l")).refusal(fleet, {"a"}) or "")
    assert Add(model("a")).refusal(fleet, {"a"}) is None  # the device knows whether it is there
    assert Add(model("c")).refusal(fleet, {"a"}) is None


def test_the_next_worker_serves_what_was_ordered() -> None:
    async def scenario() -> None:
        async with running() as (controller, _):
            outcome = await controller.commands.execute(Add(model("c")))
            assert (outcome.code, list(controller.devices.specs)) == (None, ["a", "c"])
            pinned = change("c", pinned=True)
            assert (await controller.commands.execute(pinned)).code is None
            assert controller.devices.specs["c"].pinned
            await until_restarted(controller)
            assert list(controller.devices.specs) == ["a", "c"]
            assert controller.devices.fleet.models[-1].pinned
            assert (await controller.commands.execute(Remove("a", 1.0))).code is None
            await until_restarted(controller)
            assert list(controller.devices.specs) == ["c"]
            asked = replace(submission("1"), model="c")
            assert isinstance((await all_of(controller.router.submit([asked])))[-1], FinishedOutput)

    asyncio.run(scenario())


def test_what_was_not_done_changes_nothing() -> None:
    async def scenario() -> None:
        async with running() as (controller, _):
            outcome = await controller.commands.execute(Add(model("c", "broken")))
            assert (outcome.code, outcome.reason) == ("invalid", "it is broken")
            assert (controller.devices.fleet, list(controller.devices.specs)) == (FLEET, ["a"])

    asyncio.run(scenario())


def test_a_model_that_could_not_be_loaded_can_be_removed_or_replaced() -> None:
    async def scenario() -> None:
        async with running() as (controller, _):
            assert list(controller.devices.failed) == ["b"]
            assert (await controller.commands.execute(Remove("b", 1.0))).code is None
            assert (controller.devices.failed, names(controller.devices.fleet)) == ({}, ["a"])
            assert (await controller.commands.execute(Remove("a", 1.0))).code == "refused"
        async with running() as (controller, _):
            assert (await controller.commands.execute(Add(model("b", "whole")))).code is None
            assert (controller.devices.failed, list(controller.devices.specs)) == ({}, ["a", "b"])

    asyncio.run(scenario())


def test_of_two_models_one_stays_whoever_removes_them() -> None:
    async def scenario() -> None:
        async with running() as (controller, _):
            await controller.commands.execute(Add(model("b")))
            orders = [controller.commands.execute(Remove(name, 1.0)) for name in ("a", "b")]
            outcomes = await asyncio.gather(*orders)
            assert [o.code for o in outcomes] == [None, "refused"]
            assert list(controller.devices.specs) == ["b"]

    asyncio.run(scenario())


def test_an_order_that_a_worker_dies_of_fails_and_is_not_repeated() -> None:
    async def scenario() -> None:
        async with running() as (controller, _):
            with pytest.raises(Unavailable, match=r"add was not done: .* signal 9"):
                await controller.commands.execute(Add(model("c", "deadly")))
            with pytest.raises(Unavailable, match="the worker is gone"):
                await controller.commands.execute(ActivateCommand("a"))
            while controller.devices.down is not None:
                await asyncio.sleep(0.01)
            assert (controller.devices.fleet, list(controller.devices.specs)) == (FLEET, ["a"])
            assert (await controller.commands.execute(ActivateCommand("a"))).code is None

    asyncio.run(scenario())


def test_what_fails_on_an_answer_does_not_end_the_device() -> None:
    async def scenario() -> None:
        seen: list[str] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: seen.append(str(context["exception"])))

        def fails(outcome: CommandOutcome) -> None:
            raise RuntimeError("a test")

        async with running() as (controller, _):
            (device,) = controller.devices.values()
            device.order(ActivateCommand("a"), fails)
            assert (await controller.commands.execute(ActivateCommand("a"))).code is None
            assert (seen, device.down) == (["a test"], None)

    asyncio.run(scenario())


def test_decisions_outlive_the_worker_that_they_are_of() -> None:
    async def scenario() -> None:
        before = asyncio.get_running_loop().time()  # the worker's clock starts after it
        async with running() as (controller, _):
            for workers in (1, 2):
                while len(controller.devices.decisions) < workers:
                    await asyncio.sleep(0.01)
                if workers == 1:
                    await until_restarted(controller)
            moments = [moment for moment, _ in controller.devices.decisions]
            assert before <= moments[0] < moments[1] <= asyncio.get_running_loop().time()
            result = {"action": "Activate", "model": "a", "why": "a test"}
            assert [what for _, what in controller.devices.decisions] == [result, result]

    asyncio.run(scenario())
