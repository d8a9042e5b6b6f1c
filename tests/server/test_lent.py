"""Two live workers that lend to each other, by order and by policy: clients cannot tell."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ballast.bench.server_process import ENDED
from ballast.cluster.placing import need_of
from ballast.core.units import KiB, MiB, ceil_div
from ballast.fleet.fleet_file import load_fleet
from ballast.kv.layout import fitted
from ballast.models.on_cpu import on_cpu
from ballast.models.profile_run import measured
from ballast.policy.presets import PRESETS
from ballast.weights.checkpoint import load_host_model
from tests.server.process import ServerProcess, server, until
from tests.server.test_crash import TOKENS, Stream, streamed_amid
from tests.server.test_devices import ADMIN

LENDER, BORROWER = "cpu:0", "cpu:1"
MODEL = "wren-mini"


def tight(fleet_file: Path) -> int:
    """Bytes for the second device's model and three of its requests."""
    fleet = load_fleet(fleet_file, presets=PRESETS, environ={})
    (settings,) = (m for m in fleet.models if m.name == MODEL)
    host = load_host_model(settings)
    host.spec = fitted(host.spec, settings.block_tokens, fleet.device.page_bytes)
    host = measured(host, on_cpu, fleet.device)
    need = need_of(host.spec, [fleet.device], {})
    kv = 3 * (TOKENS + 20) * host.spec.kv_bytes_per_token
    most = fleet.device.step_tokens * host.spec.kv_bytes_per_token
    host.close()
    pages = ceil_div(need.least - most + kv, fleet.device.page_bytes)
    return pages * fleet.device.page_bytes


@pytest.fixture(scope="module")
def two(fleet_file: Path) -> Iterator[ServerProcess]:
    """The first has memory to spare until its own requests come, the second too little. A policy
    could lend as well, but operators have ordered something between the two."""
    fleet = yaml.safe_load(fleet_file.read_text())
    fleet["preset"] = "ballast"
    homes = {"atlas-chat": [LENDER], MODEL: [BORROWER]}
    for model in fleet["models"]:
        model["devices"] = homes[model["name"]]
    (device,) = fleet["devices"]
    budgets = {LENDER: "4MiB", BORROWER: f"{tight(fleet_file) // KiB}KiB"}
    fleet["devices"] = [device | {"budget": b, "name": name} for name, b in budgets.items()]
    fleet["server"] = {"admin_key": "sk-admin-of-the-tests"}
    file = fleet_file.with_name("lent.yaml")
    file.write_text(yaml.safe_dump(fleet))
    with server(file) as running:
        until(lambda: order(running, "lend", memory="1MiB")[0] == 200)
        assert order(running, "recall") == (200, "recalled")
        until(lambda: lent(running) == (0, 0))
        yield running


def order(running: ServerProcess, verb: str, **keys: Any) -> tuple[int, str]:
    answer = running.http.post(
        f"/admin/devices/{LENDER}/{verb}", json={"to": BORROWER, **keys}, headers=ADMIN
    )
    result = answer.json()
    return answer.status_code, result.get("status") or result["error"]["message"]


def devices(running: ServerProcess) -> dict[str, dict[str, Any]]:
    state = running.http.get("/admin/state", headers=ADMIN).json()
    return {device["device"]: device for device in state["devices"]}


def lent(running: ServerProcess) -> tuple[float, float]:
    """MiB, as either side has them in its books."""
    result = devices(running)
    out = result[LENDER]["owners"].get(f"lent:{BORROWER}", 0)
    back = result[BORROWER]["borrowed"].get(LENDER, 0)
    mib = result[LENDER]["page_bytes"] / MiB
    return out * mib, back * mib


def used(running: ServerProcess) -> int:
    """Borrowed pages with KV on them."""
    return sum(m["borrowed_pages"] for m in devices(running)[BORROWER]["models"])


def pid_of(running: ServerProcess, device: str) -> int:
    """Workers are told apart by what they serve: one has the weights of the other's model not."""
    model = MODEL if device == BORROWER else "atlas-chat"
    found = set()
    for pid in running.children:
        with contextlib.suppress(*ENDED):
            for link in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(*ENDED):
                    if f"memfd:ballast-{model}" in os.readlink(f"/proc/{pid}/fd/{link}"):
                        found.add(pid)
    (only,) = found
    return only


async def tokens_of(
    running: ServerProcess,
    amid: Callable[[], None] | None = None,
    then: Callable[[], None] = lambda: None,
) -> list[list[str]]:
    """`amid` is called while KV lies on borrowed pages, `then` when requests may go on."""

    def lying() -> None:
        assert amid is not None
        until(lambda: used(running) > 0)
        amid()

    streams = [Stream(MODEL, seed, 0.7) for seed in range(24)]
    tokens = await streamed_amid(running, streams, None if amid is None else lying, then)
    assert all(len(result) == TOKENS for result in tokens)
    return tokens


@pytest.fixture(scope="module")
def expected(two: ServerProcess) -> list[list[str]]:
    return asyncio.run(tokens_of(two))


