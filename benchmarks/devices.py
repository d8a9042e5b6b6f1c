"""Two devices behind one server, against one device of twice the budget and against two servers.

The fleet, arrivals, service levels and budget of `fleet` (40 % of all weights + peak KV), under
`balloon`. `one`: a device with all of the budget and all cores. The others are two devices with
half of each: one server that places models by their `weights`, for good; one whose models `follow`
the load; two `servers` that know nothing of each other, with the models divided as by `weights`.
Every device has a link of its own, as fast as that of `fleet`. Every variant is served by worker
processes, without HTTP; in virtual time with their engine's costs (`worker_profile`), models on the
devices where the server places them.

Per variant: the highest rate, as a factor on the trace's, at which 99 % of requests meet both
service levels, by bisection, the variants in turns, on the same requests; around rates that virtual
time suggests, where two servers are what `weights` is; 0 where the lowest that was tried misses.
`capacity_error_max`: the largest error of a rate in virtual time against the live one, with a goal
of 10 %, as of throughput in `sim_fidelity`; not stated where a live search found no rate.
Service levels are those of the single device with memory for everything, at low load. `why`: the
same in virtual time with half of that link for each of two devices, twice of it for one, and one
device with the threads of a half.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ballast.bench.cluster_run import run_cluster
from ballast.bench.rate_search import RateSearch, bisect_max_rate, search_in_turns, searching
from ballast.bench.servers import ServersRun, run_servers
from ballast.cluster.placing import homes_of, part_of
from ballast.core.settings import FleetSettings, LinkSettings, Slo
from ballast.policy.presets import resolve
from ballast.sim.calibrate import calibrate
from ballast.sim.cluster import Kind
from ballast.sim.machine_profile import MachineProfile
from ballast.sim.profile import profile_of
from benchmarks.common import NOT_STATED, finish, options, verdict
from benchmarks.fleet import BUDGET, LOW_LOAD, TARGET, TURNS
from benchmarks.live_placement import placed_live
from benchmarks.setting import (
    PAGE,
    ROOMY,
    Setting,
    halves,
    no_levels,
    prepare,
    service_levels,
    trace_option,
)
from benchmarks.worker_profile import calibrate_in_worker

PRESET = "balloon"
LEAST_RATE = 0.45
"""A live search is around no lower one: at lower rates a run takes many minutes."""
CAPACITY_GOAL = 0.1
"""Largest error of a highest rate in virtual time, relative to the live one."""
QUICK_RATE = 0.7
"""Of the live runs of the quick form, which seek nothing."""

Servers = Sequence[FleetSettings]
"""A fleet for each."""


@dataclass
class Bench:
    """What all variants have in common, and what came of their runs."""

    setting: Setting
    slos: dict[str, Slo]
    profiles: Mapping[int, MachineProfile]
    """By the threads of a device."""
    console: Console
    runs: list[dict[str, Any]] = field(default_factory=list)

    def virtual(self, servers: Servers) -> RateSearch:
        """The highest rate in virtual time."""
        devices = [d for fleet in servers for d in fleet.devices.values()]
        settings, link = devices[0]
        assert settings.threads is not None
        assert link.pace is not None
        profile = self.profiles[settings.threads].over(link.pace)
        preset = resolve(PRESET, {}, placement=servers[0].placement or "weights")
        kind = Kind(len(devices), profile_of("cpu", profile, settings))

        def run(rate: float) -> float:
            ran = run_cluster(
                preset,
                [kind],
                self.setting.specs,
                self.setting.workload.scale_rate(rate),
                self.slos,
                files=placed_live(preset, servers),
            )
            return ran.report.total.attainment

        return bisect_max_rate(run, TARGET, lo=0.25, hi=1.0)

    def live(self, name: str, servers: Servers, rate: float) -> float:
        """What is attained on this machine."""
        work = self.setting.workload.scale_rate(rate)
        ran = asyncio.run(run_servers(servers, work, self.slos, name=name))
        self.runs.append({"variant": name, "rate": rate, **_counts(ran)})
        self.console.print(self.runs[-1])
        return ran.report.total.attainment


def ratio(a: float, b: float) -> float | None:
    """None where nothing can be divided by."""
    return a / b if b else None


def _counts(ran: ServersRun) -> dict[str, Any]:
    report, total = ran.report, ran.report.total
    assert total.requests
    return {
        "attainment": total.attainment,
        "attainment_ttft": total.attained_ttft / total.requests,
        "attainment_tpot": total.attained_tpot / total.requests,
        "worst_model": report.worst_attainment,
        "failed": total.failed,
        "output_tokens_per_second": report.output_tokens_per_second,
        "seconds": report.wall_seconds,
        "latest_send": report.latest_send,
        "moves": len([m for m in ran.moves if "refused" not in m]),
        "devices": {
            device.device: {
                "busy": sum(m.lane_seconds for m in device.models) / report.wall_seconds,
                "activations": sum(m.activations for m in device.models),
                "evictions": sum(m.evictions for m in device.models),
            }
            for device in ran.devices
        },
    }


def one(roomy: FleetSettings, pages: int, threads: int, link: float) -> Servers:
    """A single device."""
    device = replace(roomy.device, budget_bytes=pages * PAGE, threads=threads)
    return [replace(roomy, preset=PRESET, device=device, link=LinkSettings(bytes_per_second=link))]


def two(
    roomy: FleetSettings, pages: int, threads: int, link: float, placement: str = "weights"
) -> Servers:
    """Two devices of so much behind one server."""
    (fleet,) = one(roomy, 2 * pages, 2 * threads, link)
    return [replace(halves(fleet), placement=placement)]


def apart(server: FleetSettings) -> Servers:
    """Each device of a server as a server of its own, with the same models."""
    homes = homes_of(server)
    return [
        part_of(server, name, {model for model, at in homes.items() if name in at}, 1)
        for name in server.devices
    ]


def extra(parser: argparse.ArgumentParser) -> None:
    trace_option(parser)
    parser.add_argument("--seconds", type=float, help="of the trace; default 45, quick 12")
    parser.add_argument("--virtual-only", action="store_true", help="nothing live but calibration")


def main() -> None:
    args = options(__doc__, extra=extra)
    console = Console(width=160)
    cores = len(os.sched_getaffinity(0))
    few = max(1, cores // 2)
    with tempfile.TemporaryDirectory() as scratch:
        seconds = args.seconds or (12.0 if args.quick else 45.0)
        setting = prepare(Path(scratch), args.trace, seconds)
        work = setting.workload
        console.print(f"{len(work.requests)} requests: {work.describe()}")
        # The quick form takes the levels from virtual time.
        run = setting.virtual if args.quick or args.virtual_only else setting.live
        low = setting.under(TURNS, ROOMY, 1e12), work.scale_rate(LOW_LOAD), no_levels(setting)
        slos = service_levels(run(*low).report)
        setting = setting.with_levels(slos)
        roomy = setting.roomy
        link = roomy.link.bytes_per_second
        assert link is not None
        half = int(BUDGET * (setting.weight_bytes + setting.peak_kv_bytes)) // PAGE // 2
        (server,) = two(roomy, half, few, link)
        variants = {
            "one": one(roomy, 2 * half, cores, link),
            "weights": [server],
            "follow": two(roomy, half, few, link, "follow"),
            "servers": apart(server),
        }
        fewer = replace(roomy, device=replace(roomy.device, threads=few))
        profiles = {
            few: calibrate_in_worker(
                halves(roomy), setting.specs, calibrate(fewer, rounds=2), rounds=2
            ),
            cores: calibrate_in_worker(roomy, setting.specs, setting.profile, rounds=2),
        }
        bench = Bench(setting, slos, profiles, console)
        virtual = {name: bench.virtual(servers) for name, servers in variants.items()}
        console.print({name: search.rate for name, search in virtual.items()})
        why = {
            "weights_with_half_the_link_each": bench.virtual(two(roomy, half, few, link / 2)).rate,
            "one_with_twice_the_link": bench.virtual(one(roomy, 2 * half, cores, 2 * link)).rate,
            "one_with_half_the_threads": bench.virtual(one(roomy, 2 * half, few, link)).rate,
        }
        console.print(why)
        live: dict[str, RateSearch] = {}
        if not args.virtual_only:
            live = _searched(bench, variants, virtual, quick=args.quick)
    shown = live or virtual
    rates = {name: search.rate for name, search in shown.items()}
    result: dict[str, Any] = {
        "workload": work.describe(),
        "requests": len(work.requests),
        "live": bool(live),
        "max_rate": rates,
        "missed_at": {name: search.failed_at for name, search in shown.items()},
        **{f"{n}_over_one": ratio(rates[n], rates["one"]) for n in rates if n != "one"},
        **{f"{n}_over_servers": ratio(rates[n], rates["servers"]) for n in ("weights", "follow")},
        "virtual_max_rate": {name: search.rate for name, search in virtual.items()},
        **capacity_errors(
            {name: search.rate for name, search in live.items()},
            {name: search.rate for name, search in virtual.items()},
        ),
        "why": why,
        "budget_bytes": {"one": 2 * half * PAGE, "each_of_two": half * PAGE},
        "threads": {"one": cores, "each_of_two": few},
        "models": {
            f"server {i}": [m.name for m in fleet.models]
            for i, fleet in enumerate(variants["servers"])
        },
        "slos": {name: {"ttft": s.ttft, "tpot": s.tpot} for name, s in slos.items()},
        "runs": bench.runs,
    }
    finish(args, "devices", result, _table(result))


def capacity_errors(
    live: Mapping[str, float], virtual: Mapping[str, float], goal: float = CAPACITY_GOAL
) -> dict[str, Any]:
    """How far each highest rate in virtual time is from the live one, and whether the largest error
    meets the goal; a search that found no rate leaves nothing to compare."""
    errors = {name: virtual[name] / rate - 1 for name, rate in live.items() if rate}
    complete = bool(live) and len(errors) == len(live)
    largest = max(map(abs, errors.values())) if errors else None
    return {
        "capacity_error": errors,
        "capacity_error_max": largest,
        "capacity_error_goal": goal,
        "capacity": verdict(largest, at_most=goal) if complete else NOT_STATED,
    }


def _searched(
    bench: Bench, variants: Mapping[str, Servers], virtual: Mapping[str, RateSearch], quick: bool
) -> dict[str, RateSearch]:
    """Around the rates of virtual time. The quick form runs each once, and finds nothing."""
    if quick:
        for name, servers in variants.items():
            bench.live(name, servers, QUICK_RATE)
        return {}
    guesses = {name: max(LEAST_RATE, search.rate) for name, search in virtual.items()}
    return search_in_turns(
        {
            name: (
                partial(bench.live, name, servers),
                searching(TARGET, lo=0.75 * guess, hi=1.35 * guess, steps=1, widen=2),
            )
            for (name, servers), guess in zip(variants.items(), guesses.values(), strict=True)
        }
    )


def _table(result: Mapping[str, Any]) -> Table:
    names = list(result["max_rate"])
    table = Table("", *names, title="highest rate at 99 %, as a factor on the trace's")

    def row(what: str, values: Mapping[str, float | None]) -> None:
        table.add_row(what, *("-" if values[n] is None else f"{values[n]:.2f}" for n in names))

    if result["live"]:
        row("live", result["max_rate"])
        row("live, missed at", result["missed_at"])
    row("virtual", result["virtual_max_rate"])
    goal = f"virtual over live, off by at most {CAPACITY_GOAL:.0%}: {result['capacity']}"
    errors = result["capacity_error"]
    row(goal, {n: 1 + errors[n] if n in errors else None for n in names})
    for what, rate in result["why"].items():
        name = what.partition("_")[0]
        other = what.replace("_", " ")
        row(f"virtual, {other}", {n: rate if n == name else None for n in names})
    return table


if __name__ == "__main__":
    main()
