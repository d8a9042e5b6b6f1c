"""Keep an agent on each node of a Ray cluster, as the child of a detached actor.

Used by `ray_process`. Agents, and the placement groups of devices, outlive the server that has
started them: the next server of the same fleet finds them by their names. An agent for which none
comes in time ends; its actor then frees the groups of its node, and those that wait, and ends too.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import get_placement_group, remove_placement_group

from ballast.cluster.hosts.agent_process import ABANDONED
from ballast.cluster.hosts.ray_children import ANSWER_SECONDS, ActorChild, detached
from ballast.isolation.environment import child_environment


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """The placement group of a device."""

    name: str
    device: str
    node: str | None
    """Its host; None: it waits for one."""


def group_name(fleet: str, device: str) -> str:
    """Return a name for a new placement group of a device, different from all before."""
    return f"{fleet}/{secrets.token_hex(4)}/{device}"


def groups_of(fleet: str) -> Iterator[DeviceGroup]:
    """Yield the placement groups of a fleet's devices. Raises errors of Ray."""
    for group in ray.util.placement_group_table().values():
        name, state = group["name"], group["state"]
        if name.startswith(f"{fleet}/") and state != "REMOVED":
            node = group["bundles_to_node_id"].get(0) if state == "CREATED" else None
            yield DeviceGroup(name, name.split("/", 2)[2], node or None)


class HostActor:
    """Holds a host's agent, on that host. Ray restarts it where it or the agent fails."""

    def __init__(self, fleet: str, node: str, worker_command: Sequence[str]) -> None:
        self._fleet, self._node = fleet, node
        environment = child_environment()
        # Ray's, for an actor without CPUs; a worker sets its own number of threads.
        environment.pop("OMP_NUM_THREADS", None)
        options = ["--worker", *worker_command] if worker_command else []
        self._agent = ActorChild(
            "ballast.cluster.hosts.agent_process", *options, environment=environment
        )
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        if self._agent.wait() != ABANDONED:
            os._exit(1)
        for group in groups_of(self._fleet):
            if group.node in (None, self._node):
                with contextlib.suppress(ValueError):  # another actor was first
                    remove_placement_group(get_placement_group(group.name))
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    def key(self) -> str:
        """Return the agent's public key."""
        return self._agent.started.decode().strip()

    def connect(self, address: str, key: str) -> str:
        """Have the agent connect to a server, once it has none; returns the agent's public key."""
        self._agent.connect(address, key)
        return self.key()


class RayAgents:
    """The agents' actors of one fleet."""

    def __init__(self, fleet: str) -> None:
        self._prefix, self._fleet = f"agent-{fleet}-", fleet
        self._keys: dict[str, str] = {}
        """Public key of each node's agent, when it was opened."""

    def nodes(self) -> list[str]:
        """Return the nodes that have an agent. Raises errors of Ray."""
        names = ray.util.list_named_actors()
        return [n.removeprefix(self._prefix) for n in names if n.startswith(self._prefix)]

    def open(self, node: str, worker_command: Sequence[str], *, anew: bool) -> str:
        """Return the public key of a host's agent, started if there is none, or `anew`. Raises
        errors of Ray."""
        if anew:
            self._kill(node)
        made = detached(HostActor, self._prefix + node, node)
        actor = made.remote(self._fleet, node, list(worker_command))
        key = self._keys[node] = str(ray.get(actor.key.remote(), timeout=ANSWER_SECONDS))
        return key

    def connect(self, node: str, address: str, key: str) -> None:
        """Have a host's agent connect to a server. Raises errors of Ray, and ValueError: there is
        none, or it is another by now, whose key the server does not let in."""
        actor: Any = ray.get_actor(self._prefix + node)
        own = ray.get(actor.connect.remote(address, key), timeout=ANSWER_SECONDS)
        if own != self._keys.get(node):
            raise ValueError("its agent has ended, and another was started")

    def end(self) -> None:
        """End all agents, and what they have started. Raises errors of Ray."""
        for node in self.nodes():
            self._kill(node)

    def _kill(self, node: str) -> None:
        with contextlib.suppress(ValueError):  # it has gone by itself
            ray.kill(ray.get_actor(self._prefix + node), no_restart=True)
