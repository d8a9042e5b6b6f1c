"""What `arbiter_live` serves, and what it says of runs; the runs themselves are not made here."""

from __future__ import annotations

from pathlib import Path

import pytest

from ballast.bench.demo_terms import seconds_alone
from ballast.bench.record import RequestRecord
from ballast.bench.report import Report
from ballast.core.settings import DeviceSettings, FleetSettings, LinkSettings, ModelSettings, Slo
from ballast.core.units import MiB
from ballast.sim.profile import device_profile
from ballast.workload.workload import Workload, WorkloadRequest
from benchmarks import arbiter_live
from benchmarks.setting import Setting
from tests.sim.test_cluster import spec

BUDGET = 64 * MiB
SETTING = Setting(
    roomy=FleetSettings(
        models=tuple(ModelSettings(name=n, path=n) for n in "ab"),
        device=DeviceSettings(budget_bytes=4 * BUDGET, threads=2),
        link=LinkSettings(bytes_per_second=1e9),
    ),
    specs=[spec(n) for n in "ab"],
    profile=device_profile("H100-80G").of([spec(n) for n in "ab"]),
    workload=Workload.of(
        "one", [WorkloadRequest(id=0, at=0.0, model="a", prompt_tokens=1, output_tokens=1)]
    ),
)


def report(in_time: int, late: int, tpot: float) -> Report:
    """Requests of two tokens, the late ones by their first."""
    slos = {"a": Slo(ttft=1.0, tpot=9.0)}
    firsts = [0.5] * in_time + [2.0] * late
    records = [
        RequestRecord(
            id=i,
            model="a",
            at=0.0,
            sent=0.0,
            first_token=first,
            end=first + tpot,
            prompt_tokens=1,
            output_tokens=2,
            token_times=(first, first + tpot),
        )
        for i, first in enumerate(firsts)
    ]
    return Report.of(records, slos, 9.0, name="", workload="")


def test_rows_have_the_same_memory_threads_links_and_levels() -> None:
    fleets = {row: arbiter_live.served(SETTING, row, BUDGET) for row in arbiter_live.COMPARED.rows}
    assert {fleet.preset for fleet in fleets.values()} == set(arbiter_live.COMPARED.rows)
    for fleet in fleets.values():
        devices = [device for device, _ in fleet.devices.values()]
        assert [d.budget_bytes for d in devices] == [BUDGET // 2] * 2
        assert [d.threads for d in devices] == [1, 1]
        assert [link.bytes_per_second for _, link in fleet.devices.values()] == [1e9, 1e9]
    first, *others = fleets.values()
    for other in others:
        assert (other.devices, other.models) == (first.devices, first.models)


def test_each_workload_keeps_the_machine_as_busy(tmp_path: Path) -> None:
    made = arbiter_live.workloads(SETTING, tmp_path / "no trace here", 60.0)
    assert list(made) == ["bursty", "arena", "alternation"]
    for work in made.values():
        load = len(work.requests) * seconds_alone(work, SETTING.profile.lane_costs) / 60.0
        assert load == pytest.approx(arbiter_live.LOAD, rel=0.5)


def test_the_worst_workload_is_beside_its_own_best_other() -> None:
    rows = {"ballast": [report(9, 1, 0.2)], "prism": [report(8, 2, 0.1)]}
    found = arbiter_live.summary(
        {
            "x": {**rows, "balloon": [report(6, 4, 0.1)]},
            "y": {**rows, "balloon": [report(10, 0, 0.1)]},
        }
    )
    assert found["attained"]["x"] == {"ballast": 0.9, "prism": 0.8, "balloon": 0.6}
    assert found["worst_vs_best_other"] == pytest.approx(-10.0)
    assert found["mean_vs_best_other"] == pytest.approx(0.0)
    assert found["tpot_over_balloon"] == pytest.approx(2.0)
