"""Hosts that die under streams: what clients and memory notice of it.

The fleet of `hosts` on three nodes of Ray on this machine, streams over HTTP, half greedy, half
sampled. In each round, once each host has its spare worker and while all streams are under way, on
one host that is not the server's own:

- `worker`, `agent`: its process is killed with SIGKILL.
- `cut`: the agent is stopped, so that nothing comes over its connection, and goes on after the
  server has taken the host for dead: a partition, whose other side still computes.
- `link`, `slow`: the host's link is down as long, or has 20 Mbit/s; where nodes have network
  namespaces of their own.
- `node`: all of the node is killed, and a new node of the same name is started afterwards.

- `lost`: streams that did not end well; `changed`: those with other tokens than undisturbed.
- `paused_s`: the longest pause of any stream after a fault, by kind: median, and the greatest.
- `leaked_pages`: once all models have been evicted, pages that belong to neither activations nor
  the free list, of all devices.

At last the server is killed with SIGKILL, without streams, as their connections end with it, and
another is started: `server` has how many workers it found, after how many seconds it served, and
the same streams once more.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from ballast.bench.server_process import Serving, serving
from ballast.cluster.worker.process_names import SERVING, SPARE
from ballast.fleet.fleet_file import load_fleet
from ballast.policy.presets import PRESETS
from benchmarks.common import finish, options, verdict
from benchmarks.crash import TIMEOUT, Stream
from benchmarks.host_cluster import NAMES, RayNodes, ray_nodes
from benchmarks.hosts import ADMIN, SERVER, fleet_file
from benchmarks.prism_faults import leaked_of

STREAMS = 9
KINDS = ("worker", "agent", "cut", "node")
OF_LINKS = ("link", "slow")
CUT_SECONDS = 4.0
"""Longer than the silence after which a connection counts as broken."""
PAUSE_GOAL = 3.0
COUNTS = ("lost", "changed", "leaked_pages")
SETTLED = 300.0
"""Seconds, on a busy machine, for a device to serve again."""
KEY = {"Authorization": f"Bearer {ADMIN}"}
AGENT = "ballast.cluster.hosts.agent_process"


def descendants(pid: int) -> Iterator[int]:
    """Processes below one, itself left out."""
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in task.read_text().split()]
        except OSError:  # it has just ended
            continue
        for child in children:
            yield child
            yield from descendants(child)


def named(pid: int, name: str) -> bool:
    """Whether a process is called so, or runs that module."""
    try:
        comm = Path(f"/proc/{pid}/comm").read_text().strip()
        return name == comm or name in Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return False


class Hosts:
    """The server, its nodes, and their processes."""

    def __init__(self, running: Serving, nodes: RayNodes, models: Sequence[str]) -> None:
        self._running, self._nodes, self._models = running, nodes, models
        self._killed: list[str] = []

    async def round(self, new_tokens: int, kind: str, rng: random.Random | None) -> list[Stream]:
        """Run all streams, with a fault amid; `rng`: None: without one."""
        limits = httpx.Limits(max_connections=STREAMS + 4)
        streams = [
            Stream(self._models[i % len(self._models)], i, new_tokens) for i in range(STREAMS)
        ]
        async with httpx.AsyncClient(
            base_url=self._running.url, timeout=TIMEOUT, limits=limits
        ) as client:
            open_streams = [asyncio.create_task(s.run(client)) for s in streams]
            for stream in streams:
                await stream.begun.wait()
            if rng is not None:
                await self._fault(kind, rng)
            await asyncio.gather(*open_streams)
            while self._killed:
                self._nodes.add(self._killed.pop())  # on the main thread, as Ray wants it
            await self._settle(client)
        return streams

    async def _fault(self, kind: str, rng: random.Random) -> None:
        if kind == "node":
            name = rng.choice(NAMES[1:])
            await asyncio.to_thread(self._nodes.kill, name)
            self._killed.append(name)
            return
        if kind in OF_LINKS:
            network, name = self._nodes.network, rng.choice(NAMES[1:])
            assert network is not None
            (network.cut if kind == "link" else network.slow)(name)
            await asyncio.sleep(CUT_SECONDS)
            network.mend(name)
            return
        agents = [p for p in descendants(os.getpid()) if named(p, AGENT)]
        workers = {agent: [p for p in descendants(agent) if named(p, SERVING)] for agent in agents}
        agent = rng.choice([agent for agent in agents if workers[agent]])
        if kind == "cut":
            os.kill(agent, signal.SIGSTOP)
            await asyncio.sleep(CUT_SECONDS)
            os.kill(agent, signal.SIGCONT)
        else:
            os.kill(agent if kind == "agent" else workers[agent][0], signal.SIGKILL)

    async def _settle(self, client: httpx.AsyncClient) -> None:
        """Wait until all devices serve, and each host that has one has its spare."""
        end = time.monotonic() + SETTLED
        while (
            any(device["status"] != "ok" for device in (await state(client))["devices"])
            or self._lacking_spares()
        ):
            if time.monotonic() > end:
                raise TimeoutError(f"not all devices serve again within {SETTLED:g} s")
            await asyncio.sleep(0.2)

    @staticmethod
    def _lacking_spares() -> bool:
        agents = [p for p in descendants(os.getpid()) if named(p, AGENT)]
        below = [[*descendants(agent)] for agent in agents]
        return any(
            any(named(p, SERVING) for p in processes)
            and not any(named(p, SPARE) for p in processes)
            for processes in below
        )

    async def leaked(self) -> int:
        """Pages that are nobody's, with all models evicted."""
        async with httpx.AsyncClient(base_url=self._running.url, timeout=TIMEOUT) as client:
            (await client.post("/admin/models/evict", headers=KEY)).raise_for_status()
            end = time.monotonic() + 15.0
            while True:
                found = sum(leaked_of(device) for device in (await state(client))["devices"])
                if not found or time.monotonic() > end:
                    return found
                await asyncio.sleep(0.5)


