"""A Ray cluster of several nodes on this machine, by Ray's own cluster utility, for benchmarks.

Each node is in a network namespace of its own where this process may make them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.host_network import HostNetwork, available

NAMES = ("host0", "host1", "host2")
"""The first is the server's own and the head's."""


class RayNodes:
    """The nodes by name; they can be killed and started again."""

    def __init__(self, cpus: int, network: HostNetwork | None) -> None:
        """`network`: None: all nodes have this machine's own."""
        from ray.cluster_utils import Cluster  # late: Ray reads its environment when imported

        self.network = network
        self._sizes = {"num_cpus": cpus, "object_store_memory": 80 << 20}
        head = {**self._node(NAMES[0]), "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, connect=False, head_node_args=head)
        self.address: str = self._cluster.address
        self._nodes: dict[str, Any] = {}
        for name in NAMES[1:]:
            self.add(name)

    @property
    def described(self) -> str:
        """How the nodes are apart."""
        return "Ray's cluster utility" if self.network is None else "network namespaces"

    def add(self, name: str) -> None:
        """Start a node."""
        with contextlib.ExitStack() as inside:
            if self.network is not None:
                inside.enter_context(self.network.inside(name))
            self._nodes[name] = self._cluster.add_node(**self._node(name))

    def kill(self, name: str) -> None:
        """Kill a node with all that runs there."""
        self._cluster.remove_node(self._nodes.pop(name), allow_graceful=False)

    def close(self) -> None:
        self._cluster.shutdown()

    def _node(self, name: str) -> dict[str, Any]:
        at = {} if self.network is None else {"node_ip_address": self.network.address(name)}
        return {**self._sizes, "node_name": name, **at}


@contextmanager
def ray_nodes(cpus: int = 1) -> Iterator[RayNodes]:
    """Three nodes with so many cores each, which no stranger can use."""
    os.environ |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_enable_metrics_collection": "0",
        "RAY_worker_niceness": "0",
    }
    with contextlib.ExitStack() as stack:
        network = HostNetwork(NAMES) if available() else None
        if network is not None:
            stack.callback(network.close)
        nodes = RayNodes(cpus, network)
        stack.callback(nodes.close)
        yield nodes
