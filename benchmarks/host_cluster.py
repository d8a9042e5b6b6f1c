"""A Ray cluster of several nodes on this machine, by Ray's own cluster utility, for benchmarks."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NAMES = ("host0", "host1", "host2")
"""The first is the server's own and the head's."""


class RayNodes:
    """The nodes by name; they can be killed and started again."""

    def __init__(self, cpus: int) -> None:
        from ray.cluster_utils import Cluster  # late: Ray reads its environment when imported

        self._sizes = {"num_cpus": cpus, "object_store_memory": 80 << 20}
        head = {**self._sizes, "include_dashboard": False, "node_name": NAMES[0]}
        self._cluster = Cluster(initialize_head=True, connect=False, head_node_args=head)
        self.address: str = self._cluster.address
        self._nodes: dict[str, Any] = {}
        for name in NAMES[1:]:
            self.add(name)

    def add(self, name: str) -> None:
        """Start a node."""
        self._nodes[name] = self._cluster.add_node(**self._sizes, node_name=name)

    def kill(self, name: str) -> None:
        """Kill a node with all that runs there."""
        self._cluster.remove_node(self._nodes.pop(name), allow_graceful=False)

    def close(self) -> None:
        self._cluster.shutdown()


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
    nodes = RayNodes(cpus)
    try:
        yield nodes
    finally:
        nodes.close()
