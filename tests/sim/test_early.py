"""First jobs that begin while weights arrive, in virtual time: when, and what that leaves alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ballast.core.cost import StepCosts
from ballast.core.entries import StoryEntry
from ballast.core.event import Output, TokenOutput
from ballast.core.link import LinkRates
from ballast.core.model import ModelSpec
from ballast.core.request import Submission
from ballast.engine.story_file import StoryFile
from ballast.policy.presets import PRESETS, resolve
from ballast.sim.device import SimDevice
from ballast.sim.machine_profile import MachineProfile
from ballast.sim.replay import replay
from ballast.sim.simulate import simulate
from ballast.sim.story_reader import read_device_stories
from tests.sim.test_simulate import COSTS, PAGE, OutputLog, fleet, spec, submissions, watch

RATE = 1e7
"""Of the link, in bytes a second."""
LAYER = 4 * PAGE
STEP = 0.02
"""Seconds of a job, whatever it computes: less than the link takes for its layers."""
ON_DEMAND = ("swap", "lru", "balloon", "prism", "ballast", "swiftcache", "c2cserve")
"""Presets that bring models for requests; others have brought all before any request waits."""


def layered(name: str, layers: int = 4, pages: int = 4) -> ModelSpec:
    """Embeddings, layers and a head of so many pages each."""
    plain = spec(name)
    return replace(plain, n_layers=layers, segment_bytes=(pages * PAGE,) * (layers + 2))


def first_tokens(
    profile: MachineProfile, asked: list[Submission], specs: list[ModelSpec]
) -> tuple[dict[str, list[float]], list[StoryEntry]]:
    outcome: dict[str, list[float]] = {s.id: [] for s in asked}
    entries: list[StoryEntry] = []

    def said(now: float, output: Output) -> None:
        if isinstance(output, TokenOutput):
            outcome[output.request_id].append(now)

    simulate(fleet("balloon", specs, 400), specs, asked, profile, said, entries.extend, watch)
    return outcome, entries


@pytest.mark.parametrize("step", [STEP, 10.0])
def test_the_first_token_follows_the_last_layer_by_one_layers_work(step: float) -> None:
    one = layered("m")
    profile = MachineProfile(
        costs={"m": StepCosts(step, 0.0, 0.0, 0.0, 0.0)}, link=LinkRates.even(RATE), overhead=0.0
    )
    asked = [Submission(id="one", model="m", prompt=(1,) * 20, max_tokens=1)]
    whole, _ = first_tokens(profile, asked, [one])
    early, entries = first_tokens(replace(profile, early=True), asked, [one])
    load = sum(one.segment_bytes) / RATE
    assert whole["one"] == [pytest.approx(load + step)]
    # A layer takes the link longer than the job, or the job longer than the link.
    through = load + step / 4 if step == STEP else 3 * LAYER / RATE + step
    assert early["one"] == [pytest.approx(through)]
    kinds = [e["event"] for e in entries if "event" in e]
    assert kinds.index("FirstJobReady") < kinds.index("TransferDone") < kinds.index("JobDone")
    (done,) = (e for e in entries if e.get("event") == "JobDone")
    assert done["seconds"] - done.get("stall", 0.0) == pytest.approx(step)


def test_no_lane_is_kept_from_others_for_a_whole_load() -> None:
    """A model that answers goes on until the other's load has no more to come than takes as long
    as its first job."""
    specs = [layered("a"), layered("b", pages=40)]
    costs = dict.fromkeys("ab", StepCosts(STEP, 0.0, 0.0, 0.0, 0.0))
    profile = MachineProfile(costs=costs, link=LinkRates.even(RATE), overhead=0.0, early=True)
    asked = [
        Submission(id="a", model="a", prompt=(1,) * 20, max_tokens=200, ignore_eos=True),
        Submission(id="b", model="b", prompt=(1,) * 20, max_tokens=1, arrival=1.0),
    ]
    outcome, entries = first_tokens(profile, asked, specs)
    load = 40 * PAGE / RATE
    assert 6 * load > 1.5
    gaps = [b - a for a, b in zip(outcome["a"], outcome["a"][1:], strict=False)]
    assert max(gaps) <= 3 * STEP
    # The other's job may have to wait for the step in flight.
    assert 1.0 + 6 * load + STEP / 4 - 1e-9 <= outcome["b"][0] <= 1.0 + 6 * load + 2 * STEP
    assert any(e.get("event") == "FirstJobReady" for e in entries)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_serves_with_leaps_as_without(preset: str) -> None:
    specs = [layered(f"m{i}", 2 + i, 3) for i in range(3)]
    asked = submissions([s.name for s in specs], 20, seed=3)
    profile = MachineProfile(
        costs={s.name: COSTS for s in specs}, link=LinkRates.even(RATE), overhead=1e-4, early=True
    )
    opened: list[list[float]] = []
    for leaps in (True, False):
        entries: list[StoryEntry] = []
        received = OutputLog()
        result = simulate(
            fleet(preset, specs, 60), specs, asked, profile, received, entries.extend, watch, leaps
        )
        assert received.ended.keys() == {s.id for s in asked}
        assert not result.state.requests
        opened.append([e["at"] for e in entries if e.get("event") == "FirstJobReady"])
    assert opened[0] == opened[1]
    assert bool(opened[0]) == (preset in ON_DEMAND)


def test_a_story_of_early_jobs_replays(tmp_path: Path) -> None:
    specs = [layered(f"m{i}", 2 + i, 3) for i in range(3)]
    asked = submissions([s.name for s in specs], 60, seed=4)
    profile = MachineProfile(
        costs={s.name: COSTS for s in specs}, link=LinkRates.even(RATE), overhead=1e-4, early=True
    )
    settings = fleet("balloon", specs, 60)
    path = tmp_path / "story.jsonl"
    file = StoryFile(path, settings.device.name)
    device = SimDevice(
        settings.device, specs, resolve("balloon"), profile, lambda now, output: None, file.write
    )
    for one in asked:
        device.submit(one)
    device.finish(asked[-1].arrival)
    file.close()
    (life,) = read_device_stories(path)
    found = replay(life)
    assert (found.difference, found.stray) == (None, None)
    assert sum(e.get("event") == "FirstJobReady" for e in life.entries) > 1


@pytest.mark.parametrize("segments", [1, 0])
def test_a_model_whose_last_third_is_gone_is_back_in_a_third_of_the_time(segments: float) -> None:
    """48 and 20 pages of weights in memory for 56: the second takes 16 of the first."""
    specs = [layered("m", 10), layered("n", 3)]
    profile = MachineProfile(
        costs={s.name: StepCosts(STEP, 0.0, 0.0, 0.0, 0.0) for s in specs},
        link=LinkRates.even(RATE),
        overhead=0.0,
    )
    asked = [
        Submission(id=f"{i}", model=model, prompt=(1,) * 20, max_tokens=1, arrival=10.0 * i)
        for i, model in enumerate("mnm")
    ]
    settings = replace(fleet("balloon", specs, 56), options={"segments": segments})
    came: dict[str, float] = {}

    def said(now: float, output: Output) -> None:
        if isinstance(output, TokenOutput):
            came[output.request_id] = now

    simulate(settings, specs, asked, profile, said, lambda entries: None, watch)
    whole, _, again = (came[r.id] - r.arrival for r in asked)
    if segments:
        assert again <= 0.45 * whole
    else:
        assert again == pytest.approx(whole)
