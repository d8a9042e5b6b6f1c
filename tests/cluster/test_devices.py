"""Several devices behind one controller: who gets what, and what a death leaves undisturbed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ballast.cluster import device as keeping
from ballast.cluster.controller import Controller
from ballast.cluster.device import WORKER_LOST, Answered, RemoteDevice
from ballast.cluster.worker.local_worker import LocalWorker
from ballast.core.actions import Change
from ballast.core.command import Add, Remove
from ballast.core.errors import Unavailable
from ballast.core.event import FailedOutput, FinishedOutput
from ballast.core.fleet_orders import Drain, Place, Uncordon, Withdraw
from ballast.core.fleet_state import OPERATOR, Command
from ballast.core.request import Submission
from ballast.core.settings import (
    DeviceSettings,
    FleetSettings,
    LinkSettings,
    ModelSettings,
    ServerSettings,
    Slo,
)
from tests.cluster.fake_device import DIE, HOLD, PAUSE
from tests.cluster.test_crash import whole
from tests.cluster.worker.test_worker import all_of, running, submission, tokens

BOTH = ("cpu:0", "cpu:1")
FLEET = FleetSettings(
    models=(
        ModelSettings(name="a", path="a", devices=("cpu:0",)),
        ModelSettings(name="b", path="b", devices=("cpu:1",)),
        ModelSettings(name="ab", path="ab", devices=BOTH),
    ),
    device=DeviceSettings(name="cpu:0", budget_bytes=2**20),
    others=(DeviceSettings(name="cpu:1", budget_bytes=2**20),),
    other_links=(LinkSettings(device="cpu:1"),),
    server=ServerSettings(spare_worker=False),
)


def asked(request_id: str, model: str, seed: int = 0, max_tokens: int = 6) -> Submission:
    return replace(submission(request_id, seed, max_tokens), model=model)


def kill(controller: Controller, device: str) -> None:
    worker = controller.devices[device].worker
    assert isinstance(worker, LocalWorker)
    os.kill(worker.pid, signal.SIGKILL)


def where(controller: Controller) -> dict[str, str]:
    """By open request, its device."""
    return {i: d.name for d in controller.devices.values() for i in d.requests}


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.005)


def test_each_device_serves_its_models_and_requests_go_to_the_least_busy() -> None:
    async def scenario() -> None:
        async with running(FLEET) as (controller, _):
            assert list(controller.devices.specs) == ["a", "b", "ab"]
            assert {n: list(d.specs) for n, d in controller.devices.items()} == {
                "cpu:0": ["a", "ab"],
                "cpu:1": ["b", "ab"],
            }
            held = [controller.router.submit([asked(m, m, HOLD)]) for m in ("a", "b")]
            held.append(controller.router.submit([asked("x", "ab", HOLD), asked("y", "ab", HOLD)]))
            assert where(controller) == {"a": "cpu:0", "b": "cpu:1", "x": "cpu:0", "y": "cpu:0"}
            held.append(controller.router.submit([asked("z", "ab", HOLD)]))
            assert where(controller)["z"] == "cpu:1"
            assert controller.devices.open_requests == 5
            for stream in held:
                assert tokens(await stream.take())[:2] == [10, 11]
                stream.close()
            assert controller.devices.open_requests == 0
            report = controller.devices.report
            assert report is not None
            assert (report.device, report.total) == ("cpu:0, cpu:1", 200)
            assert [m.name for m in report.models] == ["a", "ab", "b"]

    asyncio.run(scenario())


def test_a_conversation_goes_on_where_its_beginning_is() -> None:
    def turn(request_id: str, first: int, length: int) -> Submission:
        return replace(asked(request_id, "ab", HOLD), prompt=tuple(range(first, first + length)))

    def holds(device: RemoteDevice) -> bool:
        assert device.report is not None
        return any(m.kv_pages for m in device.report.models)

    async def scenario() -> None:
        async with running(FLEET) as (controller, _):
            for i in range(2):
                controller.router.submit([turn(f"{i}", 100 * i, 40)])
            assert where(controller) == {"0": "cpu:0", "1": "cpu:1"}
            await until(lambda: all(map(holds, controller.devices.values())))
            for i in range(2, 5):
                controller.router.submit([turn(f"{i}", 100, 40 + i)])
            assert [where(controller)[f"{i}"] for i in range(2, 5)] == ["cpu:1"] * 3
            salted = replace(turn("other", 100, 40), salt="tenant")
            controller.router.submit([salted])
            assert where(controller)["other"] == "cpu:0"
            kill(controller, "cpu:1")
            await until(lambda: bool(controller.devices.missing))
            assert not controller.devices["cpu:1"].held_tokens(turn("again", 100, 40))
            controller.router.fail_all("unavailable", "the test is over")

    asyncio.run(scenario())


def test_a_death_concerns_its_own_device_alone() -> None:
    async def scenario() -> None:
        async with running(FLEET) as (controller, _):
            mine = controller.router.submit([asked("1", "a", PAUSE)])
            other = controller.router.submit([asked("2", "b", HOLD)])
            found = await mine.take()
            assert tokens(await other.take()) == [10, 11]
            kill(controller, "cpu:0")
            await until(lambda: bool(controller.devices.missing))
            assert list(controller.devices.missing) == ["cpu:0"]
            assert (controller.devices.down, controller.devices.replacing) == (None, True)
            there = await all_of(controller.router.submit([asked("3", "b")]))
            assert whole(there)
            found += await mine.take()
            kill(controller, "cpu:0")
            assert whole(found + await all_of(mine))
            assert [d.restarts for d in controller.devices.values()] == [2, 0]
            assert where(controller) == {"2": "cpu:1"}
            other.close()

    asyncio.run(scenario())


def test_what_waited_goes_on_at_a_replica_and_what_may_have_killed_does_not() -> None:
    async def scenario() -> None:
        async with running(FLEET) as (controller, _):
            first = controller.devices["cpu:0"]
            old = controller.router.submit([asked("old", "ab", PAUSE)])
            found = await old.take()
            assert where(controller) == {"old": "cpu:0"}
            first.worker.in_flight = lambda: frozenset({"suspect"})  # type: ignore[method-assign]
            suspect = controller.router.submit([asked("suspect", "a", HOLD)])
            await suspect.take()
            kill(controller, "cpu:0")
            await until(lambda: where(controller).get("old") == "cpu:1")
            assert where(controller)["suspect"] == "cpu:0"
            new = controller.router.submit([asked("new", "ab")])
            assert whole(await all_of(new))
            found += await old.take()
            assert tokens(found) == [10, 11, 12, 10]
            old.close()
            suspect.close()

    asyncio.run(scenario())


def test_a_poisonous_request_does_not_cross_over() -> None:
    async def scenario() -> None:
        async with running(FLEET) as (controller, _):
            poison = await all_of(controller.router.submit([asked("1", "ab", DIE)]))
            assert [o.code for o in poison if isinstance(o, FailedOutput)] == ["poison"]
            assert [d.restarts for d in controller.devices.values()] == [2, 0]

    asyncio.run(scenario())


def test_a_device_that_is_lost_loses_what_no_other_can_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken"
    monkeypatch.setenv("BALLAST_TEST_DEVICE_FAILS", str(broken))
    monkeypatch.setattr(keeping, "BACKOFF_SECONDS", 0.01)

    async def scenario() -> None:
        async with running(FLEET) as (controller, _):
            mine = controller.router.submit([asked("1", "a", HOLD)])
            shared = controller.router.submit([asked("2", "ab", HOLD)])
            assert where(controller) == {"1": "cpu:0", "2": "cpu:1"}
            broken.touch()
            kill(controller, "cpu:0")
            end = (await all_of(mine))[-1]
            assert isinstance(end, FailedOutput)
            assert end.code == WORKER_LOST
            with pytest.raises(Unavailable, match="no room for the pool now"):
                controller.router.submit([asked("3", "a")])
            assert isinstance(
                (await all_of(controller.router.submit([asked("4", "ab")])))[-1], FinishedOutput
            )
            assert (controller.devices.lost, shared.open) == (None, {"2"})
            broken.unlink()
            await until(lambda: not controller.devices.missing)
            assert whole(await all_of(controller.router.submit([asked("5", "a")])))
            shared.close()

    asyncio.run(scenario())


def test_orders_reach_the_devices_that_they_concern() -> None:
    def change(model: str, **more: object) -> Change:
        known = {"slo": Slo(ttft=9.0), "priority": 3, "max_waiting": 5, "queue_seconds": 7.0}
        return Change(model=model, **{**known, **more})  # type: ignore[arg-type]

    async def scenario() -> None:
        async with running(FLEET) as (controller, _):
            assert (await controller.commands.execute(change("ab", pinned=True))).code is None
            assert all(d.specs["ab"].pinned for d in controller.devices.values())
            new = ModelSettings(name="c", path="c", devices=("cpu:1",))
            assert (await controller.commands.execute(Add(new))).code is None
            assert [d.serves("c") for d in controller.devices.values()] == [False, True]
            assert (await controller.commands.execute(Remove("ab", 1.0))).code is None
            assert list(controller.devices.specs) == ["a", "b", "c"]
            assert [m.name for m in controller.devices.fleet.models] == ["a", "b", "c"]
            # The only one of its device, but not of the fleet.
            assert (await controller.commands.execute(Remove("a", 1.0))).code is None
            placed = await controller.commands.execute(Add(ModelSettings(name="d", path="d")))
            assert placed.code is None
            assert controller.devices["cpu:0"].serves("d")
            twice = await controller.commands.execute(Add(replace(new, devices=("cpu:0",))))
            assert (twice.code, "'c' already" in twice.reason) == ("refused", True)
            nowhere = ModelSettings(name="e", path="e", devices=("cpu:2",))
            outcome = await controller.commands.execute(Add(nowhere))
            assert (outcome.code, "cpu:0, cpu:1" in outcome.reason) == ("invalid", True)

    asyncio.run(scenario())


def test_an_order_is_done_by_all_or_none() -> None:
    async def scenario() -> None:
        async with running(FLEET) as (controller, _):
            second = controller.devices["cpu:1"]
            refusing = ModelSettings(name="c", path="c", devices=BOTH)
            real = second.order

            def order(command: Command, answered: Answered, by: str = OPERATOR) -> None:
                refused = Add(replace(refusing, path="broken"))
                real(refused if isinstance(command, Add) else command, answered, by)

            second.order = order  # type: ignore[method-assign]
            outcome = await controller.commands.execute(Add(refusing))
            assert (outcome.code, outcome.reason) == ("invalid", "it is broken")
            assert list(controller.devices.specs) == ["a", "b", "ab"]
            assert controller.devices.fleet == FLEET
            kill(controller, "cpu:1")
            await until(lambda: second.down is not None)
            with pytest.raises(Unavailable, match="the worker is gone"):
                await controller.commands.execute(Remove("ab", 1.0))
            assert controller.devices["cpu:0"].serves("ab")

    asyncio.run(scenario())


def test_what_an_order_has_done_is_reported_before_its_answer() -> None:
    """However soon after the last report it is done."""

    def reported(controller: Controller) -> set[str]:
        report = controller.devices["cpu:1"].report
        assert report is not None
        return {model.name for model in report.models}

    async def scenario() -> None:
        async with running(FLEET) as (controller, _):
            for _ in range(5):
                assert (await controller.commands.execute(Place("a", "cpu:1"))).code is None
                assert reported(controller) == {"a", "b", "ab"}
                assert (
                    await controller.commands.execute(Withdraw("a", "cpu:1", seconds=1.0))
                ).code is None
                assert reported(controller) == {"b", "ab"}

    asyncio.run(scenario())


def test_a_drained_device_hands_everything_over_and_takes_nothing() -> None:
    """`a` is on that device alone, and has to be placed; half-told answers go on elsewhere."""

    async def scenario() -> None:
        async with running(FLEET) as (controller, _):
            alone = await all_of(controller.router.submit([asked("alone", "a", 3)]))
            held = controller.router.submit([asked("a1", "a", HOLD), asked("x", "ab", HOLD)])
            there = controller.router.submit([asked("y", "ab", HOLD)])
            assert where(controller)["a1"] == "cpu:0"
            outcome = await controller.commands.execute(Drain("cpu:0"))
            assert outcome.code is None, outcome
            assert set(where(controller).values()) == {"cpu:1"}
            assert controller.devices["cpu:1"].takes("a")
            assert not controller.devices["cpu:0"].takes("a")
            again = await all_of(controller.router.submit([asked("again", "a", 3)]))
            assert tokens(again) == tokens(alone)
            refused = await controller.commands.execute(Place("b", "cpu:0"))
            assert refused.code == "refused"
            assert "uncordon" in refused.reason
            assert (await controller.commands.execute(Uncordon("cpu:0"))).code is None
            assert controller.devices["cpu:0"].takes("a")
            for stream in (held, there):
                stream.close()

    asyncio.run(scenario())


def test_a_device_is_not_drained_where_a_model_finds_no_other() -> None:
    async def scenario() -> None:
        async with running(FLEET) as (controller, _):
            assert (await controller.commands.execute(Drain("cpu:7"))).code == "refused"
            assert (await controller.commands.execute(Drain("cpu:0"))).code is None
            last = await controller.commands.execute(Drain("cpu:1"))
            assert last.code == "refused"
            assert "stays on cpu:1" in last.reason
            assert controller.devices["cpu:1"].takes("b")
            open_request = controller.router.submit([asked("b1", "b", HOLD)])
            assert where(controller) == {"b1": "cpu:1"}
            open_request.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("path", ["broken", "deadly"])
def test_a_drain_that_cannot_be_done_leaves_nothing_behind(path: str) -> None:
    """One model has come to the other device when the next finds no place there, or ends it."""

    async def scenario() -> None:
        other = ModelSettings(name="last", path="last", devices=("cpu:0",))
        async with running(replace(FLEET, models=(*FLEET.models, other))) as (controller, _):
            changed = (*FLEET.models, replace(other, path=path))
            controller.devices.fleet = replace(controller.devices.fleet, models=changed)
            there = controller.devices["cpu:1"]
            try:
                outcome = await controller.commands.execute(Drain("cpu:0"))
                assert (path, outcome.code) == ("broken", "refused")
                assert "last stays on cpu:0" in outcome.reason
            except Unavailable:
                assert path == "deadly"
            assert all(controller.devices["cpu:0"].takes(m) for m in ("a", "ab", "last"))
            if path == "broken":
                assert not there.takes("a")
                assert "a" not in there.leaving
            assert controller.devices.homes("a") == ["cpu:0"] or path == "deadly"

    asyncio.run(scenario())
