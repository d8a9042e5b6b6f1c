"""How much of real traces one budget serves: `static`, `swap`, `lru`, `recompute`, `balloon`,
`ballast`.

Eight models, a paced link. Cases: 300 s of LMSYS Chatbot Arena (22 models folded onto the eight by
popularity; lengths scaled, as printed) as a whole and in windows of 60 s; arrivals of an image
service (77 models) and sessions of coding agents (6 models), brought to the Arena's mean rate. Each
case has `--seeds` assignments of its models to ours, whose requests are counted together: at
least 700, of the same arrivals, so that one of these can miss in several. A curve gives the share
of requests that keep both service levels over rates (factors on the trace's); rates at 99, 95 and
90 % are read from it.

Every preset may use either order of compute, `round-robin` or `deadline`: its better one counts,
and all are compared under `deadline` as well. The budget is 40 % of all weights + peak KV (eight of
the longest requests of every model); `ceiling` is `balloon` with memory for everything; `bound`, on
whole traces, is what orders make of that which know the future (`benchmarks.clairvoyant`).
`--presets` runs some presets alone, without these two.

Service levels: TTFT 5x and TPOT 2x the P95 that each model has with memory for everything and in
turns, at 0.35 times the Arena's rate, in the world in which they are judged: in virtual time for
virtual runs, on this machine for live ones (docs/decisions/005-service-levels-of-a-shared-lane.md).
The policies are told these levels. Requests ask for as many tokens as they will get, which the
order by deadline makes use of.

Live: two of the windows, `lru` and `balloon` in turns, each in the order that is better for it
there in virtual time with the live run's levels. Each climbs from half of its virtual rate until it
misses the target, or descends from there until it meets it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console, Group
from rich.table import Column, Table

from ballast.bench.demo_terms import LINK_RATIO, pace
from ballast.bench.device_run import DeviceRun
from ballast.core.settings import Slo
from ballast.policy.presets import Preset, resolve
from ballast.workload.traces import load_trace
from ballast.workload.workload import Workload
from benchmarks.clairvoyant import Future, orders
from benchmarks.common import finish, options, verdict
from benchmarks.contenders import TURNS_AND_DEADLINES, defaults
from benchmarks.rate_curves import RATES, TARGETS, Curve, Ratios, best, curve, ratios
from benchmarks.setting import (
    MOST_OUTPUT,
    MOST_PROMPT,
    OUTPUT_FACTOR,
    PROMPT_FACTOR,
    ROOMY,
    Setting,
    no_levels,
    prepare,
    service_levels,
    trace_option,
)

BUDGET = 0.4
CURVE = (0.2, 0.3, 0.4, 0.5, 0.6, 0.8)
SWEEP = (0.25, 0.5, 1.0, 2.0, 4.0)
LOW_LOAD = 0.35
TURNS = "balloon+round-robin"
"""The preset that service levels come from: no order that knows of levels."""
COMPARED_PRESETS = ("static", "swap", "lru", "recompute", "balloon", "ballast")
CEILING = tuple(f"ceiling+{o}" for o in TURNS_AND_DEADLINES)
TARGET = TARGETS[0]
WINDOW = 60.0
LEAST_REQUESTS = 700
"""Of a case, over its seeds, for a statement about 99 %."""
LIVE_WINDOWS = 1, 3
LIVE_PRESETS = ("lru", "balloon")
OTHERS = {
    "images": "gentd26_lora_requests_20241115-20241201.csv.gz",
    "agents": "claudecode_agentic_open.jsonl.gz",
}
"""Other traces, beside the first, by case: arrivals with tokens that are made up, and sessions."""
GOALS = {
    "balloon_over_lru.mean": 1.3,
    "balloon_over_lru.worst": 1.0,
    "balloon_over_recompute.mean": 1.0,
    "balloon_over_recompute.worst": 1.0,
    "of_bound": 0.8,
    "live.balloon_over_lru": 1.2,
}
"""Of rates at `TARGET`, over whole traces, each preset in its better order."""
EQUAL = "deadline"
"""The order in which all presets are compared as well."""


@dataclass(frozen=True)
class Case:
    """Arrivals on the models of the fleet, in several assignments."""

    name: str
    workloads: tuple[Workload, ...]
    """One for each seed."""
    window: bool = False
    """It is a part of another case."""

    @property
    def n_requests(self) -> int:
        return sum(len(w.requests) for w in self.workloads)


def cases(setting: Setting, trace: Path, seeds: int, *, quick: bool) -> list[Case]:
    """The first trace as a whole and in windows, and the others that lie beside it."""
    names = [s.name for s in setting.specs]
    whole = folded(load_trace(trace), names, seeds) if trace.is_file() else (setting.workload,)
    seconds = whole[0].seconds
    if quick:
        return [Case("arena 0-60", tuple(w.window(0.0, WINDOW) for w in whole))]
    found = [Case("arena", whole)]
    for start in np.arange(0.0, seconds - WINDOW / 2, WINDOW).tolist():
        per_window = len(whole[0].window(start, start + WINDOW).requests)
        enough = max(seeds, -(-LEAST_REQUESTS // per_window))
        windows = (
            w.window(start, start + WINDOW) for w in folded(load_trace(trace), names, enough)
        )
        name = f"arena {start:.0f}-{start + WINDOW:.0f}"
        found.append(Case(name, tuple(windows), window=True))
    rate = len(whole[0].requests) / seconds
    for name, file in OTHERS.items():
        if (path := trace.parent / file).is_file():
            found.append(Case(name, folded(brought_to(rate, load_trace(path)), names, seeds)))
    return found


def folded(trace: Workload, names: Sequence[str], seeds: int) -> tuple[Workload, ...]:
    """The trace on our models, lengths scaled; each seed assigns them in another order."""
    return tuple(
        trace.map_models(
            names if seed == 0 else np.random.default_rng(seed).permutation(names).tolist()
        ).scale_lengths(PROMPT_FACTOR, OUTPUT_FACTOR, MOST_PROMPT, MOST_OUTPUT)
        for seed in range(seeds)
    )


def brought_to(rate: float, trace: Workload) -> Workload:
    """The trace's first LEAST_REQUESTS requests at so many per second."""
    end = trace.requests[min(LEAST_REQUESTS, len(trace.requests) - 1)].at
    first = trace.window(0.0, end)
    return first.scale_rate(rate * end / len(first.requests))


