"""A fleet file and operators' changes, read together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ballast.core.errors import ConfigError
from ballast.core.settings import ModelSettings
from ballast.fleet.changes import Changes
from ballast.fleet.fleet_source import FleetSource
from ballast.fleet.schema import NamedModelKeys

TEXT = """
defaults: {priority: 3}
models:
  - {name: a, path: m}
  - {name: lora, adapter: l, base: a}
  - {name: b, path: "${B:-m}"}
devices:
  - {budget: 64MiB}
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    for name, file in (("m", "config.json"), ("l", "adapter_config.json")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("{}")
    (tmp_path / "fleet.yaml").write_text(TEXT)
    return tmp_path


def source(home: Path, **environ: str) -> FleetSource:
    return FleetSource(
        home / "fleet.yaml",
        presets=("ballast",),
        changes=home / "c.json",
        adjust=lambda fleet: replace(fleet, story_path="told"),
        environ=environ,
    )


def entry(**keys: object) -> NamedModelKeys:
    return NamedModelKeys.model_validate(keys)


def test_the_next_start_reads_what_was_kept(home: Path) -> None:
    first = source(home)
    plain = first.read()
    assert [m.name for m in plain.fleet.models] == ["a", "b"]
    assert (plain.names, plain.fleet.story_path) == ({"a", "lora", "b"}, "told")
    changes = Changes().adding(entry(name="c", path="m"), ()).removing({"b"}, plain.names)
    changes = changes.changing(plain.fleet.models[0].adapters[0], {"priority": 7})
    changes = changes.changing(ModelSettings(name="c", path="m"), {"pinned": True})
    first.keep(changes)
    reading = source(home).read()
    a, c = reading.fleet.models
    assert (a.priority, a.adapters[0].priority) == (3, 7)
    assert (c.name, c.path, c.priority, c.pinned) == ("c", str(home / "m"), 0, True)
    assert (reading.changes, reading.notes) == (changes, ())


def test_what_does_not_count_any_more_is_forgotten(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = source(home)
    a, _ = first.read().fleet.models
    first.keep(Changes().changing(a, {"priority": 4, "share": 2.0}))
    (home / "fleet.yaml").write_text(TEXT.replace("priority: 3", "priority: 5"))
    again = source(home)
    reading = again.read()
    assert (reading.fleet.models[0].priority, reading.fleet.models[0].share) == (5, 2.0)
    again.settle(reading)
    assert "a: priority was changed; the fleet file's value counts" in caplog.text
    (home / "fleet.yaml").write_text(TEXT)
    assert source(home).read().fleet.models[0].priority == 3


def test_faults_name_the_entry(home: Path) -> None:
    kept = source(home)
    kept.read()
    kept.keep(Changes().removing({"a", "lora"}, {"a", "lora", "b"}))
    with pytest.raises(ConfigError, match=r"models\[2\]\.path: 'no'"):
        source(home, B="no").read()
    kept.keep(Changes().adding(entry(name="c", path="gone"), ()))
    assert "c (added by an operator).path: 'gone'" in source(home).read().fleet.faults["c"]
    kept.keep(Changes().removing({"a", "lora", "b"}, {"a", "lora", "b"}))
    with pytest.raises(ConfigError, match=r"operators have removed all models; see .*c\.json"):
        source(home).read()
