"""Convert events, actions and snapshots into story entries: dictionaries without token ids.

Used by the story of a device, story files, and replay. The format is described in docs/story.md. A
story that can be replayed begins with a `Snapshot`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ballast.core.actions import Action, LoopCommand
from ballast.core.cost import StepCosts
from ballast.core.event import (
    ArrivalEvent,
    CancelEvent,
    CommandEvent,
    DrainEvent,
    Event,
    FirstJobReadyEvent,
    GrammarReadyEvent,
    JobDoneEvent,
    JobFailedEvent,
    PauseEvent,
    ResumeEvent,
    RotationSettledEvent,
    StopEvent,
    TimerEvent,
    TransferDoneEvent,
)
from ballast.core.fleet_state import OPERATOR
from ballast.core.kv_tiers import KvFetchedEvent, KvFoundEvent
from ballast.core.lease import (
    Lease,
    PagesLentEvent,
    PagesRecalledEvent,
    PagesReturnedEvent,
    PeerGoneEvent,
    PeerMetEvent,
)
from ballast.core.migration import (
    DepartEvent,
    DropKvEvent,
    ExportKvEvent,
    ImportKvEvent,
    KvReadEvent,
    KvTailEvent,
)
from ballast.core.model import ModelSpec
from ballast.core.omitted import OMITTED, UNTOLD
from ballast.core.settings import DeviceSettings

FORMAT = 1
"""Version of the format of stories that can be replayed; a reader refuses others."""

StoryEntry = dict[str, Any]
Sink = Callable[[Sequence[StoryEntry]], None]
"""Function that receives the entries of one turn."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """A model in a snapshot."""

    spec: ModelSpec
    costs: StepCosts
    """Costs that policies see at this time."""
    learned: bool = False
    """Whether its costs are learned from its jobs from now on."""

    @property
    def measured(self) -> StepCosts | None:
        """The costs; None where they are learned."""
        return None if self.learned else self.costs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """State of a device before its first turn: no model is resident, no request is open."""

    format: int = FORMAT
    version: str
    """Version of Ballast."""
    device: DeviceSettings
    preset: str
    options: dict[str, float]
    link_bytes_per_second: float
    models: tuple[ModelEntry, ...]
    began: float
    """Unix time of the clock's zero, in seconds; 0 in virtual time."""
    overhead: float | None
    """The engine's own seconds per job in virtual time; None: a live device."""
    rotates: bool = False
    """Whether layers can rotate on the device."""
    tiers: bool = False
    """Whether KV is kept in tiers below the device."""
    order: str = "round-robin"
    """Name of the order of compute; the default stands for older stories, which lack it."""
    near_host: bool = False
    """Whether passes read host memory as fast as the device's."""


EVENT_TAGS: Mapping[type[Event], str] = {
    ArrivalEvent: "Arrival",
    CancelEvent: "Cancel",
    PauseEvent: "Pause",
    ResumeEvent: "Resume",
    GrammarReadyEvent: "GrammarReady",
    JobDoneEvent: "JobDone",
    JobFailedEvent: "JobFailed",
    TransferDoneEvent: "TransferDone",
    FirstJobReadyEvent: "FirstJobReady",
    RotationSettledEvent: "Settled",
    TimerEvent: "Timer",
    DrainEvent: "Drain",
    StopEvent: "Stop",
    CommandEvent: "Operate",
    PeerMetEvent: "PeerMet",
    PeerGoneEvent: "PeerGone",
    PagesLentEvent: "Lent",
    PagesRecalledEvent: "AskedBack",
    PagesReturnedEvent: "Returned",
    ExportKvEvent: "ExportKv",
    DepartEvent: "Depart",
    ImportKvEvent: "ImportKv",
    KvReadEvent: "KvRead",
    KvTailEvent: "KvTail",
    DropKvEvent: "DropKv",
    KvFoundEvent: "KvFound",
    KvFetchedEvent: "KvFetched",
}
"""Tag of each event in a story. Tags are a file format: a class may be renamed, its tag stays."""


def describe(event: Event) -> StoryEntry:
    """Describe an event as plain data, with the number of its tokens but not their ids."""
    kind = EVENT_TAGS[type(event)]
    if isinstance(event, ArrivalEvent):
        s = event.submission
        return {
            "event": kind,
            "request": s.id,
            "model": s.model,
            "prompt_tokens": len(s.prompt),
            "max_tokens": s.max_tokens,
        }
    if isinstance(event, ImportKvEvent):
        return {
            "event": kind,
            "request": event.wanted.id,
            "model": event.wanted.model,
            "prompt_tokens": len(event.wanted.prompt),
            "form": event.form,
            "attempt": event.attempt,
        }
    if isinstance(event, KvTailEvent):
        fields = {"request_id": event.request_id, "tokens": event.tokens}
        return {"event": kind, **fields, "attempt": event.attempt}
    if isinstance(event, JobDoneEvent | JobFailedEvent):
        job = event.job
        entry = {
            "event": kind,
            "job": job.id,
            "model": job.model,
            **job.load._asdict(),
        }
        if isinstance(event, JobFailedEvent):
            return entry | {"reason": event.reason}
        entry["seconds"] = event.seconds
        if event.stall:
            entry["stall"] = event.stall
        if any(event.carried):
            entry["carried"] = list(event.carried)
        return entry
    if isinstance(event, GrammarReadyEvent):
        # Not its reason, which may quote the grammar.
        entry = {"event": kind, "request_id": event.request_id}
        return entry if event.code is None else entry | {"code": event.code}
    if isinstance(event, CommandEvent):
        wanted = event.command
        return {
            "event": kind,
            "id": event.id,
            "operation": action_tag(type(wanted)),
            **describe_action(wanted),
            **({} if event.by == OPERATOR else {"by": event.by}),
        }
    if isinstance(event, PagesLentEvent | PagesRecalledEvent | PagesReturnedEvent):
        return {"event": kind, **describe_lease(event.lease)}
    return {"event": kind, **dataclasses.asdict(event)}


def action_tag(kind: type[Action | LoopCommand]) -> str:
    """Return the tag of an action or command in a story; see `EVENT_TAGS`."""
    return kind.__name__.removesuffix("Command")


def describe_action(action: Action | LoopCommand) -> StoryEntry:
    """Describe an action or command as plain data."""
    return {name: _plain(value) for name, value in _fields(action)}


def _fields(of: Any) -> Iterator[tuple[str, Any]]:
    """Return the names and values of a dataclass's fields, without those that stories omit."""
    for field in dataclasses.fields(of):
        value = getattr(of, field.name)
        if field.metadata == UNTOLD:
            continue
        if field.metadata != OMITTED or value != field.default:
            yield field.name, value


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {name: _plain(part) for name, part in _fields(value)}
    if isinstance(value, frozenset):
        return sorted(value)
    return value


def describe_lease(lease: Lease) -> StoryEntry:
    """Describe a lease as plain data. Its page numbers do not follow from the story."""
    entry = dataclasses.asdict(lease)
    return {"lease": entry.pop("id"), "page_numbers": entry.pop("pages"), **entry}


def both(a: Sink | None, b: Sink | None) -> Sink | None:
    """Combine two sinks into one that writes to both."""
    if a is None or b is None:
        return a or b

    def write(entries: Sequence[StoryEntry]) -> None:
        a(entries)
        b(entries)

    return write
