"""Simulations for the page: one at a time, in a process that ends with its client."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from ballast.core.settings import DeviceSettings, FleetSettings
from ballast.server.admin import simulations
from ballast.server.admin.simulations import Simulations
from ballast.server.http.faults import Fault
from ballast.server.http.sse import DONE, EventStream
from ballast.server.observe.recent_requests import TracedRequest
from ballast.server.service import Service
from tests.policy import worlds
from tests.sim.test_simulate import COSTS

SPEC = worlds.spec("m", pages=4)
PROGRESS = """print('{"event":"progress","what":"x","done":1,"of":2}', flush=True)"""
ECHO = f"""
import sys, msgspec
job = msgspec.msgpack.decode(sys.stdin.buffer.read())
{PROGRESS}
print('{{"event":"result","result":{{"requests":%d}}}}' % len(job["requests"]))
"""
FOREVER = f"{PROGRESS}\nimport time\ntime.sleep(1e6)"
KILLED = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"


def simulated(requests: int = 3, costs: Any = COSTS) -> Simulations:
    report = SimpleNamespace(
        device="cpu:0",
        models=[SimpleNamespace(name="m", costs=costs)],
        activation_bytes_per_second=1e9,
    )
    devices = SimpleNamespace(
        specs={"m": SPEC},
        fleet=FleetSettings(models=(), device=DeviceSettings(budget_bytes=1)),
        values=lambda: [SimpleNamespace(report=report)],
    )
    traced = [TracedRequest(float(i), "m", 5, 5) for i in range(requests)]
    service = SimpleNamespace(
        controller=SimpleNamespace(devices=devices),
        requests=SimpleNamespace(trace=lambda: [*traced, TracedRequest(9.0, "gone", 5, 5)]),
    )
    return Simulations(cast(Service, service))


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Sets the source of the process that runs instead of a simulation."""

    def use(source: str) -> None:
        monkeypatch.setattr(simulations, "COMMAND", (sys.executable, "-c", source))

    use(ECHO)
    return use


async def sent(stream: EventStream, leave_after: int | None = None) -> list[dict[str, Any]]:
    """Events that a client gets, which leaves after so many."""
    found: list[dict[str, Any]] = []
    gone = asyncio.Event()

    async def receive() -> dict[str, str]:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        body = message.get("body")
        if body and body != DONE:
            found.append(msgspec.json.decode(body.removeprefix(b"data: ")))
            if len(found) == leave_after:
                gone.set()

    await stream({}, receive, send)
    return found


def test_a_run_gets_what_is_served_and_the_client_its_result(
    program: Callable[[str], None],
) -> None:
    async def run() -> list[dict[str, Any]]:
        return await sent(simulated().stream("simulate", {"workload": "recorded"}))

    progress, result = asyncio.run(run())
    assert progress["event"] == "progress"
    assert result == {"event": "result", "result": {"requests": 3}}  # none of a model that is gone


def test_one_at_a_time_and_its_process_ends_with_its_client(program: Callable[[str], None]) -> None:
    program(FOREVER)

    async def run() -> None:
        runs = simulated()
        first = runs.stream("simulate", {})
        with pytest.raises(Fault, match="one at a time"):
            runs.stream("plan", {})
        assert len(await sent(first, leave_after=1)) == 1
        program(ECHO)
        assert len(await sent(runs.stream("simulate", {}))) == 2

    asyncio.run(run())


def test_a_run_whose_process_is_killed_says_so(program: Callable[[str], None]) -> None:
    program(KILLED)

    async def run() -> list[dict[str, Any]]:
        return await sent(simulated().stream("simulate", {}))

    [failed] = asyncio.run(run())
    assert failed["event"] == "error"
    assert "SIGKILL" in failed["message"]


def test_what_there_is_nothing_to_simulate_with() -> None:
    with pytest.raises(Fault, match="no story"):
        simulated().stream("story", {})
    with pytest.raises(Fault, match="no request has been answered"):
        simulated(requests=0).stream("simulate", {"workload": "recorded"})
    with pytest.raises(Fault, match="costs of 'm'"):
        simulated(costs=None).stream("simulate", {"workload": "poisson"})
