"""Jobs of several lanes in virtual time: each has part of the compute, and all share the memory.

A job is arithmetic and reading, one after the other in small portions (`StepCosts.split`). Its
arithmetic goes as fast as its share of the device; it reads with up to `reach` times its share of
the bandwidth, and when all together would read more than there is, each of them as much more
slowly. On an A100 (measured with 30 and 50 % of the multiprocessors: the rows in its profile) a
decode step reaches 2 times its share (`lane_reach` there), and a prefill takes 2.7 and 1.7 times as
long, where this says 3.3 and 2: on the whole device it does not use all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ballast.core.clock import Clock
from ballast.core.event import JobDone, Result
from ballast.core.job import Job
from ballast.sim.heap import EventHeap

_STEPS = 50
"""Halvings that find how much more slowly all read."""


@dataclass(slots=True, eq=False)
class _Running:
    job: Job
    results: tuple[Result, ...]
    share: float
    compute: float
    """Seconds on the whole device."""
    memory: float
    """Seconds at all of the bandwidth."""
    stall: float
    """Seconds that it waits for layers, as if after its work."""
    began: float
    left: float = 1.0
    """Of its work."""
    rate: float = 0.0
    """Of its work, per second."""
    event: int = 0
    """Its end, in the heap; 0: not there yet."""


def rates(jobs: Sequence[tuple[float, float, float]], reach: float) -> list[float]:
    """Of jobs that run together, (share, compute, memory): the part of itself that each does in a
    second. `compute` and `memory` in seconds, alone on the whole device; of one job, their sum is
    above 0."""

    def at(slower: float) -> list[float]:
        return [1.0 / (c / s + m / (slower * min(1.0, reach * s))) for s, c, m in jobs]

    def read(slower: float) -> float:
        return sum(rate * m for rate, (_, _, m) in zip(at(slower), jobs, strict=True))

    if read(1.0) <= 1.0:
        return at(1.0)
    low, high = 0.0, 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if read(middle) <= 1.0 else (low, middle)
    return at(low or high)


class SimLanes:
    """The jobs that run; whenever one begins or ends, all others' ends move."""

    def __init__(self, heap: EventHeap, clock: Clock, reach: float, overhead: float) -> None:
        """`overhead`: seconds from a job's end to when the loop hears of it."""
        self._heap, self._clock, self._reach, self._overhead = heap, clock, reach, overhead
        self._running: list[_Running] = []
        self._since = 0.0
        """When the rates last changed."""

    def alone(self, share: float, compute: float, memory: float) -> float:
        """Seconds of a job beside which nothing runs."""
        return 1.0 / rates([(share, compute, memory)], self._reach)[0]

    def start(
        self,
        job: Job,
        share: float,
        compute: float,
        memory: float,
        results: tuple[Result, ...],
        stall: float = 0.0,
    ) -> None:
        """Begin a job that takes so many seconds alone on the whole device, and waits so many."""
        self._pass_time()
        begun = _Running(job, results, share, compute, memory, stall, self._clock.now())
        self._running.append(begun)
        self._renew()

    def _ended(self, ended: _Running) -> None:
        self._pass_time()
        self._running.remove(ended)
        self._renew()

    def _pass_time(self) -> None:
        now = self._clock.now()
        for one in self._running:
            one.left = max(0.0, one.left - (now - self._since) * one.rate)
        self._since = now

    def _renew(self) -> None:
        """Say anew when each will end. One that waits to be heard of has ended, and stays so."""
        now = self._clock.now()
        going = [one for one in self._running if one.left > 0]
        told = rates([(one.share, one.compute, one.memory) for one in going], self._reach)
        for one, rate in zip(going, told, strict=True):
            if one.event and rate == one.rate:
                continue
            if one.event:
                self._heap.forget(one.event)
            one.rate = rate
            end = now + one.left / rate + one.stall
            done = JobDone(one.job, one.results, end - one.began, one.stall)
            one.event = self._heap.schedule(
                end + self._overhead,
                done,
                lambda one=one: self._ended(one),  # type: ignore[misc]
            )
