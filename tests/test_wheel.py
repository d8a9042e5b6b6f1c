"""The wheel: it is built of what git knows, and what it holds works with nothing of the clone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.test_docs_site import ROOT

BUILT_OF = ("ballast", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's files, as an installation has them. `scripts/try_wheel.py` installs it with all
    that it needs, which takes minutes and a package index."""
    scratch = tmp_path_factory.mktemp("wheel")
    sources, wheels = scratch / "sources", scratch / "wheels"
    listed = subprocess.run(
        ("git", "ls-files", "-z", *BUILT_OF), cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\0")
    for name in filter(None, listed):
        if (ROOT / name).exists():
            (sources / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, sources / name)
    wheels.mkdir()
    build = "import sys, setuptools.build_meta as b; b.build_wheel(sys.argv[1])"
    subprocess.run(
        (sys.executable, "-c", build, wheels), cwd=sources, check=True, capture_output=True
    )
    [wheel] = wheels.glob("ballast_serve-*-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(scratch / "unpacked")
    return scratch / "unpacked"


def run(unpacked: Path, *command: str | Path) -> str:
    """Run Python with the unpacked wheel in front of everything else; returns what it printed."""
    done = subprocess.run(
        (sys.executable, *command),
        cwd=unpacked.parent,
        env={**os.environ, "PYTHONPATH": str(unpacked)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout


def test_all_packages_and_files_of_the_clone_are_in_it(unpacked: Path) -> None:
    listed = subprocess.run(
        ("git", "ls-files", "-z", "ballast"), cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\0")
    known = {name for name in filter(None, listed) if (ROOT / name).exists()}
    assert len(known) > 100
    missing = {name for name in known if not (unpacked / name).exists()}
    assert not missing, "named neither as a package nor in package-data"


def test_its_command_runs_from_it(unpacked: Path) -> None:
    import ballast

    found = run(unpacked, "-c", "import ballast; print(ballast.__file__)")
    assert Path(found.strip()) == unpacked / "ballast" / "__init__.py"
    assert ballast.__version__ in run(unpacked, "-m", "ballast", "version")


def test_a_simulation_finds_its_profiles(unpacked: Path, tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.yaml"
    shutil.copy2(ROOT / "examples" / "ten-models.yaml", fleet)
    options = ("--devices", "H100-80G", "--preset", "ballast", "--seconds", "2", "--rate", "1")
    assert "ballast" in run(unpacked, "-m", "ballast", "simulate", fleet, *options)
