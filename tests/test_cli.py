"""The command line, as its users meet it: a process, its output and its exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ballast import __version__
from ballast.cli import app
from ballast.core.errors import ConfigError
from ballast.fleet.make import make_fleet
from ballast.sim.profile import device_profile


def ballast(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ballast.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_help_names_the_commands_and_loads_nothing_heavy() -> None:
    shown = ballast("--help")
    assert shown.returncode == 0
    for command in ("doctor", "fleet", "version"):
        assert command in shown.stdout
    code = "import sys, ballast.cli; print(sorted({'torch', 'numba', 'zmq'} & set(sys.modules)))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert loaded.stdout.strip() == "[]"


def test_version() -> None:
    assert ballast("version").stdout.strip() == __version__


def test_make_a_fleet_and_let_the_doctor_see_it(tmp_path: Path) -> None:
    arguments = ("fleet", "make", tmp_path, "--size", "tiny", "--steps", "0", "--models", "2")
    made = ballast(*arguments, "--budget", "32MiB")
    assert made.returncode == 0, made.stderr
    assert "atlas-chat" in made.stdout
    assert f"ballast serve {tmp_path}/fleet.yaml" in made.stdout
    again = ballast(*arguments)
    assert again.returncode == 2
    assert "--force" in again.stderr

    seen = ballast("doctor", tmp_path / "fleet.yaml")
    assert seen.returncode == 0, seen.stdout + seen.stderr
    assert "wren-mini" in seen.stdout

    (tmp_path / "wren-mini" / "model.safetensors").write_bytes(b"")
    assert ballast("doctor", tmp_path / "fleet.yaml").returncode == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("preset: balon\nmodels: [{name: a, path: .}]\ndevices: [{budget: 1GB}]\n", "'balloon'"),
        ("models: []\n", "models"),
    ],
)
def test_a_fault_of_the_users_is_one_line_and_exit_2(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "fleet.yaml").write_text(text)
    shown = ballast("doctor", tmp_path / "fleet.yaml")
    assert shown.returncode == 2
    assert shown.stdout == ""
    (line,) = shown.stderr.splitlines()
    assert line.startswith("ballast: ")
    assert says in line


def test_an_unknown_option_is_exit_2() -> None:
    assert ballast("fleet", "make", "--wrong").returncode == 2


def test_a_measured_profile_drives_a_simulation(tmp_path: Path) -> None:
    """In this process, where what the commands load is loaded once."""
    file, report = tmp_path / "out" / "here.toml", tmp_path / "report.json"
    fleet = make_fleet(tmp_path, n_models=1, size="tiny", steps=0, budget="32MiB").file

    def ballast(*arguments: object) -> str:
        done = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
        assert done.exit_code == 0
        return done.output

    assert "atlas-chat" in ballast("profile", fleet, "--to", file, "--rounds", 1, "--device", "pi")
    profile = device_profile(file)
    assert profile.device == "pi"
    assert profile.costs("atlas-chat").prefill_seconds(128) > 0

    work = ("bench", fleet, "--seconds", 5, "--profile", file, "--json", report)
    ballast(*work, "--virtual")
    assert json.loads(report.read_text())[0]["total"]["failed"] == 0
    with pytest.raises(ConfigError, match="it goes with --virtual"):
        ballast(*work)
