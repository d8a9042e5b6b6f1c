"""Run a workload on a simulated cluster and report it like any other run.

`run_cluster` drives `sim.cluster.Cluster` for `ballast simulate`, `ballast plan` and benchmarks.
Everything happens in virtual time; no model runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from ballast.bench.expected_load import specs_expecting
from ballast.bench.record import RequestRecorder, prompts_of, submission_for, vocabularies_of
from ballast.bench.report import Report
from ballast.bench.sample import DecisionRecord, decisions_of
from ballast.bench.simulation_samples import SimulationSampler
from ballast.bench.stories import SinkOf
from ballast.core.cost import Traffic
from ballast.core.event import FailedOutput, Output
from ballast.core.fleet import Place, Withdraw
from ballast.core.model import ModelSpec, weight_bytes
from ballast.core.order import Order
from ballast.core.request import Submission
from ballast.core.settings import DeviceSettings, Slo
from ballast.engine.model import ModelState
from ballast.engine.state import DeviceState
from ballast.policy.presets import Preset
from ballast.sim.cluster import SERVED, Cluster, Kind
from ballast.sim.cluster_files import NO_FILES, ClusterFiles
from ballast.sim.device import COUNTED, SimDevice
from ballast.workload.workload import Workload, WorkloadRequest

Estimates = Callable[[Iterable[ModelState], Workload], None]
"""Gives a device's models other estimates of a workload to come than those that they learn:
`sim.known_traffic.reveal`, `sim.distorted_traffic.Distortion.impose`."""


@dataclass(frozen=True, slots=True)
class ClusterRun:
    """One preset's run on a simulated cluster."""

    report: Report
    devices: dict[str, dict[str, Any]]
    """By device: its memory, its models and their weights, and counts of its decisions."""
    jobs: int
    placement: str
    """Name of the fleet policy; `given` where a file names the devices."""
    moves: tuple[dict[str, Any], ...]
    """Actions of the fleet policy, in order: time, action, and the reason if it was refused."""
    moved: int = 0
    """Number of requests that migrated to another device with their KV."""

    @property
    def placed(self) -> int:
        """Times a model was given one more device, after the start."""
        return self._moved(Place)

    @property
    def withdrawn(self) -> int:
        """Times a model was withdrawn from a device."""
        return self._moved(Withdraw)

    def _moved(self, action: type) -> int:
        done = (m for m in self.moves if "refused" not in m)
        return sum(m["action"] == action.__name__ for m in done)

    def total(self, what: str) -> int:
        """Sum of a numeric field over all devices."""
        return sum(device[what] for device in self.devices.values())

    @property
    def rotations(self) -> dict[str, dict[str, float]]:
        """Costs of rotating layers (`Loads`) by model, summed over all devices."""
        found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for device in self.devices.values():
            for name, loads in device["rotations"].items():
                for what, much in loads.items():
                    found[name][what] += much
        return found

    def to_json(self) -> dict[str, Any]:
        """The report's form, the devices, and how models moved between them."""
        return {
            **self.report.to_json(),
            "placement": self.placement,
            "moves": list(self.moves),
            "devices": self.devices,
        }


def run_cluster(
    preset: Preset,
    kinds: Sequence[Kind],
    specs: Sequence[ModelSpec],
    workload: Workload,
    slos: Mapping[str, Slo],
    served: DeviceSettings = SERVED,
    progress: Callable[[int], None] = lambda sent: None,
    missed: Callable[[str], None] | None = None,
    sink_of: SinkOf = lambda device: None,
    files: ClusterFiles = NO_FILES,
    planned: bool = True,
    estimates: Estimates | None = None,
    open_ended: bool = False,
) -> ClusterRun:
    """Simulate a cluster that serves the workload.

    The traffic that a fleet policy expects is the workload's own, on average and in each model's
    busiest seconds; `planned`: so do the models' settings. `estimates` are put in place of what
    devices learn of it. `open_ended`: requests are bounded by their contexts alone, as of clients
    that give no bound; else each by the length of its answer. `files`: see `Cluster`. `progress`
    gets the number of requests that have arrived, `missed` the model of each request whose first
    token is late, or that fails; `sink_of` returns the sink of a device's story. Raises
    ConfigError, and errors of the callbacks.
    """
    specs = specs_expecting(specs, workload) if planned else list(specs)
    observer = _Observer(workload, slos, missed)
    cluster = Cluster(
        kinds,
        specs,
        preset,
        observer.record_output,
        served,
        traffic_of(workload),
        watch=observer.record_turn,
        on_move=observer.record_move,
        sink_of=sink_of,
        files=files,
        busiest=busiest_of(workload),
        steps=observer.recorder.tokens,
    )
    observer.devices = cluster.devices
    if estimates is not None:
        for device in cluster.devices.values():
            estimates(device.state.models.values(), workload)
    seconds = cluster.run(_arrivals(workload, specs, observer, progress, open_ended=open_ended))
    progress(len(workload.requests))
    report = Report.of(
        observer.recorder.records(),
        slos,
        seconds,
        observer.gauge.samples(),
        [*observer.decisions, *decisions_of(observer.moves)],
        name=preset.name,
        workload=workload.describe(),
    )
    placement = preset.placement if files.homes is None else "given"
    moves, moved = tuple(observer.moves), cluster.controller.moved
    return ClusterRun(report, _did(cluster), cluster.jobs, placement, moves, moved)


