"""Prism live: rows share memory, threads and links alike, and a stall is counted in steps."""

from __future__ import annotations

import pytest

from ballast.core.settings import DeviceSettings, FleetSettings, LinkSettings, ModelSettings
from ballast.core.units import MiB
from ballast.sim.profile import device_profile
from ballast.workload.workload import Workload, WorkloadRequest
from benchmarks.migration import Stream
from benchmarks.prism_live import COMPARED, served
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


@pytest.mark.parametrize("row", COMPARED.rows)
def test_rows_have_the_same_memory_threads_and_links(row: str) -> None:
    fleet = served(SETTING, row, BUDGET)
    devices = [device for device, _ in fleet.devices.values()]
    assert [d.budget_bytes for d in devices] == [BUDGET // 2] * 2
    assert [d.threads for d in devices] == [1, 1]
    assert [link.bytes_per_second for _, link in fleet.devices.values()] == [1e9, 1e9]
    assert fleet.placement == ("kvpr" if row == "prism" else "weights")
    assert fleet.preset == COMPARED.rows[row].preset


def test_a_stall_is_the_longest_gap_beyond_a_step() -> None:
    stream = Stream(times=[0.0, 0.1, 0.2, 0.3, 0.6, 0.7])
    assert stream.step(ordered=0.25) == pytest.approx(0.1)
    assert stream.stall(ordered=0.25) == pytest.approx(2.0)
    assert stream.stall(ordered=0.65) == pytest.approx(0.0, abs=1e-9)
