"""A fleet policy places models and routes requests alike live and in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from ballast.core.fleet import DeviceCapacity, ModelDemand
from ballast.core.settings import ModelSettings
from ballast.policy import presets
from ballast.policy.fleet.fixed_placement import FixedPlacement
from ballast.policy.fleet.replica_choice import Replica
from ballast.policy.presets import resolve
from ballast.sim.cluster import Cluster, parse_kinds
from tests.cluster import test_devices
from tests.cluster.fake_device import HOLD
from tests.cluster.test_devices import asked, where
from tests.cluster.worker.test_worker import running
from tests.sim.test_cluster import arrivals, spec


class Everywhere(FixedPlacement):
    """Every model has all devices, and the last one gets all requests."""

    def place(
        self, needs: Sequence[ModelDemand], rooms: Sequence[DeviceCapacity]
    ) -> dict[str, list[str]]:
        return {need.model: [room.device for room in rooms] for need in needs}

    def route(self, replicas: Sequence[Replica]) -> str:
        return replicas[-1].device


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(presets.PLACEMENTS, "everywhere", Everywhere())  # type: ignore[arg-type]


def test_a_server_asks_the_fleet_policy_that_its_fleet_names() -> None:
    models = tuple(ModelSettings(name=name, path=name) for name in "ab")
    fleet = replace(test_devices.FLEET, models=models, placement="everywhere")

    async def scenario() -> None:
        async with running(fleet) as (controller, _):
            homes = {m: [d.name for d in controller.devices.values() if d.serves(m)] for m in "ab"}
            assert homes == {m: ["cpu:0", "cpu:1"] for m in "ab"}
            streams = [controller.router.submit([asked(f"{i}", "a", HOLD)]) for i in range(7)]
            assert set(where(controller).values()) == {"cpu:1"}, "however many are open there"
            for stream in streams:
                stream.close()

    asyncio.run(scenario())


def test_a_simulation_asks_the_same_policy() -> None:
    chosen: set[str] = set()
    cluster = Cluster(
        parse_kinds("3xH100-80G"),
        [spec("a"), spec("b")],
        resolve("balloon", placement="everywhere"),
        lambda device, at, output: chosen.add(device),
    )
    assert cluster.controller.homes() == dict.fromkeys("ab", tuple(cluster.devices))
    cluster.run(arrivals(["a", "b"], 20))
    assert chosen == {list(cluster.devices)[-1]}
    for device in cluster.devices.values():
        device.state.validate()
