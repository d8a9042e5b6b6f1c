"""Keep an HTTP relay on each node of a Ray cluster, as the child of a detached actor.

Used by `ray_process`. The actor outlives the server that has started it, and the next server finds
it by its name.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from typing import Any

import msgspec
import ray

from ballast.cluster.hosts.ray_children import ANSWER_SECONDS, ActorChild, detached
from ballast.cluster.hosts.relay_process import RelayStarted
from ballast.isolation.environment import child_environment

log = logging.getLogger(__name__)


class RelayActor:
    """Holds a host's relay, on that host. Ray restarts it where it or the relay fails."""

    def __init__(self, ip: str, port: int) -> None:
        options = "--host", ip, "--port", str(port)
        self._relay = ActorChild(
            "ballast.cluster.hosts.relay_process", *options, environment=child_environment()
        )
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        if self._relay.wait():
            os._exit(1)
        # It has ended by itself: it cannot listen, or no server has come.
        started = msgspec.json.decode(self._relay.started, type=RelayStarted)
        if not started.error:
            ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    def started(self) -> bytes:
        """Return `RelayStarted`, as JSON."""
        return self._relay.started

    def connect(self, address: str, key: str) -> None:
        """Have the relay connect to a server."""
        self._relay.connect(address, key)


class RayRelays:
    """The relays' actors of one fleet, by node."""

    def __init__(self, fleet: str) -> None:
        self._fleet = fleet
        self._actors: dict[str, Any] = {}

    def open(self, node: str, ip: str, port: int, anew: bool) -> str:
        """Return the public key of a host's relay, started if there is none. Raises ValueError
        where it cannot listen, and errors of Ray."""
        name = f"http-relay-{self._fleet}-{port}-{node}"
        if anew:
            with contextlib.suppress(ValueError):  # it has gone by itself
                ray.kill(ray.get_actor(name), no_restart=True)
        made = detached(RelayActor, name, node)
        actor = self._actors[node] = made.remote(ip, port)
        line = ray.get(actor.started.remote(), timeout=ANSWER_SECONDS)
        started = msgspec.json.decode(line, type=RelayStarted)
        if started.error:
            ray.kill(actor, no_restart=True)  # else the next attempt finds it
            raise ValueError(started.error)
        return started.key

    def connect(self, node: str, address: str, key: str) -> None:
        """Have a host's relay connect to a server. Raises errors of Ray, and KeyError."""
        ray.get(self._actors[node].connect.remote(address, key), timeout=ANSWER_SECONDS)
