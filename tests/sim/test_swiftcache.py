"""Preset `swiftcache` in virtual time: KV goes to the host before work is undone, and returns."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from ballast.core.event import FinishedOutput
from ballast.core.link import LinkRates
from ballast.core.request import Submission
from ballast.engine.state import DeviceState
from ballast.engine.story_file import StoryFile
from ballast.kv.staging import BlockStaging
from ballast.sim.machine_profile import MachineProfile
from ballast.sim.replay import replay
from ballast.sim.simulate import SimulatedRun, simulate
from ballast.sim.story_reader import read_device_stories
from tests.policy.random_stages import add_preset
from tests.sim import scenarios
from tests.sim.scenarios import OPTIONS, Seeded, scenario
from tests.sim.test_simulate import COSTS, OutputLog, fleet, spec, watch
from tests.sim.watching import Run


def asked(n: int, prompt: int, output: int) -> list[Submission]:
    return [
        Submission(
            id=f"r{i}",
            model="m",
            prompt=tuple(range(1 + i, 1 + i + prompt)),
            max_tokens=output,
            ignore_eos=True,
            arrival=1e-3 * i,
        )
        for i in range(n)
    ]


def run(
    preset: str,
    arrivals: list[Submission],
    pages: int,
    link: float,
    seen: Callable[[DeviceState], object] = lambda state: None,
    sink: StoryFile | None = None,
) -> tuple[SimulatedRun, OutputLog]:
    specs = [spec("m", weight_pages=4)]
    profile = MachineProfile(costs={"m": COSTS}, link=LinkRates.even(link), overhead=0.0)
    log = OutputLog()

    def observe(now: float, state: DeviceState) -> None:
        watch(now, state)
        seen(state)

    write = None if sink is None else sink.write
    settings = fleet(preset, specs, pages)
    result = simulate(settings, specs, arrivals, profile, log, write, observe=observe)
    assert all(isinstance(end, FinishedOutput) for end in log.ended.values()), log.ended
    return result, log


def test_requests_that_outgrow_the_device_are_staged_in_place_of_preempted() -> None:
    staged: list[int] = []
    arrivals = asked(6, 20, 200)
    preempted = {}
    for preset in ("balloon", "swiftcache"):
        result, _ = run(
            preset, arrivals, 20, 1e10, lambda s: staged.append(len(s.models["m"].kv.staged))
        )
        preempted[preset] = result.state.models["m"].preemptions
    assert preempted["balloon"] > 0
    assert preempted["swiftcache"] < preempted["balloon"]
    assert max(staged) > 0
    assert staged[-1] == 0


def test_a_context_longer_than_the_device_streams_and_is_refused_where_nothing_streams() -> None:
    (long,) = asked(1, 440, 40)
    with pytest.raises(AssertionError, match="insufficient_memory"):
        run("balloon", [long], 11, 1e9)
    staged: list[int] = []
    _, log = run(
        "swiftcache", [long], 11, 1e9, lambda s: staged.append(len(s.models["m"].kv.staged))
    )
    assert log.tokens["r0"] == 40
    assert max(staged) * 16 > 400


def test_a_pass_waits_for_staged_layers_where_the_link_is_slow() -> None:
    (long,) = asked(1, 440, 40)
    slow, fast = (run("swiftcache", [long], 11, link)[0].seconds for link in (1e7, 1e11))
    assert slow > 2 * fast


def test_stories_replay(tmp_path: Path) -> None:
    file = StoryFile(tmp_path / "story", "device")
    run("swiftcache", asked(6, 20, 200), 20, 1e10, sink=file)
    file.close()
    (life,) = read_device_stories(tmp_path / "story")
    assert any(e.get("action") == "Stage" for e in life.entries)
    found = replay(life)
    assert (found.difference, found.stray) == (None, None)


@pytest.mark.parametrize("seed", [103, 105, 107, 110])
def test_random_scenarios_with_random_stages(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancellations, failing jobs, evictions and peers beside blocks that come and go."""
    name, moved = add_preset(monkeypatch), Counter[str]()
    monkeypatch.setitem(scenarios.OPTIONS, name, OPTIONS["balloon"])
    end = BlockStaging.end_moves

    def counted(staging: BlockStaging, tables: list[list[int]], *, done: bool) -> bool:
        moved["stores"] += len(staging._book.moves.stores)
        return end(staging, tables, done=done)

    monkeypatch.setattr(BlockStaging, "end_moves", counted)
    Run(scenario(Seeded(random.Random(seed)), (name,)))()
    assert moved["stores"] > 0
