"""The profiles that come with Ballast are what the script makes of the measurements."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ballast.sim.model_catalogue import CatalogueKeys, catalogue
from ballast.sim.profile import DeviceProfile, device_files, device_profile
from ballast.sim.toml_file import as_toml, read_keys
from scripts.fit_profiles import catalogue_of, fitted_row, profiles, stated_rows
from scripts.measured import Tables, read_tables, rows

TABLES = Path(os.environ.get("BALLAST_TABLES", "../shared/profiles"))
needs_tables = pytest.mark.skipif(not TABLES.is_dir(), reason="the measurements are not at hand")


@pytest.fixture(scope="module")
def tables() -> Tables:
    return read_tables(TABLES)


@needs_tables
@pytest.mark.parametrize("device", ["A10", "H20-96G"])
def test_fits_are_as_good_as_the_tables_own(tables: Tables, device: str) -> None:
    stated = {
        (r["gpu"], tables.named(r["model"])): r
        for r in rows(TABLES / "latency_fit.csv")
        if r["source"] == "aegaeon"
    }
    pairs = [pair for pair in tables.decode if pair[0] == device]
    assert pairs
    for pair in pairs:
        row = fitted_row(tables, pair)
        assert row.costs.base == pytest.approx(float(stated[pair]["decode_step_a_s"]), rel=0.01)
        assert row.costs.floor == pytest.approx(float(stated[pair]["prefill_floor_s"]), rel=0.01)
        assert row.decode_error is not None
        assert row.prefill_error is not None
        assert row.decode_error <= float(stated[pair]["decode_step_mape_pct"]) + 0.1
        assert row.prefill_error <= float(stated[pair]["prefill_floor_mape_pct"]) + 0.1
        (shipped,) = (r for r in device_profile(device).measured if r.model == row.model)
        for key, value in row.costs.model_dump().items():
            assert getattr(shipped.costs, key) == pytest.approx(value, rel=0.01), (pair, key)


@needs_tables
def test_every_pair_of_the_tables_is_there(tables: Tables) -> None:
    for device, hardware in tables.hardware.items():
        profile = device_profile(device)
        assert profile.hardware == hardware
        measured = {r.model for r in profile.measured if r.source == "aegaeon"}
        assert measured == {m for d, m in tables.decode if d == device}
    shipped = [r for r in device_profile("A100-80G").measured if r.source == "muxserve"]
    stated = stated_rows(tables, TABLES, "A100-80G")
    assert len(stated) == 12 * 8
    for a, b in zip(shipped, stated, strict=True):
        assert (a.model, a.tp, a.sm_percent) == (b.model, b.tp, b.sm_percent)
        assert a.costs.model_dump() == pytest.approx(b.costs.model_dump(), rel=1e-5)
    assert catalogue_of(TABLES).models == list(catalogue().values())


@needs_tables
def test_devices_and_engines_are_what_the_script_makes() -> None:
    made = profiles(TABLES)
    assert set(made) == set(device_files())
    for device, profile in made.items():
        shipped = device_profile(device)
        assert shipped.page_seconds == pytest.approx(profile.page_seconds, rel=1e-4)
        assert (shipped.engine, set(shipped.engines)) == (
            "graphs",
            {"graphs", "sglang", "eager"},
        )
        for name, engine in profile.engines.items():
            own = shipped.engines[name]
            for part in ("host", "derate"):
                values, wanted = getattr(own, part), getattr(engine, part)
                assert (values is None) == (wanted is None)
                if values is not None:
                    assert values.model_dump() == pytest.approx(wanted.model_dump(), rel=0.01)
        assert shipped.reach is not None
        assert profile.reach is not None
        for key, value in profile.reach.model_dump().items():
            near = pytest.approx(value, rel=0.01) if isinstance(value, float) else value
            assert getattr(shipped.reach, key) == near, (device, key)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    for device in ("A100-80G", "H800", "L4"):
        profile = device_profile(device)
        file.write_text(as_toml(profile, "a comment"))
        assert read_keys(file, DeviceProfile) == profile
    document = CatalogueKeys(source='a "source"', models=list(catalogue().values()))
    file.write_text(as_toml(document))
    assert read_keys(file, CatalogueKeys) == document