def workers() -> set[int]:
    """Processes that serve devices, on all nodes."""
    return {p for p in descendants(os.getpid()) if named(p, SERVING)}


def next_server(
    file: Path, nodes: RayNodes, killed: Serving, undisturbed: Sequence[Stream]
) -> dict[str, Any]:
    """What the server finds that is started when one has been killed."""
    before = workers()
    os.kill(killed.pid, signal.SIGKILL)
    began = time.perf_counter()
    with serving(file, "--ray", nodes.address, command=SERVER) as running:
        seconds = time.perf_counter() - began
        kept = workers() & before
        hosts = Hosts(
            running, nodes, [model.name for model in load_fleet(file, presets=PRESETS).models]
        )
        streams = asyncio.run(hosts.round(len(undisturbed[0].tokens), "", None))
        leaked = asyncio.run(hosts.leaked())
    return {
        "workers": len(before),
        "kept": len(kept),
        "served_after_s": seconds,
        **outcome(streams, undisturbed),
        "leaked_pages": leaked,
    }


def outcome(streams: Sequence[Stream], undisturbed: Sequence[Stream]) -> dict[str, int]:
    """How many streams were lost, and how many have other tokens than those undisturbed."""
    pairs = list(zip(streams, undisturbed, strict=True))
    changed = sum(mine.ended and mine.tokens != other.tokens for mine, other in pairs)
    return {"lost": sum(not mine.ended for mine, _ in pairs), "changed": changed}


async def state(client: httpx.AsyncClient) -> Any:
    return (await client.get("/admin/state", headers=KEY)).json()


def longest_pause(stream: Stream) -> float:
    """Seconds between two tokens."""
    return max((b - a for a, b in itertools.pairwise(stream.times)), default=float("inf"))


def measure(directory: Path, faults: int, new_tokens: int, seed: int) -> dict[str, Any]:
    """The result."""
    file = fleet_file(directory, 3)
    models = [model.name for model in load_fleet(file, presets=PRESETS).models]
    rng = random.Random(seed)
    totals = Counter[str]()
    pauses: dict[str, list[float]] = defaultdict(list)
    with (
        ray_nodes(cpus=2) as nodes,
        serving(file, "--ray", nodes.address, command=SERVER) as running,
    ):
        hosts, described = Hosts(running, nodes, models), nodes.described
        undisturbed = asyncio.run(hosts.round(new_tokens, "", None))
        assert all(s.ended and len(s.tokens) == new_tokens for s in undisturbed)
        known = KINDS if nodes.network is None else (*KINDS, *OF_LINKS)
        for kind in itertools.islice(itertools.cycle(known), faults):
            streams = asyncio.run(hosts.round(new_tokens, kind, rng))
            totals.update(outcome(streams, undisturbed))
            pauses[kind].append(max(map(longest_pause, streams)))
        totals["leaked_pages"] = asyncio.run(hosts.leaked())
        after = next_server(file, nodes, running, undisturbed)
    lost, changed, leaked = (totals[name] + after[name] for name in COUNTS)
    greatest = max(max(values) for values in pauses.values())
    return {
        "nodes": described,
        "faults": faults,
        "seed": seed,
        "lost": lost,
        "changed": changed,
        "leaked_pages": leaked,
        "paused_s": {
            kind: {"median": statistics.median(values), "greatest": max(values)}
            for kind, values in pauses.items()
        },
        "server": after,
        "undisturbed_s": max(map(longest_pause, undisturbed)),
        "verdicts": {
            "lost": verdict(lost, at_most=0),
            "changed": verdict(changed, at_most=0),
            "leaked_pages": verdict(leaked, at_most=0),
            "server_kept": verdict(after["workers"] - after["kept"], at_most=0),
            "paused_s": verdict(greatest, at_most=PAUSE_GOAL),
        },
    }


def extra(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--faults", type=int, help="how many rounds; default 100, quick 6")
    parser.add_argument("--seed", type=int, default=0)


def main() -> int:
    args = options(__doc__, extra=extra)
    faults = args.faults or (len((*KINDS, *OF_LINKS)) if args.quick else 100)
    with tempfile.TemporaryDirectory() as scratch:
        result = measure(Path(scratch), faults, 60 if args.quick else 120, args.seed)
    finish(args, "hosts_faults", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
