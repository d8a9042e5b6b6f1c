"""Phases of prefills, and how much of KV's transfers passes hid, by the story of a run.

Used by `swift_live` and `swift_sim`. As in SwiftCache, 5.4: *queue*, *load*, *execute* and *store*,
summed over requests from arrival to first token, without regard to overlap: `load` and `store` are
the seconds for which links carried KV, whether a pass waited for them or not. What a host tier
takes in behind a step is in none of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np


@dataclass
class Phases:
    """Seconds, summed over one model's requests."""

    queue: float = 0.0
    load: float = 0.0
    execute: float = 0.0
    store: float = 0.0
    stall: float = 0.0
    """For which these requests' passes waited for links: what overlap leaves of the two."""
    carried: float = 0.0
    """Of all jobs that could hide what links carried for them: their passes took longer."""
    waited: float = 0.0
    """Part of `carried` for which these jobs waited."""
    loads: list[float] = field(default_factory=list)
    """Of each request."""
    stores: list[float] = field(default_factory=list)

    def __add__(self, other: Phases) -> Phases:
        return Phases(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        )

    @property
    def hidden(self) -> float | None:
        """Part of transfers behind the passes that could hide them; None: there were none."""
        return 1 - self.waited / self.carried if self.carried else None

    def parts(self) -> dict[str, float]:
        """The phases as parts of their sum."""
        seconds = {n: getattr(self, n) for n in ("queue", "load", "execute", "store")}
        total = sum(seconds.values())
        return {name: of / total for name, of in seconds.items()} if total else seconds

    def measured(self) -> dict[str, float | None]:
        """The parts; `overlapped`, what is left of load and store where passes hide them; and the
        99th percentiles of a request's load and store, in ms."""
        after = self.queue + self.execute + self.stall
        found: dict[str, float | None] = dict(self.parts())
        found["overlapped"] = self.stall / after if after else None
        for name, seconds in (("load_p99_ms", self.loads), ("store_p99_ms", self.stores)):
            found[name] = 1e3 * float(np.percentile(seconds, 99)) if seconds else None
        return found


@dataclass
class _Prefill:
    """A request until its prompt is computed."""

    arrived: float
    spent: float = 0.0
    """Seconds in its jobs and fetches."""
    load: float = 0.0
    store: float = 0.0


class PhaseCounter:
    """Sums the phases of one model's requests from the entries of one device's story, in order."""

    def __init__(self, model: str, fetch_seconds: float = 0.0, since: float = 0.0) -> None:
        """`fetch_seconds`: of one block that a host tier gives back; `since`: requests that arrived
        before it do not count."""
        self.found = Phases()
        self._model, self._fetch_seconds, self._since = model, fetch_seconds, since
        self._numbers: dict[str, int] = {}
        self._open: dict[int, _Prefill] = {}
        self._jobs: dict[int, dict[int, bool]] = {}
        """By job, the requests whose prompts it computes, and whether it ends them."""

    def take(self, entries: Iterable[Mapping[str, Any]]) -> None:
        for e in entries:
            event = e.get("event")
            if event == "Arrival" and e["model"] == self._model and e["at"] >= self._since:
                self._numbers[e["request"]] = e["n"]
                self._open[e["n"]] = _Prefill(e["at"])
            elif event == "KvFetched":
                self._fetched(e)
            elif event is None and "job" in e and e["model"] == self._model:
                self._jobs[e["job"]] = {part[0]: part[3] for part in e.get("prefill", ())}
            elif event == "JobDone" and e["model"] == self._model:
                self._done(e)

    def _fetched(self, e: Mapping[str, Any]) -> None:
        request = self._open.get(self._numbers.get(e["request_id"], -1))
        if request is not None:
            request.load += e["blocks"] * self._fetch_seconds
            request.spent += e["blocks"] * self._fetch_seconds

    def _done(self, e: Mapping[str, Any]) -> None:
        found, stall = self.found, e.get("stall", 0.0)
        read, written = e.get("carried", (0.0, 0.0))
        if 0 < read + written <= e["seconds"] - stall:
            found.carried += read + written
            found.waited += min(stall, read + written)
        for n, ends in self._jobs.pop(e["job"], {}).items():
            request = self._open.get(n)
            if request is None:
                continue
            request.load, request.store = request.load + read, request.store + written
            request.spent += e["seconds"]
            found.execute += e["seconds"] - stall
            found.stall += stall
            if ends:
                self._ended(self._open.pop(n), e["at"])

    def _ended(self, request: _Prefill, at: float) -> None:
        self.found.queue += max(0.0, at - request.arrived - request.spent)
        self.found.load += request.load
        self.found.store += request.store
        self.found.loads.append(request.load)
        self.found.stores.append(request.store)


def entries_of(story: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in story.read_text().splitlines()]


def phases(entries: Iterable[Mapping[str, Any]], model: str, fetch_seconds: float = 0.0) -> Phases:
    """Sum a story's phases. `fetch_seconds`: of one block that a host tier gives back."""
    counter = PhaseCounter(model, fetch_seconds)
    counter.take(entries)
    return counter.found
