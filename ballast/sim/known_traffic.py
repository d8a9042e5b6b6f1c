"""Traffic of a simulated model whose arrivals and lengths are known beforehand: oracle estimates.

Takes the place of `core.traffic.TrafficStats` in runs that separate the faults of a policy from
those of its estimates. Policies read it through the view like the learned one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ballast.core.traffic import TrafficStats
from ballast.engine.model import ModelState
from ballast.workload.workload import Workload

HORIZON = 10.0
"""Seconds ahead over which known arrivals are counted as a rate."""


@dataclass(frozen=True, slots=True)
class KnownTraffic(TrafficStats):
    """Traffic of one model whose future is known.

    `max_tokens` of simulated requests is the length of their answers.
    """

    coming: Sequence[float] = ()
    """Times of all arrivals of the run, ascending."""

    def restarted(self, now: float) -> TrafficStats:
        empty = TrafficStats.since(now)
        return KnownTraffic(empty.arrivals, coming=self.coming)

    def rate(self, now: float) -> float:
        return self._between(now, now + HORIZON) / HORIZON

    def chance(self, now: float, seconds: float) -> float:
        return float(self._between(now, now + seconds) > 0)

    def expecting(self, unended: int = 0) -> Callable[[int], int]:
        return lambda left: max(1, left)

    def _between(self, start: float, end: float) -> int:
        return bisect_right(self.coming, end) - bisect_right(self.coming, start)


def reveal(models: Iterable[ModelState], workload: Workload) -> None:
    """Let the models of a device, before its first turn, know the workload that is to come."""
    times: dict[str, list[float]] = {}
    for r in workload.requests:
        times.setdefault(r.model, []).append(r.at)
    for m in models:
        own = sorted(at for s in m.spec.served for at in times.get(s.name, ()))
        m.traffic = KnownTraffic(coming=tuple(own))
