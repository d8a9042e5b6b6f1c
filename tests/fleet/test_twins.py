"""Adapters that were added while a server ran: their twins, the file read again, the next start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ballast.core.settings import AdapterSettings, FleetSettings, ModelSettings
from ballast.fleet.changes import Changes
from ballast.fleet.fleet_difference import difference
from ballast.fleet.fleet_source import FleetSource
from ballast.fleet.schema import NamedModelKeys
from ballast.fleet.twins import adapters_added_to, base_of, is_twin, twin, twin_of, with_twins
from tests.fleet.test_fleet_difference import FLEET, NOTHING

BASE = ModelSettings(name="llama", path="/l", aliases=("l",), pinned=True, preload=True)
PIRATE = AdapterSettings(name="pirate", path="/p", priority=3)


def fleet(*models: ModelSettings) -> FleetSettings:
    return replace(FLEET, models=models)


RUNNING = fleet(BASE, twin(BASE, PIRATE, ["cpu:0"]))
READ = fleet(replace(BASE, adapters=(PIRATE,)))
"""As the file and the operators' changes have it."""


def test_a_twin_has_its_bases_weights_and_nothing_else_of_it() -> None:
    made = twin(BASE, PIRATE, ["cpu:0"])
    assert is_twin(made.name)
    assert not is_twin(BASE.name)
    assert (base_of(made.name), base_of(BASE.name)) == ("llama", "llama")
    assert (made.path, made.adapters, made.devices) == (BASE.path, (PIRATE,), ("cpu:0",))
    assert (made.aliases, made.pinned, made.preload, made.priority) == ((), False, False, 3)
    assert twin_of(RUNNING, "pirate") == made
    assert twin_of(READ, "pirate") is None
    assert adapters_added_to(RUNNING, "llama") == ["pirate"]


def test_a_file_that_is_read_again_leaves_it_as_it_is() -> None:
    again = with_twins(READ, RUNNING)
    assert again == RUNNING
    assert difference(RUNNING, again) == NOTHING


def test_it_goes_with_its_entry_and_with_its_base() -> None:
    assert difference(RUNNING, with_twins(fleet(BASE), RUNNING)).removed == ("llama+pirate",)
    other = ModelSettings(name="other", path="/o")
    gone = difference(RUNNING, with_twins(fleet(other), RUNNING))
    assert set(gone.removed) == {"llama", "llama+pirate"}


def test_its_levels_are_followed_and_another_path_counts_at_a_restart() -> None:
    changed = fleet(replace(BASE, adapters=(replace(PIRATE, priority=5),)))
    found = difference(RUNNING, with_twins(changed, RUNNING))
    assert [model.name for model in found.levels] == ["pirate"]
    moved = fleet(replace(BASE, adapters=(replace(PIRATE, path="/q"),)))
    assert difference(RUNNING, with_twins(moved, RUNNING)).again == {"llama+pirate": ("adapters",)}


def test_at_the_next_start_it_is_one_of_its_bases_own(tmp_path: Path) -> None:
    for name in ("llama", "pirate"):
        (tmp_path / name).mkdir()
    (tmp_path / "llama" / "config.json").write_text("{}")
    (tmp_path / "pirate" / "adapter_config.json").write_text("{}")
    file = tmp_path / "fleet.yaml"
    file.write_text("devices: [{budget: 1GiB}]\nmodels: [{name: llama, path: llama}]\n")
    source = FleetSource(file, presets=["ballast"], changes=tmp_path / "changes.json", environ={})
    source.read()
    source.keep(Changes().adding(NamedModelKeys(name="pirate", adapter="pirate", base="llama"), ()))
    [model] = source.read().fleet.models
    assert [adapter.name for adapter in model.adapters] == ["pirate"]
    assert model.adapters[0].path == str(tmp_path / "pirate")
