"""Record the story of a device: every event, decision and job, in order, with its time.

Written by the loop, live and in virtual time. Recent entries are kept in a ring for display; texts
of reasons are made as they are read (`core.actions.Why`). With a `sink`, everything that a
replay needs is passed to it turn by turn: the initial snapshot, events with the requests that they
ended, decisions and jobs. Never records token ids.
"""

from __future__ import annotations

import dataclasses
from collections import UserString, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from math import inf

from ballast.core.actions import Action, LoopCommand, Promise
from ballast.core.entries import (
    ModelEntry,
    Sink,
    Snapshot,
    StoryEntry,
    action_tag,
    describe,
    describe_action,
    describe_lease,
)
from ballast.core.event import ArrivalEvent, Event, Output
from ballast.core.job import Job
from ballast.core.lease import Lease
from ballast.core.migration import ImportKvEvent
from ballast.core.request import Request
from ballast.core.story_requests import StoryRequests


class Story:
    """Keeps the last `keep` entries for display, and passes each turn's entries to `sink`.

    Used by the loop's thread only, except `take_decisions`.
    """

    def __init__(
        self,
        keep: int = 2000,
        sink: Sink | None = None,
        *,
        key: bytes = b"",
        began: float = 0.0,
        overhead: float | None = None,
    ) -> None:
        """`key`: of the digests that replace tokens; `began` and `overhead`: as in `Snapshot`."""
        self.entries: deque[StoryEntry] = deque(maxlen=keep)
        self._new_decisions: deque[StoryEntry] = deque(maxlen=keep)
        """Decisions that `take_decisions` has not returned yet."""
        self._sink = sink
        self.began, self.overhead = began, overhead
        self._turn: list[StoryEntry] = []
        """Entries of the present turn, which `sink` has not received yet."""
        self._turns = 0
        self._last: StoryEntry = {}
        self._links: tuple[float, float | None] = (0.0, None)
        self._requests = StoryRequests(key)

    @property
    def whole(self) -> bool:
        """Whether the story can be replayed: a sink receives all entries."""
        return self._sink is not None

    def record_snapshot(self, at: float, snapshot: Snapshot) -> None:
        """Record the initial state of the device."""
        self._links = snapshot.link_bytes_per_second, None
        self._requests.caches_prefixes = snapshot.device.prefix_cache
        for m in snapshot.models:
            self._requests.add_model(m.spec)
        self._append({"at": at, "snapshot": snapshot})

    def record_event(self, at: float, event: Event) -> None:
        """Record an event."""
        entry = {"at": at, **describe(event)}
        if self._sink is not None:
            entry["turn"] = self._turns
            if isinstance(event, ArrivalEvent):
                self._requests.add_arrival(entry, event.submission)
            elif isinstance(event, ImportKvEvent):
                self._requests.number(entry, event.wanted)
        self._last = entry
        self._append(entry)

    def record_join(self, joining: ModelEntry) -> None:
        """Add to the last event the model that joins the device by it."""
        if self._sink is not None:
            self._last["joining"] = joining
            self._requests.add_model(joining.spec)

    def record_lease(self, lease: Lease) -> None:
        """Add to the last event the lease that it has made."""
        self._last |= describe_lease(lease)

    def record_returned(self, at: float, home: int, dropped: int) -> None:
        """Record how many slabs on recalled pages were moved `home`, and how many were dropped."""
        self._append({"at": at, "vacated": {"home": home, "dropped": dropped}})

    def record_event_outputs(self, outputs: Sequence[Output]) -> None:
        """Add to the last event the requests that it has ended."""
        if self._sink is None:
            return
        refused = self._last.pop("open_already", False)
        if blocks := self._requests.filled_by(outputs):
            self._last["blocks"] = blocks
        if ended := self._requests.end(outputs, refused):
            self._last["ended"] = ended

    def record_decision_outputs(self, at: float, outputs: Sequence[Output]) -> None:
        """Record the requests that decisions have ended."""
        if self._sink is not None and (ended := self._requests.end(outputs)):
            self._append({"at": at, "ended": ended})

    def record_job(self, at: float, job: Job) -> None:
        """Record the start of a job."""
        if self._sink is None:
            return
        prefill, decode = [], []
        numbered = self._requests.open
        for w in job.work:
            number = numbered[w.request_id][0]
            if len(w.tokens) == 1 and w.sample is not None:
                decode.append(number)
            else:
                prefill.append((number, w.start, len(w.tokens), w.sample is not None))
        entry: StoryEntry = {"at": at, "job": job.id, "model": job.model}
        if job.parts is not None:
            entry |= {"lane": job.lane, "parts": job.parts}
        if prefill:
            entry["prefill"] = prefill
        if decode:
            entry["decode"] = decode
        self._append(entry)

    def record_leap(
        self,
        at: float,
        job: Job,
        steps: int,
        lasts: Sequence[tuple[float, float | None]],
        moved: Iterable[Request],
        jobs: Sequence[Job] = (),
    ) -> None:
        """Record a leap: `steps` decode-only jobs that ended without turns of their own, `job` and
        others like it, of the requests `moved`.

        `lasts`: for each model's last job, in order, the time of its end and its seconds without
        stalls. `jobs`: all jobs, if their order does not follow from that; `lasts` then has an
        entry for each.
        """
        entry = {"event": "Leap", "job": job.id, "model": job.model, "steps": steps}
        entry["decode_sequences"] = job.load.decode_sequences
        if self._sink is not None:
            ends, seconds = zip(*lasts, strict=True)
            entry |= {"turn": self._turns, "ends": ends, "seconds": seconds}
            if jobs:
                entry["jobs"] = [j.id for j in jobs]
                if job.parts is not None:
                    entry["parts"] = [j.parts for j in jobs]
            if blocks := self._requests.filled_in(moved):
                entry["blocks"] = blocks
        self._append({"at": at, **entry})

    def record_link_rates(self, at: float, host: float, peers: float | None) -> None:
        """Record the rates at which policies expect links to carry from now on, if they have
        changed; `peers`: None or inf where borrowed pages are read over no link of their own."""
        peers = None if peers == inf else peers
        if self._sink is not None and (host, peers) != self._links:
            self._links = host, peers
            entry: StoryEntry = {"at": at, "turn": self._turns, "link_bytes_per_second": host}
            if peers is not None:
                entry["peer_bytes_per_second"] = peers
            self._append(entry)

    def record_decision(
        self,
        at: float,
        action: Action | LoopCommand,
        refused: str | None,
        by: str | None = None,
        tag: str | None = None,
    ) -> None:
        """Record an action or command, with the reason if it was refused. `by`: its origin, if not
        the memory policy. `tag`: for readers, what it does; None: the tag of its type."""
        tag = tag or action_tag(type(action))
        entry = {"at": at, "action": tag, **describe_action(action)}
        if by is not None:
            entry["by"] = by
        if refused is not None:
            entry["refused"] = refused
        if self._sink is not None:
            entry = _with_text(entry)
        self._new_decisions.append(entry)
        self._append(entry)

    def record_promises(self, at: float, stated: Sequence[Promise]) -> None:
        """Record the promises that hold from now on."""
        self._append({"at": at, "promises": [dataclasses.asdict(p) for p in stated]})

    def record_stray(self, at: float, why: str) -> None:
        """Record an occurrence that no replay can repeat."""
        self._append({"at": at, "stray": why})

    def end_turn(self) -> None:
        """End a turn: pass its entries to the sink."""
        self._turns += 1
        if self._turn and self._sink is not None:
            self._sink(self._turn)
            self._turn = []

    def record_end(self, at: float, why: str, outputs: Sequence[Output]) -> None:
        """Record the regular end of the device, and the requests that it has ended."""
        entry: StoryEntry = {"at": at, "end": why}
        if self._sink is not None:
            entry["turn"] = self._turns
            if outputs:
                entry["ended"] = self._requests.end(outputs)
        self._append(entry)
        self.end_turn()

    def take_decisions(self) -> tuple[StoryEntry, ...]:
        """Return the decisions since the last call; the oldest may be missing. Call from one thread
        only, which need not be the loop's."""
        decisions = []
        with suppress(IndexError):
            while True:
                decisions.append(_with_text(self._new_decisions.popleft()))
        return tuple(decisions)

    def _append(self, entry: StoryEntry) -> None:
        self.entries.append(entry)
        if self._sink is not None:
            self._turn.append(entry)


def _with_text(entry: StoryEntry) -> StoryEntry:
    """Return a decision's entry with a reason that is plain text (`core.actions.Why`)."""
    why = entry.get("why")
    return {**entry, "why": str(why)} if isinstance(why, UserString) else entry
