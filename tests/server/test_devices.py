"""A server over two devices with real models: clients cannot tell, operators can."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from ballast.cli import app
from ballast.core.units import MiB
from benchmarks.memory_back import device_bytes
from tests.server.process import ServerProcess, server, until
from tests.server.test_crash import KINDS, MODELS, Stream, streamed_amid

ADMIN = {"Authorization": "Bearer sk-admin-of-the-tests"}


@pytest.fixture(scope="module")
def two(fleet_file: Path) -> Iterator[ServerProcess]:
    """atlas-chat is on both devices, wren-mini on the second."""
    fleet = yaml.safe_load(fleet_file.read_text())
    homes = {"atlas-chat": ["cpu:0", "cpu:1"], "wren-mini": ["cpu:1"]}
    for model in fleet["models"]:
        model["devices"] = homes[model["name"]]
    (device,) = fleet["devices"]
    fleet["devices"] = [device | {"budget": "32MiB", "name": name} for name in ("cpu:0", "cpu:1")]
    fleet["server"] = {"admin_key": "sk-admin-of-the-tests"}
    file = fleet_file.with_name("two.yaml")
    file.write_text(yaml.safe_dump(fleet))
    with server(file) as running:
        yield running


async def tokens_of(running: ServerProcess, kill: bool) -> list[list[str]]:
    streams = [Stream(model, *kind) for model in MODELS for kind in (*KINDS, *KINDS)]
    return await streamed_amid(running, streams, running.kill_worker if kill else None)


def test_the_tokens_are_those_of_one_device_also_when_a_worker_is_killed(
    real: ServerProcess, two: ServerProcess
) -> None:
    expected = asyncio.run(tokens_of(real, kill=False))
    assert asyncio.run(tokens_of(two, kill=False)) == expected
    assert asyncio.run(tokens_of(two, kill=True)) == expected

    def restarts() -> list[int]:
        state = two.http.get("/admin/state", headers=ADMIN).json()
        return sorted(d["restarts"] for d in state["devices"])

    until(lambda: restarts() == [0, 1])


def weights_of(running: ServerProcess, model: str) -> list[set[int]]:
    """By worker, the files in which it has the weights of a model."""
    found = []
    for pid in running.children:
        inodes = set()
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if f"memfd:ballast-{model}" in str(link.readlink()):
                    inodes.add(link.stat().st_ino)
        found += [inodes] if inodes else []
    return found


def test_weights_are_in_host_memory_once(two: ServerProcess) -> None:
    first, second = weights_of(two, "atlas-chat")
    assert len(first) > 1
    assert first == second
    assert len(weights_of(two, "wren-mini")) == 1


def test_operators_are_told_of_each_device(two: ServerProcess) -> None:
    health = {"status": "ok", "serving": 2, "models": 2, "failed": {}}
    until(lambda: two.http.get("/health", headers=ADMIN).json() == health)
    state = two.http.get("/admin/state", headers=ADMIN).json()
    assert state["device"] == "cpu:0, cpu:1"
    first, second = state["devices"]
    assert (first["device"], first["status"], second["device"]) == ("cpu:0", "ok", "cpu:1")
    assert [m["name"] for m in first["models"]] == ["atlas-chat"]
    assert [m["name"] for m in second["models"]] == ["atlas-chat", "wren-mini"]
    assert state["total"] == first["total"] + second["total"]
    ways = [(c["lender"], c["borrower"], c["means"]) for c in state["lending"]]
    assert ways == [("cpu:0", "cpu:1", "map"), ("cpu:1", "cpu:0", "map")]
    for result in (state, first, second):
        assert (
            sum(result["owners"].values()) + result["free"] + result["reclaiming"]
            == result["total"]
        )
    homes = {m["report"]["name"]: m["devices"] for m in state["models"]}
    assert homes == {"atlas-chat": ["cpu:0", "cpu:1"], "wren-mini": ["cpu:1"]}
    metrics = two.http.get("/metrics", headers=ADMIN).text
    assert 'ballast_device_up{device="cpu:0"} 1.0' in metrics
    assert 'ballast_device_up{device="cpu:1"} 1.0' in metrics


def test_streams_take_their_kv_along(real: ServerProcess, two: ServerProcess) -> None:
    """wren-mini is placed on the other device, and has a request there when the KV is there."""

    def here() -> dict[str, Any]:
        found: dict[str, Any] = two.http.get("/admin/state", headers=ADMIN).json()["devices"][0]
        return found

    def order(wanted: str) -> int:
        path = f"/admin/devices/cpu:1/{wanted}"
        return two.http.post(path, headers=ADMIN, timeout=240).status_code

    draining = threading.Thread(target=order, args=["drain"])

    def drain() -> None:
        draining.start()
        two.until_one_departs()

    streams = [[Stream("wren-mini", *kind) for kind in KINDS] for _ in range(2)]
    expected = asyncio.run(streamed_amid(real, streams[0]))
    try:
        assert asyncio.run(streamed_amid(two, streams[1], drain, draining.join)) == expected
        assert here()["moved_in"] > 0
    finally:
        assert order("uncordon") == 200
        path = "/admin/models/wren-mini/withdraw?device=cpu:0"
        assert two.http.post(path, headers=ADMIN, timeout=240).status_code == 200


def test_operators_move_models(two: ServerProcess) -> None:
    def order(verb: str, model: str, device: str) -> tuple[int, str]:
        answer = two.http.post(
            f"/admin/models/{model}/{verb}", params={"device": device}, headers=ADMIN
        )
        result = answer.json()
        return answer.status_code, result.get("status") or result["error"]["message"]

    def homes() -> list[str]:
        (found,) = (
            m["devices"]
            for m in two.http.get("/admin/state", headers=ADMIN).json()["models"]
            if m["report"]["name"] == "wren-mini"
        )
        return list(found)

    assert order("place", "wren-mini", "cpu:1") == (409, "cpu:1 serves wren-mini already")
    assert order("withdraw", "wren-mini", "cpu:1") == (409, "wren-mini is on no other device")
    assert order("place", "wren-mini", "cpu:7")[0] == 409
    assert order("evict", "wren-mini", "cpu:0") == (409, "wren-mini is not on 'cpu:0'")
    expected = asyncio.run(tokens_of(two, kill=False))
    assert order("place", "wren-mini", "cpu:0") == (200, "placed")
    assert homes() == ["cpu:0", "cpu:1"]
    first, second = weights_of(two, "wren-mini")
    assert first == second
    assert order("withdraw", "wren-mini", "cpu:1") == (200, "withdrawn")
    assert homes() == ["cpu:0"]
    assert asyncio.run(tokens_of(two, kill=False)) == expected
    assert order("place", "wren-mini", "cpu:1") == (200, "placed")
    assert order("withdraw", "wren-mini", "cpu:0") == (200, "withdrawn")


def test_streams_go_on_elsewhere_when_their_device_is_drained(
    real: ServerProcess, two: ServerProcess
) -> None:
    """In the middle of their answers: the tokens are the same, and nobody is told."""
    expected = asyncio.run(tokens_of(real, kill=False))
    answers: list[int] = []

    def order(wanted: str, device: str) -> int:
        path = f"/admin/devices/{device}/{wanted}"
        return two.http.post(path, headers=ADMIN, timeout=240).status_code

    def cordoned() -> dict[str, bool]:
        state = two.http.get("/admin/state", headers=ADMIN).json()
        return {d["device"]: d["cordoned"] for d in state["devices"]}

    draining = threading.Thread(target=lambda: answers.append(order("drain", "cpu:1")))

    def drain() -> None:
        draining.start()
        until(lambda: cordoned() == {"cpu:0": False, "cpu:1": True})

    def and_wait() -> None:
        draining.join()

    streams = [Stream(model, *kind) for model in MODELS for kind in (*KINDS, *KINDS)]
    try:
        assert asyncio.run(streamed_amid(two, streams, drain, and_wait)) == expected
        assert answers == [200]
        assert order("drain", "cpu:0") == 409
        assert asyncio.run(tokens_of(two, kill=False)) == expected
    finally:
        assert order("uncordon", "cpu:1") == 200
    assert cordoned() == {"cpu:0": False, "cpu:1": False}


def test_the_command_drains_a_device_and_says_why_not(two: ServerProcess) -> None:
    def ran(*options: str) -> Result:
        return CliRunner().invoke(
            app, ["drain", *options, "--url", two.base, "--key", "sk-admin-of-the-tests"]
        )

    try:
        assert ran("cpu:1").output == "cpu:1 is drained\n"
        last = ran("cpu:0")
        assert last.exit_code == 1
        assert "stays on cpu:0: there is no other device" in last.output
        assert "no device 'cpu:9'" in ran("cpu:9").output
    finally:
        assert ran("cpu:1", "--undo").output == "cpu:1 is uncordoned\n"
    refused = CliRunner().invoke(
        app, ["drain", "cpu:1", "--url", two.base, "--key", "sk-wrong-of-the-tests"]
    )
    assert refused.exit_code == 1


def test_free_memory_goes_back_to_the_machine_at_an_order(two: ServerProcess) -> None:
    def state() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = two.http.get("/admin/state", headers=ADMIN).json()["devices"]
        return found

    def filled() -> bool:
        """Whether all free pages have memory; a model that has none takes none meanwhile."""
        return device_bytes(two.pid) >= sum(d["free"] * d["page_bytes"] for d in state())

    def release(**body: object) -> Any:
        answer = two.http.post("/admin/memory/release", headers=ADMIN, json=body)
        return answer.status_code, answer.json()

    def back(*options: str) -> Result:
        given = ["--url", two.base, "--key", "sk-admin-of-the-tests"]
        return CliRunner().invoke(app, ["release", *options, *given])

    expected = asyncio.run(tokens_of(two, kill=False))
    until(filled)
    before = device_bytes(two.pid)
    status, found = release(devices=["cpu:1"], keep="1MiB")
    assert (status, found["refused"], list(found["released"])) == (200, {}, ["cpu:1"])
    assert 0 < found["released"]["cpu:1"] <= 31 * MiB
    assert device_bytes(two.pid) < before
    status, found = release()
    assert (status, sorted(found["released"])) == (200, ["cpu:0", "cpu:1"])
    owned = sum(sum(d["owners"].values()) * d["page_bytes"] for d in state())
    assert device_bytes(two.pid) <= owned, "only what is in use has memory"
    told = two.http.get("/admin/story?last=1000", headers=ADMIN).json()["decisions"]
    orders = [d for d in told if d["action"] == "ReleaseMemory"]
    assert [d["kept_bytes"] for d in orders] == [MiB, 0, 0]
    assert asyncio.run(tokens_of(two, kill=False)) == expected

    assert release(devices=["cpu:9"])[1]["error"]["param"] == "devices"
    for wrong in ({"keep": -1}, {"devices": []}, {"device": "cpu:0"}):
        assert release(**wrong)[0] == 400
    assert two.http.post("/admin/memory/release").status_code == 401
    assert "cpu:0 has given " in back("cpu:0", "--keep", "32MiB").output
    assert "there is no device 'cpu:9'" in back("cpu:9").output
    assert back("cpu:9").exit_code == 1
    assert release(keep="32MiB") == (200, {"released": {"cpu:0": 0, "cpu:1": 0}, "refused": {}})
    until(filled)
