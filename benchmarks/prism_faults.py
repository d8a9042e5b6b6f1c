"""Workers killed while models move between two devices: what clients and memory notice of it.

A made fleet of tiny models in float32 on two CPU devices, streams over HTTP, half greedy, half
sampled. In each round one model is activated, evicted, moved to the other device, or a device is
drained, while streams go on; at a random moment of that one of the two workers is killed with
SIGKILL.

- `lost`: streams that did not end well; `changed`: those with other tokens than undisturbed.
- `leaked_pages`: once all models have been evicted, pages that belong to neither activations nor
  the free list, of both devices.
- `operations`: how many of each kind, and how many were answered with success all the same.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import yaml

from ballast.bench.server_process import Serving, children_of, serving
from ballast.cluster.worker.process_names import SERVING
from ballast.fleet.fleet_file import load_fleet
from ballast.policy.presets import PRESETS
from benchmarks.common import finish, options
from benchmarks.crash import ADMIN, TIMEOUT, Stream, fleet_file

STREAMS = 8
DEVICES = ("cpu:0", "cpu:1")
OPERATIONS = ("activate", "evict", "migrate", "drain")
LATEST = 0.4
"""Seconds from the beginning of an operation to the kill, at most."""
KEY = {"Authorization": f"Bearer {ADMIN}"}
SETTLED = 600.0
"""Seconds, on a busy machine, for a device to serve again, and for pages to come back."""


def two_devices(directory: Path) -> Path:
    """The fleet of `crash`, its memory on each of two devices, models on either in turn."""
    file = fleet_file(directory)
    fleet = yaml.safe_load(file.read_text())
    (device,), (link,) = fleet["devices"], fleet["links"]
    fleet["devices"] = [{**device, "name": name} for name in DEVICES]
    fleet["links"] = [{**link, "device": name} for name in DEVICES]
    for i, model in enumerate(fleet["models"]):
        model["devices"] = [DEVICES[i % len(DEVICES)]]
    file.write_text(yaml.safe_dump(fleet))
    return file


class Fleet:
    """A server, as its operator sees it."""

    def __init__(self, running: Serving, client: httpx.AsyncClient, models: Sequence[str]) -> None:
        self._running, self._client, self.models = running, client, models

    async def streams(self, new_tokens: int) -> list[Stream]:
        """Undisturbed ones."""
        made = self.made(new_tokens)
        await asyncio.gather(*(s.run(self._client) for s in made))
        return made

    def made(self, new_tokens: int) -> list[Stream]:
        return [Stream(self.models[i % len(self.models)], i, new_tokens) for i in range(STREAMS)]

    async def disturbed(self, new_tokens: int, what: str, rng: random.Random) -> Round:
        """Streams, and a worker that is killed amid an operation."""
        made = self.made(new_tokens)
        tasks = [asyncio.create_task(s.run(self._client)) for s in made]
        begun = [asyncio.create_task(s.begun.wait()) for s in made]
        await asyncio.wait(begun, return_when=asyncio.FIRST_COMPLETED)
        operation = asyncio.create_task(self._do(what, rng))
        await asyncio.sleep(rng.uniform(0.0, LATEST))
        self._kill(rng)
        done = await operation
        await asyncio.gather(*tasks, *begun)
        await self.settle()
        return Round(made, what, done)

    async def settle(self) -> None:
        """Until both devices serve, and take requests."""
        async with asyncio.timeout(SETTLED):
            while True:
                state = await self.state()
                if all(d["status"] == "ok" for d in state["devices"]):
                    break
                await asyncio.sleep(0.05)
        for name in DEVICES:
            await self._post(f"devices/{name}/uncordon")

    async def leaked(self) -> int:
        """Pages that are nobody's, with all models evicted."""
        await self._post("models/evict")
        end = asyncio.get_running_loop().time() + SETTLED / 40
        while True:
            found = sum(leaked_of(d) for d in (await self.state())["devices"])
            if not found or asyncio.get_running_loop().time() > end:
                return found
            await asyncio.sleep(0.5)

    async def state(self) -> Any:
        return (await self._client.get("/admin/state", headers=KEY)).json()

    async def _do(self, what: str, rng: random.Random) -> bool:
        """Whether all of it was done."""
        model = rng.choice(self.models)
        homes = await self._homes(model)
        there, other = homes[0], next(d for d in DEVICES if d != homes[0])
        match what:
            case "activate":
                orders = [f"models/{model}/evict", f"models/{model}/activate"]
            case "evict":
                orders = [f"models/{model}/evict"]
            case "migrate":
                placed = [f"models/{model}/place?device={other}"] if other not in homes else []
                orders = [
                    *placed,
                    f"models/{model}/activate?device={other}",
                    f"models/{model}/withdraw?device={there}&patience=30",
                ]
            case _:
                orders = [f"devices/{rng.choice(DEVICES)}/drain"]
        return all([await self._post(order) for order in orders])

    async def _homes(self, model: str) -> list[str]:
        state = await self.state()
        return [
            d["device"] for d in state["devices"] if any(m["name"] == model for m in d["models"])
        ]

    async def _post(self, path: str) -> bool:
        answer = await self._client.post(f"/admin/{path}", headers=KEY)
        return answer.is_success

    def _kill(self, rng: random.Random) -> None:
        workers = sorted(
            child
            for child in children_of(self._running.pid)
            if Path(f"/proc/{child}/comm").read_text().strip() == SERVING
        )
        os.kill(rng.choice(workers), signal.SIGKILL)


