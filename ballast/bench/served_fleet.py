"""Simulate the fleet of a running server, plan devices for it, or play its story.

The program of the child processes of `server.admin.simulations`: reads a `SimulationJob` from
stdin, and writes lines of JSON (`simulation_job.Line`) to stdout.
"""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec

from ballast.bench.cluster_run import ClusterRun
from ballast.bench.page_data import MARKED, page_data
from ballast.bench.planning import Question, plan_preset
from ballast.bench.report import RequestStats
from ballast.bench.run_options import compared_presets, slos_of
from ballast.bench.sample import decisions_of
from ballast.bench.simulation import simulate_presets
from ballast.bench.simulation_samples import SimulationSampler
from ballast.bench.simulation_setup import WorkloadOptions
from ballast.bench.story_report import report_story
from ballast.bench.verdict import verdict
from ballast.core.errors import BallastError, ConfigError
from ballast.core.job import JobLoad
from ballast.core.link import LinkRates
from ballast.engine.state import DeviceState
from ballast.isolation.limits import Limits
from ballast.isolation.orphan import die_with
from ballast.server.admin.simulation_job import (
    HERE,
    MEMORY_BYTES,
    MOST_DEVICES,
    MOST_REQUESTS,
    RECORDED,
    RUN_SECONDS,
    ErrorLine,
    Line,
    ProgressLine,
    ResultLine,
    SimulationJob,
)
from ballast.sim.cluster import Kind, parse_kinds
from ballast.sim.machine_profile import MachineProfile
from ballast.sim.profile import profile_of
from ballast.sim.replay import replay
from ballast.sim.story_reader import DeviceStory, read_device_stories
from ballast.workload.workload import Workload, WorkloadRequest

MOST_PRESETS = 6
UNASKED = 8, 200
"""Fewest and most requests of a generator, on average, where no rate was asked for."""
PROGRESS_SECONDS = 0.2
_NICE = 10


def main() -> int:
    """Run the job on stdin; returns the exit code."""
    die_with(os.getppid())
    _limit()
    job = msgspec.msgpack.decode(_read(), type=SimulationJob)
    line: Line
    try:
        line = ResultLine(answer(job, _Progress()))
    except BallastError as error:
        line = ErrorLine(str(error))
    except MemoryError:
        line = ErrorLine(Limits(MEMORY_BYTES).no_memory)
    _write(line)
    return 0


def _limit() -> None:
    os.nice(_NICE)
    Limits(MEMORY_BYTES, RUN_SECONDS).apply()


def _read() -> bytes:
    return sys.stdin.buffer.read()


def _write(line: Line) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    sys.stdout.buffer.flush()


class _Progress:
    """Writes how far a run is, a few times a second."""

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, what: str, done: int, of: int) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + PROGRESS_SECONDS
            _write(ProgressLine(what, done, of))


def answer(job: SimulationJob, progress: Any = lambda what, done, of: None) -> dict[str, Any]:
    """Return the result of a job, as plain data. Raises BallastError."""
    if job.kind == "story":
        return _story(job, progress)
    kinds, workload, slos = _kinds(job), _workload(job), slos_of(job.fleet)
    presets = compared_presets(job.fleet, job.presets)
    if len(presets) > MOST_PRESETS:
        raise ConfigError("presets", job.presets, f"at most {MOST_PRESETS}")
    n = len(workload.requests)

    def arrived(what: str, sent: int) -> None:
        progress(what, sent, n)

    described = {
        "kind": job.kind,
        "workload": f"{n} requests in {workload.seconds:.0f} s: {workload.describe()}",
        "devices": ", ".join(f"{kind.number} x {kind.profile.device}" for kind in kinds),
    }
    if job.kind == "plan":
        return described | {"target": job.target, "presets": _plans(job, kinds, workload, arrived)}
    settings = (job.fleet, job.specs, kinds, workload, presets)
    runs = list(simulate_presets(*settings, progress=arrived))
    reports = [run.report for run in runs]
    return described | {
        "verdict": verdict(reports),
        "presets": [_row(run) for run in runs],
        "played": page_data("", reports),
        "levels": {name: asdict(slo) for name, slo in slos.items()},
    }


def _plans(
    job: SimulationJob, kinds: Sequence[Kind], workload: Workload, arrived: Any
) -> list[dict[str, Any]]:
    if len(kinds) > 1 or kinds[0].number > 1 or job.devices == HERE:
        raise ConfigError("devices", job.devices, "one kind without a number, which is sought")
    plans = []
    for name in compared_presets(job.fleet, job.presets):
        question = Question(job.fleet, job.specs, kinds[0], name, job.target)
        found = plan_preset(question, [workload], most=MOST_DEVICES, progress=arrived)
        plans.append(
            {
                "name": name,
                "devices": found.number,
                "attainment": found.least,
                "with_fewer": found.with_fewer,
                "alone": found.alone,
            }
        )
    return plans


