"""What clients notice when a worker dies: streams over HTTP, the worker killed with SIGKILL amid.

A made fleet of tiny models in float32; half of the streams are greedy, half are sampled. Each kill
is in a round of its own: while all streams decode, while some still wait for their prompt's first
chunks, or while the models are activated. Then a request whose first job kills the process, in
workers that this script brings along, beside the same streams.

- `lost`: streams that did not end well; `changed`: those with other tokens than undisturbed.
- `recovery_s`: from the kill to the first token of any stream that the new worker computed; of
  which `ready_s` until the new worker serves.
- `poison`: the same beside the request that kills; `answered`: by what status it was refused, after
  so many `kills`.
"""

from __future__ import annotations

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

from ballast.bench.server_process import Serving, child_called, serving
from ballast.cluster.worker.process_names import SPARE
from ballast.core.errors import Unavailable
from ballast.fleet.fleet_file import load_fleet
from ballast.fleet.make import make_fleet
from ballast.policy.presets import PRESETS
from benchmarks.common import Samples, finish, options
from benchmarks.poisonable import MAGIC

STREAMS = 20
PROMPT = 40
"""Words of each prompt, of two to four tokens each."""
STEP_TOKENS = 32
"""Of the device: the prompts take many steps."""
DEVICE = "threads: 1\n    prefix_cache: false\n    "
"""Each round computes its prompts."""
BUDGETS = {"float32": "12MiB", "bfloat16": "8MiB"}
"""By dtype."""
BANDWIDTH = "4MB/s"
"""Of the link: an activation takes long enough to be seen, a quarter of a second."""
MOMENTS = ("decode", "prefill", "activation")
ADMIN = "crash-of-a-worker"
TIMEOUT = 240.0