@dataclass(frozen=True)
class World:
    """What virtual runs need, in any process."""

    setting: Setting
    levels: dict[str, Slo]

    def attained(
        self, preset: str, budget: float, workload: Workload, policies: Preset | None = None
    ) -> int:
        """Requests that keep their service levels; `budget`: a share, or everything from 1 on."""
        setting = self.setting
        link = 1e12 if budget >= 1 else None
        room = ROOMY if budget >= 1 else int(budget * whole_bytes(setting))
        fleet = setting.under(preset, room, link)
        return setting.virtual(fleet, workload, self.levels, policies).report.total.attained

    def row(self, case: Case, preset: str, budget: float) -> Curve:
        """One preset's curve."""

        def attainment(rate: float) -> float:
            done = [self.attained(preset, budget, w.scale_rate(rate)) for w in case.workloads]
            return sum(done) / case.n_requests

        return curve(attainment)

    def bound(self, case: Case) -> Curve:
        """Of orders that know the future, with memory for everything: each run has its best."""

        def attainment(rate: float) -> float:
            return sum(self._foreseen(w.scale_rate(rate)) for w in case.workloads) / case.n_requests

        return curve(attainment)

    def _foreseen(self, workload: Workload) -> int:
        preset = resolve("balloon")
        future = Future(workload, self.levels, self.setting.profile.lane_costs)
        most = 0
        for order in orders(future):
            ran = self.attained("balloon", 1, workload, replace(preset, compute=order))
            most = max(most, ran)
            if most == len(workload.requests):
                break
        return most


def whole_bytes(setting: Setting) -> int:
    """Of all weights and peak KV."""
    return setting.weight_bytes + setting.peak_kv_bytes


def virtual_curves(
    world: World, found: Sequence[Case], presets: Sequence[str], workers: int, console: Console
) -> dict[str, dict[str, Curve]]:
    """By row and case; ceiling and bound beside all presets. Runs are independent: in so many
    processes."""
    jobs: dict[tuple[str, str], Callable[[], Curve]] = {}
    compared = defaults(*(row for preset in presets for row in rows_of(preset)))
    for case in found:
        for preset in compared.rows:
            jobs[preset, case.name] = partial(world.row, case, preset, BUDGET)
        if tuple(presets) != COMPARED_PRESETS:
            continue
        for row, order in zip(CEILING, TURNS_AND_DEADLINES, strict=True):
            jobs[row, case.name] = partial(world.row, case, f"balloon+{order}", 1)
        if not case.window:
            jobs["bound", case.name] = partial(world.bound, case)
    curves: dict[str, dict[str, Curve]] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context) as pool:
        coming = {key: pool.submit(job) for key, job in jobs.items()}
        for (row, name), future in coming.items():
            made = curves.setdefault(row, {})[name] = future.result()
            console.print(f"{name}, {row}: {made.rate_at(TARGET):.2f} at 99 %")
    return curves


