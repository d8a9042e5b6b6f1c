"""`ballast profile` of a GPU, over a stand-in: the same measurements, on the GPU's own machine."""

from __future__ import annotations

from pathlib import Path

from ballast.core.settings import DeviceSettings, FleetSettings, ModelSettings
from ballast.core.units import MiB
from ballast.sim.calibrate import calibrate
from ballast.sim.profile import DeviceProfile, profile_of
from ballast.sim.toml_file import as_toml
from tests.engine.checkpoints import make_llama
from tests.engine.gpus import OnHost, machine_over
from tests.memory.fake_cuda import FakeDriver


def test_a_gpu_is_measured(tmp_path: Path) -> None:
    path = make_llama(tmp_path / "m", 0)
    gpu = DeviceSettings(
        name="cuda:0", budget_bytes=192 * MiB, page_bytes=256 << 10, step_tokens=64, graphs=0
    )
    models = (ModelSettings(name="m", path=str(path), dtype="float32"),)
    fleet = FleetSettings(models=models, device=gpu)
    driver = FakeDriver(n_bytes=1 << 30)
    measured = calibrate(fleet, rounds=1, make_machine=machine_over(driver, OnHost()))
    assert measured.link.positive
    assert measured.costs["m"].prefill_seconds(32) > 0
    assert "copy_to_host" in driver.calls
    assert driver.is_clean()
    result = profile_of("here", measured, fleet.device)
    assert isinstance(result, DeviceProfile)
    assert "[link]" in as_toml(result, "A test's.")
