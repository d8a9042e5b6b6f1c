"""Hosts of a Ray cluster: three nodes on this machine, by Ray's own cluster utility."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ballast.cluster.hosts.ray_cluster import RayCluster
from tests.cluster.fake_device import PAUSE
from tests.cluster.hosts.test_hosted_workers import hosted
from tests.cluster.test_devices import asked, until
from tests.cluster.worker.test_worker import all_of, tokens

# Not imported here: Ray reads its environment, with the token, when it is.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
    pytest.mark.filterwarnings("default"),
]

NODES = 3


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name, value in (
        ("RAY_AUTH_MODE", "token"),
        ("RAY_AUTH_TOKEN", secrets.token_hex(32)),
        ("RAY_USAGE_STATS_ENABLED", "0"),
        ("RAY_enable_metrics_collection", "0"),
    ):
        monkeypatch.setenv(name, value)
    from ray.cluster_utils import Cluster

    sizes = {"num_cpus": 2, "object_store_memory": 80 << 20}
    made = Cluster(
        initialize_head=True,
        connect=False,
        head_node_args={**sizes, "include_dashboard": False, "node_name": "host0"},
    )
    made.nodes = [made.add_node(**sizes, node_name=f"host{i}") for i in range(1, NODES)]
    yield made
    made.shutdown()


def test_streams_of_a_node_that_is_killed_go_on(cluster: Any) -> None:
    async def scenario() -> None:
        async with hosted(RayCluster(cluster.address)) as (controller, workers):
            names = {workers.host_of(device) for device in ("cpu:0", "cpu:1")}
            assert len(names) == 2
            assert names < {"host0", "host1", "host2"}
            lost = next(d for d in ("cpu:0", "cpu:1") if workers.host_of(d) != "host0")
            model = {"cpu:0": "a", "cpu:1": "b"}[lost]
            plain = await all_of(controller.router.submit([asked("1", model)]))
            stream = controller.router.submit([asked("2", model, PAUSE, 4)])
            begun = await stream.take()
            name = workers.host_of(lost)
            node = cluster.nodes[int(name.removeprefix("host")) - 1]
            removing = asyncio.to_thread(cluster.remove_node, node, allow_graceful=False)
            removed = asyncio.ensure_future(removing)
            assert tokens([*begun, *await all_of(stream)]) == tokens(plain)[:4]
            await removed
            await until(lambda: controller.devices.restarts == 1)
            assert workers.host_of(lost) not in ("", name)
            await all_of(controller.router.submit([asked("3", model)]))

    asyncio.run(scenario())
