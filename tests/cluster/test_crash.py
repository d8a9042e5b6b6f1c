"""Workers that die, hang or cannot be started, over a device that echoes."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from ballast.cluster import device as keeping
from ballast.cluster.controller import Controller
from ballast.cluster.device import WORKER_LOST
from ballast.cluster.worker.liveness_watch import LivenessWatch
from ballast.control.open_requests import POISON
from ballast.core.errors import Unavailable
from ballast.core.event import FailedOutput, FinishedOutput, Output, TokenOutput
from ballast.core.settings import ModelSettings, ServerSettings
from tests.cluster.fake_device import DIE, HOLD, PAUSE, STUCK
from tests.cluster.worker.test_worker import (
    FLEET,
    all_of,
    device,
    present,
    reported,
    running,
    submission,
    tokens,
)

ECHO = [10, 11, 12, 10, 11, 12]


def kill(controller: Controller, number: int = signal.SIGKILL) -> None:
    os.kill(present(controller).pid, number)


async def until_down(controller: Controller) -> None:
    while controller.devices.down is None:
        await asyncio.sleep(0)


def whole(outputs: list[Output]) -> bool:
    """Whether these are the six tokens of an undisturbed run, each once, and their end."""
    result = [o.index for o in outputs if isinstance(o, TokenOutput)]
    end = outputs[-1]
    return (
        tokens(outputs) == ECHO
        and result == list(range(6))
        and isinstance(end, FinishedOutput)
        and end.output_tokens == 6
    )


def test_requests_go_on_in_the_next_worker_and_are_not_lost_to_two_kills() -> None:
    async def scenario() -> None:
        async with running() as (controller, first):
            streams = [controller.router.submit([submission(str(i), PAUSE, 6)]) for i in range(3)]
            outputs = [await stream.take() for stream in streams]
            for life in (1, 2):
                kill(controller)
                if life == 1:  # of two tokens each: in the third life they run one by one
                    for stream, found in zip(streams, outputs, strict=True):
                        found += await stream.take()
                        assert tokens(found) == ECHO[:4]
            for stream, found in zip(streams, outputs, strict=True):
                found += await all_of(stream)
                assert whole(found)
            assert (controller.devices.restarts, controller.devices.open_requests) == (2, 0)
            assert first.exit_reason() == "killed by signal 9"
            assert not first.directory.exists()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("seed", "number", "silent", "why"),
    [
        (PAUSE, signal.SIGSTOP, 2.0, "said nothing for 2 s"),
        (STUCK, 0, 60.0, "a job took more than 100 s"),
    ],
)
def test_a_worker_that_hangs_is_killed(seed: int, number: int, silent: float, why: str) -> None:
    async def scenario() -> None:
        # Others may have to wait for the processor.
        patient = ServerSettings(silent_seconds=60.0, stuck_seconds=100.0)
        async with running(replace(FLEET, server=patient)) as (controller, first):
            stream = controller.router.submit([submission("1", seed, 6)])
            found = await stream.take()
            if seed == PAUSE:
                first._watch.limits = replace(patient, silent_seconds=silent)
                kill(controller, number)
                found += await stream.take()
                kill(controller)
            assert whole(found + await all_of(stream))
            assert first.exit_reason().startswith("killed by signal 9: ")
            assert why in first.exit_reason()

    asyncio.run(scenario())


def test_loading_that_does_not_go_on_is_ended() -> None:
    async def scenario() -> None:
        hangs = replace(FLEET, options={"mute": 1.0}, server=ServerSettings(loading_seconds=0.1))
        with pytest.raises(Unavailable, match=r"signal 9: nothing more was loaded for 0\.1 s"):
            async with running(hangs):
                pass

    asyncio.run(scenario())


BRIEF = ServerSettings(silent_seconds=0.5, starting_seconds=0.5)


async def tick_as_it_computes(self: LivenessWatch, tick: float) -> None:
    """Instead of `LivenessWatch._watch`, whose ticks may find a worker that had no processor."""
    why, before = None, self._activity()
    while why is None:
        await asyncio.sleep(0.01)
        if (now := self._activity()) != before:
            why, before = self.tick(tick), now
    self._kill(why)


@pytest.mark.parametrize(
    ("how", "limits", "why"),
    [
        ("CLUTCHES", BRIEF, r"it said nothing for 0\.5 s, and used no processor time"),
        ("COMPUTES", replace(BRIEF, loading_seconds=20.0), r"nothing for 20 s, though it used"),
    ],
)
def test_a_worker_that_starts_for_ever_is_ended(
    how: str, limits: ServerSettings, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"BALLAST_TEST_DEVICE_{how}", "30")
    if how == "COMPUTES":  # for longer than it may be silent, with the interpreter lock
        monkeypatch.setattr(LivenessWatch, "_watch", tick_as_it_computes)

    async def scenario() -> None:
        with pytest.raises(Unavailable, match=why):
            async with running(replace(FLEET, server=limits)):
                pass

    asyncio.run(scenario())


def test_poison_fails_and_its_companions_do_not_notice() -> None:
    async def scenario() -> None:
        async with running() as (controller, _):
            held = controller.router.submit([submission("old", HOLD)])
            found = await held.take()
            poison = controller.router.submit([submission("poison", DIE)])
            await until_down(controller)
            later = controller.router.submit([submission("later", max_tokens=6)])
            result = await all_of(poison)
            assert [o.code for o in result if isinstance(o, FailedOutput)] == [POISON]
            assert whole(await all_of(later))
            assert controller.devices.restarts == 3
            assert tokens(found) == [10, 11]
            again = controller.router.submit(
                [submission("again", DIE)]
            )  # counts start anew for "old"
            assert isinstance((await all_of(again))[-1], FailedOutput)
            assert held.open == {"old"}
            held.close()

    asyncio.run(scenario())


def test_while_no_worker_serves_requests_wait_and_may_leave() -> None:
    async def scenario() -> None:
        async with running() as (controller, _):
            kill(controller)
            await until_down(controller)
            gone = controller.router.submit([submission("gone", HOLD)])
            kept = controller.router.submit([submission("kept", max_tokens=6)])
            gone.close()
            assert controller.devices.open_requests == 1
            assert whole(await all_of(kept))
            await reported(controller, running=0)

    asyncio.run(scenario())


def test_no_more_than_a_model_allows_wait_for_a_worker() -> None:
    async def scenario() -> None:
        async with running() as (controller, _):
            served = controller.devices.specs["a"]
            device(controller).specs = {"a": replace(served, max_waiting=2)}
            kill(controller)
            await until_down(controller)
            streams = [controller.router.submit([submission(str(i))]) for i in range(3)]
            ends = [(await all_of(stream))[-1] for stream in streams]
            assert [type(e) for e in ends] == [FinishedOutput, FinishedOutput, FailedOutput]
            assert isinstance(ends[2], FailedOutput)
            assert ends[2].code == "queue_full"

    asyncio.run(scenario())


def test_a_worker_that_cannot_be_replaced_is_lost_until_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken"
    monkeypatch.setenv("BALLAST_TEST_DEVICE_FAILS", str(broken))
    monkeypatch.setattr(keeping, "BACKOFF_SECONDS", 0.01)

    async def scenario() -> None:
        async with running() as (controller, _):
            held = controller.router.submit([submission("1", HOLD)])
            await held.take()
            broken.touch()
            kill(controller)
            end = (await all_of(held))[-1]
            assert isinstance(end, FailedOutput)
            assert (end.code, "no room for the pool now" in end.reason) == (WORKER_LOST, True)
            with pytest.raises(Unavailable, match="no room for the pool now"):
                controller.router.submit([submission("2")])
            broken.unlink()
            while controller.devices.lost is not None:
                await asyncio.sleep(0.01)
            assert isinstance(
                (await all_of(controller.router.submit([submission("3")])))[-1], FinishedOutput
            )

    asyncio.run(scenario())


def test_requests_fail_where_nothing_can_start_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "BACKOFF_SECONDS", 0.01)

    async def scenario() -> None:
        async with running() as (controller, first):
            held = controller.router.submit([submission("1", HOLD)])
            await held.take()

            async def none(_: str) -> None:
                raise OSError

            with monkeypatch.context() as patched:
                patched.setattr(controller.workers, "next", none)
                kill(controller)
                end = (await all_of(held))[-1]
                assert isinstance(end, FailedOutput)
                assert (end.code, end.reason) == (WORKER_LOST, "OSError")
                assert first.in_flight() == frozenset()
            while controller.devices.lost is not None:
                await asyncio.sleep(0.01)

    asyncio.run(scenario())


def test_a_server_can_stop_while_it_waits_for_a_worker() -> None:
    async def scenario() -> None:
        async with running() as (controller, first):
            held = controller.router.submit([submission("1", HOLD)])
            await held.take()
            device(controller).fleet = replace(FLEET, options={"mute": 1.0})
            kill(controller)
            while present(controller) is first or not present(controller).started:
                await asyncio.sleep(0.01)
        end = (await all_of(held))[-1]
        assert isinstance(end, FailedOutput)
        assert end.code == "unavailable"
        assert present(controller).exit_reason() == "killed by signal 9"

    asyncio.run(scenario())


def test_a_new_worker_serves_the_fleet_of_that_moment() -> None:
    async def scenario() -> None:
        async with running() as (controller, _):
            more = ModelSettings(name="c", path="c")
            fleet = replace(FLEET, models=(*FLEET.models, more))
            controller.devices.fleet = device(controller).fleet = fleet
            kill(controller)
            while controller.devices.restarts == 0:
                await asyncio.sleep(0.01)
            assert list(controller.devices.specs) == ["a", "c"]
            assert controller.devices.failed == {"b": "it is broken"}

    asyncio.run(scenario())
