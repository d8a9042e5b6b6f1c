"""What clients notice when a worker dies: streams over HTTP, the worker killed with SIGKILL amid.

A made fleet of tiny models in float32; greedy and seeded streams. Then a request whose first job
kills the process, in workers that this script brings along, beside the same streams.

- `lost`: streams that did not end well; `changed`: those with other tokens than undisturbed.
- `recovery_s`: from the kill to the first token of any stream that the new worker computed.
- `poison`: the same beside the request that kills; `answered`: by what status it was refused.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from ballast.bench.serving import Serving, serving
from ballast.cluster import worker
from ballast.core.event import Result
from ballast.core.job import SequenceWork
from ballast.core.settings import FleetSettings
from ballast.engine.device import LiveDevice
from ballast.engine.state import ModelState
from ballast.fleet.file import load_fleet
from ballast.fleet.make import make_fleet
from ballast.models.served import Served
from ballast.policy.presets import PRESETS
from ballast.server.serve import serve
from ballast.weights.host import HostModel
from benchmarks.common import Samples, finish, options

STREAMS = 20
MAGIC = 7
"""Token id that kills, three times in a row; no other prompt here has it so."""
WORKER, SERVE = "worker", "serve"
TIMEOUT = 240.0


class Deadly(LiveDevice):
    """Kills its process when a job has the magic tokens."""

    def executor(self, host: HostModel, m: ModelState) -> Served:
        made = super().executor(host, m)
        run = made.run

        def deadly(work: Sequence[SequenceWork]) -> list[Result]:
            if any(list(w.tokens[:3]) == [MAGIC] * 3 for w in work):
                os.kill(os.getpid(), signal.SIGKILL)
            return run(work)

        made.run = deadly  # type: ignore[method-assign]
        return made


def deadly_device(
    fleet: FleetSettings, outbox: worker.Outbox, record: worker.Record
) -> worker.Device:
    return Deadly(fleet, outbox, record=record)


class Stream:
    """One request, its tokens and when each came (`time.perf_counter`)."""

    def __init__(self, model: str, number: int, new_tokens: int) -> None:
        self._body = {
            "model": model,
            "prompt": f"Ship {number}",
            "max_tokens": new_tokens,
            "temperature": float(number % 2),
            "seed": number,
            "logprobs": 0,
            "ignore_eos": True,
            "stream": True,
        }
        self.tokens: list[str] = []
        self.times: list[float] = []
        self.ended = False
        self.begun = asyncio.Event()

    async def run(self, client: httpx.AsyncClient) -> None:
        try:
            async with client.stream("POST", "/v1/completions", json=self._body) as response:
                async for line in response.aiter_lines():
                    self._hear(line)
        except httpx.HTTPError:
            self.ended = False
        self.begun.set()

    def _hear(self, line: str) -> None:
        if line == "data: [DONE]":
            self.ended = True
        elif line.startswith("data: "):
            for choice in json.loads(line[6:]).get("choices", ()):
                told = (choice["logprobs"] or {"tokens": []})["tokens"]
                self.tokens += told
                self.times += [time.perf_counter()] * len(told)
        if len(self.tokens) > 5:
            self.begun.set()


class Round:
    """All streams at once, and what came of them."""

    def __init__(self, models: Sequence[str], new_tokens: int) -> None:
        self.streams = [Stream(models[i % len(models)], i, new_tokens) for i in range(STREAMS)]
        self.recovery_s = 0.0
        self.answered = 0

    async def run(self, running: Serving, kill: bool = False, poison: str | None = None) -> None:
        limits = httpx.Limits(max_connections=STREAMS + 1)
        async with httpx.AsyncClient(
            base_url=running.url, timeout=TIMEOUT, limits=limits
        ) as client:
            open_streams = [asyncio.create_task(s.run(client)) for s in self.streams]
            for stream in self.streams:
                await stream.begun.wait()
            if kill:
                (victim,) = running.children
                os.kill(victim, signal.SIGKILL)
                killed = time.perf_counter()
            if poison is not None:
                body = {"model": poison, "prompt": [MAGIC] * 3, "max_tokens": 4}
                self.answered = (await client.post("/v1/completions", json=body)).status_code
            await asyncio.gather(*open_streams)
        if kill:
            # What the old worker had said is there at once: the longest gap ends with the new one.
            self.recovery_s = min(_resumed(s.times, killed) for s in self.streams) - killed

    def compared(self, undisturbed: Round) -> dict[str, int]:
        pairs = list(zip(self.streams, undisturbed.streams, strict=True))
        return {
            "lost": sum(not mine.ended for mine, _ in pairs),
            "changed": sum(mine.ended and mine.tokens != other.tokens for mine, other in pairs),
        }


def _resumed(times: Sequence[float], killed: float) -> float:
    """When the longest pause that lasted beyond the kill was over; infinite without one."""
    gaps = [(b - a, b) for a, b in itertools.pairwise(times) if b > killed]
    return max(gaps)[1] if gaps else float("inf")


def measure(file: Path, new_tokens: int, rounds: int) -> dict[str, Any]:
    """The result."""
    models = [m.name for m in load_fleet(file, presets=PRESETS).models]
    undisturbed = Round(models, new_tokens)
    killed = [Round(models, new_tokens) for _ in range(rounds)]
    with serving(file) as running:
        asyncio.run(undisturbed.run(running))
        for each in killed:
            asyncio.run(each.run(running, kill=True))
    assert all(s.ended and len(s.tokens) == new_tokens for s in undisturbed.streams)
    poisoned = Round(models, new_tokens)
    with serving(file, command=(sys.executable, "-m", "benchmarks.crash")) as running:
        asyncio.run(poisoned.run(running, poison=models[0]))
    told = [each.compared(undisturbed) for each in killed]
    return {
        "streams": STREAMS,
        "rounds": rounds,
        "output_tokens": new_tokens,
        "lost": sum(t["lost"] for t in told),
        "changed": sum(t["changed"] for t in told),
        "recovery_s": Samples(tuple(each.recovery_s for each in killed)).to_json(),
        "poison": {**poisoned.compared(undisturbed), "answered": poisoned.answered},
    }


def serve_deadly(argv: Sequence[str]) -> int:
    """`serve FILE --port 0`, with workers that can be killed by a request."""
    parser = argparse.ArgumentParser()
    parser.add_argument("fleet", type=Path)
    parser.add_argument("--port", type=int)
    asked = parser.parse_args(argv)
    command = (sys.executable, "-m", "benchmarks.crash", WORKER)
    fleet = load_fleet(asked.fleet, presets=PRESETS)
    return serve(fleet, port=asked.port, worker_command=command)


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == [WORKER]:
        return worker.main(argv[1:], deadly_device)
    if argv[:1] == [SERVE]:
        return serve_deadly(argv[1:])
    args = options(__doc__, argv)
    new_tokens, rounds = (100, 1) if args.quick else (300, 5)
    with tempfile.TemporaryDirectory() as scratch:
        made = make_fleet(
            scratch, n_models=4, steps=0, size="tiny", dtype="float32", budget="128MiB"
        )
        result = measure(made.file, new_tokens, rounds)
    finish(args, "crash", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
