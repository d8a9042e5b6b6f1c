"""Profiles of engines in worker processes, and where a simulated cluster has its models."""

from dataclasses import replace
from pathlib import Path

from ballast.bench.cluster_run import run_cluster
from ballast.bench.run import specs_of
from ballast.cluster.placing import homes_of
from ballast.core.settings import DeviceSettings, FleetSettings, LinkSettings, Slo
from ballast.core.units import MiB
from ballast.fleet.fleet_file import load_fleet
from ballast.fleet.make import make_fleet
from ballast.policy.presets import PRESETS, resolve
from ballast.sim.calibrate import calibrated
from ballast.sim.cluster import Kind
from ballast.sim.profile import profile_of
from ballast.workload.workload import Workload, WorkloadRequest
from benchmarks.live_placement import placed_live
from benchmarks.worker_profile import calibrate_in_worker, copied


def two_devices(folder: Path, n_models: int) -> FleetSettings:
    file = make_fleet(
        folder / "fleet", n_models=n_models, size="tiny", steps=0, budget="32MiB"
    ).file
    fleet = load_fleet(file, presets=PRESETS)
    device = replace(fleet.device, name="cpu:0", budget_bytes=32 * MiB, threads=1)
    other = DeviceSettings(name="cpu:1", budget_bytes=32 * MiB, threads=1)
    return replace(
        fleet, device=device, others=(other,), other_links=(LinkSettings(device="cpu:1"),)
    )


def test_the_engine_in_a_worker_is_measured(tmp_path: Path) -> None:
    fleet = two_devices(tmp_path, 1)
    here, specs = calibrated(replace(fleet, others=(), other_links=()), rounds=1)
    found = calibrate_in_worker(fleet, specs, here, rounds=1)
    assert found.costs.keys() == here.costs.keys() == {m.name for m in fleet.models}
    assert found.costs != here.costs
    assert found.answer > here.answer
    assert (found.link, found.pages) == (here.link, here.pages)


def test_every_device_has_a_copy_of_every_model(tmp_path: Path) -> None:
    fleet = two_devices(tmp_path, 2)
    both = copied(fleet, tmp_path / "story")
    assert homes_of(both) == {
        f"{m.name}-{device}": [device.replace("-", ":")]
        for device in ("cpu-0", "cpu-1")
        for m in fleet.models
    }


def test_a_simulated_cluster_starts_with_the_placement_of_the_live_server(tmp_path: Path) -> None:
    fleet = two_devices(tmp_path, 3)
    specs = specs_of(fleet)
    here, _ = calibrated(replace(fleet, others=(), other_links=()), rounds=1)
    preset = resolve("static", {})
    # All models on the second device: no policy would choose that.
    models = tuple(replace(m, devices=("cpu:1",)) for m in fleet.models)
    work = Workload.of(
        "one each",
        [
            WorkloadRequest(id=i, at=0.1 * i, model=s.name, prompt_tokens=4, output_tokens=2)
            for i, s in enumerate(specs)
        ],
    )
    ran = run_cluster(
        preset,
        [Kind(2, profile_of("cpu", here, fleet.device))],
        specs,
        work,
        dict.fromkeys((s.name for s in specs), Slo()),
        files=placed_live(preset, [replace(fleet, models=models)]),
    )
    assert ran.devices["cpu:1"]["models"] == sorted(s.name for s in specs)
    assert ran.report.total.answered == len(specs)