def rates_of(
    curves: Mapping[str, Mapping[str, Curve]], rows: Sequence[str], target: float
) -> dict[str, float]:
    """By case, of the best of some rows."""
    return {case: best([curves[row][case] for row in rows], target) for case in curves[rows[0]]}


def rows_of(preset: str) -> tuple[str, ...]:
    """Of both orders."""
    return tuple(f"{preset}+{order}" for order in TURNS_AND_DEADLINES)


def summary(
    curves: Mapping[str, Mapping[str, Curve]],
    target: float,
    rows: Callable[[str], tuple[str, ...]] = rows_of,
) -> dict[str, Ratios]:
    """Ratios at one target, each preset in the better one of its `rows`."""
    there = [p for p in (*COMPARED_PRESETS, "ceiling") if rows(p)[0] in curves]
    rates = {p: rates_of(curves, rows(p), target) for p in there}
    found = {
        f"{of}_over_{p}": ratios(rates[of], rates[p])
        for of in ("balloon", "ballast")
        for p in there
        if of in there and of != p
    }
    if "bound" in curves:
        bound = rates_of(curves, ("bound",), target)
        found["of_bound"] = ratios({case: rates["balloon"][case] for case in bound}, bound)
    return found


def equal_rows(preset: str) -> tuple[str, ...]:
    """Of the order in which all presets are compared."""
    return (f"{preset}+{EQUAL}",)


# -- live -----------------------------------------------------------------------------------------


class Climb:
    """The rates at which one live run comes after another, towards the highest that meets a target.

    It begins at half of what is `expected`.
    """

    def __init__(self, expected: float, target: float, rates: Sequence[float] = RATES) -> None:
        self._rates = sorted(rates)
        self._target = target
        below = [i for i, rate in enumerate(self._rates) if rate <= expected / 2]
        self._at = self._start = below[-1] if below else 0
        self.attained: dict[float, float] = {}

    @property
    def next_rate(self) -> float | None:
        """Where the next run is; None: the rate is known."""
        return self._rates[self._at] if 0 <= self._at < len(self._rates) else None

    def saw(self, share: float) -> None:
        """Of the run at the next rate, so many attained their levels."""
        self.attained[self._rates[self._at]] = share
        met, descends = share >= self._target, self._at < self._start
        if met and descends:
            self._at = len(self._rates)
        elif met:
            self._at += 1
        elif descends or self._at == self._start:
            self._at -= 1
        else:
            self._at = len(self._rates)


def live_windows(setting: Setting, windows: Sequence[Case], console: Console) -> dict[str, Any]:
    """Attainment live and, with the same levels, in virtual time, over rates."""
    low = setting.workload.window(0.0, WINDOW).scale_rate(LOW_LOAD)
    first = setting.live(setting.under(TURNS, ROOMY, 1e12), low, no_levels(setting))
    levels = service_levels(first.report)
    setting = setting.with_levels(levels)
    budget = int(BUDGET * whole_bytes(setting))

    def share(run: Callable[..., DeviceRun], row: str, case: Case, rate: float) -> float:
        work = case.workloads[0].scale_rate(rate)
        return run(setting.under(row, budget), work, levels).report.total.attainment

    foreseen = {
        row: {case.name: curve(partial(share, setting.virtual, row, case)) for case in windows}
        for preset in LIVE_PRESETS
        for row in rows_of(preset)
    }
    better = {p: max(rows_of(p), key=lambda row: _typical(foreseen[row])) for p in LIVE_PRESETS}
    virtual = {p: foreseen[row] for p, row in better.items()}
    live: dict[str, dict[str, Curve]] = {p: {} for p in LIVE_PRESETS}
    for case in windows:
        climbs = {p: Climb(virtual[p][case.name].rate_at(TARGET), TARGET) for p in LIVE_PRESETS}
        while any(climb.next_rate is not None for climb in climbs.values()):
            for preset, climb in climbs.items():
                if (rate := climb.next_rate) is not None:
                    seen = share(setting.live, better[preset], case, rate)
                    climb.saw(seen)
                    outcome = f"live {case.name}, {better[preset]}, rate {rate:.2f}: {seen:.3f}"
                    console.print(f"{outcome}; virtual {virtual[preset][case.name].attained}")
        for preset, climb in climbs.items():
            live[preset][case.name] = Curve(climb.attained)
    curves = {"live": live, "virtual": virtual}
    rates = {
        world: {p: {case: c.rate_at(TARGET) for case, c in of.items()} for p, of in by.items()}
        for world, by in curves.items()
    }
    over = {world: ratios(of["balloon"], of["lru"]) for world, of in rates.items()}
    errors = [
        _apart(rate, rates["live"][preset][case])
        for preset, of in rates["virtual"].items()
        for case, rate in of.items()
    ]
    known = [e for e in errors if e is not None]
    return {
        "rows": better,
        "slos": _levels(levels),
        "max_rate": rates,
        "attained": {
            world: {p: _plain({case: c.attained for case, c in of.items()}) for p, of in by.items()}
            for world, by in curves.items()
        },
        "balloon_over_lru": over["live"].mean,
        "balloon_over_lru_by_case": over["live"].to_json(),
        "virtual_balloon_over_lru": over["virtual"].to_json(),
        "virtual_error_max": max(known, default=None),
        "virtual_within_15_percent": verdict(
            max(known) if known and len(known) == len(errors) else None, at_most=0.15
        ),
    }


