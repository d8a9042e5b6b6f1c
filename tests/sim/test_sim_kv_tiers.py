"""KV tiers in virtual time: a conversation whose model was evicted finds its history again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from ballast.core.event import FinishedOutput, Output
from ballast.core.kv_tiers import KvTierSettings
from ballast.core.link import LinkRates
from ballast.core.request import Submission
from ballast.core.units import MiB, ceil_div
from ballast.engine.kv_tiers import KvTiers
from ballast.engine.model import ModelState
from ballast.engine.state import DeviceState
from ballast.engine.story_file import StoryFile
from ballast.kv.directory import Tier
from ballast.memory.cell_book import CELL_BYTES
from ballast.policy.presets import PRESETS
from ballast.sim.cluster_files import ClusterFiles
from ballast.sim.kv_tiers import SimKvTiers
from ballast.sim.machine_profile import MachineProfile
from ballast.sim.replay import replay
from ballast.sim.simulate import SimulatedRun, simulate
from ballast.sim.story_reader import read_device_stories
from ballast.sim.topology import APART, places
from tests.sim.test_simulate import COSTS, OutputLog, fleet, spec
from tests.sim.test_swiftcache import asked


def turns(n: int) -> list[Submission]:
    """Conversations with two models in turns, where only one of them has room."""
    made = []
    for i in range(n):
        model = "ab"[i % 2]
        prompt = tuple(1 + (7 * k + i % 2) % 300 for k in range(100 + 50 * (i // 2)))
        made.append(
            Submission(id=f"q{i}", model=model, prompt=prompt, max_tokens=4, arrival=2.0 * i)
        )
    return made


def run(host_bytes: int, disk_bytes: int = 0) -> tuple[SimulatedRun, dict[str, int]]:
    specs = [spec("a"), spec("b")]
    profile = MachineProfile(
        costs={"a": COSTS, "b": COSTS}, link=LinkRates.even(1e8), overhead=1e-4
    )
    settings = fleet("swap", specs, 60)
    kv = KvTierSettings(host_bytes=host_bytes, disk_path="kv", disk_bytes=disk_bytes)
    settings = replace(settings, kv=kv)
    cached: dict[str, int] = {}

    def said(now: float, output: Output) -> None:
        if isinstance(output, FinishedOutput):
            cached[output.request_id] = output.cached_tokens

    result = simulate(settings, specs, turns(8), profile, said)
    result.state.validate()
    return result, cached


def test_history_is_fetched_after_evictions() -> None:
    _, without = run(0)
    assert set(without.values()) == {0}
    result, kept = run(8 * MiB)
    assert list(kept) == [f"q{i}" for i in range(8)]
    assert [n > 0 for n in kept.values()] == [i > 1 for i in range(8)]
    assert result.state.tiers.fetched_tokens.total() == sum(kept.values())
    assert result.state.tiers.failed == 0
    again, same = run(8 * MiB)
    assert (again.seconds, same) == (result.seconds, kept)


def test_prefixes_in_use_on_the_device_stay_on_the_host() -> None:
    """Prompts that come once, for more than the host keeps, do not flush one that requests find on
    the device: it is there when its model has been evicted."""
    specs = [spec("a"), spec("b")]
    a, n = specs[0], 120
    full = (n - 1) // a.block_tokens
    cells = full * ceil_div(a.block_bytes, CELL_BYTES)
    profile = MachineProfile(costs={"a": COSTS, "b": COSTS}, link=LinkRates.even(1e8), overhead=0.0)
    settings = fleet("swap", specs, 60)
    settings = replace(settings, kv=KvTierSettings(host_bytes=5 * cells * CELL_BYTES // 2))
    cached: dict[str, int] = {}

    def said(now: float, output: Output) -> None:
        if isinstance(output, FinishedOutput):
            cached[output.request_id] = output.cached_tokens

    asked_for = ["hot", "hot", "hot", "cold0", "cold1", "cold2", "cold3", "b", "hot"]
    requests = [
        Submission(
            id=f"{i} {what}",
            model="b" if what == "b" else "a",
            prompt=tuple(1 + (7 * k + sum(what.encode())) % 300 for k in range(n)),
            max_tokens=2,
            arrival=2.0 * i,
        )
        for i, what in enumerate(asked_for)
    ]
    result = simulate(settings, specs, requests, profile, said)
    result.state.validate()
    assert cached == {r.id: full * a.block_tokens * (r.id[0] in "128") for r in requests}
    assert result.state.tiers.fetched_tokens.total() == full * a.block_tokens


def preempted(preset: str, host_bytes: int, link: float = 1e10) -> ModelState:
    """Six requests that outgrow the device; returns what came of their model."""
    specs = [spec("m", weight_pages=4)]
    profile = MachineProfile(costs={"m": COSTS}, link=LinkRates.even(link), overhead=0.0)
    settings = replace(fleet(preset, specs, 20), kv=KvTierSettings(host_bytes=host_bytes))
    log = OutputLog()
    state = simulate(settings, specs, asked(6, 20, 200), profile, log).state
    state.validate()
    assert all(isinstance(end, FinishedOutput) for end in log.ended.values())
    m = state.models["m"]
    tiers = cast("KvTiers", m.tiers)
    assert tiers.failed == 0 or host_bytes < MiB
    fetched.append(tiers.fetched_tokens.total())
    return m


fetched: list[int] = []
"""Tokens that each run of `preempted` has fetched."""


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preempted_request_finds_what_it_computed_under_each_preset(preset: str) -> None:
    without, kept = preempted(preset, 0), preempted(preset, 64 * MiB)
    assert fetched[-2] == 0
    if preset in ("kvswap", "swiftcache"):  # they stage instead
        assert kept.preemptions <= 1
    else:
        assert kept.preemptions > 0
        assert fetched[-1] > 100
        saved = 0 if preset == "superinfer" else fetched[-1]  # without tiers others make way
        assert kept.step_tokens < without.step_tokens
        assert kept.step_tokens <= without.step_tokens - saved


def test_staged_blocks_count_in_the_host_tier_and_the_story_replays(tmp_path: Path) -> None:
    specs = [spec("m", weight_pages=4)]
    profile = MachineProfile(costs={"m": COSTS}, link=LinkRates.even(1e10), overhead=0.0)
    kv = KvTierSettings(host_bytes=64 * MiB)
    settings = replace(fleet("swiftcache", specs, 20), kv=kv)
    seen: set[int] = set()

    def observe(now: float, state: DeviceState) -> None:
        copies, m = state.tiers.copies, state.models["m"]
        assert isinstance(copies, SimKvTiers)
        staged = len(m.kv.staged) * m.spec.block_bytes
        assert copies._store.directory.shelves[Tier.HOST].capacity == 64 * MiB - staged
        seen.add(staged)

    file = StoryFile(tmp_path / "story", "device")
    arrivals = asked(6, 20, 200)
    simulate(settings, specs, arrivals, profile, OutputLog(), file.write, observe=observe)
    file.close()
    assert len(seen) > 3
    (life,) = read_device_stories(tmp_path / "story")
    assert replay(life).difference is None


def test_a_chain_longer_than_the_tier_is_kept_by_its_head() -> None:
    whole, part = preempted("balloon", 64 * MiB), preempted("balloon", 50 * CELL_BYTES)
    assert 0 < fetched[-1] < fetched[-2]
    assert part.step_tokens > whole.step_tokens


def test_what_is_computed_sooner_than_fetched_is_computed() -> None:
    preempted("balloon", 64 * MiB, link=1e6)
    assert fetched[-1] == 0


def test_what_leaves_the_host_is_read_from_disk_which_takes_longer() -> None:
    _, small = run(12 * CELL_BYTES)
    read, found = run(12 * CELL_BYTES, 8 * MiB)
    roomy, same = run(8 * MiB)
    assert sum(small.values()) < sum(found.values()) == sum(same.values())
    tiers = read.state.tiers.fetched_tokens
    assert tiers[Tier.DISK] > 0
    assert tiers.total() == sum(found.values())
    assert read.seconds > roomy.seconds


def test_devices_of_a_host_share_its_tiers() -> None:
    files = ClusterFiles(joints=replace(APART, kv_host=8 * MiB, kv_disk=16 * MiB))
    (place,) = places(files.joints, [(LinkRates.even(1e9), 1)])
    assert place.host.kv_store is not None
    assert set(place.host.kv_store.directory.shelves) == {Tier.HOST, Tier.DISK}
