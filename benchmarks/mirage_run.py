"""One run of `mirage_sim`: a setting served in virtual time, and what its clients saw."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ballast.bench.record import submission_for
from ballast.core.cost import activation_bytes
from ballast.core.event import Finished, Output, TokenOut
from ballast.core.request import Submission
from ballast.core.settings import FleetSettings
from ballast.core.units import ceil_div
from ballast.sim.device import Profile
from ballast.sim.simulate import simulate
from ballast.weights.rotor import Loads
from ballast.workload.workload import Workload
from benchmarks.mirage_setting import SERVED, Device, Setting, specs_of

BEFORE = 10.0
"""Seconds before the first arrival, in which weights come over a link however slow."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What clients saw of one run, or of several side by side."""

    arrived: tuple[float, ...]
    """By answered request."""
    told: tuple[NDArray[np.float64], ...]
    """When each of its tokens was told."""
    requests: int
    preemptions: int
    loads: Loads
    """Of layers that rotate, all models together."""

    @classmethod
    def beside(cls, runs: Iterable[Measured]) -> Measured:
        """Of devices side by side."""
        each = list(runs)
        return cls(
            arrived=tuple(at for m in each for at in m.arrived),
            told=tuple(at for m in each for at in m.told),
            requests=sum(m.requests for m in each),
            preemptions=sum(m.preemptions for m in each),
            loads=_sum(m.loads for m in each),
        )

    def summary(self, since: float = 0.0) -> dict[str, float]:
        """Seconds, tokens per second, bytes per second; latencies are those heard after `since`.

        `tbt`: gaps between any two tokens of a request; `tpot`: a request's mean gap; `throughput`:
        output tokens until the last answer; `frame_throughput`: until the last arrival; `copying`,
        `stalled`: parts of the time in which layers were copied, and jobs waited for them.
        """
        first, last = min(self.arrived), max(self.arrived)
        every = np.concatenate(self.told)
        seconds = float(every.max()) - first
        late = [
            (arrived, at[at >= since])
            for arrived, at in zip(self.arrived, self.told, strict=True)
            if at[0] >= since
        ]
        tbt = np.concatenate([np.diff(at[at >= since]) for at in self.told])
        tpot = [(at[-1] - at[0]) / (len(at) - 1) for _, at in late if len(at) > 1]
        told = {"ttft": [at[0] - arrived for arrived, at in late], "tbt": tbt, "tpot": tpot}
        percentiles = {
            f"p{p}_{what}": float(np.percentile(np.array(values), p))
            for what, values in told.items()
            for p in (50, 99)
        }
        return {
            "throughput": len(every) / seconds,
            "frame_throughput": int((every <= last).sum()) / (last - first),
            **percentiles,
            "mean_tbt": float(tbt.mean()),
            "seconds": seconds,
            "requests": self.requests,
            "answered": len(self.told),
            "preemptions": self.preemptions,
            "loaded_bytes_per_second": self.loads.n_bytes / seconds,
            "copying": self.loads.copy_seconds / seconds,
            "stalled": self.loads.stall_seconds / seconds,
        }


def run(
    setting: Setting,
    workload: Workload,
    preset: str,
    options: Mapping[str, float],
    device: Device,
) -> Measured:
    """Serve `workload` in virtual time."""
    asked = [submission_for(r, (0,) * r.prompt_tokens) for r in workload.requests]
    if not setting.apart:
        return _run(setting, asked, preset, options, device)
    return Measured.beside(
        _run(
            replace(setting, fractions={name: 1.0}),
            [r for r in asked if r.model == name],
            preset,
            options,
            device.sliced(part),
        )
        for name, part in setting.fractions.items()
    )


def _run(
    setting: Setting,
    arrivals: Sequence[Submission],
    preset: str,
    options: Mapping[str, float],
    device: Device,
) -> Measured:
    lanes, most = setting.lanes, setting.sequences
    settings = replace(SERVED, lanes=lanes, step_logits=most)
    specs = specs_of(setting.fractions, device.memory, most)
    activations = lanes * max(
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
    profile = Profile(
        costs={s.name: device.costs(s.name) for s in specs},
        link=device.rates,
        overhead=device.profile.overhead_seconds,
    )
    arrived = {s.id: s.arrival for s in arrivals}
    later = [replace(s, arrival=BEFORE + s.arrival) for s in arrivals]
    told: dict[str, list[float]] = {s.id: [] for s in arrivals}
    finished: dict[str, Finished] = {}

    def said(now: float, output: Output) -> None:
        match output:
            case TokenOut(request_id=id):
                told[id].append(now - BEFORE)
            case Finished(request_id=id):
                finished[id] = output

    ended = simulate(fleet, specs, later, profile, said)
    return Measured(
        arrived=tuple(arrived[id] for id in finished),
        told=tuple(np.array(told[id]) for id in finished),
        requests=len(arrivals),
        preemptions=sum(f.preemptions for f in finished.values()),
        loads=_sum(m.weights.rotor.loads for m in ended.state.models.values() if m.weights.rotor),
    )


def _sum(each: Iterable[Loads]) -> Loads:
    total = Loads()
    for loads in each:
        total.n += loads.n
        total.n_bytes += loads.n_bytes
        total.copy_seconds += loads.copy_seconds
        total.stall_seconds += loads.stall_seconds
    return total
