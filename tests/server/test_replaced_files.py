"""A model is its content: files that change beneath a server change no token, whoever dies."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file

from tests.server.process import ServerProcess, server
from tests.server.test_crash import KINDS, MODELS, TOKENS, Stream, streamed_amid


def retrained(directory: Path) -> None:
    """Other weights under the same names, as a download writes them."""
    file, other = directory / "model.safetensors", directory / "other"
    save_file({n: t + 0.5 for n, t in load_file(file).items()}, other, {"format": "pt"})
    os.replace(other, file)


def tokens_of(running: ServerProcess, amid: Callable[[], None] | None = None) -> list[list[str]]:
    streams = [Stream(model, *kind) for model in MODELS for kind in KINDS]
    return asyncio.run(streamed_amid(running, streams, amid))


def test_streams_and_requests_see_the_model_that_was_loaded(
    fleet_file: Path, tmp_path: Path
) -> None:
    shutil.copytree(fleet_file.parent, tmp_path, dirs_exist_ok=True)
    paths = [tmp_path / model for model in MODELS]
    with server(tmp_path / fleet_file.name) as running:
        undisturbed = tokens_of(running)
        assert all(len(tokens) == TOKENS for tokens in undisturbed)
        for change in (retrained, shutil.rmtree):

            def amid(change: Callable[[Path], object] = change) -> None:
                for path in paths:
                    change(path)
                running.kill_worker()

            assert tokens_of(running, amid) == undisturbed
            assert tokens_of(running) == undisturbed
        running.until_said("have changed since it was loaded", "its files have gone")