def _apart(virtual: float, live: float) -> float | None:
    """By how much a virtual rate differs from the live one, as a part of that; None: one of them is
    below the lowest rate."""
    if virtual == live:
        return 0.0
    return abs(virtual / live - 1) if virtual and live else None


def _plain(of: Mapping[str, Mapping[float, float]]) -> dict[str, dict[str, float]]:
    return {case: {f"{r:.3g}": v for r, v in shares.items()} for case, shares in of.items()}


def _levels(levels: Mapping[str, Slo]) -> dict[str, dict[str, float]]:
    return {name: {"ttft": s.ttft, "tpot": s.tpot} for name, s in levels.items()}


# -- the whole ------------------------------------------------------------------------------------


def sweeps(world: World, whole: Case) -> dict[str, dict[str, dict[str, float]]]:
    """Rates at 99 % over budgets, and over links, of each preset in its own order."""

    def rates(moved: World, budget: float) -> dict[str, float]:
        one = Case(whole.name, whole.workloads[:1])
        return {p: moved.row(one, p, budget).rate_at(TARGET) for p in COMPARED_PRESETS}

    setting = world.setting
    paces = {
        times: pace(setting.specs, setting.profile.costs, LINK_RATIO * times) for times in SWEEP
    }
    return {
        "virtual_max_rate_by_budget": {f"{share:g}": rates(world, share) for share in CURVE},
        "virtual_max_rate_by_link_slowdown": {
            f"{times:g}": rates(
                replace(
                    world,
                    setting=replace(
                        setting,
                        roomy=replace(
                            setting.roomy,
                            link=replace(setting.roomy.link, bytes_per_second=bytes_per_second),
                        ),
                    ),
                ),
                BUDGET,
            )
            for times, bytes_per_second in paces.items()
        },
    }


def extra(parser: argparse.ArgumentParser) -> None:
    trace_option(parser)
    parser.add_argument("--seeds", type=int, default=1, help="assignments of models; default 1")
    parser.add_argument("--workers", type=int, default=2, help="processes of virtual runs")
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--virtual-only", action="store_true", help="no live runs")
    parts.add_argument("--live-only", action="store_true", help="no virtual runs beyond its own")
    parser.add_argument("--whole", action="store_true", help="whole traces alone, no windows")
    parser.add_argument("--presets", default=",".join(COMPARED_PRESETS), help="compare these alone")
    parser.add_argument("--sweeps", action="store_true", help="also over budgets and links")


