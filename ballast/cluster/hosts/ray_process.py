"""Speak to Ray for a server: `python -m ballast.cluster.hosts.ray_process --ray ADDRESS ...`.

Started by `RayCluster`. Only it, `ray_agents`, `ray_children` and `ray_relays` import Ray, in a
process of its own: Ray's threads and signals, and its habit to end a process whose cluster is gone,
stay out of the server's. Ray gets addresses, sizes and public keys, no secret and nothing of
clients.

A device's resources are a placement group, which waits where no host has room: that is how Ray's
autoscaler learns what is wanted. Agents (`ray_agents`) and groups outlive the server, by names that
the next server of the same fleet finds.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    remove_placement_group,
)

from ballast.cluster.hosts.host_choice import HostInfo, HostRoom, choose_host
from ballast.cluster.hosts.ray_agents import RayAgents, group_name, groups_of
from ballast.cluster.hosts.ray_messages import (
    ConnectHostMsg,
    ConnectRelayMsg,
    EndFleetMsg,
    HostsMsg,
    KeptMsg,
    OpenHostMsg,
    OpenRelayMsg,
    RayAnswer,
    RayRequest,
    ReleaseHostMsg,
    ReserveHostMsg,
)
from ballast.cluster.hosts.ray_relays import RayRelays

log = logging.getLogger(__name__)

NODE_LABEL = "ray.io/node-id"
OTHER_ROOM_SECONDS = 5.0
"""Time after which a chosen host that has no room after all is not waited for."""


class RayDriver:
    """Carries out requests, each on a thread of its own."""

    def __init__(self, fleet: str) -> None:
        self._fleet = fleet
        self._groups: dict[str, PlacementGroup] = {}
        """Of each device: what it has, or waits for."""
        self._nodes: dict[str, str] = {}
        """Host of each device."""
        self._lock = threading.Lock()
        self._agents = RayAgents(fleet)
        self._relays = RayRelays(fleet)

    def answer(self, request: RayRequest) -> RayAnswer:
        """Carry out a request; errors of Ray become answers."""
        try:
            match request:
                case HostsMsg():
                    return RayAnswer(request.id, hosts=_hosts())
                case ReserveHostMsg():
                    return RayAnswer(request.id, node=self._reserve(request))
                case ReleaseHostMsg():
                    with self._lock:
                        self._release(request.device)
                    return RayAnswer(request.id)
                case KeptMsg():
                    return self._kept(request)
                case EndFleetMsg():
                    self._agents.end()
                    for group in groups_of(self._fleet):
                        remove_placement_group(get_placement_group(group.name))
                    return RayAnswer(request.id)
                case OpenHostMsg():
                    command, anew = request.worker_command, request.anew
                    key = self._agents.open(request.node, command, anew=anew)
                    return RayAnswer(request.id, key=key, ip=ray.util.get_node_ip_address())
                case ConnectHostMsg():
                    self._agents.connect(request.node, request.address, request.key)
                    return RayAnswer(request.id)
                case OpenRelayMsg():
                    key = self._relays.open(request.node, request.ip, request.port, request.anew)
                    return RayAnswer(request.id, key=key, ip=ray.util.get_node_ip_address())
                case ConnectRelayMsg():
                    self._relays.connect(request.node, request.address, request.key)
                    return RayAnswer(request.id)
        except (ray.exceptions.RayError, OSError, ValueError, KeyError, TimeoutError) as error:
            return RayAnswer(request.id, error=f"Ray: {type(error).__name__}: {error}")

    def _kept(self, request: KeptMsg) -> RayAnswer:
        """Take over what a server before this one has left; reservations that wait are void."""
        alive = {node["NodeID"] for node in _nodes()}
        with self._lock:
            for group in groups_of(self._fleet):
                found = get_placement_group(group.name)
                if (
                    group.node is not None
                    and group.node in alive
                    and group.device not in self._groups
                ):
                    self._groups[group.device] = found
                    self._nodes[group.device] = group.node
                else:
                    remove_placement_group(found)
            nodes = [node for node in self._agents.nodes() if node in alive]
            return RayAnswer(request.id, nodes=tuple(nodes), reserved=dict(self._nodes))

    def abandon(self) -> None:
        """Free what waits for a host: the server has died."""
        for group in groups_of(self._fleet):  # to wait for 0 s says "no" of groups that are there
            if group.node is None and group.device in self._groups:
                log.warning("%s does not wait any more", group.device)
                remove_placement_group(get_placement_group(group.name))

    def _reserve(self, request: ReserveHostMsg) -> str:
        device, need = request.device, request.need
        with self._lock:
            self._release(device)
            chosen = choose_host(need, self._rooms(), request.avoid, request.doubtful)
            if chosen is not None:
                self._nodes[device] = chosen
        bundle = {"CPU": float(need.cpus), "memory": float(need.memory)}
        group = self._group(device, bundle, _only(chosen, request.avoid))
        if chosen is not None and not group.wait(OTHER_ROOM_SECONDS):  # others were faster
            self._check(device, group)
            group = self._group(device, bundle, _only(None, request.avoid))
        while not group.wait(1.0):
            self._check(device, group)
            log.info("device %s waits for %d CPUs and %d bytes", device, need.cpus, need.memory)
        self._check(device, group)
        table = ray.util.placement_group_table(group)
        (node,) = table["bundles_to_node_id"].values()
        with self._lock:
            self._nodes[device] = node
        return str(node)

    def _group(
        self, device: str, bundle: dict[str, float], where: dict[str, str]
    ) -> PlacementGroup:
        """Have a group reserved for a device, in place of the one that it had."""
        with self._lock:
            node = self._nodes.get(device)
            self._release(device)
            made = placement_group(
                [bundle],
                bundle_label_selector=[where],
                name=group_name(self._fleet, device),
                lifetime="detached",
            )
            self._groups[device] = made
            if node is not None:
                self._nodes[device] = node  # chosen: others are not to choose it as well
            return made

    def _release(self, device: str) -> None:
        if (group := self._groups.pop(device, None)) is not None:
            remove_placement_group(group)
        self._nodes.pop(device, None)

    def _check(self, device: str, group: PlacementGroup) -> None:
        """Raise ValueError if a group has been replaced by that of a later request."""
        if self._groups.get(device) is not group:
            raise ValueError(f"{device} does not wait any more")

    def _rooms(self) -> list[HostRoom]:
        free = ray._private.state.available_resources_per_node()
        devices = list(self._nodes.values())
        return [
            HostRoom(
                id := node["NodeID"],
                free.get(id, {}).get("CPU", 0.0),
                free.get(id, {}).get("memory", 0.0),
                devices.count(id),
            )
            for node in _nodes()
        ]


def _only(node: str | None, avoid: Sequence[str]) -> dict[str, str]:
    """Return a selector of labels: one host, or all but some."""
    if node is not None:
        return {NODE_LABEL: node}
    return {NODE_LABEL: f"!in({','.join(avoid)})"} if avoid else {}


def _nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _hosts() -> dict[str, HostInfo]:
    """Return the hosts that there are, each with a name of its own."""
    nodes = _nodes()
    names = [node["NodeName"] for node in nodes]
    found = {}
    for node, name in zip(nodes, names, strict=True):
        id, cpus = node["NodeID"], node["Resources"].get("CPU", 0.0)
        full = name if names.count(name) == 1 else f"{name}-{id[:6]}"
        found[id] = HostInfo(full, cpus, node["NodeManagerAddress"])
    return found


def main() -> None:
    """Answer requests until the server closes the connection."""
    parser = argparse.ArgumentParser(prog="ballast.cluster.hosts.ray_process")
    parser.add_argument("--ray", required=True, help="address of the cluster")
    parser.add_argument("--fleet", required=True, help="which fleet of the cluster this is")
    parser.add_argument("--fd", type=int, required=True, help="descriptor of the connection")
    arguments = parser.parse_args()
    connection = socket.socket(fileno=arguments.fd)
    lock = threading.Lock()

    def send(answer: RayAnswer) -> None:
        with lock:
            connection.sendall(msgspec.json.encode(answer) + b"\n")

    try:
        ray.init(
            address=arguments.ray,
            namespace="ballast",
            log_to_driver=False,
            logging_level="warning",
            configure_logging=False,
        )
        send(RayAnswer(0, addresses=tuple(node["NodeManagerAddress"] for node in _nodes())))
    except (ray.exceptions.RayError, OSError, ValueError, RuntimeError) as error:
        send(RayAnswer(0, error=f"{type(error).__name__}: {error}"))
        return
    driver = RayDriver(arguments.fleet)
    decoder = msgspec.json.Decoder(RayRequest)
    with connection.makefile("rb") as lines, ThreadPoolExecutor(32) as threads:
        for line in lines:
            threads.submit(lambda request: send(driver.answer(request)), decoder.decode(line))
        driver.abandon()
        os._exit(0)  # whatever a thread waits for


if __name__ == "__main__":
    main()