class Round:
    """What came of one."""

    def __init__(self, streams: Sequence[Stream], what: str, done: bool) -> None:
        self.streams, self.what, self.done = streams, what, done

    def lost(self) -> int:
        return sum(not s.ended for s in self.streams)

    def changed(self, undisturbed: Sequence[Stream]) -> int:
        pairs = zip(self.streams, undisturbed, strict=True)
        return sum(mine.ended and mine.tokens != other.tokens for mine, other in pairs)


def leaked_of(device: Any) -> int:
    """Pages that are neither free nor activations', or of no account at all."""
    owners = device["owners"]
    held = sum(n for owner, n in owners.items() if not owner.startswith("arena"))
    known = device["free"] + device["reclaiming"] + sum(owners.values())
    return int(held + abs(device["total"] - known))


async def rounds(
    running: Serving, models: Sequence[str], kills: int, new_tokens: int, seed: int
) -> Any:
    """The result."""
    rng = random.Random(seed)
    limits = httpx.Limits(max_connections=STREAMS + 4)
    async with httpx.AsyncClient(base_url=running.url, timeout=TIMEOUT, limits=limits) as client:
        fleet = Fleet(running, client, models)
        undisturbed = await fleet.streams(new_tokens)
        assert all(s.ended and len(s.tokens) == new_tokens for s in undisturbed)
        await fleet.settle()
        found = [
            await fleet.disturbed(new_tokens, OPERATIONS[i % len(OPERATIONS)], rng)
            for i in range(kills)
        ]
        return {
            "kills": kills,
            "seed": seed,
            "streams": STREAMS,
            "output_tokens": new_tokens,
            "lost": sum(r.lost() for r in found),
            "changed": sum(r.changed(undisturbed) for r in found),
            "leaked_pages": await fleet.leaked(),
            "operations": dict(Counter(r.what for r in found)),
            "done": dict(Counter(r.what for r in found if r.done)),
        }


def main(argv: Sequence[str] | None = None) -> None:
    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--kills", type=int, help="default 200, quick 8")
        parser.add_argument("--seed", type=int, default=1, help="of what is killed when")

    args = options(__doc__, argv, extra)
    kills, new_tokens = args.kills or (8 if args.quick else 200), 60
    with tempfile.TemporaryDirectory() as scratch:
        file = two_devices(Path(scratch))
        models = [m.name for m in load_fleet(file, presets=PRESETS).models]
        with serving(file, "--host", "127.0.0.1") as running:
            result = asyncio.run(rounds(running, models, kills, new_tokens, args.seed))
    finish(args, "prism_faults", result)


if __name__ == "__main__":
    main()
