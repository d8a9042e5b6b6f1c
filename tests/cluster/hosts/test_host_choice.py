"""Which host a device comes to, and what it needs there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ballast.cluster.hosts.host_choice import DeviceNeed, HostRoom, choose_host, needs_of
from ballast.cluster.hosts.hosted_workers import check_hosted
from ballast.cluster.hosts.ray_cluster import objection
from ballast.core.errors import ConfigError
from ballast.core.kv_tiers import KvTierSettings
from tests.cluster.test_devices import FLEET

ROOMS = (HostRoom("a", 4, 100, 1), HostRoom("b", 2, 100), HostRoom("c", 8, 10))


@pytest.mark.parametrize(
    ("need", "avoid", "doubtful", "host"),
    [
        (DeviceNeed(1, 1), (), (), "c"),  # two have no device, one of them more cores
        (DeviceNeed(1, 50), (), (), "b"),
        (DeviceNeed(4, 50), (), (), "a"),
        (DeviceNeed(9, 1), (), (), None),
        (DeviceNeed(1, 50), ("b",), (), "a"),
        (DeviceNeed(1, 50), (), ("b",), "a"),
        (DeviceNeed(1, 50), (), ("a", "b"), "b"),
        (DeviceNeed(1, 1), ("a", "b", "c"), (), None),
    ],
)
def test_a_device_comes_where_there_is_room_and_few_others(
    need: DeviceNeed, avoid: tuple[str, ...], doubtful: tuple[str, ...], host: str | None
) -> None:
    assert choose_host(need, ROOMS, avoid, doubtful) == host


def test_devices_share_the_cores_of_hosts_evenly() -> None:
    def cpus(*cores: float) -> list[int]:
        needs = needs_of(FLEET, {f"{i}": n for i, n in enumerate(cores)})
        return [need.cpus for need in needs.values()]

    assert cpus(8) == [4, 4]
    assert cpus(8, 8) == [8, 8]
    assert cpus(8, 2, 2) == [2, 2]
    assert cpus(0.5) == [1, 1]
    given = replace(FLEET, device=replace(FLEET.device, threads=3))
    assert needs_of(given, {"a": 8.0})["cpu:0"] == DeviceNeed(3, FLEET.device.budget_bytes)


def test_what_hosts_do_not_have_yet_is_refused() -> None:
    check_hosted(FLEET)
    with pytest.raises(ConfigError, match="devices"):
        check_hosted(replace(FLEET, device=replace(FLEET.device, name="cuda:0")))
    with pytest.raises(ConfigError, match="kv_host"):
        check_hosted(replace(FLEET, kv=KvTierSettings(host_bytes=2**20)))


@pytest.mark.parametrize(
    ("addresses", "environment", "reason"),
    [
        (["127.0.0.1", "::1"], {}, None),
        (["10.0.0.1"], {}, "RAY_AUTH_MODE"),
        (["127.0.0.1", "10.0.0.1"], {"RAY_AUTH_MODE": "disabled"}, "RAY_AUTH_MODE"),
        (["10.0.0.1"], {"RAY_AUTH_MODE": "token"}, None),
        (["8.8.8.8"], {"RAY_AUTH_MODE": "token"}, "public"),
        (["8.8.8.8"], {"RAY_USE_TLS": "1"}, None),
        (["host"], {"RAY_AUTH_MODE": "token"}, "no address"),
    ],
)
def test_a_cluster_that_strangers_reach_is_refused(
    addresses: list[str], environment: dict[str, str], reason: str | None
) -> None:
    why = objection(addresses, environment)
    assert why is None if reason is None else why is not None and reason in why
