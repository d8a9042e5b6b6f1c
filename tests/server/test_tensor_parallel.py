"""A server whose device is two ranks: clients cannot tell, whoever of the ranks dies."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file

from ballast.bench.server_process import child_called
from ballast.cluster.tensor_parallel.rank_process import PROCESS_NAME
from ballast.core.units import KiB
from ballast.fleet.fleet_file import load_fleet
from ballast.policy.presets import PRESETS
from tests.cluster.tensor_parallel.test_group_machine import specs_of_ranks
from tests.server.process import ServerProcess, server, until
from tests.server.test_crash import KINDS, MODELS, Stream, streamed_amid
from tests.server.test_devices import ADMIN

Tokens = list[list[str]]


async def tokens_of(running: ServerProcess, kill: Callable[[], None] | None = None) -> Tokens:
    """`kill` is called in the midst of it."""
    streams = [Stream(model, *kind) for model in MODELS for kind in KINDS]
    return await streamed_amid(running, streams, kill)


def fleet_of(fleet_file: Path, name: str, **device: Any) -> Path:
    """Two models that two ranks can divide, alike in sizes and in nothing else."""
    fleet = yaml.safe_load(fleet_file.read_text())
    home = fleet_file.parent
    if not (home / "other").exists():
        shutil.copytree(home / "atlas-chat", home / "other")
        (file,) = (home / "other").glob("*.safetensors")
        tensors = {n: t * 1.25 for n, t in load_file(file).items()}
        save_file(tensors, file, {"format": "pt"})
    for model in fleet["models"]:
        model["path"] = {"atlas-chat": "atlas-chat", "wren-mini": "other"}[model["name"]]
    (given,) = fleet["devices"]
    fleet["devices"] = [given | device]
    fleet["server"] = {"admin_key": "sk-admin-of-the-tests"}
    file = fleet_file.with_name(name)
    file.write_text(yaml.safe_dump(fleet))
    return file


@pytest.fixture(scope="module")
def expected(fleet_file: Path) -> Tokens:
    """Of one rank."""
    with server(fleet_of(fleet_file, "one.yaml")) as running:
        return asyncio.run(tokens_of(running))


@pytest.fixture(scope="module")
def ranks(fleet_file: Path) -> Iterator[ServerProcess]:
    """One device of two ranks, which has no room for both models."""
    more = {"budget": "64MiB", "threads": 2, "tensor_parallel": 2}
    roomy = load_fleet(fleet_of(fleet_file, "ranks.yaml", **more), presets=PRESETS, environ={})
    specs, pages = specs_of_ranks(roomy.models, roomy.device)
    pages += sum(spec.weight_pages(roomy.device.page_bytes) for spec in specs) - 1
    more["budget"] = f"{2 * pages * roomy.device.page_bytes // KiB}KiB"
    with server(fleet_of(fleet_file, "ranks.yaml", **more)) as running:
        yield running


def rank_of(running: ServerProcess) -> int:
    """Process id of the second rank."""
    return child_called(PROCESS_NAME, running.worker_pid)


def device_of(running: ServerProcess) -> dict[str, Any]:
    (found,) = running.http.get("/admin/state", headers=ADMIN).json()["devices"]
    return dict(found)


def lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_the_tokens_are_those_of_one_rank(expected: Tokens, ranks: ServerProcess) -> None:
    assert asyncio.run(tokens_of(ranks)) == expected
    device = device_of(ranks)
    assert sum(m["evictions"] for m in device["models"]) > 0
    assert device["page_bytes"] == 2 * 64 * KiB
    held = sum(device["owners"].values()) + device["free"] + device["reclaiming"]
    assert held == device["total"]


def test_a_follower_is_killed_and_no_token_changes(expected: Tokens, ranks: ServerProcess) -> None:
    leader, follower = ranks.worker_pid, rank_of(ranks)

    def kill() -> None:
        os.kill(follower, signal.SIGKILL)

    assert asyncio.run(tokens_of(ranks, kill=kill)) == expected
    assert not lives(leader)
    assert device_of(ranks)["restarts"] == 1
    assert rank_of(ranks) != follower


def test_the_leader_is_killed_and_no_token_changes(expected: Tokens, ranks: ServerProcess) -> None:
    follower, restarts = rank_of(ranks), device_of(ranks)["restarts"]
    assert asyncio.run(tokens_of(ranks, kill=ranks.kill_worker)) == expected
    until(lambda: not lives(follower))
    assert device_of(ranks)["restarts"] == restarts + 1


def test_operators_add_and_remove_models(ranks: ServerProcess, fleet_file: Path) -> None:
    entry = {"name": "again", "path": "other"}
    added = ranks.http.post("/admin/models", json=entry, headers=ADMIN)
    assert added.status_code == 201, added.text
    asked = {"model": "again", "prompt": "Ship 1", "max_tokens": 8, "temperature": 0}
    said = ranks.http.post("/v1/completions", json=asked).json()["choices"][0]["text"]
    same = ranks.http.post("/v1/completions", json=asked | {"model": "wren-mini"}).json()
    assert said == same["choices"][0]["text"]
    assert ranks.http.delete("/admin/models/again", headers=ADMIN).status_code == 200
    refused = ranks.http.post(
        "/admin/models", json={"name": "odd", "path": "wren-mini"}, headers=ADMIN
    )
    assert refused.status_code == 400
    assert "3 heads" in refused.text
