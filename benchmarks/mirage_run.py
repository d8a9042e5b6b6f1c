"""One run of `mirage_sim`: a setting served in virtual time, and what its clients saw."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ballast.bench.record import submission_for
from ballast.core.cost import activation_bytes
from ballast.core.event import Failed, Finished, Output, TokenOut
from ballast.core.request import Submission
from ballast.core.settings import FleetSettings
from ballast.core.units import ceil_div
from ballast.sim.device import Profile
from ballast.sim.simulate import simulate
from ballast.workload.workload import Workload
from benchmarks.mirage_setting import SERVED, Device, Fractions, Setting, specs_of


@dataclass(frozen=True, slots=True)
class Measured:
    """One run, or several that share a workload, as clients saw it."""

    ttft: NDArray[np.float64]
    ttft_at: NDArray[np.float64]
    """When they were told; likewise `gaps_at`."""
    gaps: NDArray[np.float64]
    """Between any two tokens of a request: TBT."""
    gaps_at: NDArray[np.float64]
    seconds: float
    """From the first arrival to the last answer."""
    requests: int
    failed: int
    tokens: int
    preemptions: int
    loaded_bytes: int
    stall_seconds: float

    @property
    def throughput(self) -> float:
        """Output tokens per second."""
        return self.tokens / self.seconds

    def since(self, at: float) -> Measured:
        """The same with only those latencies that clients heard from `at` on."""
        late, later = self.ttft_at >= at, self.gaps_at >= at
        return replace(
            self,
            ttft=self.ttft[late],
            ttft_at=self.ttft_at[late],
            gaps=self.gaps[later],
            gaps_at=self.gaps_at[later],
        )

    def summary(self) -> dict[str, float]:
        """Figures in seconds, tokens per second, bytes per second."""
        (p50_ttft, p99_ttft), (p50_tbt, p99_tbt) = (
            np.percentile(of, (50, 99)).tolist() for of in (self.ttft, self.gaps)
        )
        return {
            "throughput": self.throughput,
            "p50_ttft": p50_ttft,
            "p99_ttft": p99_ttft,
            "p50_tbt": p50_tbt,
            "p99_tbt": p99_tbt,
            "mean_tbt": float(self.gaps.mean()),
            "seconds": self.seconds,
            "requests": self.requests,
            "failed": self.failed,
            "preemptions": self.preemptions,
            "loaded_bytes_per_second": self.loaded_bytes / self.seconds,
            "stall": self.stall_seconds / self.seconds,
        }


class _Clients:
    """What clients hear."""

    def __init__(self) -> None:
        self.arrived: dict[str, float] = {}
        self.last: dict[str, float] = {}
        self.ttft: list[float] = []
        self.ttft_at: list[float] = []
        self.gaps: list[float] = []
        self.gaps_at: list[float] = []
        self.preemptions = self.failed = 0

    def said(self, now: float, output: Output) -> None:
        match output:
            case TokenOut(request_id=id):
                if output.index:
                    self.gaps.append(now - self.last[id])
                    self.gaps_at.append(now)
                else:
                    self.ttft.append(now - self.arrived[id])
                    self.ttft_at.append(now)
                self.last[id] = now
            case Finished():
                self.preemptions += output.preemptions
            case Failed():
                self.failed += 1
            case _:
                pass


def run(
    setting: Setting,
    workload: Workload,
    preset: str,
    options: Mapping[str, float],
    device: Device,
) -> Measured:
    """Serve `workload` in virtual time."""
    if setting.apart:
        return _merged(
            _run(
                {name: 1.0},
                [r for r in _submissions(workload) if r.model == name],
                preset,
                options,
                device.sliced(part),
                1,
            )
            for name, part in setting.fractions.items()
        )
    return _run(setting.fractions, _submissions(workload), preset, options, device, setting.lanes)


def _submissions(workload: Workload) -> list[Submission]:
    return [submission_for(r, (0,) * r.prompt_tokens) for r in workload.requests]


def _run(
    fractions: Fractions,
    arrivals: Sequence[Submission],
    preset: str,
    options: Mapping[str, float],
    device: Device,
    lanes: int,
) -> Measured:
    settings = replace(SERVED, name="gh200:0", lanes=lanes)
    specs = specs_of(fractions, device.memory)
    activations = lanes * max(
        activation_bytes(s, settings.step_tokens, settings.step_logits) for s in specs
    )
    # A fraction holds weights and KV; activations lie in what no fraction takes.
    pages = ceil_div(int(sum(fractions.values()) * device.memory), settings.page_bytes)
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
    clients = _Clients()
    clients.arrived = {s.id: s.arrival for s in arrivals}
    ended = simulate(fleet, specs, arrivals, profile, clients.said)
    first = min(clients.arrived.values())
    return Measured(
        ttft=np.array(clients.ttft),
        ttft_at=np.array(clients.ttft_at),
        gaps=np.array(clients.gaps),
        gaps_at=np.array(clients.gaps_at),
        seconds=ended.seconds - first,
        requests=len(arrivals),
        failed=clients.failed,
        tokens=len(clients.ttft) + len(clients.gaps),
        preemptions=clients.preemptions,
        loaded_bytes=0,
        stall_seconds=0.0,
    )


def _merged(runs: Iterable[Measured]) -> Measured:
    """Of devices side by side."""
    each = list(runs)
    return Measured(
        ttft=np.concatenate([m.ttft for m in each]),
        ttft_at=np.concatenate([m.ttft_at for m in each]),
        gaps=np.concatenate([m.gaps for m in each]),
        gaps_at=np.concatenate([m.gaps_at for m in each]),
        seconds=max(m.seconds for m in each),
        requests=sum(m.requests for m in each),
        failed=sum(m.failed for m in each),
        tokens=sum(m.tokens for m in each),
        preemptions=sum(m.preemptions for m in each),
        loaded_bytes=sum(m.loaded_bytes for m in each),
        stall_seconds=sum(m.stall_seconds for m in each),
    )
