"""A fleet on three nodes of Ray, against the same three devices without Ray; copies of weights.

Made models in float32 on three CPU devices of a thread each. The nodes are on this machine, in
network namespaces if these are to be had; all workers are connected over TCP and by CURVE. Both
servers run, and are asked in turns: all streams at once, then single requests.

- `changed`, `lost`: streams that end with other tokens than without Ray, or do not end well.
- `throughput_ratio`: tokens per second of all streams, over those without Ray.
- `added_ttft_ms`: of single requests, beside those without Ray, medians of each round.
- `copy_ratio`: seconds until three hosts that ask at once have a model that another one has, over
  those of one host; every host's link carries `link_mb_per_second`.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from ballast.bench.server_process import Serving, serving
from ballast.fleet.fleet_file import load_fleet
from ballast.fleet.make import make_fleet
from ballast.policy.presets import PRESETS
from benchmarks.common import Samples, finish, options, verdict
from benchmarks.crash import TIMEOUT, Round, Stream
from benchmarks.host_cluster import NAMES, ray_nodes
from benchmarks.host_copies import copy_seconds

ADMIN = "hosts-of-a-fleet"
GOALS = {"throughput_ratio": 0.95, "added_ttft_ms": 3.0, "copy_ratio": 1.3}
SEGMENTS = 26
"""Of the copied model."""
SERVER = (sys.executable, "-m", "benchmarks.hosts_server")


def fleet_file(directory: Path, models: int) -> Path:
    """A device for each node; each model is on one of them."""
    made = make_fleet(
        directory, n_models=models, steps=0, size="small", dtype="float32", budget="256MiB", seed=1
    )
    head, _, rest = made.file.read_text().partition("devices:\n")
    device, defaults, served = rest.partition("defaults:\n")
    _, *sizes = device.splitlines()  # without its budget
    keys = ["budget: 256MiB", "threads: 1", "prefix_cache: false", *map(str.strip, sizes)]
    devices = "".join(
        "\n    ".join([f"  - name: cpu:{i}", *keys]) + "\n" for i in range(len(NAMES))
    )
    server = f"server:\n  admin_key: {ADMIN}\n"
    made.file.write_text(f"{head}devices:\n{devices}{defaults}{served}{server}")
    return made.file


def ttft(running: Serving, model: str, number: int) -> float:
    """Seconds to the first token of a request that is alone."""
    stream = Stream(model, number, 1)

    async def ask() -> float:
        async with httpx.AsyncClient(base_url=running.url, timeout=TIMEOUT) as client:
            await client.get("/live")  # connected
            began = time.perf_counter()
            await stream.run(client)
            return stream.times[0] - began

    return asyncio.run(ask())


def rate(running: Serving, models: list[str], new_tokens: int) -> tuple[float, Round]:
    """Tokens per second of all streams at once."""
    each = Round(models, new_tokens)
    began = time.perf_counter()
    asyncio.run(each.run(running))
    last = max(stream.times[-1] for stream in each.streams)
    return sum(len(stream.tokens) for stream in each.streams) / (last - began), each


def served(directory: Path, args: argparse.Namespace) -> dict[str, Any]:
    """What serving on hosts costs."""
    rounds, singles, new_tokens = (2, 10, 16) if args.quick else (7, 40, 64)
    file = fleet_file(directory, 6)
    models = [model.name for model in load_fleet(file, presets=PRESETS).models]
    rates: dict[str, list[float]] = {"plain": [], "hosts": []}
    firsts: dict[str, list[float]] = {"plain": [], "hosts": []}
    lost = changed = 0
    with ray_nodes() as nodes, ExitStack() as stack:
        on_hosts = ("--ray", nodes.address)
        servers = {
            "plain": stack.enter_context(serving(file)),
            "hosts": stack.enter_context(serving(file, *on_hosts, command=SERVER)),
        }
        places, described = _places(servers["hosts"]), nodes.described
        for turn in range(-1, rounds):
            order = list(servers)[:: 1 if turn % 2 else -1]
            found = {name: rate(servers[name], models, new_tokens) for name in order}
            alone: dict[str, list[float]] = {name: [] for name in order}
            for number in range(singles):
                for name in order[:: 1 if number % 2 else -1]:
                    alone[name].append(ttft(servers[name], models[number % len(models)], number))
            compared = found["hosts"][1].compared(found["plain"][1])
            lost, changed = lost + compared["lost"], changed + compared["changed"]
            for name in order if turn >= 0 else ():  # the first one warms up
                rates[name].append(found[name][0])
                firsts[name].append(statistics.median(alone[name]))
    ratio = Samples(tuple(rates["hosts"])).over(Samples(tuple(rates["plain"])))
    added = [1e3 * (a - b) for a, b in zip(firsts["hosts"], firsts["plain"], strict=True)]
    return {
        "nodes": described,
        "places": places,
        "changed": changed,
        "lost": lost,
        "throughput_ratio": ratio.to_json(),
        "added_ttft_ms": Samples(tuple(added)).to_json(),
        "ttft_ms": 1e3 * statistics.median(firsts["plain"]),
        "tokens_per_second": statistics.median(rates["plain"]),
    }


def _places(running: Serving) -> dict[str, str]:
    headers = {"Authorization": f"Bearer {ADMIN}"}
    state = httpx.get(f"{running.url}/admin/state", headers=headers, timeout=TIMEOUT).json()
    return {device["device"]: device["host"] for device in state["devices"]}


def copied(args: argparse.Namespace) -> dict[str, Any]:
    """What it costs that three hosts want a model."""
    n_bytes, pace = (16_000_000, 2e6) if args.quick else (args.model_bytes, args.link)
    seconds = {n: asyncio.run(copy_seconds(n, n_bytes, SEGMENTS, pace)) for n in (1, len(NAMES))}
    return {
        "model_bytes": n_bytes,
        "link_mb_per_second": pace / 1e6,
        "copy_seconds": {f"{n}": value for n, value in seconds.items()},
        "copy_ratio": seconds[len(NAMES)] / seconds[1],
    }


def extra(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=("served", "copied"))
    parser.add_argument("--model-bytes", type=int, default=1_000_000_000, help="500M in bfloat16")
    parser.add_argument("--link", type=float, default=40e6, help="bytes per second of each host")


def main() -> int:
    args = options(__doc__, extra=extra)
    result: dict[str, Any] = {}
    if args.only != "served":
        result |= copied(args)
    if args.only != "copied":
        with tempfile.TemporaryDirectory() as scratch:
            result |= served(Path(scratch), args)
    at = {key: result.get(key) for key in GOALS}
    values = {k: v["median"] if isinstance(v, dict) else v for k, v in at.items()}
    result["verdicts"] = {
        "throughput_ratio": verdict(values["throughput_ratio"], at_least=0.95),
        "added_ttft_ms": verdict(values["added_ttft_ms"], at_most=3.0),
        "copy_ratio": verdict(values["copy_ratio"], at_most=1.3),
    }
    finish(args, "hosts", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