def test_kv_lies_on_borrowed_pages_and_moves_home_when_asked(
    two: ServerProcess, expected: list[list[str]]
) -> None:
    assert order(two, "lend", memory="1MiB") == (200, "lent")
    until(lambda: lent(two) == (1, 1))

    def recall() -> None:
        assert order(two, "recall", memory="768KiB") == (200, "recalled")
        until(lambda: lent(two) == (0.25, 0.25))

    assert asyncio.run(tokens_of(two, lambda: None, recall)) == expected
    metrics = two.http.get("/metrics", headers=ADMIN).text
    assert f'ballast_device_lent_bytes{{borrower="{BORROWER}",device="{LENDER}"}}' in metrics
    assert order(two, "recall") == (200, "recalled")
    until(lambda: lent(two) == (0, 0))
    assert order(two, "recall") == (409, f"nothing is lent to {BORROWER}")
    assert order(two, "lend", memory="1GiB")[0] == 409
    assert not any(device["restarts"] for device in devices(two).values())


def test_a_borrower_that_does_not_answer_is_killed_and_its_requests_go_on(
    two: ServerProcess, expected: list[list[str]]
) -> None:
    assert order(two, "lend", memory="1MiB") == (200, "lent")
    free = devices(two)[LENDER]["total"]

    def stop() -> None:
        os.kill(pid_of(two, BORROWER), signal.SIGSTOP)

    def recall() -> None:
        assert order(two, "recall", seconds=0.5) == (200, "recalled")

    assert asyncio.run(tokens_of(two, stop, recall)) == expected
    result = devices(two)
    assert (result[BORROWER]["restarts"], result[LENDER]["restarts"]) == (1, 0)
    until(lambda: lent(two) == (0, 0))
    lender = devices(two)[LENDER]
    held = sum(lender["owners"].values()) + lender["free"] + lender["reclaiming"]
    assert held == free
    until(lambda: order(two, "lend", memory="1MiB") == (200, "lent"))  # they know each other anew
    until(lambda: lent(two) == (1, 1))
    assert order(two, "recall") == (200, "recalled")
    until(lambda: lent(two) == (0, 0))


@pytest.mark.slow
def test_a_lender_that_dies_is_replaced_once_its_memory_is_let_go_of(
    two: ServerProcess, expected: list[list[str]]
) -> None:
    assert order(two, "lend", memory="1MiB") == (200, "lent")
    restarts = devices(two)[LENDER]["restarts"]

    def kill() -> None:
        os.kill(pid_of(two, LENDER), signal.SIGKILL)

    def replaced() -> None:
        until(lambda: devices(two)[LENDER]["restarts"] == restarts + 1)

    assert asyncio.run(tokens_of(two, kill, replaced)) == expected
    until(lambda: lent(two) == (0, 0))
    until(lambda: order(two, "lend", memory="1MiB") == (200, "lent"))
    assert order(two, "recall") == (200, "recalled")


def test_a_policy_lends_what_is_spare_and_the_lender_takes_it_back(two: ServerProcess) -> None:
    """Once operators have released the pair."""

    def conversations() -> list[list[str]]:
        streams = [Conversation(seed) for seed in range(8)]
        return asyncio.run(streamed_amid(two, streams))

    def own() -> list[list[str]]:
        """More than the lender has memory for once it has lent some."""
        streams = [Stream("atlas-chat", seed, 0.7) for seed in range(24)]
        return asyncio.run(streamed_amid(two, streams))

    def state() -> dict[str, Any]:
        found: dict[str, Any] = two.http.get("/admin/state", headers=ADMIN).json()
        return found

    def demand() -> None:
        """Own requests of the lender, as soon as KV lies on what it has lent."""
        until(lambda: used(two) > 0)
        leases.extend(state()["leases"])
        lenders_own.append(own())

    leases: list[dict[str, Any]] = []
    lenders_own: list[list[list[str]]] = []
    undisturbed, restarts = conversations(), [d["restarts"] for d in devices(two).values()]
    assert order(two, "release") == (200, "released")
    assert order(two, "release")[0] == 409
    thread = threading.Thread(target=demand)
    thread.start()
    while thread.is_alive():
        assert conversations() == undisturbed
    assert lenders_own == [own()]
    for lease in leases:
        assert (lease["lender"], lease["borrower"]) == (LENDER, BORROWER)
        assert re.match(rf"a page is worth \S+ to {BORROWER}, costs {LENDER} ", lease["why"])
        assert not lease["by_operator"]
    assert "Recall" in {d["action"] for d in state()["decisions"] if d.get("device") == LENDER}
    assert [device["restarts"] for device in devices(two).values()] == restarts


class Conversation(Stream):
    """One with a history: waits until there is memory for it."""

    def __init__(self, seed: int) -> None:
        super().__init__(MODEL, seed, 0.7)
        self._asked["prompt"] = [(11 * seed + 7 * i) % 400 + 10 for i in range(250)]