class _Observer:
    """Record outputs, decisions of devices and moves of models while a cluster runs."""

    def __init__(
        self,
        workload: Workload,
        slos: Mapping[str, Slo],
        missed: Callable[[str], None] | None,
    ) -> None:
        self.recorder = RequestRecorder()
        self.gauge = SimulationSampler(workload.seconds)
        self.decisions: list[DecisionRecord] = []
        self.moves: list[dict[str, Any]] = []
        self.devices: Mapping[str, SimDevice] = {}
        """Those of the cluster, which is made with this object's methods."""
        self.silent: dict[str, WorkloadRequest] = {}
        """Requests without an output so far, by submission id."""
        self._slos = slos
        self._missed = missed

    def record_arrival(self, request: WorkloadRequest, submission_id: str) -> None:
        """Record a request that has arrived."""
        self.recorder.sent(request, submission_id, request.at)
        self.silent[submission_id] = request

    def record_output(self, device: str, at: float, output: Output) -> None:
        """Record an output; report a first token that is late, or an error instead, to `missed`."""
        self.recorder.record(at, output)
        request = self.silent.pop(output.request_id, None)
        if request is None or self._missed is None:
            return
        if isinstance(output, FailedOutput) or at - request.at > self._slos[request.model].ttft:
            self._missed(request.model)

    def record_move(self, at: float, order: Order, refused: str | None) -> None:
        """Record an order of the fleet policy or of an operator, with the reason if `refused`."""
        move = {"at": at, "action": type(order).__name__, **asdict(order)}  # type: ignore[call-overload]
        self.moves.append(move if refused is None else {**move, "refused": refused})

    def record_turn(self, device: str, at: float, state: DeviceState) -> None:
        """Record a device's memory and queue, and its decisions since the last turn."""
        self.gauge.watch(device, at, state)
        self.decisions.extend(decisions_of(self.devices[device].story.take_decisions(), device))


def _arrivals(
    workload: Workload,
    specs: Sequence[ModelSpec],
    observer: _Observer,
    progress: Callable[[int], None],
    *,
    open_ended: bool,
) -> Iterator[Submission]:
    """Yield the submissions of a workload in order, each recorded as it arrives."""
    prompts = prompts_of(vocabularies_of(specs))
    contexts = {s.name: s.max_model_len for spec in specs for s in spec.served}
    for n, request in enumerate(workload.requests):
        context = contexts[request.model] if open_ended else None
        submission = submission_for(request, prompts(request), context)
        if open_ended:
            for device in observer.devices.values():
                device.ends[submission.id] = request.prompt_tokens + request.output_tokens - 1
        observer.record_arrival(request, submission.id)
        progress(n)
        yield submission


BUSIEST_SECONDS = 10.0
"""Length of a model's busiest period: its devices have to keep up with that; shorter bursts may
wait."""


def traffic_of(workload: Workload) -> dict[str, Traffic]:
    """Return the mean traffic of each model over the whole workload."""
    seconds = max(workload.seconds, 1.0)
    return {model: _traffic(own, seconds) for model, own in _asked(workload).items()}


def busiest_of(workload: Workload) -> dict[str, Traffic]:
    """Return the mean traffic of each model over the `BUSIEST_SECONDS` with most tokens."""
    found = {}
    for model, own in _asked(workload).items():
        first = tokens = most = 0
        busiest = own[:1]
        for last, request in enumerate(own):
            tokens += request.prompt_tokens + request.output_tokens
            while own[first].at <= request.at - BUSIEST_SECONDS:
                tokens -= own[first].prompt_tokens + own[first].output_tokens
                first += 1
            if tokens > most:
                most, busiest = tokens, own[first : last + 1]
        found[model] = _traffic(busiest, BUSIEST_SECONDS)
    return found


def _asked(workload: Workload) -> dict[str, list[WorkloadRequest]]:
    by_model: dict[str, list[WorkloadRequest]] = defaultdict(list)
    for request in workload.requests:
        by_model[request.model].append(request)
    return by_model


def _traffic(requests: Sequence[WorkloadRequest], seconds: float) -> Traffic:
    return Traffic(
        len(requests) / seconds,
        fmean(r.prompt_tokens for r in requests),
        fmean(r.output_tokens for r in requests),
    )


def _did(cluster: Cluster) -> dict[str, dict[str, Any]]:
    did: dict[str, dict[str, Any]] = {}
    for name, device in cluster.devices.items():
        state = device.state
        models = state.models.values()
        did[name] = {
            "memory_bytes": state.pool.total * state.settings.page_bytes,
            "models": sorted(state.models),
            "weights_bytes": weight_bytes(m.spec for m in models),
            "jobs": state.jobs,
            **{what: device.did(what) for what in COUNTED},
            "rotations": {name: asdict(loads) for name, loads in device.loads.items()},
        }
    return did
