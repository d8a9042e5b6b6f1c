"""One run of `mirage_sim`: a setting served in virtual time, and what its clients saw."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ballast.bench.record import submission_for
from ballast.core.cost import activation_bytes
from ballast.core.event import FinishedOutput, Output, TokenOutput
from ballast.core.request import Submission
from ballast.core.settings import FleetSettings
from ballast.core.units import MiB, ceil_div
from ballast.engine.state import DeviceState
from ballast.sim.simulate import simulate
from ballast.weights.weight_stream import Loads
from ballast.workload.workload import Workload
from benchmarks.mirage_setting import SERVED, Device, Setting, page_by_default, specs_of

SEQUENCES = 256
"""Most that a model runs together, as in vLLM 0.7.3."""
BEFORE = 10.0
"""Seconds before the first arrival, in which weights come over a link however slow."""


class Enough(Exception):
    """A run was stopped: it has preempted as many requests as were asked for."""


@dataclass(frozen=True, slots=True)
class Remapped:
    """Layers that were lent, and KV blocks on the host, all models of a device together."""

    weights: float = 0.0
    """Layers lent, times seconds."""
    kv: float = 0.0
    """KV blocks on the host, times seconds."""
    most: int = 0
    """Most layers lent at a time."""
    changes: int = 0
    """Changes of the number of layers lent."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What clients saw of one run, or of several side by side."""

    arrived: tuple[float, ...]
    """When each answered request arrived, in seconds."""
    times: tuple[NDArray[np.float64], ...]
    """When the client got each of its tokens."""
    requests: int
    preemptions: int
    loads: Loads
    """Loads of layers that rotate, all models together."""
    remapped: Remapped = Remapped()

    @classmethod
    def beside(cls, runs: Iterable[Measured]) -> Measured:
        """Runs of devices side by side as one."""
        each = list(runs)
        return cls(
            arrived=tuple(at for m in each for at in m.arrived),
            times=tuple(at for m in each for at in m.times),
            requests=sum(m.requests for m in each),
            preemptions=sum(m.preemptions for m in each),
            loads=_sum(m.loads for m in each),
            remapped=Remapped(
                sum(m.remapped.weights for m in each),
                sum(m.remapped.kv for m in each),
                sum(m.remapped.most for m in each),
                sum(m.remapped.changes for m in each),
            ),
        )

    def summary(self) -> dict[str, float]:
        """Seconds, tokens per second, bytes per second.

        `tbt`: gaps between any two tokens of a request; `tpot`: a request's mean gap; `throughput`:
        output tokens until the last answer; `frame_throughput`: while requests come, until the last
        arrival; `drain`: from that to the last answer. `copying`, `stalled`: parts of the time in
        which layers were copied, and jobs waited for them; `lent_layers`, `swapped_blocks`: on
        average over the time.
        """
        first, last = min(self.arrived), max(self.arrived)
        every = np.concatenate(self.times)
        end = float(every.max())
        seconds = end - first
        ttft = [at[0] - arrived for arrived, at in zip(self.arrived, self.times, strict=True)]
        tbt = np.concatenate([np.diff(at) for at in self.times])
        tpot = [(at[-1] - at[0]) / (len(at) - 1) for at in self.times if len(at) > 1]
        latencies = {"ttft": ttft, "tbt": tbt, "tpot": tpot}
        percentiles = {
            f"p{p}_{metric}": float(np.percentile(np.array(values), p))
            for metric, values in latencies.items()
            for p in (50, 99)
        }
        return {
            "throughput": len(every) / seconds,
            "frame_throughput": int((every <= last).sum()) / (last - first),
            "drain": end - last,
            **percentiles,
            "mean_tbt": float(tbt.mean()),
            "seconds": seconds,
            "requests": self.requests,
            "answered": len(self.times),
            "preemptions": self.preemptions,
            "loaded_bytes_per_second": self.loads.n_bytes / seconds,
            "copying": self.loads.copy_seconds / seconds,
            "stalled": self.loads.stall_seconds / seconds,
            "lent_layers": self.remapped.weights / seconds,
            "most_lent": self.remapped.most,
            "remaps": self.remapped.changes,
            "swapped_blocks": self.remapped.kv / seconds,
        }


