"""HTTP relays of hosts for tests: each is a process of its own on this machine."""

from __future__ import annotations

import asyncio
import os
import sys

import msgspec

from ballast.cluster.hosts.host_choice import HostInfo
from ballast.cluster.hosts.relay_process import RelayStarted
from ballast.cluster.hosts.server_inbox import Server
from ballast.core.errors import Unavailable
from ballast.isolation.environment import child_environment

PATIENT = """
from ballast.transport import curve
curve.LOST_SECONDS = 240.0
from ballast.cluster.hosts.relay_process import main
main()
"""
"""A relay that does not take a server for lost that gets no time; one that dies closes its
connections."""


class RelayHosts:
    """A `RelayProvider` without Ray; as there, relays outlive the servers that use them."""

    def __init__(self, *nodes: str) -> None:
        self._nodes = nodes
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self.started: dict[str, RelayStarted] = {}

    async def hosts(self) -> dict[str, HostInfo]:
        return {node: HostInfo(f"host-{node}", 1.0, "127.0.0.1") for node in self._nodes}

    async def open_relay(self, node: str, ip: str, port: int, *, anew: bool) -> tuple[str, str]:
        process = self.processes.get(node)
        if process is None or process.returncode is not None:
            kept = self.started.get(node)
            process = self.processes[node] = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", PATIENT, "--parent", str(os.getpid())),
                *("--host", ip, "--port", str(port if kept is None else kept.port)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=child_environment(),
            )
            assert process.stdout is not None
            line = await process.stdout.readline()
            started = msgspec.json.decode(line, type=RelayStarted)
            if started.error:
                raise Unavailable(started.error)
            self.started[node] = started
        return self.started[node].key, "127.0.0.1"

    async def connect_relay(self, node: str, address: str, key: str) -> None:
        stdin = self.processes[node].stdin
        assert stdin is not None
        stdin.write(msgspec.json.encode(Server(address, key)) + b"\n")
        await stdin.drain()

    def url(self, node: str) -> str:
        return f"http://127.0.0.1:{self.started[node].port}"

    async def close(self) -> None:
        """End all relays."""
        for process in self.processes.values():
            if process.returncode is None:
                process.kill()
            await process.wait()
