"""One made fleet and few servers for all tests here: starting either takes seconds."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ballast.fleet.make import make_fleet
from tests.server.process import ServerProcess, server


@pytest.fixture(scope="session")
def fleet_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tiny models with random weights in float32, and room for both; one calls functions.

    One thread: on a busy machine two wait for each other at every operation.
    """
    directory = tmp_path_factory.mktemp("fleet")
    made = make_fleet(
        directory, n_models=2, steps=0, size="tiny", dtype="float32", budget="64MiB", seed=1
    )
    text = made.file.read_text()
    text = text.replace("    page:", "    threads: 1\n    page:")
    made.file.write_text(text.rstrip() + "\n    tool_parser: hermes\n")
    return made.file


@pytest.fixture(scope="session")
def real(fleet_file: Path) -> Iterator[ServerProcess]:
    """A server with real, if tiny, models."""
    with server(fleet_file) as running:
        yield running


@pytest.fixture(scope="session")
def echo_file(fleet_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, and two that cannot be served: a broken one, and one without a tokenizer."""
    directory = tmp_path_factory.mktemp("echo")
    shutil.copytree(fleet_file.parent, directory, dirs_exist_ok=True)
    model = next(path for path in sorted(directory.iterdir()) if path.is_dir())
    shutil.copytree(model, directory / "broken")
    shutil.copytree(model, directory / "mute")
    for file in (directory / "mute").glob("*token*"):
        file.unlink()
    file = directory / "fleet.yaml"
    text = file.read_text()
    more = "\n  - {name: broken, path: broken}\n  - {name: mute, path: mute}\n"
    file.write_text(text.rstrip() + more)
    return file


@pytest.fixture(scope="session")
def echo(echo_file: Path) -> Iterator[ServerProcess]:
    """A server whose models repeat the prompt."""
    with server(echo_file, "--echo") as running:
        yield running
