"""Phases of prefills, and how much of KV's transfers passes hid, by the story of a live run.

Used by `swift_live`. As in SwiftCache, 5.4: *queue*, *load*, *execute* and *store*, summed over
requests from arrival to first token, without regard to overlap: `load` and `store` are the seconds
for which links carried KV, whether a pass waited for them or not. What a host tier takes in behind
a step is in none of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Phases:
    """Seconds, summed over one model's requests."""

    queue: float = 0.0
    load: float = 0.0
    execute: float = 0.0
    store: float = 0.0
    carried: float = 0.0
    """Of all jobs that could hide what links carried for them: their passes took longer."""
    waited: float = 0.0
    """Part of `carried` for which these jobs waited."""

    def __add__(self, other: Phases) -> Phases:
        names = self.__dataclass_fields__
        return Phases(**{n: getattr(self, n) + getattr(other, n) for n in names})

    @property
    def hidden(self) -> float | None:
        """Part of transfers behind the passes that could hide them; None: there were none."""
        return 1 - self.waited / self.carried if self.carried else None

    def parts(self) -> dict[str, float]:
        """The phases as parts of their sum."""
        seconds = {n: getattr(self, n) for n in ("queue", "load", "execute", "store")}
        total = sum(seconds.values())
        return {name: of / total for name, of in seconds.items()} if total else seconds


def entries_of(story: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in story.read_text().splitlines()]


def phases(entries: Iterable[Mapping[str, Any]], model: str, fetch_seconds: float = 0.0) -> Phases:
    """Sum a story's phases. `fetch_seconds`: of one block that a host tier gives back."""
    found = Phases()
    number: dict[str, int] = {}
    arrived: dict[int, float] = {}
    """When requests arrived, by their numbers, until their prompts are computed."""
    spent: dict[int, float] = {}
    """Seconds in their jobs and fetches."""
    jobs: dict[int, dict[int, bool]] = {}
    """By job, the requests whose prompts it computes, and whether it ends them."""
    for e in entries:
        event = e.get("event")
        if event == "Arrival" and e["model"] == model:
            number[e["request"]] = n = e["n"]
            arrived[n], spent[n] = e["at"], 0.0
        elif event == "KvFetched" and number.get(e["request_id"]) in arrived:
            seconds = e["blocks"] * fetch_seconds
            found.load += seconds
            spent[number[e["request_id"]]] += seconds
        elif event is None and "job" in e and e["model"] == model:
            jobs[e["job"]] = {part[0]: part[3] for part in e.get("prefill", ())}
        elif event == "JobDone" and e["model"] == model:
            _add_job(found, e)
            for n, ends in jobs.pop(e["job"], {}).items():
                if n not in arrived:
                    continue
                read, written = e.get("carried", (0.0, 0.0))
                found.load, found.store = found.load + read, found.store + written
                found.execute += e["seconds"] - e.get("stall", 0.0)
                spent[n] += e["seconds"]
                if ends:
                    found.queue += max(0.0, e["at"] - arrived.pop(n) - spent[n])
    return found


def _add_job(found: Phases, done: Mapping[str, Any]) -> None:
    """Count what a job hid of what links carried for it, if its passes took as long."""
    stall, carried = done.get("stall", 0.0), sum(done.get("carried", (0.0, 0.0)))
    if 0 < carried <= done["seconds"] - stall:
        found.carried += carried
        found.waited += min(stall, carried)
