"""How much of a real trace one memory budget serves, under `static`, `swap` and `balloon`, live.

Eight models, a paced link, the arrivals of LMSYS Chatbot Arena (22 models folded onto the eight by
popularity; lengths scaled, as printed). Per preset: the highest arrival rate, as a factor on the
trace's, at which 99 % of requests meet both service levels, by bisection from rates that virtual
time suggests. The budget is 40 % of all weights + peak KV; the curve over 30 .. 80 %, and the sweep
of the link from 1/4 to 4 times, run in virtual time.

Service levels: TTFT 5x and TPOT 2x the P95 that each model has on this device, with memory for
everything, at low load (docs/decisions/005-service-levels-of-a-shared-lane.md). Peak KV: eight of
the longest requests of every model. The other presets are searched from balloon's rate over the
goal (2 for `static`, 3 for `swap`) upwards; one that misses there is given as 0, with that bound.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ballast.bench.report import Report
from ballast.bench.search import RateSearch, bisect_max_rate
from ballast.core.settings import Slo
from benchmarks.common import MET, NOT_STATED, finish, options, verdict
from benchmarks.contenders import defaults
from benchmarks.setting import (
    LINK_RATIO,
    ROOMY,
    Setting,
    no_levels,
    pace,
    prepare,
    service_levels,
    trace_option,
)

BUDGET = 0.4
CURVE = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
SWEEP = (0.25, 0.5, 1.0, 2.0, 4.0)
LOW_LOAD = 0.35
GOALS = {"static": 2.0, "swap": 3.0}
"""How many times as much `balloon` is to serve."""
COMPARED = defaults(*GOALS, "balloon")
PRESETS = tuple(COMPARED.rows)
TARGET = 0.99
FLOOR = 0.35
"""The lowest rate that a live search begins at: at lower ones a run takes many minutes."""


class Bench:
    """The setting, its service levels and its budget."""

    def __init__(self, setting: Setting, slos: dict[str, Slo], console: Console) -> None:
        self.setting = setting
        self.slos = slos
        self.console = console
        self.runs: list[dict[str, Any]] = []

    def virtual_rate(
        self, preset: str, budget: int, link: float | None = None, steps: int = 3
    ) -> RateSearch:
        """In virtual time."""
        fleet = self.setting.under(preset, budget, link)

        def run(rate: float) -> float:
            work = self.setting.workload.scale_rate(rate)
            return self.setting.virtual(fleet, work, self.slos).report.total.attainment

        return bisect_max_rate(run, TARGET, lo=0.25, hi=1.0, steps=steps, widen=3)

    def live_rate(
        self, preset: str, budget: int, lo: float, hi: float, steps: int, widen: int
    ) -> RateSearch:
        """On this machine."""
        fleet = self.setting.under(preset, budget)

        def run(rate: float) -> float:
            work = self.setting.workload.scale_rate(rate)
            ran = self.setting.live(fleet, work, self.slos)
            self._note(preset, rate, ran.report, ran.counts)
            return ran.report.total.attainment

        return bisect_max_rate(run, TARGET, lo=lo, hi=hi, steps=steps, widen=widen)

    def _note(self, preset: str, rate: float, told: Report, counts: Mapping[str, int]) -> None:
        total = told.total
        assert total.requests
        self.runs.append(
            {
                "preset": preset,
                "rate": rate,
                "attainment": total.attainment,
                "attainment_ttft": total.attained_ttft / total.requests,
                "attainment_tpot": total.attained_tpot / total.requests,
                "worst_model": told.worst_attainment,
                "failed": total.failed,
                "output_tokens_per_second": told.output_tokens_per_second,
                "seconds": told.wall_seconds,
                **counts,
            }
        )
        self.console.print(self.runs[-1])


def ratio(a: float, b: float) -> float | None:
    """None where nothing can be divided by."""
    return a / b if b else None


def shown(balloon: float, other: float, bounds: Mapping[str, float | None], preset: str) -> str:
    """Whether `balloon` serves so many times as much as a preset; not stated where the search for
    that one's rate went no lower than a bound which is too high to show it."""
    goal, bound = GOALS[preset], bounds[f"balloon_over_{preset}_at_least"]
    if other:
        return verdict(balloon / other, at_least=goal)
    return MET if bound is not None and bound >= goal else NOT_STATED


def extra(parser: argparse.ArgumentParser) -> None:
    trace_option(parser)
    parser.add_argument("--seconds", type=float, help="of the trace; default 80, quick 20")
    parser.add_argument("--virtual-only", action="store_true", help="no live search")