def _kinds(job: SimulationJob) -> list[Kind]:
    """The devices: the fleet's own, with what is known of this machine, or others."""
    if job.devices != HERE:
        if re.search(r"[/\\]|\.toml", job.devices):
            raise ConfigError("devices", job.devices, "names of devices, as in 2xH100-80G")
        kinds = parse_kinds(job.devices)
        if (
            sum(kind.number * kind.ranks * max(1, len(kind.slices)) for kind in kinds)
            > MOST_DEVICES
        ):
            raise ConfigError("devices", job.devices, f"at most {MOST_DEVICES}")
        return kinds
    kinds = []
    for name, (device, link) in job.fleet.devices.items():
        learned = job.link_bytes_per_second.get(name, 0.0)
        alone = link.bytes_per_second or learned
        if not alone:
            raise ConfigError("devices", job.devices, f"{name} has not loaded a model yet")
        measured = MachineProfile(
            costs=job.costs,
            link=LinkRates.even(alone, link.mixed_bytes_per_second),
            overhead=0.0,
        )
        kind = name.partition(":")[0]  # simulated devices are numbered
        kinds.append(Kind(1, profile_of(kind, measured, device), device.lanes))
    return kinds


def _workload(job: SimulationJob) -> Workload:
    """The requests. Raises ConfigError and WorkloadError."""
    if job.workload == RECORDED:
        return _recorded(job)
    context = min(spec.max_model_len for spec in job.specs)
    if (job.rate or 0.0) * job.seconds > MOST_REQUESTS:
        raise ConfigError("rate", job.rate, f"at most {MOST_REQUESTS} requests in all")
    wanted = WorkloadOptions(job.workload, job.rate, job.seconds, seed=job.seed, context=context)
    names = list(slos_of(job.fleet))
    drawn = wanted.drawn(names, job.seed)
    if job.rate is not None or job.devices != HERE or not drawn.requests:
        return drawn
    least, most = (n / job.seconds for n in UNASKED)
    rate = min(max(least, _full_rate(job, drawn)), most)
    return replace(wanted, rate=rate).drawn(names, job.seed)


def _full_rate(job: SimulationJob, work: Workload) -> float:
    """Requests a second, of such lengths, that the fleet's own devices could serve one after the
    other: steps that several share leave room beside that, a lack of pages does not."""
    costs = {s.name: job.costs[spec.name] for spec in job.specs for s in spec.served}

    def alone(r: WorkloadRequest) -> float:
        step = costs[r.model].of(JobLoad(0, 0, 0, 1, r.prompt_tokens))
        return costs[r.model].prefill_seconds(r.prompt_tokens) + (r.output_tokens - 1) * step

    seconds = sum(map(alone, work.requests)) / len(work.requests)
    return float(f"{len(job.fleet.devices) / seconds:.2g}")


def _recorded(job: SimulationJob) -> Workload:
    """The server's last requests, as they came in the last `seconds` before the last one; at
    another rate, if one is asked for."""
    began = max(job.requests[0].at, job.requests[-1].at - job.seconds)
    made = (
        WorkloadRequest(
            id=i,
            at=r.at - began,
            model=r.model,
            prompt_tokens=r.prompt_tokens,
            output_tokens=r.output_tokens,
        )
        for i, r in enumerate(job.requests)
        if r.at >= began
    )
    labels = ("prompts share nothing: what they had in common was not recorded",)
    work = Workload.of(RECORDED, made, "the requests that this server answered last", labels)
    if job.rate is None or work.seconds <= 0:
        return work
    return work.scale_rate(job.rate * work.seconds / (len(work.requests) - 1))


def _row(run: ClusterRun) -> dict[str, Any]:
    report = run.report
    counted = {what: run.total(what) for what in ("activations", "evictions", "preemptions")}
    return {
        "name": report.name,
        "worst_attainment": report.worst_attainment,
        "output_tokens_per_second": report.output_tokens_per_second,
        **_stats(report.total),
        **counted,
        "models": {name: _stats(own) for name, own in report.models.items() if own.requests},
    }


def _stats(stats: RequestStats) -> dict[str, Any]:
    return {
        "requests": stats.requests,
        "answered": stats.answered,
        "attainment": stats.attainment,
        "ttft": None if stats.ttft is None else [stats.ttft.p50, stats.ttft.p99],
        "tpot": None if stats.tpot is None else [stats.tpot.p50, stats.tpot.p99],
    }


def _story(job: SimulationJob, progress: Any) -> dict[str, Any]:
    """Replay the server's own story, and return its memory and its decisions over time."""
    assert job.fleet.story_path is not None
    lives = read_device_stories(Path(job.fleet.story_path))
    told = report_story(lives, "story")
    began = min(_first_arrival(life) for life in lives)
    sampler = SimulationSampler(told.report.wall_seconds)
    notes = []
    for number, life in enumerate(lives):
        progress("reading the story", number, len(lives))
        since = life.snapshot.began - began

        def observe(
            now: float, state: DeviceState, name: str = life.device, since: float = since
        ) -> None:
            sampler.watch(name, now + since, state)

        found = replay(life, observe=observe)
        if found.stray is not None or found.difference is not None:
            notes.append(f"{life.device}: what follows its {found.events}th event is not shown")
    decisions = decisions_of(told.decisions)[-MARKED:]
    report = replace(told.report, memory=sampler.samples(), decisions=decisions)
    return {
        "kind": "story",
        "began": began,
        "notes": notes,
        "verdict": verdict([report]),
        "played": page_data("", [report]),
    }


def _first_arrival(life: DeviceStory) -> float:
    """Unix time of a life's first request; infinite without any."""
    arrivals = (e["arrival"] for e in life.entries if e.get("event") == "Arrival")
    return life.snapshot.began + min(arrivals, default=math.inf)


if __name__ == "__main__":
    sys.exit(main())
