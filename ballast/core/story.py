"""The story of a device: every event and every decision, in order, with its time.

A ring for display, and, where a `sink` is given, every entry as it happens. The sink gets plain
dictionaries; writing them somewhere is its own affair.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ballast.core.actions import Action, Operation
from ballast.core.event import Arrival, Event, JobDone, JobFailed, Operate
from ballast.core.job import Job

Sink = Callable[[dict[str, Any]], None]


def describe(event: Event) -> dict[str, Any]:
    """An event as plain data, without token ids: their number is what the story needs."""
    kind = type(event).__name__
    if isinstance(event, Arrival):
        s = event.submission
        return {
            "event": kind,
            "request": s.id,
            "model": s.model,
            "prompt_tokens": len(s.prompt),
            "max_tokens": s.max_tokens,
        }
    if isinstance(event, JobDone | JobFailed):
        job = event.job
        told = {
            "event": kind,
            "job": job.id,
            "model": job.model,
            **job.load._asdict(),
        }
        told["seconds" if isinstance(event, JobDone) else "reason"] = (
            event.seconds if isinstance(event, JobDone) else event.reason
        )
        return told
    if isinstance(event, Operate):
        wanted = event.operation
        return {
            "event": kind,
            "id": event.id,
            "operation": type(wanted).__name__,
            "model": wanted.model,
        }
    return {"event": kind, **dataclasses.asdict(event)}


class Story:
    """Keeps the last `keep` entries; hands each to `sink` as well."""

    def __init__(self, keep: int = 2000, sink: Sink | None = None) -> None:
        self.entries: deque[dict[str, Any]] = deque(maxlen=keep)
        self._untold: deque[dict[str, Any]] = deque(maxlen=keep)
        """Decisions, which would soon be lost among the events, until somebody takes them."""
        self._sink = sink

    def event(self, at: float, event: Event) -> None:
        """Something happened."""
        self._tell({"at": at, **describe(event)})

    def leap(self, at: float, job: Job, steps: int) -> None:
        """Steps that only decode have ended without turns of their own: `job`, and after it others
        like it, the last of them at `at`."""
        told = {"event": "Leap", "job": job.id, "model": job.model, "steps": steps}
        self._tell({"at": at, **told, "decode_sequences": job.load.decode_sequences})

    def decision(
        self, at: float, action: Action | Operation, refused: str | None, by: str | None = None
    ) -> None:
        """A policy, or whom `by` names, asked for `action`; `refused` says why it was not done, if
        it was not."""
        told = {"at": at, "action": type(action).__name__, **dataclasses.asdict(action)}
        if by is not None:
            told["by"] = by
        if refused is not None:
            told["refused"] = refused
        self._untold.append(told)
        self._tell(told)

    def take(self) -> tuple[dict[str, Any], ...]:
        """The decisions since the last call, of which the oldest may be missing. By one thread,
        which may be another than the teller's."""
        taken = []
        with suppress(IndexError):
            while True:
                taken.append(self._untold.popleft())
        return tuple(taken)

    def _tell(self, entry: dict[str, Any]) -> None:
        self.entries.append(entry)
        if self._sink is not None:
            self._sink(entry)
