"""Stories replay: what a run did follows from what its story tells, live and in virtual time."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ballast.cli import app
from ballast.core.errors import ConfigError
from ballast.core.link import LinkRates
from ballast.core.model import AdapterSpec, ModelSpec
from ballast.core.request import Submission
from ballast.core.settings import FleetSettings
from ballast.engine.story_file import StoryFile
from ballast.policy.presets import resolve
from ballast.sim.device import SimDevice
from ballast.sim.machine_profile import MachineProfile
from ballast.sim.replay import replay
from ballast.sim.simulate import simulate
from ballast.sim.story_reader import DeviceStory, read_device_stories
from tests.effort import some
from tests.sim.restless import LENDING, lending_world, register, restless_world
from tests.sim.test_enough_memory import world
from tests.sim.test_leap import COSTS

Line = dict[str, Any]


def conversations(
    seed: int, preset: str
) -> tuple[FleetSettings, list[ModelSpec], list[Submission]]:
    """A random world whose requests share prefixes, wait with limits, and name adapters."""
    rng = random.Random(seed)
    fleet, specs, requests = world(seed, preset)
    specs = [
        replace(
            s,
            queue_seconds=rng.choice([None, 0.4]),
            adapters=(AdapterSpec(name=f"{s.name}-tuned", fingerprint="tuned", rank=2),),
        )
        for s in specs
    ]
    device = fleet.device
    room = 2 * device.page_bytes  # for the activations of adapters
    fleet = replace(fleet, device=replace(device, budget_bytes=device.budget_bytes + room))
    begun = tuple(rng.randrange(256) for _ in range(200))
    varied = [
        replace(
            r,
            model=r.model + rng.choice(["", "", "-tuned"]),
            prompt=(*begun[: rng.choice([0, 16, 40])], *r.prompt)[:120],
            max_tokens=rng.choice([0, 1, r.max_tokens, 4 * r.max_tokens]),
            arrival=r.arrival * (1 + 20 * (seed % 3)),
            open_ended=rng.random() < 0.2,
            salt=rng.choice(["", "", "tenant"]),
            prompt_logprobs=rng.choice([None, None, None, 2]),
            stop_token_ids=tuple(range(40, 40 + seed % 3)),
            resumed=rng.choice([None, None, None, begun[:9]]),
        )
        for r in requests
    ]
    wrong = replace(varied[0], id="wrong", prompt=(5, 256), arrival=varied[0].arrival)
    twin = replace(varied[0], max_tokens=30)
    return fleet, specs, [varied[0], wrong, twin, *varied[1:]]


def recorded_life(
    path: Path, seed: int, preset: str, make: Callable[..., Any] = conversations
) -> DeviceStory:
    """A simulated life, by its file."""
    fleet, specs, requests = make(seed, preset)
    file = StoryFile(path, fleet.device.name)
    profile = MachineProfile(
        costs={s.name: COSTS for s in specs}, link=LinkRates.even(1e8), overhead=3e-4
    )
    leaps = seed % 2 == 0
    simulate(fleet, specs, requests, profile, lambda at, o: None, file.write, leaps=leaps)
    file.close()
    return read_device_stories(path)[-1]


@pytest.mark.parametrize("preset", ["static", "swap", "balloon", "swap+deadline"])
def test_simulated_runs_replay_to_the_same_actions(preset: str, tmp_path: Path) -> None:
    seen: Counter[str] = Counter()
    for seed in some(range(24), 16):
        life = recorded_life(tmp_path / f"{seed}", seed, preset)
        found = replay(life)
        assert found.difference is None, f"seed {seed}: {found.difference}"
        assert found.stray is None
        assert life.over
        ended = [e for entry in life.entries for e in entry.get("ended", ())]
        seen.update(e.get("finished", e.get("failed")) for e in ended)
        seen["hits"] += sum(e.get("cached_tokens", 0) > 0 for e in ended)
        seen["preemptions"] += sum(e.get("preemptions", 0) for e in ended)
        seen["leaps"] += sum(e.get("event") == "Leap" for e in life.entries)
        seen["evictions"] += sum(e.get("action") == "Evict" for e in life.entries)
        starts = sum("job" in e and "event" not in e for e in life.entries)
        leapt = sum(e["steps"] - 1 for e in life.entries if e.get("event") == "Leap")
        assert found.jobs == starts + leapt
    wanted = {"hits", "leaps", "stop", "length", "invalid_request"}
    wanted |= set() if preset == "static" else {"preemptions", "evictions"}
    assert {name for name in wanted if not seen[name]} == set(), seen


def test_rotations_replay_to_the_same_actions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The policy heeds what jobs took, to the last bit: stories and their leaps tell it."""
    register(monkeypatch)
    seen: Counter[str] = Counter()
    seeds = some(range(16), 8)
    for seed in seeds:
        lanes = 1 + seed % 3 // 2
        life = recorded_life(
            tmp_path / f"{seed}",
            seed,
            "",
            lambda seed, _, n=lanes: restless_world(seed, n, kv=seed % 4 == 3),
        )
        found = replay(life)
        assert (found.difference, found.stray) == (None, None), f"seed {seed}: {found.difference}"
        seen["staged"] += sum(e.get("action") == "Stage" for e in life.entries)
        remapped = [e for e in life.entries if e.get("action") == "Remap"]
        seen["remaps"] += sum("refused" not in e for e in remapped)
        seen["refused"] += sum("refused" in e for e in remapped)
        seen["settled"] += sum(e.get("event") == "Settled" for e in life.entries)
        seen["stalls"] += sum("stall" in e for e in life.entries)
        seen["leaps"] += sum(e.get("event") == "Leap" for e in life.entries)
    assert seen["settled"] > 0.5 * seen["remaps"] > 3 * len(seeds), seen
    assert min(seen["stalls"], seen["leaps"]) > 3 * len(seeds), seen
    assert seen["refused"], seen
    assert seen["staged"] > len(seeds), seen