def main() -> None:
    args = options(__doc__, extra=extra)
    console = Console(width=160)
    seconds = args.seconds or (20.0 if args.quick else 80.0)
    with tempfile.TemporaryDirectory() as scratch:
        setting = prepare(Path(scratch), args.trace, seconds)
        console.print(f"{len(setting.workload.requests)} requests: {setting.workload.describe()}")
        low = setting.workload.scale_rate(LOW_LOAD)
        # The quick form takes the levels from virtual time, and leaves curve and sweep out.
        run = setting.virtual if args.quick else setting.live
        first = run(setting.under("balloon", ROOMY, 1e12), low, no_levels(setting))
        slos = service_levels(first.report)
        bench = Bench(setting, slos, console)
        ceiling = bench.virtual_rate("balloon", ROOMY, link=1e12)
        whole = setting.weight_bytes + setting.peak_kv_bytes
        console.print(
            f"weights {setting.weight_bytes / 1e6:.0f} MB, with peak KV {whole / 1e6:.0f}"
        )
        curve = {
            f"{share:g}": {
                preset: bench.virtual_rate(preset, int(share * whole)).rate for preset in PRESETS
            }
            for share in (CURVE if not args.quick else (BUDGET,))
        }
        console.print(curve)
        budget = int(BUDGET * whole)
        sweep = {
            f"{times:g}": {
                preset: bench.virtual_rate(
                    preset, budget, pace(setting.specs, setting.profile.costs, LINK_RATIO * times)
                ).rate
                for preset in PRESETS
            }
            for times in (SWEEP if not args.quick else ())
        }
        console.print(sweep)
        guesses = curve[f"{BUDGET:g}"]
        live = {}
        if not args.virtual_only:
            steps = 0 if args.quick else 2
            guess = max(FLOOR, guesses["balloon"])
            best = bench.live_rate(
                "balloon", budget, 0.7 * guess, 1.4 * guess, steps, 0 if args.quick else 2
            )
            live["balloon"] = best
            for preset, goal in GOALS.items():
                lowest = max(FLOOR, best.rate / goal)
                live[preset] = bench.live_rate(preset, budget, lowest, 2 * lowest, steps, widen=0)
    rates = {preset: search.rate for preset, search in live.items()} or guesses
    bounds = {
        f"balloon_over_{preset}_at_least": ratio(rates["balloon"], search.failed_at or 0.0)
        for preset, search in live.items()
        if preset in GOALS
    }
    goals = {
        f"balloon_over_{preset}_goal": shown(rates["balloon"], rates[preset], bounds, preset)
        for preset in GOALS
        if live
    }
    result: dict[str, Any] = {
        "workload": setting.workload.describe(),
        "live": bool(live),
        "max_rate": rates,
        "balloon_over_static": ratio(rates["balloon"], rates["static"]),
        "balloon_over_swap": ratio(rates["balloon"], rates["swap"]),
        **bounds,
        **goals,
        "ceiling_with_memory_for_everything": ceiling.rate,
        "budget_bytes": budget,
        "weight_bytes": setting.weight_bytes,
        "peak_kv_bytes": setting.peak_kv_bytes,
        "link_bytes_per_second": setting.roomy.link.bytes_per_second,
        "link_copy_over_compute": LINK_RATIO,
        "virtual_max_rate_by_budget": curve,
        "virtual_max_rate_by_link_slowdown": sweep,
        "slos": {name: {"ttft": s.ttft, "tpot": s.tpot} for name, s in slos.items()},
        "runs": bench.runs,
    }
    finish(args, "fleet", result, _table(result, curve))


def _table(result: Mapping[str, Any], curve: Mapping[str, Mapping[str, float]]) -> Table:
    table = Table("", *PRESETS, title="highest rate at 99 %, as a factor on the trace's")
    where = "live" if result["live"] else "virtual"
    table.add_row(where, *(f"{result['max_rate'][p]:.2f}" for p in PRESETS))
    for share, rates in curve.items():
        table.add_row(f"virtual, budget {share}", *(f"{rates[p]:.2f}" for p in PRESETS))
    for times, rates in result["virtual_max_rate_by_link_slowdown"].items():
        table.add_row(f"virtual, link {times}x slower", *(f"{rates[p]:.2f}" for p in PRESETS))
    for key in ("balloon_over_static", "balloon_over_swap"):
        value = result[key]
        bound = result.get(f"{key}_at_least")
        told = f"{value:.2f}" if value else "not stated" if not bound else f"over {bound:.2f}"
        table.add_row(key, told)
    return table


if __name__ == "__main__":
    main()
