"""Each kind of KV on two devices: running requests move, and a worker is killed.

Used by `kv_kinds`. A controller without HTTP, two CPU devices of a thread each in processes of
their own, and one small model of each kind on both. All streams begin on one device, and once each
has some tokens

- `moved`: all are migrated to the other device with their KV (`ballast.control.migrations`);
- `killed`: the device's worker is killed with SIGKILL; they go on from the tokens that are known.

Greedy output is compared with `transformers`. A round in which some model's requests all ended
before they could leave is run again.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from ballast.bench.inprocess import Answer
from ballast.bench.servers import serving_fleets
from ballast.cluster.controller import Controller
from ballast.core.event import FinishedOutput, TokenOutput
from ballast.core.order import MoveRequests
from ballast.core.request import Submission
from ballast.core.settings import DeviceSettings, FleetSettings, LinkSettings, ModelSettings
from ballast.core.units import KiB, MiB
from benchmarks.exactness import Verdict, asked, compare, reference

DEVICES = ("cpu:0", "cpu:1")
BEFORE, TOKENS = 8, 104
"""Tokens of each stream before the fault, and in all."""
STREAMS = 2
"""Of each model."""
TRIES = 5
"""Rounds at most until a request of each model has moved."""
FAULTS = ("moved", "killed")

Settings = Mapping[str, Mapping[str, Any]]
"""By model: `path`, and what else its settings say."""


def two_devices(models: Settings) -> FleetSettings:
    """A fleet whose models are all on both devices."""
    common = {"dtype": "float32", "block_tokens": 16, "devices": DEVICES}
    served = tuple(ModelSettings(name=n, **{**common, **given}) for n, given in models.items())
    first, second = (
        DeviceSettings(
            name=name, budget_bytes=192 * MiB, page_bytes=64 * KiB, threads=1, step_tokens=96
        )
        for name in DEVICES
    )
    link = LinkSettings(device=second.name)
    return FleetSettings(models=served, device=first, others=(second,), other_links=(link,))


class Stream:
    """One request and its answer."""

    def __init__(self, submission: Submission) -> None:
        self.submission, self.answer = submission, Answer()
        self.begun = asyncio.Event()
        """Whether it has `BEFORE` tokens, or has ended."""

    async def run(self, server: Controller) -> None:
        output_stream = server.router.submit([self.submission])
        try:
            while output_stream.more:
                for output in await output_stream.take():
                    if isinstance(output, TokenOutput):
                        self.answer.tokens.append(output.token)
                        self.answer.logprobs.append(output.logprob)
                    else:
                        self.answer.end = output
                if len(self.answer.tokens) >= BEFORE:
                    self.begun.set()
        finally:
            self.begun.set()
            output_stream.close()


class Rounds:
    """Of one server, each with requests of its own."""

    def __init__(self, server: Controller, models: Sequence[str]) -> None:
        self._server, self._models = server, list(models)
        self._rounds = 0

    async def run(self, fault: str | None, source: int = 0) -> tuple[list[Stream], Counter[str]]:
        """The streams of a round, and how many of each model's went with their KV, or were running
        when the worker died; the key "restarts" counts new workers."""
        self._rounds += 1
        here, there = DEVICES[source], DEVICES[1 - source]
        streams = []
        for s in asked(self._models, STREAMS, seed=3, new_tokens=TOKENS):
            # A salt of its own, so that no round finds another's prefixes.
            id, salt = f"{self._rounds}-{s.id}", str(self._rounds)
            streams.append(Stream(replace(s, id=id, salt=salt)))
        self._server.devices[there].cordoned = True
        running = [asyncio.create_task(s.run(self._server)) for s in streams]
        await asyncio.gather(*(s.begun.wait() for s in streams))
        self._server.devices[there].cordoned = False
        found = Counter[str]()
        if fault == "moved":
            found = await self._move(here)
        elif fault == "killed":
            found.update(s.submission.model for s in streams if s.answer.end is None)
            await self._kill(here)
            found["restarts"] = 1
        await asyncio.gather(*running)
        return streams, found

    async def _move(self, source: str) -> Counter[str]:
        loop = asyncio.get_running_loop()
        left: dict[str, asyncio.Future[int]] = {m: loop.create_future() for m in self._models}
        for model, ended in left.items():
            self._server.migrations.move_requests(MoveRequests(source, model), ended.set_result)
        return Counter({model: await ended for model, ended in left.items()})

    async def _kill(self, name: str) -> None:
        """Kill a device's worker; returns when another one serves."""
        device = self._server.devices[name]
        before = device.restarts
        os.kill(device.worker.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        while device.restarts == before:
            await asyncio.sleep(0.05)


async def disturbed(models: Settings, faults: Sequence[str]) -> dict[str, Any]:
    """By fault: its streams, and of each model how many it met."""
    found: dict[str, Any] = {}
    async with serving_fleets([two_devices(models)]) as (server,):
        rounds = Rounds(server, [*models])
        for source in (0, 1):  # both devices bring the weights
            await rounds.run(None, source)
        for fault in faults:
            for _ in range(TRIES):
                streams, met = await rounds.run(fault)
                if all(met[model] for model in models):
                    break
            found[fault] = streams, met
    return found


def measure(
    models: Settings, faults: Sequence[str], rounding: Mapping[str, Any]
) -> dict[str, dict[str, dict[str, Any]]]:
    """By fault and model: the verdict, and how many requests the fault has `met`. `rounding`: of a
    model whose KV is rounded, the margin and what has its reference round likewise."""
    ran = asyncio.run(disturbed(models, faults))
    references = {name: reference(Path(given["path"])) for name, given in models.items()}
    found: dict[str, dict[str, dict[str, Any]]] = {fault: {} for fault in faults}
    for fault, (streams, met) in ran.items():
        for model, theirs in references.items():
            verdict = Verdict()
            if model in rounding:
                verdict.margin, rounded = rounding[model]
            with rounded(theirs) if model in rounding else nullcontext():
                for s in streams:
                    if s.submission.model == model:
                        assert isinstance(s.answer.end, FinishedOutput), s.answer.end
                        compare(theirs, s.submission.prompt, s.answer, verdict)
            whole = verdict.to_json()
            found[fault][model] = {**whole, "met": met[model], "ok": verdict.ok and met[model] > 0}
    return found