def test_layers_that_lend_their_memory_replay(tmp_path: Path) -> None:
    remaps = 0
    for seed in LENDING:
        life = recorded_life(
            tmp_path / f"{seed}", seed, "mirage", lambda seed, preset: lending_world(seed)
        )
        found = replay(life)
        assert (found.difference, found.stray) == (None, None), f"seed {seed}: {found.difference}"
        remaps += sum(e.get("action") == "Remap" for e in life.entries)
    assert remaps > 15


def test_stories_told_before_layers_rotated_replay(tmp_path: Path) -> None:
    path = tmp_path / "story"
    recorded_life(path, 8, "swap", world)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0]["snapshot"].pop("rotates") is True
    leaps = [line for line in lines if line.get("event") == "Leap"]
    assert leaps
    for leap in leaps:
        del leap["seconds"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (life,) = read_device_stories(path)
    found = replay(life)
    assert (found.difference, found.stray) == (None, None)


def test_models_that_come_and_go_replay(tmp_path: Path) -> None:
    """On a device that begins without any; what shares a prefix finds it."""
    for seed in range(6):
        fleet, specs, requests = world(seed, "balloon")
        device = fleet.device
        room = 40 * device.page_bytes  # whose activations a model needs takes what is free
        settings = replace(device, budget_bytes=device.budget_bytes + room)
        file = StoryFile(tmp_path / f"{seed}", device.name)
        profile = MachineProfile(costs={}, link=LinkRates.even(1e8), overhead=3e-4)
        sim = SimDevice(settings, [], resolve("balloon"), profile, lambda at, o: None, file.write)
        for i, spec in enumerate(specs):
            assert sim.join(float(i), spec, COSTS) is None
            mine = [r for r in requests if r.model == spec.name]
            for n, r in enumerate([*mine, *mine]):
                sim.submit(replace(r, id=f"{r.id}-{n}", arrival=i + 0.01 * n))
        sim.advance(len(specs) + 1.0)
        sim.leave(len(specs) + 1.0, specs[0].name, lambda why: None)
        sim.finish(len(specs) + 2.0)
        file.close()
        (life,) = read_device_stories(tmp_path / f"{seed}")
        assert any(e.get("operation") == "Leave" for e in life.entries)
        found = replay(life)
        assert (found.difference, found.stray) == (None, None)
        ended = [e for entry in life.entries for e in entry.get("ended", ())]
        assert sum(e.get("cached_tokens", 0) for e in ended)


def rewritten(path: Path, change: Callable[[Line], Line | None]) -> Path:
    """The story with some entry changed, or left out."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for i, line in enumerate(lines):
        changed = change(dict(line))
        if changed != line:
            lines[i : i + 1] = [] if changed is None else [changed]
            break
    else:
        raise AssertionError("nothing to change")
    out = path.with_suffix(".changed")
    out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return out


def evicts_another(line: Line) -> Line:
    return {**line, "model": "m9"} if line.get("action") == "Evict" else line


def no_eviction(line: Line) -> Line | None:
    return None if line.get("action") == "Evict" else line


def longer_prompt(line: Line) -> Line:
    more = {"prompt_tokens": line["prompt_tokens"] + 8} if line.get("event") == "Arrival" else {}
    return {**line, **more}


def another_reason(line: Line) -> Line:
    ended = [{**e, "preemptions": 99} for e in line.get("ended", ()) if "finished" in e]
    return {**line, "ended": ended} if ended else line


def other_job(line: Line) -> Line:
    return {**line, "job": 77} if line.get("event") == "JobDone" else line


@pytest.mark.parametrize(
    "change", [evicts_another, no_eviction, longer_prompt, another_reason, other_job]
)
def test_a_story_that_was_tampered_with_is_caught(
    change: Callable[[Line], Line | None], tmp_path: Path
) -> None:
    path = tmp_path / "story"
    recorded_life(path, 8, "swap", world)
    runner = CliRunner()
    fine = runner.invoke(app, ["story", "replay", str(path)])
    assert fine.exit_code == 0
    assert "decisions" in fine.output
    assert fine.output.strip().endswith("the same")
    changed = runner.invoke(app, ["story", "replay", str(rewritten(path, change))])
    assert changed.exit_code == 1
    assert "recorded:" in changed.output


def test_the_wording_of_reasons_may_be_left_out_of_the_comparison(tmp_path: Path) -> None:
    def reworded(line: Line) -> Line:
        return {**line, "why": "to make room"} if line.get("action") == "Evict" else line

    def refused(line: Line) -> Line:
        return {**line, "refused": "it is busy"} if line.get("action") == "Evict" else line

    path = tmp_path / "story"
    recorded_life(path, 8, "swap", world)
    (life,) = read_device_stories(rewritten(path, reworded))
    assert replay(life).difference is not None
    assert replay(life, reasons=False).difference is None
    (life,) = read_device_stories(rewritten(path, refused))
    assert replay(life, reasons=False).difference is not None, "it was not refused"


def test_a_policy_that_decides_otherwise_is_caught(tmp_path: Path) -> None:
    differs = 0
    for seed in range(6):
        life = recorded_life(tmp_path / f"{seed}", seed, "balloon", world)
        assert replay(life).difference is None
        life.snapshot = replace(life.snapshot, preset="swap")
        found = replay(life).difference
        differs += found is not None and "action" in (found.recorded or found.replayed or {})
    assert differs >= 5


def test_other_prefixes_make_another_run(tmp_path: Path) -> None:
    """That the digests are used at all: without them a cached prefix is not found."""
    path = tmp_path / "story"
    for seed in range(40):
        path.unlink(missing_ok=True)
        life = recorded_life(path, seed, "balloon")
        if any(e.get("cached_tokens") for x in life.entries for e in x.get("ended", ())):
            for entry in life.entries:
                entry.pop("blocks", None)
            assert replay(life).difference is not None
            return
    raise AssertionError("no prefix was found in the cache")


def test_a_story_that_breaks_off_replays_to_there(tmp_path: Path) -> None:
    path = tmp_path / "story"
    whole = recorded_life(path, 8, "swap", world)
    text = path.read_text()
    for length in range(len(text) // 3, len(text) - 2, len(text) // 23):
        path.write_text(text[:length])
        (life,) = read_device_stories(path)
        found = replay(life)
        assert found.difference is None
        assert found.stray is None
        assert not life.over
        assert len(life.entries) < len(whole.entries)


def test_several_lives_of_several_devices_in_one_file(tmp_path: Path) -> None:
    path = tmp_path / "story"
    recorded_life(path, 8, "swap", world)
    path.write_text(path.read_text()[:-30])  # the worker died
    recorded_life(path, 9, "balloon", world)
    other = tmp_path / "other"
    recorded_life(other, 10, "balloon", world)
    lines = path.read_text().splitlines()
    others = other.read_text().replace('"device":"cpu:0"', '"device":"cpu:1"').splitlines()
    mixed = [line for pair in zip(lines, others, strict=False) for line in pair]
    path.write_text("\n".join([*mixed, *lines[len(others) :], *others[len(lines) :]]) + "\n")
    lives = read_device_stories(path)
    assert [life.device for life in lives] == ["cpu:0", "cpu:1", "cpu:0"]
    assert [life.over for life in lives] == [False, True, True]
    for life in lives:
        found = replay(life)
        assert found.difference is None
        assert found.stray is None


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    path = tmp_path / "story"
    recorded_life(path, 8, "swap", world)
    lines = path.read_text().splitlines()
    half = len(lines) // 2
    gap = json.dumps({"device": "cpu:0", "missing": 5})
    path.write_text("\n".join([*lines[:half], gap, *lines[half + 5 :]]) + "\n")
    done = CliRunner().invoke(app, ["story", "replay", str(path)])
    assert done.exit_code == 1
    assert f"cannot be replayed: 5 entries before line {half + 1} are missing" in done.output
    path.write_text("\n".join([*lines[:half], lines[half][:20], *lines[half + 1 :]]) + "\n")
    done = CliRunner().invoke(app, ["story", "replay", str(path)])
    assert f"a line before line {half + 2} is cut off" in done.output


def in_parts(path: Path, n: int) -> Path:
    """The story at `path` as it would be in `n` parts and a file, of about equal size."""
    lines = path.read_text().splitlines(keepends=True)
    target = path.with_name("parted")
    size = len(lines) // (n + 1)
    for i in range(n):
        Path(f"{target}.{i + 1}").write_text("".join(lines[i * size : (i + 1) * size]))
    target.write_text("".join(lines[n * size :]))
    return target


def test_a_story_in_parts_is_one_story(tmp_path: Path) -> None:
    whole = recorded_life(tmp_path / "story", 8, "swap", world)
    path = in_parts(tmp_path / "story", 11)
    (life,) = read_device_stories(path)
    assert (life.entries, life.lines) == (whole.entries, whole.lines)
    done = CliRunner().invoke(app, ["story", "replay", str(path)])
    assert (done.exit_code, "from line 1" in done.output) == (0, True), done.output
    compared = CliRunner().invoke(app, ["story", "compare", str(path), str(tmp_path / "story")])
    assert compared.exit_code == 0, compared.output


def test_a_life_whose_first_part_was_deleted_is_said(tmp_path: Path) -> None:
    path = tmp_path / "story"
    recorded_life(path, 8, "swap", world)
    recorded_life(path, 9, "balloon", world)  # the next worker's
    path = in_parts(path, 11)
    Path(f"{path}.1").unlink()
    done = CliRunner().invoke(app, ["story", "replay", str(path)])
    assert done.exit_code == 1
    lost, kept = done.output.splitlines()
    assert "entries cannot be replayed: the part before them has been deleted" in lost
    assert kept.endswith("the same")
    (life,) = read_device_stories(path)
    assert life.snapshot.preset == "balloon"
    for i in range(2, 12):
        Path(f"{path}.{i}").unlink()
    Path(f"{path}.12").touch()
    with pytest.raises(ConfigError, match="beginning has been deleted"):
        read_device_stories(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it is empty"),
        ("hello\n", ":1: "),
        ('{"at": 1.0}\n', "not a line of a story"),
        ('{"device": "d", "at": 1.0}\n', "begins with a snapshot"),
        ('{"device": "d", "at": 0, "snapshot": {"format": 99}}\n', "format 1"),
        ('{"device": "d", "at": 0, "snapshot": {"format": 1}}\n', "missing required field"),
    ],
)
def test_what_is_no_story_is_refused_by_line(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "story"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_device_stories(path)


def test_an_entry_without_what_it_needs_is_refused_by_line(tmp_path: Path) -> None:
    def timeless(line: Line) -> Line:
        return {k: v for k, v in line.items() if k != "seconds" or line["event"] != "JobDone"}

    path = tmp_path / "story"
    recorded_life(path, 8, "swap", world)
    with pytest.raises(ConfigError, match=r"changed:\d+.*JobDone.*'seconds'"):
        read_device_stories(rewritten(path, timeless))


def test_a_story_holds_no_token(tmp_path: Path) -> None:
    """Two runs that differ by their tokens alone, all of them, have the same story but for the
    digests."""

    def shifted(seed: int, preset: str) -> tuple[FleetSettings, list[ModelSpec], list[Submission]]:
        fleet, specs, requests = world(seed, preset)
        others = [replace(r, prompt=tuple((t + 100) % 256 for t in r.prompt)) for r in requests]
        return fleet, specs, others

    def plain(life: DeviceStory) -> list[Line]:
        return [{k: v for k, v in e.items() if k != "blocks"} for e in life.entries]

    a = recorded_life(tmp_path / "a", 6, "balloon", world)
    b = recorded_life(tmp_path / "b", 6, "balloon", shifted)
    assert plain(a) == plain(b)
    assert a.entries != b.entries
