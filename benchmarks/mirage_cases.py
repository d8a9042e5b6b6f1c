"""The scenarios of `mirage_sim`: which runs there are, and the ratios between them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ballast.sim.profile import device_profile
from ballast.workload.workload import Workload
from benchmarks.contenders import SHARINGS
from benchmarks.mirage_run import Enough, run
from benchmarks.mirage_setting import (
    ALONE,
    ALPACA,
    C1,
    C2,
    ENGINE,
    LONG,
    MEMORY,
    SHAREGPT,
    SHORT,
    STEP_TOKENS,
    Device,
    Lengths,
    Setting,
    arrivals_in,
    link_of,
)

AMPLE = 2
"""Times the memory with which nothing is ever short."""
WINDOWS = {"Alpaca": (180.0, 400.0)}
WINDOW = 200.0, 100.0
"""Start and length in seconds of the part of the trace that gives the arrivals, by what is asked;
short requests take more of them to fill the same memory."""
QUICK_WINDOW = 180.0, 20.0


@dataclass(frozen=True, slots=True)
class Group:
    """Cases that one sentence of the paper speaks of."""

    settings: Mapping[str, Setting]
    temporal: bool = False
    knee_of: str = ""
    """It is run at multiples of this group's knees, if not of its own."""
    then: float = 0.0
    """After the first half of the arrivals the rate is this part of it, and only what clients get
    after that counts."""

    @property
    def shares(self) -> bool:
        """Whether models share memory for KV, so that it matters how."""
        return any(len(s.fractions) > 1 and not s.apart for s in self.settings.values())


def both(fractions: Mapping[str, float], *, apart: bool = False) -> dict[str, Setting]:
    return {
        "Alpaca": Setting.of(fractions, ALPACA, apart),
        "ShareGPT": Setting.of(fractions, SHAREGPT, apart),
    }


def weighted(**weights: float) -> Setting:
    """C2 with other rates for its models, the large one's first."""
    base = Setting.of(C2, SHAREGPT)
    return replace(base, weights=dict(zip(C2, weights.values(), strict=True)))


def mixed(*lengths: Lengths) -> Setting:
    return replace(Setting.of(C2, SHAREGPT), lengths=dict(zip(C2, lengths, strict=True)))


def with_whole_links(settings: Mapping[str, Setting]) -> dict[str, Setting]:
    return {name: replace(setting, whole_link=True) for name, setting in settings.items()}


GROUPS: dict[str, Group] = {
    "temporal_c1": Group(both(C1), temporal=True),
    "temporal_c2": Group(both(C2), temporal=True),
    "rates_c2": Group(
        {"3:1": weighted(large=3, small=1), "1:3": weighted(large=1, small=3)}, temporal=True
    ),
    "inputs_c2": Group({"L+S": mixed(LONG, SHORT), "S+L": mixed(SHORT, LONG)}, temporal=True),
    "mps_c1": Group(both(C1)),
    "mig_c1": Group(both(C1, apart=True)),
    "alone": Group(both(ALONE)),
    "mig_c1_link": Group(with_whole_links(both(C1, apart=True)), knee_of="mig_c1"),
    "reversion": Group(both(ALONE), knee_of="alone", then=0.1),
}
CURVES = "temporal_c1", "temporal_c2", "rates_c2", "inputs_c2", "mps_c1", "mig_c1", "alone"
"""Groups that are run over rates; the others belong to sweeps."""


@dataclass(frozen=True, slots=True)
class Case:
    """One run."""

    group: str
    setting: str
    multiple: float
    """Of the knee's rate."""
    rate: float
    """Requests per second, all models together."""
    row: str
    """In its comparison."""
    sharing: str = "pool"
    seed: int = 0
    memory: int = 1
    """Times the device's own."""
    quantum: float = 1.0
    preemptive: bool = False
    step_tokens: int = STEP_TOKENS
    kind: str = "GH200-96G"
    link: float | None = None
    """Its nominal bytes per second, in place of the device's own."""
    quick: bool = False
    page: int | None = None
    """MiB of a page; None: as the models have by default."""


Result = Mapping[str, float]
Runs = Mapping[Case, Result]


@functools.cache
def arrivals_of(traces: Path, setting: str, quick: bool) -> Workload:
    """When requests come."""
    return arrivals_in(traces, *(QUICK_WINDOW if quick else WINDOWS.get(setting, WINDOW)))


def measure(case: Case, traces: Path, enough: float = float("inf")) -> Result | None:
    """What a run comes to; None: it preempted `enough` requests, and was stopped."""
    group = GROUPS[case.group]
    setting = replace(group.settings[case.setting], step_tokens=case.step_tokens, page=case.page)
    workload = setting.requests(arrivals_of(traces, case.setting, case.quick), case.rate, case.seed)
    since = 0.0
    if group.then:
        since = workload.seconds / 2
        workload = slowed(workload, since, group.then)
    comparison = SHARINGS[case.sharing].on(
        temporal=group.temporal, quantum=case.quantum, preemptive=case.preemptive
    )
    options, preset = comparison.options(case.row), comparison.rows[case.row].preset
    device = Device(device_profile(case.kind, ENGINE), case.memory * MEMORY[case.kind])
    if case.link is not None:
        device = replace(device, link=link_of(case.link))
    try:
        return run(setting, workload, preset, options, device, enough).summary(since)
    except Enough:
        return None


def canonical(case: Case) -> Case:
    """The run that has a case's result: fields that make no difference to it are the defaults."""
    if case.row == "recompute":
        case = replace(case, link=None)
    if not GROUPS[case.group].temporal:
        case = replace(case, quantum=1.0, preemptive=False)
    return case


def slowed(workload: Workload, since: float, factor: float) -> Workload:
    """The same requests, those after `since` at `factor` times the rate."""
    moved = [
        replace(r, at=r.at if r.at < since else since + (r.at - since) / factor)
        for r in workload.requests
    ]
    return Workload.of(workload.name, moved, workload.source)


def ratios(runs: Runs, of: Iterable[Case], metric: str, **over: object) -> dict[Case, float]:
    """A metric of cases over that of the same case with fields changed to `over`, where both ran
    and neither is zero. `runs` is by `canonical` cases."""
    found: dict[Case, float] = {}
    for case in of:
        own = runs.get(canonical(case))
        base = runs.get(canonical(replace(case, **over)))  # type: ignore[arg-type]
        if own and base and own[metric] > 0 and base[metric] > 0:
            found[case] = own[metric] / base[metric]
    return found
