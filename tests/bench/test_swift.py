"""Benchmarks of SwiftCache compare rows that differ in nothing but what they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ballast.core.settings import ModelSettings
from ballast.core.units import KiB, MiB
from ballast.policy.presets import preset_of
from ballast.sim.model_catalogue import facts
from benchmarks import swift_live, swift_sim
from benchmarks.swift_context import computed, contradiction, range_of, roomy, units
from benchmarks.swift_live import LONG, SHORT, Setting
from benchmarks.swift_phases import phases

SETTING = Setting(
    models=tuple(ModelSettings(name=name, path=name) for name in (LONG, SHORT)),
    budgets=(8 * MiB, 16 * MiB),
    page=64 * KiB,
    host=1e6,
    host_bytes=64 * MiB,
    block_bytes=64 * KiB,
)


@pytest.mark.parametrize("name", sorted(swift_live.ROWS))
def test_live_rows_have_equal_settings_but_for_policies_and_tiers(name: str) -> None:
    row, base = swift_live.ROWS[name], swift_live.ROWS["none"]
    fleet, other = SETTING.fleet(row, Path("story")), SETTING.fleet(base, Path("story"))
    same = replace(fleet, preset=other.preset, placement=other.placement, kv=other.kv)
    assert same == other
    assert fleet.options == {}
    mine, theirs = preset_of(fleet), preset_of(other)
    shared = mine.values.keys() & theirs.values.keys()
    assert {k: mine.values[k] for k in shared} == {k: theirs.values[k] for k in shared}
    assert (mine.order, mine.admission) == (theirs.order, theirs.admission)


def test_copies_of_borrowed_kv_lie_in_the_first_devices_memory() -> None:
    setting = replace(SETTING, slots=100 * KiB)
    (copied,) = swift_live.COPIED.values()
    here = setting.fleet(copied, Path("story"))
    there = setting.fleet(swift_live.ROWS["swiftcache"], Path("story"))
    link = replace(here.link, peer_slot_bytes=0)
    assert replace(here, device=there.device, link=link) == there
    assert (here.link.peer_slot_bytes, there.link.peer_slot_bytes) == (100 * KiB, 0)
    lost = there.device.budget_bytes - here.device.budget_bytes
    assert lost == 2 * setting.page >= here.link.peer_slot_bytes


def test_phases_are_summed_over_requests_and_hidden_transfers_over_jobs_that_could_hide() -> None:
    """Two chunks of one prompt, and a decode whose pass was shorter than its transfers."""
    arrival = {"event": "Arrival", "model": "m", "request": "r", "n": 1, "at": 1.0}
    done = {"event": "JobDone", "model": "m"}
    found = phases(
        [
            arrival,
            {"job": 1, "model": "m", "at": 1.5, "prefill": [[1, 0, 16, False]]},
            {**done, "job": 1, "at": 2.5, "seconds": 1.0, "stall": 0.1, "carried": [0.2, 0.3]},
            {"job": 2, "model": "m", "at": 3.0, "prefill": [[1, 16, 4, True]]},
            {**done, "job": 2, "at": 4.0, "seconds": 1.0, "carried": [0.4, 0.1]},
            {"job": 3, "model": "m", "at": 4.0, "decode": [1]},
            {**done, "job": 3, "at": 5.0, "seconds": 1.0, "stall": 0.9, "carried": [0.9, 0.0]},
            {**arrival, "model": "other", "n": 2},
        ],
        "m",
    )
    assert found.queue == pytest.approx(0.5 + 0.5)
    assert found.execute == pytest.approx(0.9 + 1.0)
    assert (found.load, found.store) == pytest.approx((0.6, 0.4))
    assert found.hidden == pytest.approx(1 - 0.1 / (0.5 + 0.5))
    shown = found.measured()
    assert shown["overlapped"] == pytest.approx(0.1 / (1.0 + 1.9 + 0.1))
    assert (shown["load_p99_ms"], shown["store_p99_ms"]) == pytest.approx((600, 400))


def test_simulated_rows_have_equal_links_and_requests() -> None:
    rows = swift_sim.ROWS
    joints = {replace(swift_sim.joints(row, 1.0), kv_host=0) for row in rows.values()}
    assert len(joints) == 1
    assert {name for name, row in rows.items() if swift_sim.joints(row, 1.0).kv_host} == {"offload"}
    first, second = (swift_sim.conversations("Qwen3-14b", 20.0, 0) for _ in range(2))
    assert first == second


def test_the_longest_contexts_are_the_papers_but_for_models_that_fill_their_device() -> None:
    found = computed()
    assert "Qwen3-14b" not in found["L4"]
    spare = roomy(found)
    assert not any("Qwen3-32b" in rows for rows in spare.values())
    low, high = range_of(spare, "chunk_8k")
    assert 1.58 < low < high < 3.98
    v100, h20 = contradiction()
    assert v100 > 1.9 * h20


def test_units_are_the_papers() -> None:
    lwm, large = facts("LWM-1M-7b"), facts("Qwen3-32b")
    worked = {"Qwen3-14b": (5, 16), "Qwen3-32b": (1, 2), "Qwen3-8b": (9, 32)}
    for name, unit in worked.items():
        found = units(lwm, facts(name))
        assert (found["master"], found["worker"]) == unit
        assert found["lost_by_units"] >= found["lost_by_pages"]
    found = units(large, facts("Qwen3-14b"))
    assert (found["master"], found["worker"]) == (5, 8)
