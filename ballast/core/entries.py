"""What stories consist of: plain dictionaries without token ids; docs/story.md says what they mean.

A story that can be replayed begins with a snapshot.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from ballast.core.actions import OMITTED, Action, Operation
from ballast.core.cost import StepCosts
from ballast.core.event import Arrival, Event, GrammarReady, JobDone, JobFailed, Operate
from ballast.core.lease import AskedBack, Lease, Lent, Returned
from ballast.core.migration import ImportKv, KvTail
from ballast.core.model import ModelSpec
from ballast.core.settings import DeviceSettings

FORMAT = 1
"""Of stories that can be replayed; a reader refuses others."""

Entry = dict[str, Any]
Sink = Callable[[Sequence[Entry]], None]
"""Takes the entries of a turn."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelTold:
    """A model of a snapshot."""

    spec: ModelSpec
    costs: StepCosts
    """What policies know of its speed."""
    learned: bool = False
    """It is learned from its jobs, from here on."""

    @property
    def measured(self) -> StepCosts | None:
        """None: they are learned."""
        return None if self.learned else self.costs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What a device is before its first turn: nothing is resident, nobody has asked."""

    format: int = FORMAT
    version: str
    """Of Ballast."""
    device: DeviceSettings
    preset: str
    options: dict[str, float]
    link_bytes_per_second: float
    models: tuple[ModelTold, ...]
    began: float
    """Unix time when its clock showed 0, in seconds; 0 in virtual time."""
    overhead: float | None
    """The engine's own seconds per job, in virtual time; None: it was live."""
    rotates: bool = False
    """Whether layers can rotate there."""
    order: str = "round-robin"
    """The order of compute; stories of before there were several say nothing of it."""


def describe(event: Event) -> Entry:
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
    if isinstance(event, ImportKv):
        return {
            "event": kind,
            "request": event.wanted.id,
            "model": event.wanted.model,
            "prompt_tokens": len(event.wanted.prompt),
            "form": event.form,
        }
    if isinstance(event, KvTail):
        return {"event": kind, "request_id": event.request_id, "tokens": event.tokens}
    if isinstance(event, JobDone | JobFailed):
        job = event.job
        told = {
            "event": kind,
            "job": job.id,
            "model": job.model,
            **job.load._asdict(),
        }
        if isinstance(event, JobFailed):
            return told | {"reason": event.reason}
        told["seconds"] = event.seconds
        if event.stall:
            told["stall"] = event.stall
        return told
    if isinstance(event, GrammarReady):
        # Not its reason, which may quote the grammar.
        entry = {"event": kind, "request_id": event.request_id}
        return entry if event.code is None else entry | {"code": event.code}
    if isinstance(event, Operate):
        wanted = event.operation
        return {
            "event": kind,
            "id": event.id,
            "operation": type(wanted).__name__,
            **describe_action(wanted),
        }
    if isinstance(event, Lent | AskedBack | Returned):
        return {"event": kind, **describe_lease(event.lease)}
    return {"event": kind, **dataclasses.asdict(event)}


def describe_action(action: Action | Operation) -> Entry:
    """An action as plain data."""
    told = dataclasses.asdict(action)
    for field in dataclasses.fields(action):
        if field.metadata == OMITTED and told[field.name] == field.default:
            del told[field.name]
    return told


def describe_lease(lease: Lease) -> Entry:
    """A lease as plain data. Which pages it is of depends on more than the story tells."""
    told = dataclasses.asdict(lease)
    return {"lease": told.pop("id"), "page_numbers": told.pop("pages"), **told}


def both(a: Sink | None, b: Sink | None) -> Sink | None:
    """What goes to either."""
    if a is None or b is None:
        return a or b

    def tell(entries: Sequence[Entry]) -> None:
        a(entries)
        b(entries)

    return tell
