"""Run a workload on a fleet of one device, live in this process or in virtual time, and report it.

Both ways return the same `DeviceRun`, so that they can be compared. Used by `bench.run`, the demo
and benchmarks.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ballast.bench.expected_load import expecting, specs_expecting
from ballast.bench.progress import Progress, quiet
from ballast.bench.record import RequestRecorder, prompts_of, submission_for, vocabularies_of
from ballast.bench.replay import PATIENCE, EngineTarget, WorkloadReplay, replay
from ballast.bench.report import Report
from ballast.bench.sample import decisions_of
from ballast.bench.simulation_samples import SimulationSampler
from ballast.core.cost import StepCosts
from ballast.core.entries import Sink, both
from ballast.core.errors import Unavailable
from ballast.core.event import DrainEvent, Output, PromptScoresOutput, StopEvent, TokenOutput
from ballast.core.model import ModelSpec
from ballast.core.settings import FleetSettings, Slo
from ballast.engine.state import DeviceState
from ballast.live.device import LiveDevice
from ballast.live.inbox import MonotonicClock
from ballast.policy.presets import Preset
from ballast.sim.machine_profile import MachineProfile
from ballast.sim.simulate import simulate
from ballast.workload.workload import Workload


@dataclass(frozen=True, slots=True)
class DeviceRun:
    """One run on one device: report, story and counts of decisions."""

    report: Report
    story: list[dict[str, Any]]
    """Every event and decision, in order."""
    counts: dict[str, int]
    """Counts over all models: activations, evictions, preemptions; and jobs."""


def run_live(
    fleet: FleetSettings,
    workload: Workload,
    slos: Mapping[str, Slo],
    costs: Mapping[str, StepCosts] | None = None,
    *,
    timeout: float = PATIENCE,
    progress: Progress = quiet,
) -> DeviceRun:
    """Run a workload open-loop on a live device in this process, made for the run.

    Raises Unavailable where it cannot serve one of the models.
    """
    fleet = expecting(fleet, workload)
    clock = MonotonicClock()
    target = EngineTarget(clock)
    entries: list[dict[str, Any]] = []
    loading = f"{fleet.preset}: loading {len(fleet.models)} models"
    progress(loading, 0)
    device = LiveDevice(fleet, target.outbox, costs=costs, clock=clock, sink=entries.extend)
    target.connect(device.post, device.snapshot, entries)
    loop = threading.Thread(target=device.run, name="loop", daemon=True)
    loop.start()
    try:
        for model, why in device.failed.items():
            raise Unavailable(f"{model} is not served: {why}")
        device.populate()
        prompts = prompts_of(vocabularies_of(device.specs.values()))
        done = asyncio.run(
            replay(workload, target, prompts, timeout=timeout, progress=progress, name=fleet.preset)
        )
        device.post(DrainEvent())
    except BaseException:
        device.post(StopEvent("the replay failed"))
        raise
    finally:
        loop.join()
        device.close()
    return _ran(fleet.preset, workload, slos, done, entries, device.state)


def run_virtual(
    fleet: FleetSettings,
    specs: Sequence[ModelSpec],
    workload: Workload,
    slos: Mapping[str, Slo],
    profile: MachineProfile,
    *,
    sink: Sink | None = None,
    preset: Preset | None = None,
    progress: Progress = quiet,
) -> DeviceRun:
    """Run a workload in virtual time; `sink` gets the story as well. `preset`: policies without a
    registered name; None: the fleet's. `progress` gets the number of requests that have ended."""
    specs = specs_expecting(specs, workload)
    recorder = RequestRecorder()
    prompts = prompts_of(vocabularies_of(specs))
    arrivals = []
    for request in workload.requests:
        submission = submission_for(request, prompts(request))
        recorder.sent(request, submission.id, request.at)
        arrivals.append(submission)
    entries: list[dict[str, Any]] = []
    name, gauge = fleet.device.name, SimulationSampler(workload.seconds)

    ended = 0

    def record_output(now: float, output: Output) -> None:
        nonlocal ended
        recorder.record(now, output)
        if not isinstance(output, TokenOutput | PromptScoresOutput):
            ended += 1
            progress(fleet.preset, ended, len(arrivals))

    def observe(now: float, state: DeviceState) -> None:
        gauge.watch(name, now, state)

    progress(fleet.preset, 0, len(arrivals))
    simulated = simulate(
        fleet,
        specs,
        arrivals,
        profile,
        record_output,
        both(entries.extend, sink),
        observe,
        preset=preset,
    )
    decisions = decisions_of(entries, name)
    done = WorkloadReplay(recorder.records(), simulated.seconds, gauge.samples(), decisions)
    return _ran(fleet.preset, workload, slos, done, entries, simulated.state)


def _ran(
    name: str,
    workload: Workload,
    slos: Mapping[str, Slo],
    done: WorkloadReplay,
    entries: list[dict[str, Any]],
    state: DeviceState,
) -> DeviceRun:
    report = Report.of(
        done.records,
        slos,
        done.wall_seconds,
        done.memory,
        done.decisions,
        name=name,
        workload=workload.describe(),
    )
    models = state.models.values()
    counts = {
        "jobs": state.jobs,
        "activations": sum(m.activations for m in models),
        "evictions": sum(m.evictions for m in models),
        "preemptions": sum(m.preemptions for m in models),
    }
    return DeviceRun(report, entries, counts)
