"""Workloads on servers of several devices in this process, of fake devices and of real ones."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from ballast.bench.run import compare_live
from ballast.bench.servers import run_servers
from ballast.core.errors import Unavailable
from ballast.core.settings import DeviceSettings, FleetSettings, LinkSettings, ModelSettings, Slo
from ballast.fleet.fleet_file import load_fleet
from ballast.fleet.make import make_fleet
from ballast.policy.presets import PRESETS
from ballast.sim.replay import replay
from ballast.sim.story_reader import read_device_stories
from ballast.workload.workload import Workload, WorkloadRequest
from tests.cluster.worker.test_worker import FAKE

BUDGET = 2**20


def fleet(name: str, models: dict[str, tuple[str, ...]]) -> FleetSettings:
    """Models by name, each with its devices."""
    return FleetSettings(
        models=tuple(ModelSettings(name=m, path=m, devices=on) for m, on in models.items()),
        device=DeviceSettings(name=f"{name}:0", budget_bytes=BUDGET),
        others=(DeviceSettings(name=f"{name}:1", budget_bytes=BUDGET),),
        other_links=(LinkSettings(device=f"{name}:1"),),
    )


def workload(*models: str) -> Workload:
    """All at once."""
    requests = [
        WorkloadRequest(id=i, at=0.0, model=model, prompt_tokens=4 + i, output_tokens=3)
        for i, model in enumerate(models)
    ]
    return Workload.of("w", requests)


def slos(*models: str) -> dict[str, Slo]:
    return dict.fromkeys(models, Slo(ttft=1e3, tpot=1e3))


def test_each_server_answers_for_its_own_models() -> None:
    one = fleet("one", {"a": ("one:0",), "ab": ("one:0", "one:1")})
    two = fleet("two", {"c": ("two:1",), "d": ("two:0",)})
    work = workload("a", "c", "ab", "ab", "d", "c")
    ran = asyncio.run(
        run_servers([one, two], work, slos("a", "ab", "c", "d"), name="both", command=FAKE)
    )
    assert [(r.model, r.prompt_tokens, r.output_tokens, r.error) for r in ran.report.records] == [
        (asked.model, asked.prompt_tokens, 3, None) for asked in work.requests
    ]
    assert [d.device for d in ran.devices] == ["one:0", "one:1", "two:0", "two:1"]
    assert ran.report.name == "both"
    assert ran.moves == ()
    assert max(sum(s.owners.values()) for s in ran.report.memory) > 0


def test_a_model_that_cannot_be_served_is_named() -> None:
    broken = fleet("one", {"a": ("one:0",), "b": ("one:1",)})
    models = (broken.models[0], replace(broken.models[1], path="broken"))
    ends = run_servers(
        [replace(broken, models=models)], workload("a"), slos("a", "b"), name="x", command=FAKE
    )
    with pytest.raises(Unavailable, match="b is not served: it is broken"):
        asyncio.run(ends)


@pytest.mark.slow
def test_presets_are_compared_over_several_devices_each_with_its_story(tmp_path: Path) -> None:
    made = make_fleet(tmp_path, n_models=2, size="tiny", steps=0, dtype="float32", budget="64MiB")
    loaded = load_fleet(made.file, presets=PRESETS)
    half = replace(loaded.device, budget_bytes=loaded.device.budget_bytes // 2, threads=1)
    on = {"atlas-chat": ("cpu:0", "cpu:1"), "wren-mini": ("cpu:1",)}
    two = replace(
        loaded,
        models=tuple(replace(m, devices=on[m.name]) for m in loaded.models),
        device=half,
        others=(replace(half, name="cpu:1"),),
        other_links=(replace(loaded.link, device="cpu:1"),),
    )
    work = workload("atlas-chat", "wren-mini", "atlas-chat", "atlas-chat", "wren-mini")
    reports = list(compare_live(two, work, ["balloon", "static"], tmp_path / "story.jsonl"))
    assert [r.name for r in reports] == ["balloon", "static"]
    assert [r.total.answered for r in reports] == [5, 5]
    for preset in ("balloon", "static"):
        file = tmp_path / f"story-{preset}.jsonl"
        lives = list(read_device_stories(file))
        assert sorted(life.device for life in lives) == ["cpu:0", "cpu:1"]
        for life in lives:
            found = replay(life)
            assert (found.difference, found.stray) == (None, None)
        arrived = [
            json.loads(line)["device"]
            for line in file.read_text().splitlines()
            if '"Arrival"' in line
        ]
        assert len(arrived) == 5
        assert set(arrived) == {"cpu:0", "cpu:1"}
