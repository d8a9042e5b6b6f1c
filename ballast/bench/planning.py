"""What `ballast plan` runs: the fewest devices of a kind on which a fleet meets its service levels.

A run that can no longer meet the target is not run to its end: on too few devices that would take
far longer than on enough.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ballast.bench.clusters import ClusterRun
from ballast.bench.fewest import Fewest, fewest
from ballast.bench.simulating import Progress, simulate_presets
from ballast.core.errors import ConfigError
from ballast.core.model import ModelSpec
from ballast.core.settings import FleetSettings
from ballast.policy.presets import resolve
from ballast.sim.cluster import Kind
from ballast.workload.workload import Workload

MOST_DEVICES = 1024


@dataclass(frozen=True, slots=True)
class Planned:
    """How many devices one preset needs."""

    preset: str
    placement: str
    """Name of the fleet policy."""
    found: Fewest
    """Its attainments are upper bounds where a run was cut short."""
    rows: dict[int, dict[str, Any]]
    """How the workload was served on `shown` devices, and on one fewer: these ran to their ends."""

    @property
    def shown(self) -> int:
        """The number found; where there is none, the most that were tried."""
        return self.found.number or max(self.found.tried)

    def to_json(self) -> dict[str, Any]:
        tried = [
            {"devices": n, "attainment_at_most": share, **self.rows.get(n, {})}
            for n, share in self.found.tried.items()
        ]
        found = {"devices": self.found.number, "steady": self.found.steady}
        return {"name": self.preset, "placement": self.placement, **found, "tried": tried}


class _Hopeless(Exception):
    """So few requests can still attain that the target cannot be met."""

    def __init__(self, at_most: float) -> None:
        super().__init__(at_most)
        self.at_most = at_most


def plan_preset(
    fleet: FleetSettings,
    specs: Sequence[ModelSpec],
    kind: Kind,
    workload: Workload,
    preset: str,
    target: float,
    placement: str | None = None,
    *,
    each: bool = False,
    most: int = MOST_DEVICES,
    progress: Progress = lambda what, sent: None,
) -> Planned:
    """The fewest devices of a kind with which a share `target` of requests is in its service level.

    `placement`: as of `simulate_presets`. `each`: of every model's requests, not just of all
    together. Where a model has one device, no more devices than models are tried. Raises
    ConfigError.
    """
    if not 0 < target <= 1:
        raise ConfigError("target", target, "a share above 0 and at most 1, as in 0.99")
    if most < 1:
        raise ConfigError("most devices", most, "1 or more")
    rows: dict[int, dict[str, Any]] = {}
    asked = Counter(r.model if each else "" for r in workload.requests)

    def run(number: int, whole: bool = False) -> float:
        late: Counter[str] = Counter()

        def missed(model: str) -> None:
            key = model if each else ""
            late[key] += 1
            if (at_most := (asked[key] - late[key]) / asked[key]) < target:
                raise _Hopeless(at_most)

        def arrived(name: str, sent: int) -> None:
            progress(f"{name}, {number} devices", sent)

        kinds = [replace(kind, number=number)]
        hook = None if whole else missed
        try:
            (ran,) = simulate_presets(
                fleet, specs, kinds, workload, [preset], placement, arrived, hook
            )
        except _Hopeless as error:
            return error.at_most
        rows[number] = _row(ran)
        return ran.report.worst_attainment if each else ran.report.total.attainment

    chosen = resolve(preset, placement=placement or fleet.placement)
    found = fewest(run, target, most if chosen.fleet.replicates else min(most, len(specs)))
    plan = Planned(preset, chosen.placement, found, rows)
    for number in (plan.shown, plan.shown - 1):
        if number not in rows and number > 0:
            run(number, whole=True)
    return plan


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
