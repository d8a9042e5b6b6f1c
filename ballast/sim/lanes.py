"""Simulate jobs that run together on several lanes: compute is divided, memory bandwidth is shared.

Used by `sim.runner`. The duration of a job alone on its part of a device is measured
(`measured_seconds`), or else estimated (`guessed`): the job alternates arithmetic and reading in
small portions (`StepCosts.split`), its arithmetic runs at its share of the device, and it reads at
up to `reach` times its share of the bandwidth. When jobs together would read more than the
bandwidth allows, the reading of each is slowed by the same factor. On an A100 (measured with 30 and
50 % of the multiprocessors: the rows in its profile) a decode step reaches 2 times its share
(`lane_reach` there), and a prefill takes 2.7 and 1.7 times as long, where the estimate is 3.3 and
2: on the whole device a prefill does not use all multiprocessors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from ballast.core.clock import Clock
from ballast.core.cost import StepCosts
from ballast.core.event import JobDoneEvent, JobResult
from ballast.core.job import Job, JobLoad
from ballast.sim.change_queue import Change, ScheduledChange
from ballast.sim.event_heap import EventHeap
from ballast.sim.layer_passes import Pass

_STEPS = 50
"""Most Newton steps to solve for the slowdown of reading; a few suffice."""


class Part(NamedTuple):
    """Seconds of a job on its part of a device."""

    seconds: float
    """Duration with no other job running; above 0."""
    reading: float
    """Part of `seconds` spent reading, which reading by other jobs prolongs."""
    memory: float
    """Seconds to read the same at full bandwidth."""


def guessed(share: float, compute: float, memory: float, reach: float) -> Part:
    """Estimate a job on `share` of a device, from its seconds of arithmetic and of reading on the
    whole device."""
    reading = memory / min(1.0, reach * share)
    return Part(compute / share + reading, reading, memory)


def measured(share: float, seconds: float, memory: float, reach: float) -> Part:
    """Build the part of a job from its measured seconds on `share` of a device; `memory` as of
    `guessed`."""
    return Part(seconds, min(seconds, memory / min(1.0, reach * share)), min(seconds, memory))


def measured_seconds(seen: Sequence[tuple[float, StepCosts]], load: JobLoad, share: float) -> float:
    """Interpolate a job's seconds on `share` of a device from costs on some shares, ascending.

    Between them it is linear in 1 / share, as for a job of which a part gains from more
    multiprocessors and a part does not (Amdahl); below the least share all of it is assumed to
    gain.
    """
    low, least = seen[0]
    if share <= low:
        return least.of(load) * low / share
    for (low, less), (high, more) in pairwise(seen):
        if share <= high:
            far = (1 / share - 1 / high) / (1 / low - 1 / high)
            return more.of(load) + far * (less.of(load) - more.of(load))
    return seen[-1][1].of(load)


def rates(jobs: Sequence[Part]) -> list[float]:
    """Return the progress per second, as a fraction of its work, of each job that runs together.

    Where jobs would read more than the bandwidth allows, the reading of each is slowed by one
    factor, chosen so that together they use all of it (Newton's method; the reading rate is convex
    and decreasing in that factor, so all steps go the same way).
    """
    longer = 0.0
    """Slowdown of reading against running alone, less 1."""
    found = [1.0 / job.seconds for job in jobs]
    for _ in range(_STEPS):
        read = slope = 0.0
        for job, rate in zip(jobs, found, strict=True):
            read += rate * job.memory
            slope += rate * job.memory * rate * job.reading
        if read <= 1.0 or longer + (read - 1.0) / slope <= longer:
            break
        longer += (read - 1.0) / slope
        found = [1.0 / (job.seconds + job.reading * longer) for job in jobs]
    return found


@dataclass(slots=True, eq=False)
class Running:
    """A job that runs beside others. Implements `sim.layer_passes.Pace`."""

    lanes: SimLanes
    job: Job
    results: tuple[JobResult, ...]
    part: Part
    began: float
    left: float = 1.0
    """Remaining fraction of the job's work."""
    rate: float = 0.0
    """Fraction of the job's work done per second."""
    goal: float = 0.0
    """Remaining fraction at which `then` is called."""
    then: Change | None = None
    """Called at the goal; None: the job ends there."""
    waits: float | None = None
    """Time since which the job waits for a layer; None: it computes."""
    stall: float = 0.0
    """Seconds that the job has waited."""
    carried: tuple[float, float] = (0.0, 0.0)
    entry: ScheduledChange | None = None
    """On the agenda: it comes to its goal."""
    event: int = 0
    """Its end, in the heap; 0: not there yet."""

    def reach(self, fraction: float, then: Change) -> None:
        self.goal, self.then = 1.0 - fraction, then
        self.lanes.renew(self)

    def pause(self, now: float) -> None:
        self.waits = now
        self.lanes.shift(now)

    def resume(self, now: float) -> None:
        assert self.waits is not None
        self.stall += now - self.waits
        self.waits = None
        self.lanes.shift(now)

    def finish(self, now: float) -> None:
        self.goal, self.then = 0.0, None
        self.lanes.renew(self, now)

    @property
    def scheduled(self) -> bool:
        """Whether the time at which the job reaches its goal is known."""
        return self.entry is not None or self.event != 0

    @property
    def computes(self) -> bool:
        """Whether the job uses part of the device: it neither waits nor has ended."""
        return self.waits is None and self.left > 0


