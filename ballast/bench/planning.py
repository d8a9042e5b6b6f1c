"""Run `ballast plan`: search the fewest devices on which a fleet meets its service levels.

Workloads are drawn at random, so the search is repeated for several draws, the same ones for every
preset, until the interval of the answers has settled. A run that can no longer meet the target is
cut short: on too few devices it would take far longer than on enough.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ballast.bench.cluster_run import ClusterRun
from ballast.bench.device_search import Fewest, Sureness, fewest, settled
from ballast.bench.run_options import slos_of
from ballast.bench.simulation import Progress, simulate_presets
from ballast.core.cost import StepCosts
from ballast.core.errors import ConfigError
from ballast.core.job import JobLoad
from ballast.core.model import ModelSpec
from ballast.core.settings import FleetSettings, Slo
from ballast.policy.presets import resolve
from ballast.sim.cluster import Kind
from ballast.sim.cluster_files import NO_FILES, ClusterFiles
from ballast.workload.workload import Workload, WorkloadRequest

MOST_DEVICES = 1024


@dataclass(frozen=True, slots=True)
class PlanResult:
    """How many devices one preset needs."""

    preset: str
    placement: str
    """Name of the fleet policy."""
    draws: tuple[Fewest, ...]
    """By draw of the workload. Attainments are upper bounds where a run was cut short. After one
    for which no number suffices, none is tried."""
    number: int | None
    """The fewest devices that suffice for every draw; None: no number does for one."""
    rows: dict[int, dict[str, Any]]
    """How the first draw was served on `shown` devices, and on one fewer: these ran to their ends.
    """
    alone: float
    """Share of the first draw's requests that would be in time on an idle device of their own, with
    the weights there: more no number of devices can attain."""
    settled: bool
    """Whether the interval has stopped widening."""
    with_fewer: float | None = None
    """Attainment with one device fewer than `shown`, in a draw that needs the most devices; None:
    `shown` is one device."""

    @property
    def found(self) -> Fewest:
        """The first draw's."""
        return self.draws[0]

    @property
    def sure(self) -> Sureness | None:
        """None where no number suffices for one of the draws."""
        numbers = [draw.number for draw in self.draws if draw.number is not None]
        if self.number is None:
            return None
        return Sureness(min(numbers), self.number, len(self.draws))

    @property
    def shown(self) -> int:
        """The number found; where there is none, the most that were tried."""
        return self.number or max(self.draws[-1].tried)

    @property
    def least(self) -> float:
        """Lowest attainment of any draw with `shown` devices."""
        return min(draw.tried[self.shown] for draw in self.draws if self.shown in draw.tried)

    def to_json(self) -> dict[str, Any]:
        tried = [
            {"devices": n, "attainment_at_most": share, **self.rows.get(n, {})}
            for n, share in self.found.tried.items()
        ]
        sure = self.sure
        return {
            "name": self.preset,
            "placement": self.placement,
            "devices": self.number,
            "interval": None if sure is None else [sure.least, sure.most],
            "suffices_for_at_least": None if sure is None else sure.at_least,
            "settled": self.settled,
            "draws": [draw.number for draw in self.draws],
            "attainment_least": self.least,
            "attainment_with_fewer": self.with_fewer,
            "attainment_alone": self.alone,
            "steady": all(draw.steady for draw in self.draws),
            "tried": tried,
        }


class _Hopeless(Exception):
    """Raised to end a run in which too few requests can still attain to meet the target."""

    def __init__(self, at_most: float) -> None:
        super().__init__(at_most)
        self.at_most = at_most


@dataclass(frozen=True, slots=True)
class Question:
    """Parameters of the search that are the same for every draw and every number of devices."""

    fleet: FleetSettings
    specs: Sequence[ModelSpec]
    kind: Kind
    preset: str
    target: float
    placement: str | None = None
    """The fleet policy's name, as for `simulate_presets`."""
    each: bool = False
    """Whether every model has to meet the target, not only all requests together."""
    files: ClusterFiles = NO_FILES
    """Links."""

    def attainment(
        self, workload: Workload, number: int, progress: Progress, *, whole: bool
    ) -> tuple[float, ClusterRun | None]:
        """Return the attainment with this number of devices; an upper bound below the target, and
        no run, where it was cut short because the target could not be met any more. `whole`: never
        cut short."""
        requests = Counter(r.model if self.each else "" for r in workload.requests)
        late: Counter[str] = Counter()

        def missed(model: str) -> None:
            key = model if self.each else ""
            late[key] += 1
            if (at_most := (requests[key] - late[key]) / requests[key]) < self.target:
                raise _Hopeless(at_most)

        def arrived(name: str, sent: int) -> None:
            progress(f"{name}, {number} devices", sent)

        try:
            (ran,) = simulate_presets(
                self.fleet,
                self.specs,
                [replace(self.kind, number=number)],
                workload,
                [self.preset],
                self.placement,
                arrived,
                None if whole else missed,
                files=self.files,
            )
        except _Hopeless as error:
            return error.at_most, None
        report = ran.report
        return report.worst_attainment if self.each else report.total.attainment, ran


