"""What no GPU has ever run is named where a fleet turns it on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ballast.core.settings import DeviceSettings, FleetSettings, ModelSettings
from ballast.live import device
from ballast.live.never_run import FEATURES, IN_PLACE, STAGED, never_run
from tests.engine.gpus import on_gpu, serving
from tests.live.test_live_device import fleet, paths  # noqa: F401
from tests.memory.fake_cuda import FakeDriver

ROOT = Path(__file__).parents[2]


def test_each_is_named_where_it_is_turned_on_and_on_gpus_alone() -> None:
    gpu = DeviceSettings(name="cuda:0", budget_bytes=1 << 30)
    plain = FleetSettings(models=(ModelSettings(name="a", path="a"),), device=gpu)
    turned_on = {
        STAGED: replace(plain, preset="swiftcache"),
        IN_PLACE: replace(plain, preset="c2cserve"),
    }
    assert tuple(turned_on) == FEATURES
    assert never_run(plain, gpu) == ()
    for feature, settings in turned_on.items():
        assert never_run(settings, settings.device) == (feature,)
        assert never_run(settings, replace(settings.device, name="cpu:0")) == ()


def test_docs_mark_as_many() -> None:
    page = (ROOT / "docs/gpu.md").read_text()
    _, _, after = page.partition("\n## Never run\n")
    table = [line for line in after.partition("\n## ")[0].splitlines() if line.startswith("| [")]
    assert len(table) == len(FEATURES)


def test_a_device_that_uses_any_logs_it_when_it_starts(
    paths: dict[str, Path],  # noqa: F811
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = on_gpu(fleet({"a": paths["a"]}))
    settings = replace(settings, device=replace(settings.device, budget_bytes=1 << 30))

    def logged() -> list[str]:
        caplog.clear()
        driver = FakeDriver(n_bytes=1 << 31)
        with caplog.at_level("WARNING", "ballast"), serving(settings, driver):
            pass
        assert driver.is_clean()
        return [m for r in caplog.records if "no GPU has ever run" in (m := r.getMessage())]

    assert logged() == []
    monkeypatch.setattr(device, "never_run", lambda *_: (STAGED,))
    (line,) = logged()
    assert STAGED in line
