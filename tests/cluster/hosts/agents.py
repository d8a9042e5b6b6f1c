"""Hosts for tests: each is an agent's process of its own on this machine."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Collection, Sequence

import msgspec

from ballast.cluster.hosts.host_choice import DeviceNeed, HostInfo, HostRoom, choose_host
from ballast.cluster.hosts.server_inbox import Server
from ballast.isolation.environment import child_environment

PATIENT = """
from ballast.transport import curve
curve.LOST_SECONDS = curve.HANDSHAKE_SECONDS = 240.0
from ballast.cluster.hosts.agent_process import main
main()
"""
"""An agent that a machine without time for it does not take for lost, nor for a stranger that does
not say who it is; one that dies, closes its connections."""


class Agents:
    """A `HostProvider` without Ray."""

    def __init__(self, *nodes: str, cores: float = 2.0) -> None:
        self._cores = dict.fromkeys(nodes, cores)
        self._gone = set[str]()
        self.devices: dict[str, str] = {}
        self.agents: dict[str, asyncio.subprocess.Process] = {}
        self._keys: dict[str, str] = {}

    async def start(self) -> None:
        pass

    async def hosts(self) -> dict[str, HostInfo]:
        there = ((n, c) for n, c in self._cores.items() if n not in self._gone)
        return {n: HostInfo(f"host-{n}", c, "127.0.0.1") for n, c in there}

    async def reserve(
        self, device: str, need: DeviceNeed, avoid: Collection[str], doubtful: Collection[str]
    ) -> str:
        self.devices.pop(device, None)
        at = [*self.devices.values()]
        rooms = [
            HostRoom(n, c - need.cpus * at.count(n), 2**40, at.count(n))
            for n, c in self._cores.items()
        ]
        node = choose_host(need, rooms, [*avoid, *self._gone], doubtful)
        if node is None:
            await asyncio.Event().wait()  # until there is room: for ever, here
        assert node is not None
        self.devices[device] = node
        return node

    async def release(self, device: str) -> None:
        self.devices.pop(device, None)

    async def kept(self) -> tuple[list[str], dict[str, str]]:
        nodes = [node for node, a in self.agents.items() if a.returncode is None]
        return nodes, dict(self.devices)

    async def open(
        self, node: str, worker_command: Sequence[str], *, anew: bool
    ) -> tuple[str, str]:
        if node in self.agents and self.agents[node].returncode is None and not anew:
            return self._keys[node], "127.0.0.1"
        agent = self.agents[node] = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", PATIENT),
            *("--parent", str(os.getpid()), "--worker", *worker_command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=child_environment(),
        )
        assert agent.stdout is not None
        key = self._keys[node] = (await agent.stdout.readline()).decode().strip()
        return key, "127.0.0.1"

    async def connect(self, node: str, address: str, key: str) -> None:
        stdin = self.agents[node].stdin
        assert stdin is not None
        stdin.write(msgspec.json.encode(Server(address, key)) + b"\n")
        await stdin.drain()

    def lose(self, node: str) -> None:
        """Kill a host for good."""
        self._gone.add(node)
        self.agents[node].kill()

    async def close(self) -> None:
        for agent in self.agents.values():
            assert agent.stdout is not None
            await agent.stdout.read()  # which its workers have too: they have ended
            await agent.wait()
