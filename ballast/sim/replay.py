"""Replay a recorded story and compare each entry with the recorded one.

The recorded events are fed to the loop and policies. Memory is `vm_null`; a job, a transfer and a
turn end when the story says. The entries recorded anew must equal the recorded ones, in order.
Used by `ballast story` through `bench.story_tables`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from ballast.core.clock import VirtualClock
from ballast.core.entries import StoryEntry
from ballast.core.errors import BrokenPromise
from ballast.core.event import Event
from ballast.core.link import Direction
from ballast.core.story import Story
from ballast.engine.build import build_state
from ballast.engine.loop import Loop
from ballast.engine.state import DeviceState
from ballast.memory.copies import Copy
from ballast.memory.transfer import ACTIVATIONS
from ballast.memory.vm_null import NullVm
from ballast.policy.presets import resolve
from ballast.sim.abbreviations import as_recorded
from ballast.sim.no_bytes import copy_nothing, hosted_nowhere
from ballast.sim.story_events import Impossible, StoryEvents, StoryLanes, StoryStream, Unknown
from ballast.sim.story_reader import DeviceStory

CONTEXT = 6
"""Entries shown before a difference."""
_PRIVATE = ("blocks", "salt", "tenant", "turn", "page_numbers")
"""Fields that may differ: because of tokens, of turns that a leap passed over, or of free pages
with memory when a device lent some."""
_REASONS = ("why", "refused")
"""Text for readers, of which only the presence of a refusal decides anything."""


@dataclass(frozen=True, slots=True)
class StoryDifference:
    """The first difference between a story and its replay."""

    index: int
    """Index of the entry within the run; the number of entries where the story ends."""
    recorded: StoryEntry | None
    """None: nothing more is recorded of this turn."""
    replayed: StoryEntry | None
    before: list[StoryEntry]
    """Recorded entries before the difference."""
    why: str = ""
    """Further explanation, if any."""


@dataclass(frozen=True, slots=True)
class StoryReplay:
    """Result of a replay."""

    events: int
    decisions: int
    jobs: int
    difference: StoryDifference | None
    stray: str | None
    """Why the story could not be followed to its end, if so."""


class _Link:
    """Link of a replay: implements `Link`; transfers end at the recorded events."""

    def __init__(self, bytes_per_second: float, paced: bool) -> None:
        self.bytes_per_second, self.paced = bytes_per_second, paced

    def start(
        self,
        transfer_id: int,
        copies: Sequence[Copy],
        stream: str = ACTIVATIONS,
        direction: Direction = Direction.TO_DEVICE,
    ) -> None:
        """Do nothing: there is nothing to copy."""

    def stop(self, transfer_id: int) -> None:
        """Do nothing: the end that was recorded follows."""

    def close(self) -> None:
        """Do nothing: there is nothing to end."""


class _Script:
    """An inbox: the events of the next turn, which is all there is to take."""

    def __init__(self) -> None:
        self.next: list[Event] = []

    def take(self, until: float | None) -> list[Event]:
        taken, self.next = self.next, []
        return taken


def replay(
    life: DeviceStory,
    *,
    reasons: bool = True,
    observe: Callable[[float, DeviceState], None] = lambda now, state: None,
) -> StoryReplay:
    """Replay a recorded run of a device as far as possible.

    Without `reasons` the wording of reasons and refusals may differ. `observe` is called with the
    time and the state when a turn, or a leap, has ended.
    """
    return _Replay(life, reasons, observe).run()


class _Replay:
    def __init__(
        self, life: DeviceStory, reasons: bool, observe: Callable[[float, DeviceState], None]
    ) -> None:
        self._reasons, self._observe = reasons, observe
        self._entries = life.entries
        self._over = life.over
        snapshot = life.snapshot
        self._clock = VirtualClock(life.at)
        self._lanes, self._script = StoryLanes(), _Script()
        self._link = _Link(snapshot.link_bytes_per_second, not snapshot.near_host)
        self._replayed: list[StoryEntry] = []
        """By the turn that was replayed last."""
        vm = NullVm(
            snapshot.device.page_bytes, snapshot.device.budget_bytes // snapshot.device.page_bytes
        )
        hosted = [hosted_nowhere(m.spec) for m in snapshot.models]
        costs = {m.spec.name: m.costs for m in snapshot.models if not m.learned}
        preset = resolve(snapshot.preset, snapshot.options, snapshot.order)
        state = build_state(
            snapshot.device,
            hosted,
            vm,
            self._link,
            self._clock,
            copy_nothing,
            costs,
            StoryStream if snapshot.rotates or preset.requires.kv_staging else None,
            stages_kv=preset.requires.kv_staging,
        )
        self._loop = Loop(
            state,
            preset,
            self._script,
            self._lanes,
            self._clock,
            lambda outputs: None,
            Story(0, self._replayed.extend, began=snapshot.began, overhead=snapshot.overhead),
        )
        self._made = StoryEvents(life, self._lanes, self._loop)
        self._at = 0
        """Index of the entry being replayed."""
        self._events = self._decisions = self._jobs = 0

    def run(self) -> StoryReplay:
        difference = stray = None
        for number, turn in enumerate(_turns(self._entries)):
            stray = next((e["stray"] for e in self._of(turn) if "stray" in e), None)
            if stray is not None:
                break
            self._at = turn.start
            try:
                difference = self._turn(turn) if number else self._begin(turn)
            except Unknown as unknown:
                stray = str(unknown)
            except (Impossible, BrokenPromise) as fault:
                recorded = self._entries[self._at]
                difference = self._difference(self._at, recorded, None, str(fault))
            if difference is not None or stray is not None:
                break
        return StoryReplay(self._events, self._decisions, self._jobs, difference, stray)

    def _begin(self, turn: range) -> StoryDifference | None:
        self._loop.begin()
        del self._replayed[0]  # the snapshot
        return self._compare(turn)

    def _of(self, turn: range) -> list[StoryEntry]:
        return self._entries[turn.start : turn.stop]

    def _turn(self, turn: range) -> StoryDifference | None:
        """Replay one turn, and compare its entries."""
        first = self._entries[turn.start]
        if "end" in first:
            self._loop.end()
            return self._compare(turn)
        if first.get("event") == "Leap":
            return self._leap(first, turn)
        self._clock.advance_to(first["at"])
        for self._at in turn:
            entry = self._entries[self._at]
            if "link_bytes_per_second" in entry:
                self._link.bytes_per_second = entry["link_bytes_per_second"]
                peers = entry.get("peer_bytes_per_second")
                self._loop.state.lending.bytes_per_second = peers
            elif "event" in entry:
                self._events += 1
                if entry["event"] != "Timer":  # the loop finds out for itself
                    self._script.next.append(self._made.of(entry))
        self._loop.turn()
        return self._compare(turn)

    def _leap(self, leap: StoryEntry, turn: range) -> StoryDifference | None:
        """Take its steps one by one. When most of them ended, and how long they took, was not
        recorded, and nothing depends on it: they are spread evenly."""
        if "jobs" in leap:
            return self._leap_on_lanes(leap, turn)
        job = self._made.ended_job(leap)
        steps, ends = leap["steps"], leap["ends"]
        seconds = leap.get("seconds") or [0.0] * len(ends)
        begun, free = self._clock.now(), steps - len(ends)
        pitch = (ends[0] - begun) / (free + 1)
        times = [*(begun + pitch * (i + 1) for i in range(free)), *ends]
        for at, took in zip(times, [*[0.0] * free, *seconds], strict=True):
            self._clock.advance_to(at)
            self._script.next.append(self._made.job_done(job, took, {}))
            self._replayed.clear()
            self._loop.turn()
            decided = [e for e in self._replayed if "event" not in e and "job" not in e]
            flying = self._lanes.jobs
            if decided or len(flying) != 1:
                said = decided[0] if decided else None
                return self._difference(turn.start, leap, said, "a leap only decodes")
            _, job = flying.popitem()
        self._lanes.start(job)
        self._events += steps
        self._jobs += steps - 1
        self._replayed[:-1] = [leap]
        return self._compare(turn)

    def _leap_on_lanes(self, leap: StoryEntry, turn: range) -> StoryDifference | None:
        """Take its steps one by one; of each it is recorded when it ended, and how long it took."""
        begun: list[StoryEntry] = []
        for id, at, took in zip(leap["jobs"], leap["ends"], leap["seconds"], strict=True):
            flying = self._lanes.jobs.get(id)
            model = leap["model"] if flying is None else flying.model
            job = self._made.ended_job({"job": id, "model": model})
            self._clock.advance_to(at)
            self._script.next.append(self._made.job_done(job, took, {}))
            self._replayed.clear()
            self._loop.turn()
            decided = [e for e in self._replayed if "event" not in e and "job" not in e]
            if decided:
                return self._difference(turn.start, leap, decided[0], "a leap only decodes")
            begun += [e for e in self._replayed if "event" not in e]
        self._events += leap["steps"]
        self._jobs += len(begun)
        self._replayed[:] = [leap, *(e for e in begun if e["job"] in self._lanes.jobs)]
        self._jobs -= len(self._replayed) - 1  # which are counted with what is compared
        return self._compare(turn)

    def _compare(self, turn: range) -> StoryDifference | None:
        """Compare the entries that the turn recorded anew with the recorded ones."""
        self._observe(self._clock.now(), self._loop.state)
        again = [_plain(entry) for entry in self._replayed]
        self._replayed.clear()
        self._count(again)
        recorded = [{k: v for k, v in e.items() if k not in _PRIVATE} for e in self._of(turn)]
        again = [as_recorded(a, b) for a, b in zip(recorded, again, strict=False)] + again[
            len(recorded) :
        ]
        for i, (a, b) in enumerate(itertools.zip_longest(recorded, again)):
            cut_off = a is None and turn.stop == len(self._entries) and not self._over
            same = a == b if self._reasons else _without_reasons(a) == _without_reasons(b)
            if not same and not cut_off:
                return self._difference(turn.start + i, a, b)
        return None

    def _count(self, again: Sequence[StoryEntry]) -> None:
        self._decisions += sum("action" in entry for entry in again)
        self._jobs += sum("event" not in entry and "job" in entry for entry in again)

    def _difference(
        self, at: int, recorded: StoryEntry | None, replayed: StoryEntry | None, why: str = ""
    ) -> StoryDifference:
        before = self._entries[max(0, at - CONTEXT) : at]
        return StoryDifference(at, recorded, replayed, before, why)


def _turns(entries: Sequence[StoryEntry]) -> Iterator[range]:
    """Indices of each turn's entries, those of the beginning first."""
    start, turn = 0, None
    for i, entry in enumerate(entries):
        now = entry.get("turn", turn)
        if now != turn:
            yield range(start, i)
            start, turn = i, now
    yield range(start, len(entries))


def _without_reasons(entry: StoryEntry | None) -> StoryEntry | None:
    """The entry without wording; whether an action was refused stays."""
    if entry is None:
        return None
    plain = {k: v for k, v in entry.items() if k not in _REASONS}
    return plain | {"refused": True} if "refused" in entry else plain


def _plain(entry: StoryEntry) -> StoryEntry:
    """Return an entry as read from a file, without the fields that may differ."""
    public = {k: v for k, v in entry.items() if k not in _PRIVATE}
    plain: StoryEntry = msgspec.json.decode(msgspec.json.encode(public))
    return plain
