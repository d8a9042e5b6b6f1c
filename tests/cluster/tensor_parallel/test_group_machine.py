"""A live device of two ranks under pressure: tokens of one rank, equal pages, a story to replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ballast.bench.inprocess import Answer, InProcess
from ballast.cluster.machine_choice import machine_of
from ballast.cluster.tensor_parallel.rank_machine import RankMachine, settings_of_rank
from ballast.core.errors import ConfigError, DeviceError
from ballast.core.event import FailedOutput, FinishedOutput
from ballast.core.model import ModelSpec
from ballast.core.request import Submission
from ballast.core.settings import DeviceSettings, FleetSettings, ModelSettings
from ballast.core.units import ceil_div
from ballast.engine.sizing import largest_jobs
from ballast.live.inbox import MonotonicClock
from ballast.sim.replay import replay
from ballast.sim.story_reader import read_device_stories
from ballast.weights.host import HostTier
from ballast.weights.sharding import Shard
from tests.engine.checkpoints import make_base_and_tuned, make_llama
from tests.sim.test_live_story import PAGE, asked, fleet, follow


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models that share segments, and one that is unlike them."""
    root = tmp_path_factory.mktemp("models")
    base, tuned = make_base_and_tuned(root)
    return {"base": base, "tuned": tuned, "other": make_llama(root / "other", 2)}


def specs_of_ranks(
    models: Sequence[ModelSettings], device: DeviceSettings
) -> tuple[list[ModelSpec], int]:
    """What the first rank of a device has of each model, and pages for activations of their jobs,
    as measured on this machine."""
    own = settings_of_rank(device)
    machine = RankMachine(own, Shard(0, device.tensor_parallel), None, MonotonicClock(), print)
    specs = []
    for m in models:
        host = machine.load(m, HostTier(), 1)
        specs.append(host.spec)
        machine.unload(host)
    machine.link.close()
    machine.vm.close()
    assert all(spec.job_memory is not None for spec in specs)
    return specs, ceil_div(largest_jobs(specs, own), device.page_bytes)


def over_ranks(settings: FleetSettings, pages: int) -> FleetSettings:
    """`pages` beside the arena, on two ranks."""
    device = replace(settings.device, tensor_parallel=2, threads=2)
    pages += specs_of_ranks([m for m in settings.models if m.name != "odd"], device)[1]
    return replace(settings, device=replace(device, budget_bytes=2 * pages * PAGE))


def answers_of(server: InProcess) -> dict[str, Answer]:
    return {name: a for name, a in server.answers.items() if isinstance(a.end, FinishedOutput)}


def test_a_live_group_under_pressure(paths: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "story"
    plain = fleet(paths, "balloon", path, 400)
    requests: list[Submission] = asked(paths)
    with InProcess(replace(plain, story_path=None)) as one:
        follow(one, requests)
    with InProcess(over_ranks(plain, 16)) as server:
        follow(server, requests)
        state = server.device.state
        state.pool.validate()
        for m in state.models.values():
            m.weights.validate()
            # Asked of the operating system on both ranks; raises where they differ.
            seen = len(state.pool.vm.os_pages(m.weights.range.range))
            assert seen == m.weights.range.os_backed()
        report = server.device.snapshot()
    assert [a.end for a in server.answers.values() if isinstance(a.end, FailedOutput)] == []
    expected, found = answers_of(one), answers_of(server)
    assert {n: a.tokens for n, a in found.items()} == {n: a.tokens for n, a in expected.items()}
    assert report.page_bytes == 2 * PAGE
    assert sum(m.evictions for m in report.models) > 0
    assert sum(m.preemptions for m in report.models) > 0
    (life,) = read_device_stories(path)
    assert replay(life).difference is None


def test_what_cannot_be_divided_is_refused_and_the_rest_is_served(
    paths: dict[str, Path], tmp_path: Path
) -> None:
    odd = make_llama(tmp_path / "odd", 3, num_key_value_heads=1)
    plain = fleet({"base": paths["base"], "odd": odd}, "balloon", tmp_path / "story", 200)
    settings = replace(over_ranks(plain, 200), story_path=None)
    with InProcess(settings) as server:
        assert list(server.device.specs) == ["base"]
        assert "1 KV heads" in server.device.failed["odd"]
        assert server.generate(asked({"base": paths["base"]})[:1])
        with pytest.raises(DeviceError, match="lends no pages"):
            server.device.vm.export([0])


def test_lanes_are_refused(paths: dict[str, Path], tmp_path: Path) -> None:
    plain = fleet(paths, "balloon", tmp_path / "story", 16)
    device = replace(plain.device, tensor_parallel=2, lanes=2)
    with pytest.raises(ConfigError, match="one lane"):
        machine_of(replace(plain, device=device), MonotonicClock(), print)
