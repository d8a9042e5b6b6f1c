"""A live server whose layers rotate: operators see it, and clients cannot tell, not even when its
worker is killed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from ballast.bench.inprocess import InProcess
from ballast.core.units import KiB
from ballast.fleet.fleet_file import load_fleet
from ballast.policy.presets import PRESETS
from tests.server.process import ServerProcess, server, until
from tests.server.test_crash import TOKENS, Stream, streamed_amid
from tests.server.test_top import top

BUSY = "atlas-chat"
KV_PAGES = 5
"""Beside the weights: of eight requests two or three can run."""


@pytest.fixture(scope="module")
def rotating(fleet_file: Path) -> Iterator[ServerProcess]:
    settings = load_fleet(fleet_file, presets=PRESETS, environ={})
    with InProcess(settings) as roomy:
        state = roomy.device.state
        weights = sum(m.weights.pages for m in state.models.values())
        pages = state.arena.pages + weights + KV_PAGES
    budget = pages * settings.device.page_bytes // KiB
    fleet = yaml.safe_load(fleet_file.read_text())
    fleet["preset"] = "mirage"
    fleet["options"] = {"cap": 0, "cooldown": 3600}
    fleet["devices"] = [device | {"budget": f"{budget}KiB"} for device in fleet["devices"]]
    file = fleet_file.with_name("rotating.yaml")
    file.write_text(yaml.safe_dump(fleet))
    with server(file) as running:
        yield running


def turned(running: ServerProcess) -> bool:
    """Whether layers of the busy model rotate, and have been waited for."""
    (model,) = (
        m["report"]
        for m in running.http.get("/admin/state").json()["models"]
        if m["report"]["name"] == BUSY
    )
    return model["rotating_layers"] > 0 and model["stall_seconds"] > 0


async def tokens_of(running: ServerProcess, kill: bool) -> list[list[str]]:
    streams = [Stream(BUSY, seed, float(seed % 2)) for seed in range(8)]
    return await streamed_amid(running, streams, running.kill_worker if kill else None)


@pytest.fixture(scope="module")
def undisturbed(rotating: ServerProcess) -> list[list[str]]:
    """The same requests without a kill; layers rotate from then on, for nothing brings them
    back."""
    return asyncio.run(tokens_of(rotating, kill=False))


@pytest.mark.usefixtures("undisturbed")
def test_operators_see_what_layers_do(rotating: ServerProcess) -> None:
    until(lambda: turned(rotating))
    result = metrics_of_layers(rotating)
    layers, absent = result["ballast_layers"], result["ballast_absent_layers"]
    assert 0 < absent < result["ballast_rotating_layers"] <= layers
    assert result["ballast_resident_layers"] == layers - result["ballast_rotating_layers"]
    assert result["ballast_layers_lent_bytes"] > 0
    for name in ("loads", "loaded_bytes", "copy_seconds", "stall_seconds"):
        assert result[f"ballast_layer_{name}_total"] > 0
    until(lambda: shows_layers(rotating))


def metrics_of_layers(running: ServerProcess) -> dict[str, float]:
    """What `/metrics` says of the busy model, by name."""
    return {
        line.split("{")[0]: float(line.rsplit(" ", 1)[1])
        for line in running.http.get("/metrics").text.splitlines()
        if f'{{model_name="{BUSY}"}}' in line
    }


def shows_layers(running: ServerProcess) -> bool:
    """Whether `ballast top` says the same as `/metrics`, which is asked at another moment."""
    result = metrics_of_layers(running)
    layers, absent = result["ballast_layers"], result["ballast_absent_layers"]
    frame = top("--url", running.url, "--once").stdout
    assert "slots of layers" in frame
    assert "rotate through" in frame
    return f"{layers - absent:.0f}/{layers:.0f}" in frame


def test_no_token_changes_when_a_worker_dies_whose_layers_rotate(
    rotating: ServerProcess, undisturbed: list[list[str]]
) -> None:
    until(lambda: turned(rotating))
    worker = rotating.worker_pid
    assert asyncio.run(tokens_of(rotating, kill=True)) == undisturbed
    assert rotating.worker_pid != worker
    assert all(len(tokens) == TOKENS for tokens in undisturbed)
    assert len({tuple(tokens) for tokens in undisturbed}) == len(undisturbed)
