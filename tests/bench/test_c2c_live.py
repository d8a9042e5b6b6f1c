"""The terms on which `c2c_live` compares presets, and its requests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ballast.core.settings import ModelSettings
from ballast.policy.compute.deadline import Deadline
from ballast.policy.presets import resolve
from ballast.workload.workload import WorkloadRequest
from benchmarks import c2c_workload
from benchmarks.c2c_setting import COMPARED, Setting
from benchmarks.c2c_shared import at_random, devices
from benchmarks.c2c_workload import long_tail, window

NAMES = [f"m{i}" for i in range(4)]
SETTING = Setting(
    tuple(ModelSettings(name=n, path="nowhere") for n in NAMES), 1 << 24, 1 << 18, 1 << 26, 5.0
)


def test_rows_differ_in_their_preset_alone() -> None:
    for of, over in COMPARED.pairs():
        assert not COMPARED.unlike(of, over)
    for paced in (False, True):
        fleets = {row: SETTING.fleet(row, paced=paced) for row in COMPARED.rows}
        alike = {str(replace(f, preset="", options={})) for f in fleets.values()}
        assert len(alike) == 1, "budget, link, models and levels are equal"
    for row, contender in COMPARED.rows.items():
        resolved = resolve(contender.preset, COMPARED.options(row))
        assert isinstance(resolved.compute, Deadline), "one order of compute"
    ablations = [COMPARED.options(row) for row, c in COMPARED.rows.items() if c.ablates]
    assert ablations == [{"whole": 1}, {"promote": 0}]


@pytest.mark.parametrize("n", [2, 3])
def test_devices_share_one_link_and_one_budget(n: int) -> None:
    linked = devices(SETTING, n)
    found = linked.devices.values()
    assert len(found) == n
    assert sum(d.budget_bytes for d, _ in found) <= SETTING.budget
    assert {(at.shared, at.bytes_per_second) for _, at in found} == {(True, 5.0)}
    drawn = at_random(linked, 0)
    assert replace(drawn, models=()) == replace(linked, models=())
    assert all(len(m.devices) == 1 for m in drawn.models)


def test_a_window_with_many_models_comes_first() -> None:
    made = [
        WorkloadRequest(id=i, at=i, model="aaab"[i % 4], prompt_tokens=1, output_tokens=1)
        for i in range(6)
    ]
    assert [r.id for r in window(made, 2, 0)] == [2, 3]
    assert [r.id for r in window(made, 2, 1)] == [0, 1]


def test_requests_without_the_traces_are_labelled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(c2c_workload, "TRACES", tmp_path)
    made = long_tail(NAMES, 4.0, 5.0, 0)
    assert "synthetic" in made.describe()
    assert {r.model for r in made.requests} <= set(NAMES)
    assert max(r.prompt_tokens for r in made.requests) <= c2c_workload.LONGEST_PROMPT
