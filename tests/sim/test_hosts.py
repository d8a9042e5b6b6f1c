"""Devices on many simulated hosts: who is where, and what the network between them costs."""

from __future__ import annotations

from collections import Counter

import pytest

from ballast.core.event import FailedOutput, FinishedOutput, Output
from ballast.core.settings import DeviceSettings, FleetSettings, HostsSettings
from ballast.policy.presets import resolve
from ballast.sim.cluster import Cluster, parse_kinds
from ballast.sim.cluster_files import ClusterFiles
from tests.sim.test_cluster import arrivals, spec


def files(devices: int, network: float | None) -> ClusterFiles:
    """As `simulate` has them of a fleet file."""
    fleet = FleetSettings(
        models=(),
        device=DeviceSettings(budget_bytes=1),
        hosts=HostsSettings(devices=devices, network=network),
    )
    return ClusterFiles().of(fleet)


def test_fleet_policies_see_hosts_and_what_joins_them() -> None:
    cluster = Cluster(
        parse_kinds("5xH100-80G"),
        [spec("m")],
        resolve("ballast"),
        lambda *_: None,
        files=files(2, 1e9),
    )
    assert [room.host for room in cluster.controller.rooms()] == ["0", "0", "1", "1", "2"]
    assert cluster.controller.network() == 1e9


@pytest.mark.parametrize("preset", ["ballast", "prism", "recompute"])
def test_ten_hosts_of_eight_answer_all_requests(preset: str) -> None:
    names = [f"m{i}" for i in range(100)]
    ended: Counter[str] = Counter()
    at = set[str]()

    def received(device: str, _: float, output: Output) -> None:
        if isinstance(output, FinishedOutput | FailedOutput):
            ended[type(output).__name__] += 1
            at.add(device)

    cluster = Cluster(
        parse_kinds("80xH100-80G"),
        [spec(name) for name in names],
        resolve(preset),
        received,
        files=files(8, 12e9),
    )
    hosts = Counter(room.host for room in cluster.controller.rooms())
    assert hosts == {str(host): 8 for host in range(10)}
    cluster.run(arrivals(names, 200))
    assert ended == {"FinishedOutput": 200}
    assert len(at) == 80