class SimLanes:
    """Running jobs on several lanes; whenever one begins, waits, resumes or ends, the ends of the
    others are rescheduled."""

    def __init__(self, heap: EventHeap, clock: Clock, overhead: float) -> None:
        """`overhead`: seconds from a job's end to the event that ends it for the loop."""
        self._heap, self._clock, self._overhead = heap, clock, overhead
        self._running: list[Running] = []
        self._since = 0.0
        """When the rates last changed."""

    @property
    def layered(self) -> bool:
        """Whether any job passes through its layers one by one."""
        return any(one.entry is not None or one.waits is not None for one in self._running)

    def give_work(self, job: Job, results: tuple[JobResult, ...]) -> None:
        """The job of that number that runs is `job`, and brings `results`."""
        for one in self._running:
            if one.job.id == job.id:
                one.job, one.results = job, results

    def start(
        self,
        now: float,
        job: Job,
        part: Part,
        results: tuple[JobResult, ...],
        way: tuple[Callable[[Running], Pass], int, int] | None = None,
    ) -> None:
        """Begin a job at `now`.

        `way`: for a job that may wait for layers, the factory of its pass, and the tokens whose KV
        it reads and writes.
        """
        begun = Running(self, job, results, part, now)
        self._running.append(begun)
        self.shift(now)
        if way is not None:
            make, read, written = way
            make(begun).begin(now, read, written)

    def shift(self, now: float) -> None:
        """Divide the device anew from `now` on, after the set of computing jobs has changed."""
        self._pass_time(now)
        going = [one for one in self._running if one.computes]
        for one, rate in zip(going, rates([one.part for one in going]), strict=True):
            if rate != one.rate or not one.scheduled:
                one.rate = rate
                self.renew(one)
        for one in self._running:
            if one.waits is not None:
                one.rate = 0.0
                self._forget(one)

    def renew(self, one: Running, now: float | None = None) -> None:
        """Schedule anew when a job comes to its goal; `now`: None if time has passed until now."""
        if now is not None:
            self._pass_time(now)
        self._forget(one)
        left = one.left - one.goal
        at = self._since + (left / one.rate if left else 0.0)
        if one.then is not None:
            one.entry = self._heap.agenda.schedule(at, partial(self._reached, one))
            return
        seconds = at - one.began
        done = JobDoneEvent(one.job, one.results, seconds, one.stall, one.carried)
        one.event = self._heap.schedule(at + self._overhead, done, partial(self._ended, one))

    def _forget(self, one: Running) -> None:
        if one.entry is not None:
            self._heap.agenda.drop(one.entry)
        if one.event:
            self._heap.forget(one.event)
        one.entry, one.event = None, 0

    def _reached(self, one: Running, now: float) -> None:
        self._pass_time(now)
        one.entry, one.left = None, one.goal
        assert one.then is not None
        one.then(now)

    def _ended(self, one: Running) -> None:
        self._running.remove(one)
        self.shift(self._clock.now())

    def _pass_time(self, now: float) -> None:
        for one in self._running:
            one.left = max(one.goal, one.left - (now - self._since) * one.rate)
        self._since = now
