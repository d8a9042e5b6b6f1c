"""Benchmarks of SwiftCache compare rows that differ in nothing but what they are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ballast.core.settings import ModelSettings
from ballast.core.units import KiB, MiB
from ballast.policy.presets import preset_of
from ballast.sim.model_catalogue import facts
from benchmarks import swift_live, swift_sim
from benchmarks.swift_context import computed, contradiction, range_of, units
from benchmarks.swift_live import LONG, SHORT, Setting

SETTING = Setting(
    models=tuple(ModelSettings(name=name, path=name) for name in (LONG, SHORT)),
    budgets=(8 * MiB, 16 * MiB),
    page=64 * KiB,
    host=1e6,
    host_bytes=64 * MiB,
)


@pytest.mark.parametrize("name", sorted(swift_live.ROWS))
def test_live_rows_have_equal_settings_but_for_policies_and_tiers(name: str) -> None:
    row, base = swift_live.ROWS[name], swift_live.ROWS["none"]
    fleet, other = SETTING.fleet(row), SETTING.fleet(base)
    same = replace(fleet, preset=other.preset, placement=other.placement, kv=other.kv)
    if name == "chunks":
        step = other.device.step_tokens
        assert fleet.device.step_tokens < step
        same = replace(
            same,
            device=replace(same.device, step_tokens=step),
            others=tuple(replace(d, step_tokens=step) for d in same.others),
        )
    assert same == other
    assert fleet.options == {}
    mine, theirs = preset_of(fleet), preset_of(other)
    shared = mine.values.keys() & theirs.values.keys()
    assert {k: mine.values[k] for k in shared} == {k: theirs.values[k] for k in shared}
    assert (mine.order, mine.admission) == (theirs.order, theirs.admission)


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
    roomy = {d: {n: x for n, x in rows.items() if n != "Qwen3-32b"} for d, rows in found.items()}
    low, high = range_of(roomy, "chunk_8k")
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
