"""Rebuild a run's report from its story file: requests, jobs and decisions.

Used by `ballast story`; nothing is run or replayed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from ballast.bench.record import RequestRecord
from ballast.bench.report import Report
from ballast.core.entries import ModelEntry, StoryEntry
from ballast.core.errors import ConfigError
from ballast.core.model import ModelSpec
from ballast.core.settings import Slo
from ballast.sim.story_reader import DeviceStory


@dataclass(slots=True)
class Jobs:
    """Count and time of the jobs of one kind."""

    number: int = 0
    seconds: float = 0.0
    """On the lane, of all together."""

    @property
    def mean(self) -> float | None:
        return self.seconds / self.number if self.number else None

    def add(self, number: int, seconds: float) -> None:
        self.number += number
        self.seconds += seconds


@dataclass(frozen=True, slots=True)
class StoryReport:
    """Report of a run from its story file, on any number of devices."""

    report: Report
    """From the first arrival to the last answer. A token counts from the turn in which the engine
    heard of its job's end."""
    prefills: Jobs
    """Jobs with a prefill."""
    decodes: Jobs
    """Jobs of decodes alone."""
    decisions: tuple[StoryEntry, ...]
    """Those that were done, in order of time, each `at` seconds from the first arrival."""
    busy: float
    """Share of the devices' compute that jobs had."""

    @property
    def counts(self) -> dict[str, int]:
        """Counts of decisions by action; 0 where there were none."""
        return dict(Counter(entry["action"] for entry in self.decisions))


def report_story(lives: Sequence[DeviceStory], name: str) -> StoryReport:
    """Raises ConfigError for a story without an answer."""
    reader = _Reader()
    for life in lives:
        reader.read(life)
    began = min((request.at for request in reader.asked), default=0.0)
    ends = [request.ended for request in reader.asked if request.ended is not None]
    if not ends or max(ends) <= began:
        raise ConfigError("story", name, "it must have answers to compare")
    span = max(ends) - began
    records = [request.record(i, began) for i, request in enumerate(reader.asked)]
    report = Report.of(records, reader.slos, span, name=name)
    decisions = sorted(reader.decisions, key=lambda entry: entry["at"])
    devices = len({life.device for life in lives})
    return StoryReport(
        report,
        reader.prefills,
        reader.decodes,
        tuple({**entry, "at": entry["at"] - began} for entry in decisions),
        reader.seconds / (devices * span),
    )


@dataclass(slots=True)
class _Asked:
    """A request; times are Unix ones, or virtual."""

    model: str
    at: float
    prompt_tokens: int
    first: float | None = None
    last: float | None = None
    ended: float | None = None
    end: StoryEntry | None = None

    def record(self, id: int, began: float) -> RequestRecord:
        how = self.end or {"failed": "not answered by the end of the story"}
        first, last = self.first, self.last
        if "finished" in how and first is None:
            first = self.ended  # it generates nothing: its end is its first word
        times = () if first is None or last is None else (first - began, last - began)
        return RequestRecord(
            id=id,
            model=self.model,
            at=self.at - began,
            sent=self.at - began,
            first_token=None if first is None else first - began,
            end=None if self.ended is None else self.ended - began,
            prompt_tokens=self.prompt_tokens,
            output_tokens=how.get("output_tokens", 0),
            token_times=times,
            cached_tokens=how.get("cached_tokens", 0),
            preemptions=how.get("preemptions", 0),
            error=how.get("failed"),
        )


class _Reader:
    """Reads the lives of a file, one after the other."""

    def __init__(self) -> None:
        self.asked: list[_Asked] = []
        self.slos: dict[str, Slo] = {}
        self.decisions: list[StoryEntry] = []
        self.prefills, self.decodes = Jobs(), Jobs()
        self.seconds = 0.0
        """Device seconds of all jobs, each scaled to a whole device."""
        self._open: dict[str, _Asked] = {}
        """Unanswered requests by id: a worker that replaces another continues them."""

    def read(self, life: DeviceStory) -> None:
        """One more."""
        snapshot = life.snapshot
        for m in snapshot.models:
            self._serves(m.spec)
        numbers: dict[int, _Asked] = {}
        jobs: dict[int, StoryEntry] = {}
        """Story entries of the jobs in flight, by id, as recorded when each began."""
        for entry in life.entries:
            at = snapshot.began + entry.get("at", life.at)
            event = entry.get("event")
            if event == "Arrival":
                numbers[entry["n"]] = self._arrives(snapshot.began, entry)
            elif event == "JobDone":
                job = jobs.pop(entry["job"])
                for request in (numbers[n] for n in sampling_requests(job)):
                    request.first, request.last = request.first or at, at
                kind = self.prefills if entry["prefill_tokens"] else self.decodes
                kind.add(1, entry["seconds"])
                parts = snapshot.device.parts
                self.seconds += entry["seconds"] * job.get("parts", parts) / parts
            elif event == "Leap" and "jobs" in entry:
                for id in entry["jobs"]:
                    jobs.pop(id, None)  # some have begun within it
                parts, took = snapshot.device.parts, entry["seconds"]
                self.decodes.add(entry["steps"], sum(took))
                shares = (n / parts for n in entry.get("parts", [parts] * len(took)))
                self.seconds += sum(a * b for a, b in zip(took, shares, strict=True))
            elif event == "Leap":
                begun = snapshot.began + jobs.pop(entry["job"])["at"]
                seconds = at - begun - entry["steps"] * (snapshot.overhead or 0.0)
                self.decodes.add(entry["steps"], seconds)
                self.seconds += seconds
            elif "joining" in entry:
                self._serves(msgspec.convert(entry["joining"], ModelEntry).spec)
            elif event == "JobFailed":
                jobs.pop(entry["job"], None)
            elif "job" in entry:
                jobs[entry["job"]] = entry
            elif "action" in entry and "refused" not in entry:
                self.decisions.append({**entry, "at": at, "device": life.device})
            for end in entry.get("ended", ()):
                if "n" in end:
                    request = numbers[end["n"]]
                    self._open.pop(end["request"], None)
                else:  # the second of its name, refused
                    request = numbers[entry["n"]]
                request.ended, request.end = at, end

    def _serves(self, spec: ModelSpec) -> None:
        for served in spec.served:
            self.slos.setdefault(served.name, served.slo)

    def _arrives(self, began: float, entry: StoryEntry) -> _Asked:
        name = entry["request"]
        if "resumed" in entry and name in self._open:
            return self._open[name]
        request = _Asked(entry["model"], began + entry["arrival"], entry["prompt_tokens"])
        self.slos.setdefault(request.model, Slo())  # one that is not served
        self.asked.append(request)
        self._open.setdefault(name, request)
        return request


def sampling_requests(job: StoryEntry) -> Iterator[int]:
    """Numbers of the requests that get a token from a job."""
    yield from job.get("decode", ())
    yield from (n for n, _, _, samples in job.get("prefill", ()) if samples)