@dataclass
class Watch:
    """Follows a device's state: layers lent over time, and preemptions up to a limit."""

    enough: float
    """Preemptions at which the run is stopped, by raising `Enough`."""
    remapped: Remapped = field(default_factory=Remapped)
    _at: float = 0.0
    _lent: int = 0
    _swapped: int = 0

    def __call__(self, now: float, state: DeviceState) -> None:
        seconds, before = now - self._at, self.remapped
        models = state.models.values()
        lent = sum(m.rotation.n_freed for m in models)
        self.remapped = Remapped(
            before.weights + self._lent * seconds,
            before.kv + self._swapped * seconds,
            max(before.most, lent),
            before.changes + (lent != self._lent),
        )
        self._at, self._lent = now, lent
        self._swapped = sum(len(m.kv.staged) for m in models)
        if sum(m.preemptions for m in models) >= self.enough:
            raise Enough


def run(
    setting: Setting,
    workload: Workload,
    preset: str,
    options: Mapping[str, float],
    device: Device,
    enough: float = float("inf"),
) -> Measured:
    """Serve `workload` in virtual time. Raises `Enough` at so many preemptions on one device."""
    arrivals = [submission_for(r, (0,) * r.prompt_tokens) for r in workload.requests]
    if not setting.apart:
        return _run(setting, arrivals, preset, options, device, enough)
    return Measured.beside(
        _run(
            replace(setting, fractions={name: 1.0}),
            [r for r in arrivals if r.model == name],
            preset,
            options,
            device.sliced(part),
            enough,
        )
        for name, part in setting.fractions.items()
    )


def _run(
    setting: Setting,
    arrivals: Sequence[Submission],
    preset: str,
    options: Mapping[str, float],
    device: Device,
    enough: float,
) -> Measured:
    settings = replace(SERVED, step_logits=SEQUENCES)
    fitting = None
    if setting.page is not None:
        settings = replace(settings, page_bytes=setting.page * MiB)
    else:
        fitting = page_by_default(setting.fractions, device.memory)
        settings = replace(settings, page_bytes=fitting)
    specs = specs_of(setting.fractions, device.memory, SEQUENCES, fitting)
    activations = max(
        activation_bytes(s, settings.step_tokens, settings.step_logits) for s in specs
    )
    # A fraction holds weights and KV; activations lie in what no fraction takes.
    pages = ceil_div(int(sum(setting.fractions.values()) * device.memory), settings.page_bytes)
    pages += ceil_div(activations, settings.page_bytes)
    fleet = FleetSettings(
        models=(),
        device=replace(settings, budget_bytes=pages * settings.page_bytes),
        preset=preset,
        options=dict(options),
    )
    profile = replace(
        device.profile.of(specs),
        costs={s.name: device.costs(s.name) for s in specs},
        link=device.rates,
    )
    arrived = {s.id: s.arrival for s in arrivals}
    later = [replace(s, arrival=BEFORE + s.arrival) for s in arrivals]
    times: dict[str, list[float]] = {s.id: [] for s in arrivals}
    finished: dict[str, FinishedOutput] = {}

    def receive(now: float, output: Output) -> None:
        match output:
            case TokenOutput(request_id=id):
                times[id].append(now - BEFORE)
            case FinishedOutput(request_id=id):
                finished[id] = output

    watch = Watch(enough)
    ended = simulate(fleet, specs, later, profile, receive, observe=watch)
    return Measured(
        arrived=tuple(arrived[id] for id in finished),
        times=tuple(np.array(times[id]) for id in finished),
        requests=len(arrivals),
        preemptions=sum(f.preemptions for f in finished.values()),
        loads=_sum(m.weights.stream.loads for m in ended.state.models.values() if m.weights.stream),
        remapped=watch.remapped,
    )


def _sum(each: Iterable[Loads]) -> Loads:
    total = Loads()
    for loads in each:
        total.n += loads.n
        total.n_bytes += loads.n_bytes
        total.copy_seconds += loads.copy_seconds
        total.stall_seconds += loads.stall_seconds
    return total
