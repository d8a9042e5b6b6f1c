"""What `ballast simulate` and `ballast plan` run: a fleet on devices that are not at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ballast.bench.choose import options_of, slos_of
from ballast.bench.clusters import ClusterRun, run_cluster
from ballast.bench.fewest import Fewest, fewest
from ballast.core.errors import ConfigError
from ballast.core.model import ModelSpec, weight_bytes
from ballast.core.settings import FleetSettings
from ballast.policy.presets import resolve
from ballast.sim.cluster import Kind
from ballast.workload.workload import Workload

MOST_DEVICES = 1024

Progress = Callable[[str, int], None]
"""(what runs, how many of its requests have arrived)."""


def simulate_presets(
    fleet: FleetSettings,
    specs: Sequence[ModelSpec],
    kinds: Sequence[Kind],
    workload: Workload,
    presets: Sequence[str],
    progress: Progress = lambda what, sent: None,
) -> Iterator[ClusterRun]:
    """Each preset in turn. Raises ConfigError; an unknown preset, before any has run."""
    if not workload.requests:
        raise ConfigError("workload", workload.name, "it must have requests: ask for more seconds")
    chosen = [resolve(name, options_of(fleet, name)) for name in presets]
    for preset in chosen:

        def arrived(sent: int, name: str = preset.name) -> None:
            progress(name, sent)

        yield run_cluster(preset, kinds, specs, workload, slos_of(fleet), progress=arrived)


def simulation_json(
    kinds: Sequence[Kind],
    specs: Sequence[ModelSpec],
    workload: Workload,
    runs: Sequence[ClusterRun],
) -> dict[str, Any]:
    """Plain data; equal simulations give equal documents, for no time of this machine is in it."""
    return {
        "devices": [{"device": k.profile.device, "number": k.number} for k in kinds],
        "workload": workload.describe(),
        "requests": len(workload.requests),
        "weights_bytes": weight_bytes(specs),
        "presets": [run.to_json() for run in runs],
    }


@dataclass(frozen=True, slots=True)
class Planned:
    """How many devices one preset needs."""

    preset: str
    found: Fewest
    rows: dict[int, dict[str, Any]]
    """By number of devices tried: how the workload was served."""

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.preset,
            "devices": self.found.number,
            "steady": self.found.steady,
            "tried": [{"devices": n, **self.rows[n]} for n in self.found.tried],
        }


def plan_preset(
    fleet: FleetSettings,
    specs: Sequence[ModelSpec],
    kind: Kind,
    workload: Workload,
    preset: str,
    target: float,
    *,
    each: bool = False,
    most: int = MOST_DEVICES,
    progress: Progress = lambda what, sent: None,
) -> Planned:
    """The fewest devices of a kind with which a share `target` of requests is in its service level.

    `each`: of every model's requests, not just of all together. A model has one device, so no more
    devices than models are tried. Raises ConfigError.
    """
    if not 0 < target <= 1:
        raise ConfigError("target", target, "a share above 0 and at most 1, as in 0.99")
    if most < 1:
        raise ConfigError("most devices", most, "1 or more")
    rows: dict[int, dict[str, Any]] = {}

    def run(number: int) -> float:
        kinds = [replace(kind, number=number)]

        def arrived(name: str, sent: int) -> None:
            progress(f"{name}, {number} devices", sent)

        (ran,) = simulate_presets(fleet, specs, kinds, workload, [preset], arrived)
        rows[number] = _row(ran)
        return ran.report.worst_attainment if each else ran.report.total.attainment

    return Planned(preset, fewest(run, target, min(most, len(specs))), rows)


def _row(ran: ClusterRun) -> dict[str, Any]:
    total = ran.report.total
    return {
        "attainment": total.attainment,
        "worst_attainment": ran.report.worst_attainment,
        "failed": total.failed,
        "ttft_p99": None if total.ttft is None else total.ttft.p99,
        "tpot_p99": None if total.tpot is None else total.tpot.p99,
        "output_tokens_per_second": ran.report.output_tokens_per_second,
        "activations": ran.total("activations"),
        "preemptions": ran.total("preemptions"),
    }
