"""Policies are asked when something has happened that concerns them, and not for every token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest

from ballast.core.actions import ActivateCommand, Change, Decision, EvictCommand, Hold
from ballast.core.event import (
    CancelEvent,
    CommandEvent,
    Event,
    FinishedOutput,
    Output,
    PauseEvent,
    ResumeEvent,
)
from ballast.core.link import LinkRates
from ballast.core.request import Submission
from ballast.core.settings import Slo
from ballast.core.view import DeviceView, Residency
from ballast.engine.apply import apply
from ballast.policy.base import MemoryPolicy
from ballast.policy.presets import Preset, resolve
from ballast.policy.requirements import Requirements
from ballast.sim.device import SimDevice
from ballast.sim.machine_profile import MachineProfile
from tests.engine.fresh import check_views
from tests.sim.test_simulate import COSTS, fleet, spec


@dataclass
class Asked(MemoryPolicy):
    """`policy`, which wishes to be asked at no certain time, and when it was asked."""

    policy: MemoryPolicy
    at: list[float] = field(default_factory=list)

    @property
    def requires(self) -> Requirements:
        return self.policy.requires

    def __call__(self, view: DeviceView, memo: object) -> Decision:
        self.at.append(view.now)
        return replace(self.policy(view, memo), wake_at=None)


class World:
    """A device with room for its two models, and its policy."""

    def __init__(self) -> None:
        specs = [spec(name, 10) for name in "ab"]
        made, plain = fleet("balloon", specs, 400), resolve("balloon")
        self.policy = Asked(plain.memory)
        self.ended: list[str] = []
        self.device = SimDevice(
            made.device,
            specs,
            Preset("asked", self.policy, plain.compute, plain.order),
            MachineProfile(
                costs={s.name: COSTS for s in specs}, link=LinkRates.even(1e8), overhead=1e-4
            ),
            self.hear,
            leaps=False,
        )
        self.n = 0

    def hear(self, now: float, output: Output) -> None:
        if isinstance(output, FinishedOutput):
            self.ended.append(output.request_id)

    def submit(self, tokens: int) -> str:
        self.n += 1
        id = f"r{self.n}"
        at = self.device.clock.now()
        s = Submission(
            id=id, model="a", prompt=(1,) * 20, max_tokens=tokens, arrival=at, ignore_eos=True
        )
        self.device.submit(s)
        return id

    def asked_about(self, *events: Event, seconds: float = 0.05) -> bool:
        """Whether the policy was asked because of these events."""
        before, now = len(self.policy.at), self.device.clock.now()
        for event in events:
            self.device._heap.schedule(now, event)
        self.device.advance(now + seconds)
        return len(self.policy.at) > before

    def order(self, operation: ActivateCommand | EvictCommand | Change) -> CommandEvent:
        self.n += 1
        return CommandEvent(f"order-{self.n}", operation)


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.device.state.validate()
    check_views(world.device.state)


def test_tokens_and_admissions_are_no_news(world: World) -> None:
    for _ in range(3):
        world.submit(400)
    world.device.advance(0.3)
    state = world.device.state
    assert len(state.models["a"].running) == 3
    asked, jobs = len(world.policy.at), state.jobs
    world.device.advance(0.5)
    assert state.jobs > jobs + 20
    assert len(world.policy.at) == asked
    world.device.advance(10.0)
    assert world.ended == ["r1", "r2", "r3"]
    assert asked < len(world.policy.at) <= asked + 3


def test_what_becomes_of_requests_is_news(world: World) -> None:
    first = world.submit(400)
    assert world.asked_about()
    second = world.submit(400)
    assert world.asked_about()
    world.device.advance(0.5)
    assert not world.asked_about()
    assert world.asked_about(PauseEvent(second))
    assert not world.asked_about()
    assert world.asked_about(ResumeEvent(second))
    assert world.asked_about(CancelEvent(first))
    assert not world.asked_about()
    assert world.asked_about(CancelEvent(second))


def test_what_operators_do_is_news(world: World) -> None:
    world.submit(480)
    world.device.advance(0.5)
    assert not world.asked_about()
    change = Change(
        model="a",
        slo=Slo(ttft=9.0, tpot=0.9),
        priority=0,
        share=1.0,
        max_running=8,
        max_waiting=8,
        queue_seconds=None,
        pinned=False,
        ttl=None,
    )
    for _ in range(2):  # the first withdraws what was promised as well, which is news by itself
        assert world.asked_about(world.order(change))
        assert world.device.state.promises.stated == ()
    b = world.device.state.models["b"]
    assert world.asked_about(world.order(ActivateCommand("b", "")), seconds=0.2)
    assert b.residency is Residency.RESIDENT
    assert not world.asked_about()
    assert world.asked_about(world.order(EvictCommand("b", "")))
    assert b.residency is Residency.ABSENT
    assert not world.asked_about()
    now = world.device.clock.now()
    before = len(world.policy.at)
    assert world.device.join(now, spec("c", 10), COSTS) is None
    assert len(world.policy.at) > before
    world.device.leave(world.device.clock.now(), "c", lambda why: None)
    assert "c" not in world.device.state.models


def test_a_model_that_is_held_no_longer_tries_its_first_request_again() -> None:
    """Jobs formed while it was held have forgotten what that request lacked."""
    state = World().device.state
    m = state.models["a"]
    m.blocked = "r1", state.freed
    for held in (True, False):
        assert apply(state, Hold("a", held, why="of the test"), []) is None
        assert (m.blocked is None) == (not held)
