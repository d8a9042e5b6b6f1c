"""Idle models leave the device after their time to live: the decision, and under every preset."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ballast.core.entries import StoryEntry
from ballast.core.event import FinishedOutput, Output
from ballast.core.link import LinkRates
from ballast.core.request import Submission
from ballast.core.view import ModelView, Residency
from ballast.engine.state import DeviceState
from ballast.policy.memory.defaults import Expiry, expire
from ballast.policy.plans import eviction
from ballast.policy.presets import PRESETS, resolve
from ballast.sim.machine_profile import MachineProfile
from ballast.sim.simulate import simulate
from tests.policy import worlds
from tests.sim.test_simulate import COSTS, OutputLog, fleet, spec, watch


def model(name: str, ttl: float | None, idle_since: float | None, **more: bool) -> ModelView:
    plain = worlds.model(name, **more)
    return replace(plain, spec=replace(plain.spec, ttl=ttl), idle_since=idle_since)


def test_idle_models_leave_when_their_time_is_over_and_the_next_one_is_waited_for() -> None:
    models = (
        model("over", 5.0, 90.0),
        model("at this moment", 10.0, 90.0),
        model("later", 60.0, 90.0),
        model("soon", 11.0, 90.0),
        model("busy", 1.0, None),
        model("pinned", 1.0, 0.0, pinned=True),
        model("for ever", None, 0.0),
        model("for ever, too", 0.0, 0.0),
    )
    found = expire(worlds.device(*models, now=100.0, free=0))
    assert [e.model for e in found.evictions] == ["over", "at this moment"]
    assert found.evictions[0] == eviction(models[0], "no request for 5 s, its ttl")
    assert found.wake_at == 101.0
    assert expire(worlds.device(*models[4:], now=100.0, free=0)) == Expiry()


def asked(name: str, arrival: float) -> Submission:
    return Submission(
        id=f"{name} at {arrival:g}",
        model=name,
        prompt=tuple(range(1, 40)),
        max_tokens=8,
        arrival=arrival,
    )


@pytest.mark.parametrize("preset", PRESETS)
def test_under_every_preset_an_idle_model_leaves_on_time_and_returns_when_asked(
    preset: str,
) -> None:
    specs = [spec("short", ttl=3.0), spec("long", ttl=30.0), spec("kept")]
    arrivals = [asked(s.name, at) for at in (0.0, 20.0) for s in specs]
    arrivals.append(asked("kept", 60.0))
    story: list[StoryEntry] = []
    ended: dict[str, float] = {}
    received = OutputLog()

    def said(now: float, output: Output) -> None:
        received(now, output)
        ended[output.request_id] = now

    def observe(now: float, state: DeviceState) -> None:
        watch(now, state)
        gone = {e["model"] for e in story if e.get("by") == "ttl" and e["at"] == now}
        assert all(state.models[name].residency is Residency.ABSENT for name in gone)

    profile = MachineProfile(
        costs={s.name: COSTS for s in specs}, link=LinkRates.even(1e8), overhead=1e-4
    )
    result = simulate(
        fleet(preset, specs, 400), specs, arrivals, profile, said, story.extend, observe
    )
    assert all(isinstance(received.ended[s.id], FinishedOutput) for s in arrivals)
    expired = [(e["model"], e["at"]) for e in story if e.get("by") == "ttl"]
    times = [
        ("short", ended["short at 0"] + 3.0),
        ("short", ended["short at 20"] + 3.0),
        ("long", ended["long at 20"] + 30.0),
    ]
    if preset == "swap":  # of which the last model of each round alone is still there
        times = [(name, at) for name, at in times if (name, at) in expired]
    assert expired == times
    assert result.state.models["kept"].evictions == (preset == "swap")
    assert result.state.models["short"].residency is Residency.ABSENT


@pytest.mark.parametrize("waits", [False, True])
def test_a_load_that_is_given_up_is_stopped_where_others_wait(waits: bool) -> None:
    """Else it goes on: its client may ask again."""
    loading = replace(model("loading", None, None), given_up=True, residency=Residency.ACTIVATING)
    other = model("other", None, None)
    if waits:
        other = replace(other, waiting=(worlds.request(1),))
    evictions = expire(worlds.device(loading, other, now=100.0, free=0)).evictions
    assert [e.model for e in evictions] == (["loading"] if waits else [])
    assert not expire(worlds.device(loading, other, now=100.0, free=0), give_up=False).evictions


def test_models_that_are_given_up_leave_unless_they_are_pinned_or_have_places() -> None:
    models = (
        replace(model("given up", None, 99.0), given_up=True),
        replace(model("pinned", None, 99.0, pinned=True), given_up=True),
        model("used", None, 99.0),
    )
    view = worlds.device(*models, now=100.0, free=0)
    (found,) = expire(view).evictions
    assert found == eviction(models[0], "the requests that waited for it have left")
    places = ("static", "recompute", "superinfer", "mirage", "kvswap", "muxserve", "c2cserve")
    for name in PRESETS:
        left = [e.model for e in resolve(name).memory.expire(view).evictions]
        assert left == ([] if name in places else ["given up"]), name