def plan_preset(
    question: Question,
    draws: Sequence[Workload],
    *,
    most: int = MOST_DEVICES,
    progress: Progress = lambda what, sent: None,
) -> PlanResult:
    """The fewest devices of a kind with which a share of requests is in its service level.

    One draw of the workload after the other, all of `draws` or until their interval has settled
    (`fewest.settled`); the later searches begin at what was found before. Where a model has one
    device, no more devices than models are tried. Raises ConfigError.
    """
    if not 0 < question.target <= 1:
        raise ConfigError("target", question.target, "a share above 0 and at most 1, as in 0.99")
    if most < 1:
        raise ConfigError("most devices", most, "1 or more")
    chosen = resolve(question.preset, placement=question.placement or question.fleet.placement)
    most = most if chosen.fleet.replicates else min(most, len(question.specs))
    search = _Search(question, draws, most, progress)
    answer = search.fewest_for_all()
    plan = PlanResult(
        question.preset,
        chosen.placement,
        tuple(search.found),
        answer,
        search.rows,
        in_time_alone(draws[0].requests, question),
        settled(search.numbers) or len(draws) == 1,
    )
    for shown in (plan.shown, plan.shown - 1):
        if shown not in search.rows and shown > 0:
            search.run(0, shown, whole=True)
    if plan.shown == 1:
        return plan
    return replace(plan, with_fewer=search.attained_with(plan.shown - 1))


class _Search:
    """Searches the fewest devices for one draw of the workload after the other."""

    def __init__(
        self, question: Question, draws: Sequence[Workload], most: int, progress: Progress
    ) -> None:
        """`most`: where the search ends, in devices."""
        self.found: list[Fewest] = []
        """By draw."""
        self.rows: dict[int, dict[str, Any]] = {}
        """How the first draw was served, by number of devices, where its run came to its end."""
        self._question = question
        self._draws = draws
        self._most = most
        self._progress = progress

    @property
    def numbers(self) -> list[int]:
        """The fewest devices for each draw for which any number suffices."""
        return [draw.number for draw in self.found if draw.number is not None]

    def run(self, draw: int, number: int, whole: bool = False) -> float:
        """Return the attainment of a draw on this number of devices; see `Question.attainment`."""

        def draw_progress(what: str, sent: int) -> None:
            self._progress(f"{what}, draw {draw + 1}", sent)

        progress = draw_progress if draw else self._progress
        share, ran = self._question.attainment(self._draws[draw], number, progress, whole=whole)
        if ran is not None and not draw:
            self.rows[number] = _row(ran)
        return share

    def fewest_for_all(self) -> int | None:
        """Search draw by draw until the interval has settled; return the number that suffices for
        all draws.

        None where no number suffices for one of them: none is tried after it.
        """
        target, most = self._question.target, self._most
        while len(self.found) < len(self._draws) and not settled(self.numbers):
            guess, first = max(self.numbers, default=1), not self.found
            run = partial(self.run, len(self.found))
            self.found.append(fewest(run, target, most, guess, neighbours=first))
            if self.found[-1].number is None:
                return None
        for number in range(max(self.numbers), most + 1):
            if all(self._suffices(draw, number) for draw in range(len(self.found))):
                return number
        return None

    def attained_with(self, number: int) -> float:
        """Return the attainment on `number` devices, in a draw that needs the most devices."""
        hardest = max(range(len(self.found)), key=lambda i: self.found[i].number or math.inf)
        if not hardest:
            key = "worst_attainment" if self._question.each else "attainment"
            return float(self.rows[number][key])
        return self.run(hardest, number, whole=True)

    def _suffices(self, draw: int, number: int) -> bool:
        tried = self.found[draw].tried
        if number not in tried:
            tried[number] = self.run(draw, number)
        return tried[number] >= self._question.target


def in_time_alone(requests: Sequence[WorkloadRequest], question: Question) -> float:
    """Share of `requests` whose prefill, and whose mean decode step, keep their service level on an
    idle device that has the weights. No number of devices attains more."""
    costs: dict[str, StepCosts] = {}
    alone = question.kind.largest
    slos: Mapping[str, Slo] = slos_of(question.fleet)
    for spec in question.specs:
        costs |= dict.fromkeys((s.name for s in spec.served), alone.costs(spec))

    def in_time(r: WorkloadRequest) -> bool:
        slo, cost = slos[r.model], costs[r.model]
        step = cost.of(JobLoad(0, 0, 0, 1, r.prompt_tokens))
        paced = r.output_tokens == 1 or step <= slo.tpot
        return paced and cost.prefill_seconds(r.prompt_tokens) <= slo.ttft

    return sum(map(in_time, requests)) / len(requests)


def _row(ran: ClusterRun) -> dict[str, Any]:
    total = ran.report.total
    return {
        "attainment": total.attainment,
        "worst_attainment": ran.report.worst_attainment,
        "failed": total.failed,
        "ttft_p99": None if total.ttft is None else total.ttft.p99,
        "tpot_p99": None if total.tpot is None else total.tpot.p99,
        "output_tokens_per_second": ran.report.output_tokens_per_second,
        "devices_used": sum(bool(device["jobs"]) for device in ran.devices.values()),
        "activations": ran.total("activations"),
        "preemptions": ran.total("preemptions"),
    }
