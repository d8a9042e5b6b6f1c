"""Sample memory and queues of simulated devices on a grid of virtual time.

Used by `bench.cluster_run` and `bench.device_run`.
"""

from __future__ import annotations

from bisect import bisect_right
from math import ceil

from ballast.bench.sample import DeviceSample, MemorySample
from ballast.engine.report import report
from ballast.engine.state import DeviceState

SAMPLES = 240
"""Number of samples over the length of a workload."""


class SimulationSampler:
    """Samples each device at the first turn after each grid point, and whenever it falls idle."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: length of the workload."""
        self._every = max(seconds / SAMPLES, 0.1)
        self._samples: dict[str, list[tuple[float, DeviceSample]]] = {}
        """By device, in order of time."""

    def watch(self, device: str, now: float, state: DeviceState) -> None:
        """The state at `now`; a `ballast.sim.cluster.OnTurn`."""
        own = self._samples.setdefault(device, [])
        if not own or now >= own[-1][0] + self._every or not state.requests:
            own.append((now, DeviceSample.of(report(state, device))))

    def samples(self) -> tuple[MemorySample, ...]:
        """All devices at each grid point, and at the last sample of any: each as last sampled."""
        if not self._samples:
            return ()
        times = {device: [at for at, _ in own] for device, own in self._samples.items()}
        end = max(own[-1] for own in times.values())

        def all_at(at: float) -> MemorySample:
            latest = {
                device: own[max(0, bisect_right(times[device], at) - 1)][1]
                for device, own in self._samples.items()
            }
            return MemorySample(at, latest)

        grid = (n * self._every for n in range(ceil(end / self._every)))
        return tuple(all_at(at) for at in (*grid, end))
