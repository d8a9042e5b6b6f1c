"""Devices on several hosts: what is served there, and what the death of a host leaves undisturbed.

A host is an agent's process (`agents`), its workers are connected over TCP and by CURVE.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from ballast.cluster.controller import Controller
from ballast.cluster.hosts import hosted_workers
from ballast.cluster.hosts.hosted_worker import HostedWorker
from ballast.cluster.hosts.hosted_workers import HostedWorkers
from ballast.core.event import FailedOutput, FinishedOutput
from ballast.core.fleet_orders import DrainHost
from ballast.core.settings import FleetSettings
from ballast.transport import curve
from tests.cluster.fake_device import PAUSE
from tests.cluster.hosts.agents import Agents
from tests.cluster.test_devices import FLEET, asked, until, where
from tests.cluster.worker.test_worker import DEADLINE, FAKE, all_of, tokens


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `agents.PATIENT` and the workers of `fake_device`."""
    for seconds in ("LOST_SECONDS", "HANDSHAKE_SECONDS"):
        monkeypatch.setattr(curve, seconds, 240.0)
    monkeypatch.setattr(hosted_workers, "MEET_SECONDS", 240.0)


@asynccontextmanager
async def hosted(
    agents: Agents, fleet: FleetSettings = FLEET, *, local: bool = False
) -> AsyncIterator[tuple[Controller, HostedWorkers]]:
    """A controller whose workers are on `agents`."""
    fleet = replace(
        fleet,
        device=replace(fleet.device, threads=1),
        others=tuple(replace(device, threads=1) for device in fleet.others),
    )
    async with asyncio.timeout(DEADLINE):
        workers = HostedWorkers(agents, fleet, FAKE, local=local)
        await workers.start()
        controller = Controller(workers, workers)
        try:
            await controller.start(fleet)
            yield controller, workers
        finally:
            await controller.close(5.0)


def test_streams_of_a_host_that_dies_go_on_elsewhere() -> None:
    async def scenario() -> None:
        agents = Agents("x", "y")
        async with hosted(agents) as (controller, workers):
            at = {d: workers.connection_of(d) for d in ("cpu:0", "cpu:1")}
            assert {d: str(h) for d, h in at.items()} == {"cpu:0": "host-x", "cpu:1": "host-y"}
            assert [h.is_servers for h in at.values() if h is not None] == [False, False]
            rooms = {room.device: room.host for room in controller.commands.rooms()}
            assert rooms == {"cpu:0": "host-x", "cpu:1": "host-y"}
            plain = await all_of(controller.router.submit([asked("1", "ab")]))
            # Both are on the host that dies; another serves `ab` as well, and none `a`.
            streams = [controller.router.submit([asked(m, m, PAUSE, 4)]) for m in ("ab", "a")]
            begun = [await stream.take() for stream in streams]
            assert where(controller) == {"ab": "cpu:0", "a": "cpu:0"}
            agents.lose("x")
            await until(lambda: controller.devices.restarts == 1)
            # Its device is on the other host now.
            assert agents.devices == {"cpu:0": "y", "cpu:1": "y"}
            assert workers.host_of("cpu:0") == "host-y"
            for first, stream in zip(begun, streams, strict=True):
                rest = await all_of(stream)
                assert tokens([*first, *rest]) == tokens(plain)[:4]
                assert isinstance(rest[-1], FinishedOutput)
        assert controller.devices.open_requests == 0
        assert all(agent.returncode is not None for agent in agents.agents.values())

    asyncio.run(scenario())


def test_models_of_a_host_that_dies_are_served_by_other_devices() -> None:
    """No host has room for its device, and no other device has the model."""

    async def scenario() -> None:
        agents = Agents("x", "y", cores=1)
        async with hosted(agents) as (controller, workers):
            assert {c.why for c in controller.devices.lending} == {"they are on different hosts"}
            plain = await all_of(controller.router.submit([asked("1", "a")]))
            stream = controller.router.submit([asked("a", "a", PAUSE, 4)])
            begun = await stream.take()
            agents.lose("x")
            assert tokens([*begun, *await all_of(stream)]) == tokens(plain)[:4]
            assert controller.devices.assigned("a") == ["cpu:0", "cpu:1"]
            assert (workers.host_of("cpu:0"), controller.devices.restarts) == ("", 0)
            assert not controller.fail_waiting(), "the other one serves"
            agents.lose("y")
            await until(lambda: workers.waits("cpu:0") and workers.waits("cpu:1"))
            stream = controller.router.submit([asked("b", "b")])
            await until(controller.fail_waiting)  # as a server that stops does
            assert isinstance((await all_of(stream))[-1], FailedOutput)

    asyncio.run(scenario())


def test_a_host_is_drained_with_all_its_devices() -> None:
    async def scenario() -> None:
        agents = Agents("x", "y", "z")
        async with hosted(agents) as (controller, workers):
            assert await workers.set_drained("host-w", True) is None
            assert await workers.set_drained("cpu:0", True) is None
            assert await workers.set_drained("host-z", True) == []  # no device comes there
            assert await workers.set_drained("host-x", True) == ["cpu:0"]
            outcome = await controller.commands.execute(DrainHost(("cpu:0",)))
            assert outcome.code is None
            assert controller.devices.homes("a") == ["cpu:0", "cpu:1"]
            stream = controller.router.submit([asked("a", "a")])
            assert where(controller) == {"a": "cpu:1"}
            await all_of(stream)
            agents.lose("x")  # its device starts elsewhere, and is still drained
            await until(lambda: controller.devices.restarts == 1)
            assert workers.host_of("cpu:0") == "host-y"
            assert controller.devices["cpu:0"].cordoned
            assert await workers.set_drained("host-x", False) == ["cpu:0"]

    asyncio.run(scenario())


def test_a_worker_that_dies_is_replaced_by_its_hosts_spare() -> None:
    fleet = replace(FLEET, server=replace(FLEET.server, spare_worker=True))

    async def scenario() -> None:
        agents = Agents("x")
        async with hosted(agents, fleet, local=True) as (controller, workers):
            host = workers.connection_of("cpu:0")
            assert host is not None
            assert host.is_servers
            await until(lambda: workers._spares["x"].waits)
            spare = workers._spares["x"]._worker
            dying = controller.devices["cpu:0"].worker
            assert isinstance(dying, HostedWorker)
            dying.kill("by the test")
            await until(lambda: controller.devices.restarts == 1)
            assert controller.devices["cpu:0"].worker is spare
            await all_of(controller.router.submit([asked("1", "a")]))

    asyncio.run(scenario())