def main() -> None:
    args = options(__doc__, extra=extra)
    console = Console(width=160)
    with tempfile.TemporaryDirectory() as scratch:
        setting = prepare(Path(scratch), args.trace, 300.0)
        low = setting.workload.scale_rate(LOW_LOAD)
        roomy = setting.under(TURNS, ROOMY, 1e12)
        levels = service_levels(setting.virtual(roomy, low, no_levels(setting)).report)
        world = World(setting.with_levels(levels), levels)
        found = cases(setting, args.trace, 1 if args.quick else args.seeds, quick=args.quick)
        if args.whole:
            found = [case for case in found if not case.window]
        for case in found:
            console.print(
                f"{case.name}: {case.n_requests} requests, {case.workloads[0].describe()}"
            )
        presets = args.presets.split(",")
        curves: dict[str, dict[str, Curve]] = {}
        if not args.live_only:
            curves = virtual_curves(world, found, presets, args.workers, console)
        live = None
        if not (args.virtual_only or args.quick or args.whole):
            windows = [case for case in found if case.window]
            live = live_windows(setting, [windows[i] for i in LIVE_WINDOWS], console)
        swept = sweeps(world, found[0]) if args.sweeps else {}
    wholes = [case.name for case in found if not case.window] or [case.name for case in found]
    traces = {row: _only(by_case, wholes) for row, by_case in curves.items()}
    outcome = {
        order: {f"{target:g}": summary(traces, target, rows) for target in TARGETS}
        for order, rows in (("better", rows_of), (EQUAL, equal_rows))
        if traces
    }
    at_target = outcome["better"][f"{TARGET:g}"] if outcome else {}
    figures = {
        **{
            f"{n}.{key}": getattr(r, key) for n, r in at_target.items() for key in ("mean", "worst")
        },
        "of_bound": at_target["of_bound"].mean if "of_bound" in at_target else None,
        "live.balloon_over_lru": live["balloon_over_lru"] if live else None,
    }
    result: dict[str, Any] = {
        "requests": {case.name: case.n_requests for case in found},
        "workloads": {case.name: case.workloads[0].describe() for case in found},
        "tokens": "arena, agents: recorded; images: made up, as its trace has arrivals alone",
        "goals": {
            name: verdict(_number(figures.get(name)), at_least=goal) for name, goal in GOALS.items()
        },
        "max_rate": {
            f"{target:g}": {
                row: {case: c.rate_at(target) for case, c in by_case.items()}
                for row, by_case in curves.items()
            }
            for target in TARGETS
        },
        "ratios": {
            order: {t: {n: r.to_json() for n, r in of.items()} for t, of in by_target.items()}
            for order, by_target in outcome.items()
        },
        "attained": {
            row: _plain({case: c.attained for case, c in by_case.items()})
            for row, by_case in curves.items()
        },
        "live": live,
        "budget_bytes": int(BUDGET * whole_bytes(setting)),
        "weight_bytes": setting.weight_bytes,
        "peak_kv_bytes": setting.peak_kv_bytes,
        "link_bytes_per_second": setting.roomy.link.bytes_per_second,
        "link_copy_over_compute": LINK_RATIO,
        "slos": _levels(levels),
        **swept,
    }
    finish(args, "fleet", result, tables(result))


def _typical(by_case: Mapping[str, Curve]) -> float:
    return float(np.mean([c.rate_at(TARGET) for c in by_case.values()]))


def _number(value: object) -> float | None:
    return value if isinstance(value, float) else None


def tables(result: Mapping[str, Any]) -> Group:
    """Rates at 99 % of every row, and their ratios with the goals."""
    names = list(result["requests"])
    rates = _plain_table("", *names, title="highest rate at 99 %, x the trace's")
    for row, by_case in result["max_rate"][f"{TARGET:g}"].items():
        rates.add_row(row, *_cells(by_case, names))
    live = result["live"]["max_rate"]["live"] if result["live"] else {}
    for preset, by_case in live.items():
        rates.add_row(f"live {preset}", *_cells(by_case, names))
    of_rates = [_ratio_table(order, of) for order, of in result["ratios"].items()]
    goals = _plain_table("", "at least", "", title="goals")
    for name, goal in GOALS.items():
        goals.add_row(name, f"{goal:g}", result["goals"][name])
    return Group(rates, *of_rates, goals)


def _ratio_table(order: str, by_target: Mapping[str, Mapping[str, Any]]) -> Table:
    """Ratios by trace and target; where a side lies at an edge of the grid, the bound in words."""
    title = "each preset in its better order" if order == "better" else f"all under {order}"
    some = next(iter(next(iter(by_target.values())).values()))
    names = [*some["by_case"], *some["edges"]]
    table = _plain_table("", "target", *names, title=f"ratios of rates, {title}")
    for name in next(iter(by_target.values())):
        for target, of in by_target.items():
            cells = {**{c: f"{r:.2f}" for c, r in of[name]["by_case"].items()}, **of[name]["edges"]}
            table.add_row(name, target, *(cells.get(case, "-") for case in names))
    return table


def _only(by_case: Mapping[str, Curve], names: Sequence[str]) -> dict[str, Curve]:
    return {case: c for case, c in by_case.items() if case in names}


def _plain_table(*columns: str, title: str) -> Table:
    first, *others = columns
    return Table(
        Column(first, no_wrap=True),
        *others,
        title=title,
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )


def _cells(by_case: Mapping[str, float], names: Sequence[str]) -> list[str]:
    return [f"{by_case[case]:.2f}" if case in by_case else "-" for case in names]


if __name__ == "__main__":
    main()