class Stream:
    """One request, its tokens and when each came (`time.perf_counter`)."""

    def __init__(self, model: str, number: int, new_tokens: int) -> None:
        self._body = {
            "model": model,
            "prompt": " ".join(f"{number + i}" for i in range(PROMPT)),
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
                outcome = (choice["logprobs"] or {"tokens": []})["tokens"]
                self.tokens += outcome
                self.times += [time.perf_counter()] * len(outcome)
                self.begun.set()

    def resumed(self, killed: float) -> float:
        """When its longest pause after the kill was over: what the old worker had said is there
        at once."""
        times = [killed, *(t for t in self.times if t > killed)]
        gaps = [(b - a, b) for a, b in itertools.pairwise(times)]
        return max(gaps)[1] if gaps else float("inf")


class Round:
    """All streams at once, and what came of them."""

    def __init__(self, models: Sequence[str], new_tokens: int) -> None:
        self.models = models
        self.streams = [Stream(models[i % len(models)], i, new_tokens) for i in range(STREAMS)]
        self.ready_s = 0.0
        self.recovery_s = 0.0
        self.open = 0
        """Streams that had begun when the worker was killed."""
        self.answered = 0
        """Status of the poison's answer."""

    async def run(self, running: Serving, kill: str | None = None, poison: bool = False) -> None:
        """Kills at the moment `kill`."""
        limits = httpx.Limits(max_connections=STREAMS + 2)
        async with httpx.AsyncClient(
            base_url=running.url, timeout=TIMEOUT, limits=limits
        ) as client:
            if kill == "activation":
                await self._evict(client)
            open_streams = [asyncio.create_task(s.run(client)) for s in self.streams]
            if kill == "activation":
                await self._until_loading(client)
            elif kill == "prefill":
                await asyncio.wait(
                    [asyncio.create_task(s.begun.wait()) for s in self.streams],
                    return_when=asyncio.FIRST_COMPLETED,
                )
            else:
                for stream in self.streams:
                    await stream.begun.wait()
            if kill is not None:
                self.open = sum(s.begun.is_set() for s in self.streams)
                killed = time.perf_counter()
                os.kill(running.worker, signal.SIGKILL)
                await _until_healthy(client)
                self.ready_s = time.perf_counter() - killed
            if poison:
                body = {"model": self.models[0], "prompt": MAGIC * 40, "max_tokens": 4}
                self.answered = (await client.post("/v1/completions", json=body)).status_code
            await asyncio.gather(*open_streams)
        if kill is not None:
            self.recovery_s = min(s.resumed(killed) for s in self.streams) - killed

    async def _evict(self, client: httpx.AsyncClient) -> None:
        key = {"Authorization": f"Bearer {ADMIN}"}
        for model in self.models:
            outcome = await client.post(f"/admin/models/{model}/evict", headers=key)
            outcome.raise_for_status()

    async def _until_loading(self, client: httpx.AsyncClient) -> None:
        while True:
            outcome = (await client.get("/v1/models")).json()["data"]
            if any(model["status"]["value"] == "loading" for model in outcome):
                return

    def compared(self, undisturbed: Round) -> dict[str, int]:
        pairs = list(zip(self.streams, undisturbed.streams, strict=True))
        return {
            "lost": sum(not mine.ended for mine, _ in pairs),
            "changed": sum(mine.ended and mine.tokens != other.tokens for mine, other in pairs),
        }


async def _until_healthy(client: httpx.AsyncClient) -> None:
    """From not being so on."""
    for wanted in (503, 200):
        while (await client.get("/health")).status_code != wanted:
            await asyncio.sleep(0.01)


def measure(file: Path, new_tokens: int, kills: int) -> dict[str, Any]:
    """The result."""
    models = [m.name for m in load_fleet(file, presets=PRESETS).models]
    undisturbed = Round(models, new_tokens)
    rounds = [(moment, Round(models, new_tokens)) for moment in _turns(kills)]
    poisoned = Round(models, new_tokens)
    with serving(file, command=(sys.executable, "-m", "benchmarks.poisonable")) as running:
        asyncio.run(undisturbed.run(running))
        for moment, each in rounds:
            until_spare_waits(running.pid)
            asyncio.run(each.run(running, kill=moment))
        before = _restarts(running)
        asyncio.run(poisoned.run(running, poison=True))
        poison_kills = _restarts(running) - before
    assert all(s.ended and len(s.tokens) == new_tokens for s in undisturbed.streams)
    outcome = [each.compared(undisturbed) for _, each in rounds]
    return {
        "streams": STREAMS,
        "output_tokens": new_tokens,
        "kills": kills,
        "lost": sum(t["lost"] for t in outcome),
        "changed": sum(t["changed"] for t in outcome),
        "recovery_s": Samples(tuple(each.recovery_s for _, each in rounds)).to_json(),
        "ready_s": Samples(tuple(each.ready_s for _, each in rounds)).to_json(),
        "rounds": [
            {"moment": moment, "begun": each.open, "recovery_s": each.recovery_s, **t}
            for (moment, each), t in zip(rounds, outcome, strict=True)
        ],
        "poison": {
            **poisoned.compared(undisturbed),
            "answered": poisoned.answered,
            "kills": poison_kills,
        },
    }


def until_spare_waits(server: int) -> None:
    """Returns when the spare worker is prepared."""
    end = time.monotonic() + TIMEOUT
    while True:
        try:
            child_called(SPARE, server)
            return
        except Unavailable:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def _turns(kills: int) -> list[str]:
    return list(itertools.islice(itertools.cycle(MOMENTS), kills))


def _restarts(running: Serving) -> int:
    text = httpx.get(f"{running.url}/metrics").text
    line = next(li for li in text.splitlines() if li.startswith("ballast_worker_restarts"))
    return int(float(line.rpartition(" ")[2]))


def fleet_file(directory: Path, dtype: str = "float32") -> Path:
    """Models that do not fit all at once, over a link that lets their activation be seen."""
    made = make_fleet(
        directory, n_models=4, steps=0, size="tiny", dtype=dtype, budget=BUDGETS[dtype], seed=1
    )
    text = made.file.read_text()
    device = DEVICE + ("" if dtype == "float32" else "invariant: 1\n    ")
    text = text.replace("step_tokens: 128", f"{device}step_tokens: {STEP_TOKENS}")
    text += f"\nserver:\n  admin_key: {ADMIN}\nlinks:\n  - bandwidth: {BANDWIDTH}\n"
    made.file.write_text(text)
    return made.file


def main(argv: Sequence[str] | None = None) -> int:
    args = options(
        __doc__, argv, lambda p: p.add_argument("--kills", type=int, help="how many rounds")
    )
    new_tokens, kills = (40, 3) if args.quick else (200, 15)
    with tempfile.TemporaryDirectory() as scratch:
        result = measure(fleet_file(Path(scratch)), new_tokens, args.kills or kills)
    finish(args, "crash", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
