"""Hosts of a Ray cluster: three nodes on this machine, by Ray's own cluster utility."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from ballast.cluster.hosts.host_choice import HostInfo
from ballast.cluster.hosts.ray_cluster import RayCluster
from ballast.cluster.worker.local_process import COMMAND
from ballast.core.errors import Unavailable
from ballast.core.settings import FleetSettings
from benchmarks.hosts_faults import AGENT, descendants, named
from tests.cluster.fake_device import PAUSE
from tests.cluster.hosts.test_hosted_workers import hosted
from tests.cluster.hosts.test_http_relays import App, answered, assert_away, server
from tests.cluster.hosts.test_kept_workers import pids, serving
from tests.cluster.hosts.test_kv_between_hosts import (
    DEVICES,
    STREAMS,
    Streams,
    fleet,  # noqa: F401 - a fixture
    moved_in,
    none_used,
)
from tests.cluster.test_devices import asked, until
from tests.cluster.worker.test_worker import DEADLINE, FAKE, all_of, tokens

# Not imported here: Ray reads its environment, with the token, when it is.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
    pytest.mark.filterwarnings("default"),
]

NODES = 3
TOKEN = secrets.token_hex(32)
"""Of all clusters: Ray reads it once."""
NAMES = {f"host{i}" for i in range(NODES)}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name, value in (
        ("RAY_AUTH_MODE", "token"),
        ("RAY_AUTH_TOKEN", TOKEN),
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
            assert names < NAMES
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


def test_streams_move_to_another_node_with_their_kv(
    cluster: Any,
    fleet: FleetSettings,  # noqa: F811
) -> None:
    async def scenario() -> None:
        async with (
            asyncio.timeout(DEADLINE),
            serving(RayCluster(cluster.address), fleet, COMMAND) as (controller, workers),  # type: ignore[arg-type]
        ):
            assert len({workers.host_of(device) for device in DEVICES}) == 2
            assert await Streams(controller, *DEVICES).moved() == STREAMS
            assert moved_in(controller) == [0, STREAMS]
            await until(lambda: none_used(controller))

    asyncio.run(scenario())


def agents() -> list[int]:
    return [pid for pid in descendants(os.getpid()) if named(pid, AGENT)]


def test_an_agent_in_whose_place_ray_has_started_another_is_not_waited_for(cluster: Any) -> None:
    async def scenario() -> None:
        nodes = RayCluster(cluster.address)
        await nodes.start()
        try:
            node = min(await nodes.hosts())
            await nodes.open(node, FAKE, anew=False)
            [first] = agents()
            os.kill(first, signal.SIGKILL)
            await until(lambda: agents() not in ([], [first]))
            with pytest.raises(Unavailable, match="another was started"):
                await nodes.connect(node, "tcp://127.0.0.1:9", "x" * 40)
        finally:
            await nodes.close()

    asyncio.run(scenario())


SERVING = """
import asyncio, json, sys
from ballast.cluster.hosts import hosted_workers
from ballast.cluster.hosts.ray_cluster import RayCluster
from tests.cluster.hosts.test_hosted_workers import hosted
from tests.cluster.hosts.test_kept_workers import pids

hosted_workers.KEEP_SECONDS = 3600.0

async def serve():
    async with hosted(RayCluster(sys.argv[1])) as (controller, _):
        print(json.dumps(pids(controller)), flush=True)
        await asyncio.Event().wait()

asyncio.run(serve())
"""


def test_a_server_that_is_killed_is_followed_by_another(cluster: Any) -> None:
    """The next one finds the workers, on their hosts, and ends everything when it stops."""
    root = str(Path(__file__).parents[3])
    with subprocess.Popen(
        (sys.executable, "-c", SERVING, cluster.address),
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
    ) as first:
        try:
            assert first.stdout is not None
            before = json.loads(first.stdout.readline())
        finally:
            first.kill()

    async def scenario() -> None:
        async with hosted(RayCluster(cluster.address)) as (controller, workers):
            assert {workers.host_of(device) for device in ("cpu:0", "cpu:1")} < NAMES
            assert pids(controller) == before
            for model in ("a", "b"):
                await all_of(controller.router.submit([asked(model, model)]))
        for pid in before.values():
            while Path(f"/proc/{pid}").exists():
                await asyncio.sleep(0.05)

    asyncio.run(scenario())


class FirstNode(RayCluster):
    """All nodes have one address here, where one relay can listen at a port."""

    async def hosts(self) -> dict[str, HostInfo]:
        return dict([min((await super().hosts()).items())])


def test_a_relay_outlives_its_server_and_the_next_one_finds_it(cluster: Any) -> None:
    async def scenario() -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]

        @asynccontextmanager
        async def serving(name: str) -> AsyncIterator[str]:
            nodes = FirstNode(cluster.address)
            await nodes.start()
            try:
                async with server(nodes, App(name), port):
                    [host] = (await nodes.hosts()).values()
                    yield f"http://{host.ip}:{port}"
            finally:
                await nodes.close()

        async def answers(client: httpx.AsyncClient, url: str, name: str) -> None:
            while True:
                try:
                    return await answered(client, url, name)
                except httpx.TransportError:  # it does not listen yet
                    await asyncio.sleep(0.05)

        async with asyncio.timeout(DEADLINE), httpx.AsyncClient(timeout=DEADLINE) as client:
            async with serving("one") as url:
                await answers(client, url, "one")
            while True:  # the connection that was kept is closed at first
                try:
                    away = await client.get(url)
                except httpx.TransportError:
                    continue
                break
            assert_away(away)
            async with serving("two") as same:
                assert same == url
                await answers(client, url, "two")

    asyncio.run(scenario())
