"""Devices that come when requests are late, and leave their host when they are not needed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from ballast.cluster import standby_devices
from ballast.cluster.hosts.hosted_workers import check_hosted
from ballast.cluster.standby_devices import StandbyDevices
from ballast.control import standby
from ballast.control.standby import Utilisation
from ballast.core.errors import ConfigError
from ballast.core.settings import HostsSettings, ModelSettings
from tests.cluster.hosts.agents import Agents
from tests.cluster.hosts.test_hosted_workers import (
    hosted,
    patience,  # noqa: F401 - a fixture
)
from tests.cluster.hosts.test_kept_workers import THREADS, begun, die, pids, serving
from tests.cluster.test_devices import FLEET, asked, until
from tests.cluster.worker.test_worker import DEADLINE, all_of

ELASTIC = replace(
    FLEET,
    models=(ModelSettings(name="a", path="a"),),
    placement="follow",
    hosts=HostsSettings(ray="of the test", least=1),
)


def test_a_device_comes_with_load_and_leaves_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    load = [Utilisation(0, 0.0)]
    for module, name in (
        (standby, "WANT_SECONDS"),
        (standby, "LEAVE_SECONDS"),
        (standby_devices, "LOOK_SECONDS"),
    ):
        monkeypatch.setattr(module, name, 0.0)
    monkeypatch.setattr(StandbyDevices, "_utilisation", lambda *_: load[0])

    async def scenario() -> None:
        agents = Agents("x", "y", cores=1)
        async with hosted(agents, ELASTIC) as (controller, workers):
            devices = controller.devices
            device = devices["cpu:1"]

            async def serves_and_leaves() -> None:
                assert device.stands_by
                assert agents.devices == {"cpu:0": "x"}
                assert (devices.missing, devices.down, devices.replacing) == ({}, None, False)
                load[0] = Utilisation(1, 1.0)
                await until(lambda: device.down is None)
                assert not workers.stands_by("cpu:1")
                assert agents.devices == {"cpu:0": "x", "cpu:1": "y"}
                assert workers.host_of("cpu:1") == "host-y"
                load[0] = Utilisation(0, 0.0)
                await until(lambda: device.stands_by and "cpu:1" not in agents.devices)
                await until(lambda: device.down is not None)
                await all_of(controller.router.submit([asked("1", "a")]))

            await serves_and_leaves()
            await serves_and_leaves()
            assert not controller.fail_waiting(), "one serves"

    asyncio.run(scenario())


def test_a_device_that_had_come_is_on_standby_under_the_next_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(standby, "WANT_SECONDS", 0.0)
    monkeypatch.setattr(StandbyDevices, "_utilisation", lambda *_: Utilisation(1, 1.0))
    fleet = replace(ELASTIC, device=THREADS.device, others=THREADS.others)

    async def scenario() -> None:
        agents = Agents("x", "y", cores=1)
        async with asyncio.timeout(DEADLINE):
            first, workers = await begun(agents, fleet)
            await until(lambda: first.devices["cpu:1"].down is None)
            before = pids(first)
            die(first, workers)
            monkeypatch.setattr(standby, "WANT_SECONDS", float("inf"))
            async with serving(agents, fleet) as (second, _):
                assert second.devices["cpu:1"].stands_by
                assert agents.devices == {"cpu:0": "x"}
                assert second.devices["cpu:0"].kept
                await until(lambda: not Path(f"/proc/{before['cpu:1']}").exists())
                await all_of(second.router.submit([asked("1", "a")]))

    asyncio.run(scenario())


def test_nothing_depends_on_a_device_that_may_not_be_there() -> None:
    check_hosted(ELASTIC)
    check_hosted(replace(ELASTIC, placement="weights", hosts=HostsSettings(ray="r", least=2)))
    with pytest.raises(ConfigError, match="moves models"):
        check_hosted(replace(ELASTIC, placement="weights"))
    pinned = ModelSettings(name="a", path="a", devices=("cpu:0", "cpu:1"))
    with pytest.raises(ConfigError, match="always serves"):
        check_hosted(replace(ELASTIC, models=(pinned,)))
