"""Devices on many simulated hosts: who is where, and what the network between them costs."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from ballast.core.event import FailedOutput, FinishedOutput, Output, TokenOutput
from ballast.core.request import Submission
from ballast.core.settings import DeviceSettings, FleetSettings, HostsSettings
from ballast.policy.presets import resolve
from ballast.sim.cluster import Cluster, parse_kinds
from ballast.sim.cluster_files import ClusterFiles, read_cluster_files
from ballast.sim.topology import ClusterLinks, PeerLinks
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


def test_of_equal_devices_one_of_the_same_host_comes_first(tmp_path: Path) -> None:
    homes, orders = tmp_path / "homes.toml", tmp_path / "orders.toml"
    homes.write_text("[homes]\nm = [0, 1, 2, 3]\n")
    orders.write_text('[[orders]]\nat = 1.0\nmodel = "m"\nmigrate = 0\n')
    read = read_cluster_files(None, str(homes), orders)
    joints = ClusterLinks(per_host=2, peers=PeerLinks.MEMORY, network=1e9)
    cluster = Cluster(
        parse_kinds("4xH100-80G"),
        [spec("m")],
        resolve("balloon"),
        lambda *_: None,
        files=replace(read, joints=joints),
    )
    [migrations] = cluster.controller.migrations
    names = list(cluster.devices)
    found = [names.index(d) for d in migrations.others(names[2], "m")]
    assert found == [3, 0, 1]


def moved_at(directory: Path, network: float | None) -> tuple[int, float]:
    """How many requests go from one host to another with their KV when an operator orders it, and
    when the first of them has a token there. No client notices."""
    homes, orders = directory / "homes.toml", directory / "orders.toml"
    homes.write_text("[homes]\nm = [0, 1]\n")
    orders.write_text('[[orders]]\nat = 1.0\nmodel = "m"\nmigrate = 0\n')
    read = read_cluster_files(None, str(homes), orders)
    tokens: defaultdict[str, list[tuple[int, str, float]]] = defaultdict(list)
    ended: list[Output] = []

    def received(device: str, at: float, output: Output) -> None:
        if isinstance(output, TokenOutput):
            tokens[output.request_id].append((output.index, device, at))
        else:
            ended.append(output)

    cluster = Cluster(
        parse_kinds("2xH100-80G"),
        [spec("m")],
        resolve("balloon"),
        received,
        files=replace(read, joints=replace(read.joints, network=network)),
    )
    cluster.run(
        Submission(
            id=f"{i}",
            model="m",
            prompt=tuple(1 + (i * k) % 97 for k in range(400)),
            max_tokens=400,
            arrival=i / 20,
            ignore_eos=True,
        )
        for i in range(12)
    )
    assert len(ended) == 12
    assert all(isinstance(end, FinishedOutput) for end in ended)
    there = []
    for result in tokens.values():
        assert [index for index, *_ in result] == list(range(400))
        (_, first, _), *rest = result
        there += [at for _, device, at in rest if device != first][:1]
    for device in cluster.devices.values():
        device.state.validate()
        assert not any(m.kv.counts.used_blocks for m in device.state.models.values())
    return cluster.controller.moved, min(there, default=0.0)


def test_kv_of_requests_goes_to_another_host_at_the_networks_pace(tmp_path: Path) -> None:
    at_once, first = moved_at(tmp_path, 400e9)
    slower, later = moved_at(tmp_path, 2e9)
    assert at_once >= slower > 0
    # 400 tokens and more of 512 KiB: a tenth of a second for the first of them.
    assert later > first + 0.09
    assert moved_at(tmp_path, None) == (0, 0.0), "hosts that nothing joins"
    assert moved_at(tmp_path, 40e6) == (0, 0.0), "more than two seconds for each"
