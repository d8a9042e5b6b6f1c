"""Who holds the memory of many devices, sampled while a simulation runs."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from math import ceil

from ballast.bench.record import MemorySample
from ballast.engine.report import report
from ballast.engine.state import DeviceState

SAMPLES = 120
"""Over the length of a workload."""


class Gauge:
    """Samples each device at the first turn after each grid point, and whenever it falls idle."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: length of the workload."""
        self._every = max(seconds / SAMPLES, 0.1)
        self._taken: dict[str, list[MemorySample]] = {}

    def watch(self, device: str, now: float, state: DeviceState) -> None:
        """The state at `now`; a `ballast.sim.cluster.Watch`."""
        taken = self._taken.setdefault(device, [])
        if not taken or now >= taken[-1].at + self._every or not state.requests:
            taken.append(MemorySample(now, _bytes_by_use(state)))

    def samples(self) -> tuple[MemorySample, ...]:
        """All devices together, on the grid, and at the last sample of any."""
        if not self._taken:
            return ()
        end = max(taken[-1].at for taken in self._taken.values())
        times = {d: [s.at for s in taken] for d, taken in self._taken.items()}
        merged = []
        for at in (*(n * self._every for n in range(ceil(end / self._every))), end):
            owners: Counter[str] = Counter()
            for device, taken in self._taken.items():
                owners.update(taken[max(0, bisect_right(times[device], at) - 1)].owners)
            merged.append(MemorySample(at, dict(owners)))
        return tuple(merged)


def _bytes_by_use(state: DeviceState) -> dict[str, int]:
    """`kv` is what running requests need; `cached` are prefixes that may be dropped at any time."""
    told = report(state, state.settings.name)
    cached = sum(m.cached_pages for m in told.models)
    pages = Counter({"activations": 0, "weights": 0, "kv": -cached, "cached": cached})
    for owner, n in told.owners.items():
        kind = owner.partition(":")[0]
        pages[_USES.get(kind, kind)] += n
    pages["free"] = told.free + told.reclaiming
    return {use: n * told.page_bytes for use, n in pages.items()}


_USES = {"arena": "activations", "shared": "weights", "slots": "weights"}
