"""Prefill on one device, decode on another, with real models: clients cannot tell."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.server.process import ServerProcess, server
from tests.server.test_crash import KINDS, MODELS, TOKENS, Stream, streamed_amid
from tests.server.test_devices import ADMIN


@pytest.fixture(scope="module")
def apart(fleet_file: Path) -> Iterator[ServerProcess]:
    """Both models on both devices, which nobody has said of them."""
    fleet = yaml.safe_load(fleet_file.read_text())
    (device,) = fleet["devices"]
    fleet["devices"] = [
        {**device, "budget": "32MiB", "name": name, "role": role}
        for name, role in (("cpu:0", "prefill"), ("cpu:1", "decode"))
    ]
    fleet["server"] = {"admin_key": "sk-admin-of-the-tests"}
    file = fleet_file.with_name("apart.yaml")
    file.write_text(yaml.safe_dump(fleet))
    with server(file) as running:
        yield running


def devices(running: ServerProcess) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = running.http.get("/admin/state", headers=ADMIN).json()["devices"]
    return found


def test_requests_decode_where_they_did_not_prefill(
    real: ServerProcess, apart: ServerProcess
) -> None:
    def streams() -> list[Stream]:
        return [Stream(model, *kind) for model in MODELS for kind in KINDS]

    prefills, decodes = devices(apart)
    for device in (prefills, decodes):
        assert [m["name"] for m in device["models"]] == list(MODELS)
    expected = asyncio.run(streamed_amid(real, streams()))
    assert asyncio.run(streamed_amid(apart, streams(), apart.until_one_departs)) == expected
    assert all(len(tokens) == TOKENS for tokens in expected)
    prefills, decodes = devices(apart)
    assert prefills["moved_in"] == 0
    assert decodes["moved_in"] > 0


def test_a_worker_that_dies_is_no_end_of_it(real: ServerProcess, apart: ServerProcess) -> None:
    async def tokens_of(running: ServerProcess, kill: bool) -> list[list[str]]:
        streams = [Stream(model, *kind) for model in MODELS for kind in (*KINDS, *KINDS)]
        return await streamed_amid(running, streams, running.kill_worker if kill else None)

    expected = asyncio.run(tokens_of(real, kill=False))
    assert asyncio.run(tokens_of(apart, kill=True)) == expected
    assert asyncio.run(tokens_of(apart, kill=False)) == expected
