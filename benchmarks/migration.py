"""Streams that move to another device while they run: how long they stand still, and why.

A random Llama of 110M in float32 (or a small `--family`: the recurrent states of `qwen3_next` go
with its KV) on two CPU devices of a thread each, without HTTP; with `--hosts` each on a node of Ray
of its own, so that KV goes over a network (`benchmarks.host_cluster`). Four streams begin on one
device; once each has some tokens all of them are moved to the other, in turns *with their KV*
(`ballast.control.migrations`: full blocks are read while the stream runs, and it departs when one
has filled) and *anew* (the KV of all tokens is computed again, as after a worker's death). Each
round goes the other way than the last.

- `stall_steps`: of the median stream, and below of the worst: the longest gap between two tokens
  from the order on, less the stream's median gap before it, in such gaps. By context and way.
- `step_ms`: that median gap, of the median stream, by context.
- `over_two_steps`: streams that stood still for more than two steps; the goal is none with KV.
- `moved`: streams that went with their KV, of those that were to.
- `changed`: streams whose tokens are not those of undisturbed ones.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from ballast.bench.servers import serving_fleets
from ballast.cluster.controller import Controller
from ballast.cluster.hosts.hosted_workers import HostedWorkers
from ballast.cluster.hosts.ray_cluster import RayCluster
from ballast.core.event import FailedOutput, TokenOutput
from ballast.core.order import MoveRequests
from ballast.core.request import Sampling, Submission
from ballast.core.settings import FleetSettings
from ballast.fleet.fleet_file import load_fleet
from ballast.policy.presets import PRESETS
from benchmarks.common import finish, options
from benchmarks.families import FAMILIES, config, make
from benchmarks.host_cluster import ray_nodes
from benchmarks.llamas import LLAMA_6M, LLAMA_110M, TOKENS, make_fleet_file

STREAMS = 4
DEVICES = ("cpu:0", "cpu:1")
BEFORE, AFTER = 24, 40
"""Tokens of each stream before the order, and at least so many from then on."""
CONTEXTS = (64, 400, 900)
"""Tokens of the prompts; the model has 1,024."""
WAYS = ("with KV", "anew")


@dataclass
class Stream:
    """One request: its tokens and when they came."""

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    failed: str = ""

    async def run(self, server: Controller, submission: Submission) -> None:
        output_stream = server.router.submit([submission])
        try:
            while output_stream.more:
                for output in await output_stream.take():
                    if isinstance(output, TokenOutput):
                        self.tokens.append(output.token)
                        self.times.append(time.perf_counter())
                    elif isinstance(output, FailedOutput):
                        self.failed = output.reason
                if len(self.tokens) >= BEFORE:
                    self.begun.set()
        finally:
            self.begun.set()
            output_stream.close()

    def step(self, ordered: float) -> float:
        """Median seconds between two tokens before the order."""
        return statistics.median(b - a for a, b in pairwise(self.times) if b < ordered)

    def stall(self, ordered: float) -> float:
        """In steps."""
        longest = max(b - a for a, b in pairwise(self.times) if b >= ordered)
        return longest / self.step(ordered) - 1


def two_devices(directory: Path, family: str | None = None, dtype: str = "float32") -> Path:
    file = make_fleet_file(directory, {"llama": LLAMA_110M if family is None else LLAMA_6M})
    if family is not None:
        make(directory / "llama", config(family, max_position_embeddings=1024))
    fleet = yaml.safe_load(file.read_text())
    fleet["devices"] = [{"name": name, "budget": "1GiB", "threads": 1} for name in DEVICES]
    if dtype != "float32":
        fleet["devices"] = [{**device, "invariant": 1} for device in fleet["devices"]]
    fleet["models"][0] |= {"dtype": dtype, "pinned": True, "devices": list(DEVICES)}
    if family is not None:
        fleet["models"][0]["block_tokens"] = 16
    file.write_text(yaml.safe_dump(fleet))
    return file


def submission(id: str, context: int, i: int) -> Submission:
    prompt = tuple(TOKENS[(7 * i + 3 * k * k) % len(TOKENS)] for k in range(context))
    sampling = Sampling(temperature=i % 2, seed=i)
    most = BEFORE + AFTER
    return Submission(
        id=id, model="llama", prompt=prompt, max_tokens=most, sampling=sampling, ignore_eos=True
    )


class Rounds:
    """Of one server."""

    def __init__(self, server: Controller) -> None:
        self._server = server
        self._rounds = 0

    async def run(self, context: int, way: str | None) -> tuple[list[Stream], float, int]:
        """Streams, when they were ordered to move, and how many went with their KV. `way`: None,
        they stay."""
        self._rounds += 1
        source, target = (DEVICES if self._rounds % 2 else DEVICES[::-1])[:2]
        devices = self._server.devices
        devices[target].cordoned = True
        streams = [Stream() for _ in range(STREAMS)]
        tasks = []
        for i, stream in enumerate(streams):
            # A salt of its own, so that no round finds another's prefixes.
            asked = replace(submission(f"{self._rounds}-{i}", context, i), salt=str(self._rounds))
            tasks.append(asyncio.create_task(stream.run(self._server, asked)))
        await asyncio.gather(*(stream.begun.wait() for stream in streams))
        devices[target].cordoned = False
        ordered, moved = time.perf_counter(), 0
        if way == "with KV":
            left: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            step = MoveRequests(source, "llama")
            self._server.migrations.move_requests(step, left.set_result)
            moved = await left
        elif way == "anew":
            gone = devices[source].requests.hand_over(devices[source].specs["llama"])
            devices[target].requests.add(gone)
        await asyncio.gather(*tasks)
        return streams, ordered, moved


@asynccontextmanager
async def on_hosts(fleet: FleetSettings, ray: str) -> AsyncIterator[tuple[Controller]]:
    """A server whose devices are on nodes of Ray."""
    workers = HostedWorkers(RayCluster(ray), fleet, local=False)
    await workers.start()
    controller = Controller(workers, workers)
    try:
        await controller.start(fleet)
        assert len({workers.host_of(device) for device in DEVICES}) == 2
        yield (controller,)
    finally:
        await controller.close(5.0)


async def measure(
    file: Path, contexts: Sequence[int], rounds: int, ray: str | None = None
) -> dict[str, Any]:
    """`ray`: address of the cluster on whose nodes the devices are; None: they are here."""
    fleet = load_fleet(file, presets=PRESETS)
    serving = serving_fleets([fleet]) if ray is None else on_hosts(fleet, ray)
    async with serving as (server,):
        found = Rounds(server)
        await found.run(contexts[0], None)  # both devices bring the weights
        await found.run(contexts[0], None)
        stalls: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
        steps: defaultdict[int, list[float]] = defaultdict(list)
        changed = moved = 0
        for context in contexts:
            undisturbed, _, _ = await found.run(context, None)
            for n in range(rounds):
                for way in WAYS if n % 2 else WAYS[::-1]:
                    streams, ordered, went = await found.run(context, way)
                    moved += went
                    pairs = zip(streams, undisturbed, strict=True)
                    changed += sum(a.tokens != b.tokens or bool(a.failed) for a, b in pairs)
                    stalls[context, way] += [stream.stall(ordered) for stream in streams]
                    steps[context] += [stream.step(ordered) for stream in streams]
    return {
        "streams": STREAMS * rounds * len(contexts),
        "moved": moved,
        "changed": changed,
        "over_two_steps": _long(stalls, WAYS[0]),
        "over_two_steps_anew": _long(stalls, WAYS[1]),
        "step_ms": {f"{c}": 1e3 * statistics.median(seen) for c, seen in steps.items()},
        "stall_steps": {
            f"{context}, {way}": {
                "median": statistics.median(seen),
                "worst": max(seen),
            }
            for (context, way), seen in sorted(stalls.items())
        },
    }


def _long(stalls: Mapping[tuple[int, str], Sequence[float]], way: str) -> int:
    return sum(s > 2 for (_, how), seen in stalls.items() if how == way for s in seen)


def main(argv: Sequence[str] | None = None) -> None:
    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--rounds", type=int, help="default 6, quick 2")
        parser.add_argument("--hosts", action="store_true", help="a node of Ray for each device")
        parser.add_argument("--family", choices=sorted(FAMILIES), help="another kind of model")

    args = options(__doc__, argv, extra)
    rounds = args.rounds or (2 if args.quick else 6)
    contexts = CONTEXTS[1:2] if args.quick else CONTEXTS
    nodes = ray_nodes() if args.hosts else nullcontext()
    with tempfile.TemporaryDirectory() as scratch, nodes as cluster:
        file = two_devices(Path(scratch), args.family)
        ray = None if cluster is None else cluster.address
        result = asyncio.run(measure(file, contexts, rounds, ray))
    finish(args, "migration", result)


if __name__ == "__main__":
    main()
