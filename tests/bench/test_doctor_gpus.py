"""The doctor tells of GPUs where there are any, and of none where there are none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from ballast.bench import doctor_fleet, doctor_gpus
from ballast.bench.doctor_finding import Verdict
from ballast.core.settings import DeviceSettings, FleetSettings, LinkSettings
from ballast.fleet.schema import DeviceKeys
from ballast.live.never_run import FEATURES
from ballast.memory.cuda.calls import Attribute
from ballast.sim.cluster import parse_kinds
from tests.memory.fake_cuda import FakeDriver
from tests.memory.fake_nvml import Board, FakeNvml


def test_gpus_are_told() -> None:
    uuids = [f"GPU-00000000-0000-0000-0000-{i:012x}" for i in range(2)]
    boards = [
        Board(uuids[0], nvlinks=18, reads=(uuids[1],), over_nvlink=(uuids[1],)),
        Board(uuids[1], slices=[("MIG-1", 10 << 30, 16), ("MIG-2", 20 << 30, 32)]),
        Board("GPU-x", "Tesla T4", 16 << 30, 15 << 30, None),
        Board("GPU-y", "NVIDIA H100 PCIe", slices=[("MIG-3", 11 << 30, 16)]),
    ]
    attributes = {Attribute.MULTIPROCESSORS: 132}
    driver = FakeDriver(n_bytes=1 << 30, devices=2, attributes=attributes, bandwidth=25e9)
    found = list(doctor_gpus.gpus(FakeNvml(boards), driver))
    whole, part, larger, hidden, _, layout, unproven = found
    assert whole.found == (
        "NVIDIA H100 80GB HBM3, 80GiB, 79GiB free, 132 multiprocessors, "
        "PCIe 5 x16 (at best 63 GB/s one way), 18 NVLinks of version 4, "
        "uses the memory of 1 others in place, 1 over NVLink, "
        "copies 25 GB/s to it and 25 to the host, memory 50 GB/s"
    )
    assert driver.is_clean()
    assert "10GiB" in part.found
    assert "16 multiprocessors" in part.found
    # Entries that a fleet file and a simulation take as they are.
    (entry,) = re.findall(r"devices: (.*) with CUDA_VISIBLE_DEVICES=MIG-2$", larger.found)
    (keys,) = (DeviceKeys.model_validate(one) for one in yaml.safe_load(entry))
    assert keys.settings(0).name == "cuda:0"
    assert 0.89 * (20 << 30) < keys.settings(0).budget_bytes <= 0.9 * (20 << 30)
    (kind,) = parse_kinds(layout.found.rpartition(" ")[2])
    assert [s.name for s in kind.slices] == ["1g.10gb", "2g.20gb"], "and none of what is not known"
    assert "not visible" in hidden.found
    assert [f.verdict for f in (whole, part, hidden)] == [Verdict.OK, Verdict.OK, Verdict.WARN]
    assert (unproven.check, unproven.verdict) == ("never run", Verdict.OK)
    assert all(feature in unproven.found for feature in FEATURES)


def test_which_can_lend_to_which(monkeypatch: pytest.MonkeyPatch) -> None:
    def gpu(i: int) -> DeviceSettings:
        return DeviceSettings(name=f"cuda:{i}", budget_bytes=1 << 30, page_bytes=2 << 20)

    fleet = FleetSettings(models=(), device=gpu(0), others=(gpu(1),), other_links=(LinkSettings(),))
    for driver, found in (
        (FakeDriver(devices=2), "2 of 2 ways between devices"),
        (FakeDriver(devices=2, peers=False), "cuda:1 cannot to cuda:0: its driver says that it"),
        (FakeDriver(devices=1), "it is not known which GPUs cuda:0 and cuda:1 can reach"),
    ):
        monkeypatch.setattr(doctor_fleet, "CudaDriver", lambda made=driver: made)
        assert found in doctor_fleet.lending_finding(fleet).found


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor_gpus, "_LOADED", tmp_path / "version")
    assert list(doctor_gpus.gpus(FakeNvml(driver=False))) == []
    assert list(doctor_gpus.gpus(FakeNvml())) == []
    (tmp_path / "version").touch()
    [finding] = doctor_gpus.gpus(FakeNvml(driver=False))
    assert (finding.verdict, "ballast-serve[cuda]" in finding.cure) == (Verdict.WARN, True)
