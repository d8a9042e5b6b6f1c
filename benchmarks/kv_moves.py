"""Each kind of KV on two devices: running requests move, and a worker is killed.

Used by `kv_kinds`. A controller without HTTP, two CPU devices of a thread each in processes of
their own, and one small model of each kind on both. Streams begin on one device, and once each has
some tokens

- `moved`: they are migrated to the other device with their KV (`ballast.control.migrations`), one
  model after the other; those that stay, as all of models with windows, which keep no KV of what
  has left them, are sent there without;
- `killed`: the device's worker is killed with SIGKILL while it runs streams of all models; they go
  on from the tokens that are known.

Greedy output is compared with `transformers`, and where KV is rounded, which may be to either of
two numbers, with that of a round without a fault as well: no token may be another one. A round that
met no request of some model, or that moved none with its KV of a model that can, since all had
ended before, is run again.
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
BEFORE, TOKENS = 8, 160
"""Tokens of each stream before the fault, and in all."""
STREAMS = 3
"""Of each model."""
TRIES = 5
"""Rounds at most until the fault has met a request of each model."""
FAULTS = ("moved", "killed")
WITH_KV = ", with KV"

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
        self.asked = submission.model, submission.prompt
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

    def __init__(self, server: Controller) -> None:
        self._server = server
        self._rounds = 0

    async def until_met(self, fault: str, models: list[str]) -> tuple[list[Stream], Counter[str]]:
        """The last of the rounds of some models, of which there is one if the fault meets each."""
        for _ in range(TRIES):
            streams, met = await self.run(fault, models)
            if all(met[model] and self._kept(fault, model, met) for model in models):
                break
        return streams, met

    def _kept(self, fault: str, model: str, met: Counter[str]) -> bool:
        """Whether requests of a model that moved did so with their KV, if they can."""
        windows = self._server.devices.specs[model].kv_windows
        return fault != "moved" or bool(windows) or met[model + WITH_KV] > 0

    async def run(
        self, fault: str | None, models: list[str], source: int = 0
    ) -> tuple[list[Stream], Counter[str]]:
        """The streams of a round, and how many of each model's went, or ran when the worker died;
        with `WITH_KV` behind its name: those that went with their KV."""
        self._rounds += 1
        here, there = DEVICES[source], DEVICES[1 - source]
        streams = []
        for s in asked(models, STREAMS, seed=4, new_tokens=TOKENS):
            # A salt of its own, so that no round finds another's prefixes.
            id, salt = f"{self._rounds}-{s.id}", str(self._rounds)
            streams.append(Stream(replace(s, id=id, salt=salt)))
        self._server.devices[there].cordoned = True
        running = [asyncio.create_task(s.run(self._server)) for s in streams]
        await asyncio.gather(*(s.begun.wait() for s in streams))
        self._server.devices[there].cordoned = False
        found = Counter[str]()
        if fault == "moved":
            found = await self._move(streams, here, there)
        elif fault == "killed":
            found.update(s.submission.model for s in streams if s.answer.end is None)
            await self._kill(here)
        await asyncio.gather(*running)
        return streams, found

    async def _move(self, streams: Sequence[Stream], source: str, target: str) -> Counter[str]:
        devices, found = self._server.devices, Counter[str]()
        for model in dict.fromkeys(s.submission.model for s in streams):
            ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            step = MoveRequests(source, model)
            self._server.migrations.move_requests(step, ended.set_result)
            await ended
            own = [s.submission.id for s in streams if s.submission.model == model]
            there = [id for id in own if devices[target].requests.get(id) is not None]
            gone = devices[source].requests.hand_over(devices[source].specs[model])
            devices[target].requests.add(gone)
            found[model], found[model + WITH_KV] = len(there) + len(gone), len(there)
        return found

    async def _kill(self, name: str) -> None:
        """Kill a device's worker; returns when another one serves."""
        device = self._server.devices[name]
        before = device.restarts
        os.kill(device.worker.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        while device.restarts == before:
            await asyncio.sleep(0.05)


async def disturbed(
    models: Settings, faults: Sequence[str]
) -> dict[str, tuple[list[Stream], Counter[str]]]:
    """By fault, and under "" without one: its streams, and of each model how many it met."""
    found = {fault: (list[Stream](), Counter[str]()) for fault in ("", *faults)}
    async with serving_fleets([two_devices(models)]) as (server,):
        rounds = Rounds(server)
        for source in (0, 1):  # both devices bring the weights
            found[""] = await rounds.run(None, [*models], source)
        for fault in faults:
            for together in [[m] for m in models] if fault == "moved" else [[*models]]:
                streams, met = await rounds.until_met(fault, together)
                found[fault][0].extend(streams)
                found[fault][1].update(met)
    return found


def measure(
    models: Settings, faults: Sequence[str], rounding: Mapping[str, Any]
) -> dict[str, dict[str, dict[str, Any]]]:
    """By fault and model: the verdict, and how many requests the fault has `met`. `rounding`: of a
    model whose KV is rounded, the margin and what has its reference round likewise."""
    ran = asyncio.run(disturbed(models, faults))
    undisturbed = {s.asked: s.answer.tokens for s in ran.pop("")[0]}
    references = {name: reference(Path(given["path"])) for name, given in models.items()}
    found: dict[str, dict[str, dict[str, Any]]] = {fault: {} for fault in faults}
    for fault, (streams, met) in ran.items():
        for model, theirs in references.items():
            verdict, changed = Verdict(), 0
            if model in rounding:
                verdict.margin, rounded = rounding[model]
            with rounded(theirs) if model in rounding else nullcontext():
                for s in streams:
                    if s.submission.model == model:
                        assert isinstance(s.answer.end, FinishedOutput), s.answer.end
                        compare(theirs, s.submission.prompt, s.answer, verdict)
                        changed += s.answer.tokens != undisturbed[s.asked]
            counted = {"met": met[model], "with_kv": met[model + WITH_KV], "changed": changed}
            ok = verdict.ok or (model in rounding and not (verdict.wrong or changed))
            found[fault][model] = {**verdict.to_json(), **counted, "ok": ok and met[model] > 0}
    return found
