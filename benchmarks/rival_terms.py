"""Equal terms of `rivals`: models, memory, arrivals, service levels and runs for tuning.

Every contender gets these, and nothing else: the same files, at least the same bytes for weights
and KV, the same requests at the same times, and as many settings to choose from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ballast.bench.http import HttpTarget
from ballast.bench.record import RequestRecorder, prompts_of
from ballast.bench.replay import TargetError, replay
from ballast.bench.report import Report
from ballast.bench.run_options import workload_of
from ballast.bench.sample import DecisionRecord, DeviceSample
from ballast.core.clock import Clock
from ballast.core.request import Submission
from ballast.core.settings import Slo
from ballast.live.inbox import MonotonicClock
from ballast.workload.workload import Workload, WorkloadRequest

LEVEL = Slo(ttft=2.0, tpot=0.15)
"""Of every request."""
TIMEOUT = 60.0
"""Seconds after which a request has failed."""


@dataclass(frozen=True)
class Terms:
    """What all contenders have in common."""

    files: Mapping[str, Path]
    """By model, the most popular first: its GGUF file."""
    weight_bytes: int
    """Of one model's matrices, as its file has them."""
    kv_bytes: int
    """Of one token."""
    vocabulary: int
    resident: int
    """Models that memory has room for, each with KV of `context` tokens."""
    context: int
    longest: int
    """Most tokens of a request, prompt and output together."""
    seconds: float
    """Of a measured run."""
    tuning_rate: float
    tuning_seconds: float
    settings: int
    """Settings that each contender chooses from, one tuning run each."""

    @property
    def budget(self) -> int:
        """Bytes for weights and KV of all models."""
        return self.resident * (self.weight_bytes + self.context * self.kv_bytes)

    def context_beside(self, models: int) -> int:
        """Tokens of KV of each of `models` models that fill the budget together; 0 or less: they do
        not fit."""
        return int(self.budget // models - self.weight_bytes) // self.kv_bytes

    def arrivals(self, rate: float) -> Workload:
        """Requests of a measured run at `rate` requests per second; always the same ones."""
        return self._drawn(rate, self.seconds, seed=1)

    def tuning_arrivals(self) -> Workload:
        """Requests of a tuning run: others than any measured run has."""
        return self._drawn(self.tuning_rate, self.tuning_seconds, seed=2)

    def _drawn(self, rate: float, seconds: float, seed: int) -> Workload:
        names = list(self.files)
        return workload_of(
            "bursty", names, rate=rate, seconds=seconds, most_tokens=self.longest, seed=seed
        )


@dataclass(frozen=True)
class Settings:
    """One way to set up a contender."""

    label: str
    """What a user would set, in short."""
    model_bytes: int
    """Bytes for weights and KV that it takes at most, activations and everything else apart."""
    options: tuple[str, ...] = ()
    """Of its command."""
    environment: Mapping[str, str] | None = None
    resident: int = 0
    """Models that are in memory at a time; 0: as many as find room."""
    kind: str = ""
    """Type of the matrices of the files that it reads, if not that of the terms."""


@dataclass(frozen=True)
class Running:
    """A contender that serves."""

    urls: Mapping[str, str]
    """By model: where it is served. Models that are not served are left out."""
    pids: tuple[int, ...]
    """Its first processes."""


class Rival(Protocol):
    """A contender."""

    @property
    def name(self) -> str:
        """As in the keys of results."""

    def version(self) -> str:
        """What was run, as its makers call it."""

    def settings(self, terms: Terms) -> Sequence[Settings]:
        """What it may choose from: `terms.settings` of them."""

    def serving(self, terms: Terms, chosen: Settings, log: Path) -> AbstractContextManager[Running]:
        """Start it; returns once all its servers answer. `log` gets what they print."""


def choices(rival: Rival, terms: Terms) -> list[Settings]:
    """A contender's settings. Raises ValueError unless it has as many to choose from as all others,
    and no setting of ours takes more than the budget."""
    found = list(rival.settings(terms))
    if len(found) != terms.settings or len({s.label for s in found}) != len(found):
        raise ValueError(
            f"{rival.name}: {len(found)} settings to choose from, not {terms.settings}"
        )
    return found


def check_memory(ours: Sequence[Settings], others: Sequence[Settings], terms: Terms) -> None:
    """Raise ValueError if one of ours takes more bytes than the budget, or a rival has no setting
    that may fill it but for less than one request per model."""
    for s in ours:
        if s.model_bytes > terms.budget:
            raise ValueError(f"{s.label}: {s.model_bytes} bytes, the budget is {terms.budget}")
    least = terms.budget - terms.resident * terms.longest * terms.kv_bytes
    for s in others:
        if s.model_bytes < least:
            raise ValueError(f"{s.label}: {s.model_bytes} bytes, rivals have {terms.budget}")


class RoutedTarget:
    """Sends each request to the server of its model. An async context manager."""

    def __init__(self, urls: Mapping[str, str], clock: Clock) -> None:
        self._clock = clock
        self._targets = {url: HttpTarget(url, clock) for url in set(urls.values())}
        self._of = {model: self._targets[url] for model, url in urls.items()}
        self._open = AsyncExitStack()

    async def __aenter__(self) -> RoutedTarget:
        for target in self._targets.values():
            await self._open.enter_async_context(target)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()

    @property
    def clock(self) -> Clock:
        return self._clock

    async def run(self, submission: Submission, recorder: RequestRecorder) -> None:
        """Raises TargetError for a model that has no server, and as `HttpTarget`."""
        target = self._of.get(submission.model)
        if target is None:
            raise TargetError(f"no memory for {submission.model}")
        await target.run(submission, recorder)

    async def memory(self) -> Mapping[str, DeviceSample]:
        return {}  # no contender is asked for more than the others

    async def decisions(self, origin: float) -> Sequence[DecisionRecord]:
        return ()


def measured(running: Running, workload: Workload, terms: Terms, name: str) -> Report:
    """Send a workload to a contender, and judge its answers by `LEVEL`."""

    async def run() -> Report:
        prompts = prompts_of(dict.fromkeys(terms.files, terms.vocabulary))
        async with RoutedTarget(running.urls, MonotonicClock()) as target:
            done = await replay(workload, target, prompts, timeout=TIMEOUT, name=name)
        levels = dict.fromkeys(terms.files, LEVEL)
        text = workload.describe()
        return Report.of(done.records, levels, done.wall_seconds, name=name, workload=text)

    return asyncio.run(run())


def warmed(running: Running, terms: Terms) -> None:
    """Ask each model once, so that files have been read and code compiled."""
    for name in running.urls:
        request = WorkloadRequest(id=0, at=0.0, model=name, prompt_tokens=16, output_tokens=2)
        measured(running, Workload.of("warm-up", [request]), terms, "warm-up")
