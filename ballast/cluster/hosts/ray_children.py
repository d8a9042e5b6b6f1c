"""Hold a child process in a detached actor of Ray, on the node that it is for.

Used by `ray_agents` and `ray_relays`. An actor and its child outlive the server that has started
them; the next server finds the actor by its name, and has the child connect to it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import msgspec
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ballast.cluster.hosts.server_inbox import Server

ANSWER_SECONDS = 60.0
"""Time for an actor to start its child, and to answer."""


def detached(kind: type, name: str, node: str) -> Any:
    """Return what makes the actor of class `kind` and a name on a node, or finds it there. Ray
    restarts it where it fails, and its calls with it."""
    return ray.remote(kind).options(
        name=name,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=-1,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
    )


class ActorChild:
    """A child process that says one line once it has started, and reads of servers."""

    def __init__(self, module: str, *options: str, environment: Mapping[str, str]) -> None:
        """Start `python -m module`, and wait for its line."""
        command = [sys.executable, "-m", module, "--parent", str(os.getpid()), *options]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(environment)
        )
        assert self._process.stdout is not None
        self.started = self._process.stdout.readline()
        """Its line."""

    def connect(self, address: str, key: str) -> None:
        """Have it connect to a server. Raises OSError once it has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(Server(address, key)) + b"\n")
        self._process.stdin.flush()

    def wait(self) -> int:
        """Return its exit code once it has ended."""
        return self._process.wait()
