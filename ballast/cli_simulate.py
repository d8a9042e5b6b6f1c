"""The commands that serve in virtual time, on devices that need not be here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ballast.cli_common import (
    GENERATED,
    FleetFile,
    Presets,
    Rate,
    Seed,
    SessionGap,
    Spread,
    Start,
    StoryTo,
    TraceModels,
    Workload,
    importing,
    load,
    print_plain,
    writable,
    write_json,
    write_page,
)
from ballast.core.errors import ConfigError

if TYPE_CHECKING:
    from ballast.sim.cluster import Kind

Devices = Annotated[
    str, typer.Option(help="As 4xH100-80G,2xL4: how many of which device, or profile's file.")
]
Seconds = Annotated[float, typer.Option(help="Length of the workload, in virtual time.")]
MostTokens = Annotated[
    int | None,
    typer.Option(
        help="Longest prompt and output together; default: 4096, less where a model holds less."
    ),
]
Lanes = Annotated[
    int, typer.Option(min=1, help="Most jobs that run at the same time on one device.")
]
Engine = Annotated[
    str | None,
    typer.Option(
        help="What serves on devices that name none, as H100-80G@eager does: graphs, sglang, "
        "eager or one of your profile's; default: the profile's own."
    ),
]
Placed = Annotated[
    str | None,
    typer.Option(
        "--placement",
        help="weights, work, follow, both, kvpr, link, swiftcache, price or random: by weights, or "
        "by expected work as well; for good, as the load goes, to the least KV pressure, within a "
        "shared link's budget, or to where pages are worth most; or drawn. "
        "Default: the fleet file's, else the preset's own. For simulate also a .toml file that "
        "names each model's devices.",
    ),
]
Links = Annotated[
    Path | None,
    typer.Option("--links", help="A .toml file: devices per host, and what links they share."),
]
Orders = Annotated[
    Path | None,
    typer.Option("--orders", help="A .toml file: what operators order, and when."),
]


Without = Annotated[
    str | None,
    typer.Option(help="What is not to count, comma separated: mapping, copies, spread."),
]
JobSpread = Annotated[
    float | None,
    typer.Option(
        help="Deviation of the logarithm of jobs' seconds, lognormal; default: the profile's own."
    ),
]
Drift = Annotated[
    float,
    typer.Option(help="Share by which devices' speed goes up and down, in a wave of 300 s."),
]


ReportsFile = Annotated[
    Path | None, typer.Option(callback=writable, help="Write the reports here.")
]
PageFile = Annotated[
    Path | None, typer.Option(callback=writable, help="Write a page with pictures here.")
]


def simulate(
    fleet_file: FleetFile,
    devices: Devices,
    workload: Workload = None,
    preset: Presets = None,
    placement: Placed = None,
    links: Links = None,
    orders: Orders = None,
    lanes: Lanes = 1,
    engine: Engine = None,
    rate: Rate = None,
    seconds: Seconds = 600.0,
    most_tokens: MostTokens = None,
    seed: Seed = 0,
    start: Start = 0.0,
    spread: Spread = None,
    session_gap: SessionGap = None,
    trace_models: TraceModels = None,
    without: Without = None,
    job_spread: JobSpread = None,
    drift: Drift = 0.0,
    json: ReportsFile = None,
    html: PageFile = None,
    story: StoryTo = None,
) -> None:
    """Serve a fleet in virtual time on devices that need not be here; presets side by side."""
    from rich.console import Console

    with importing():
        from ballast.bench.simulation import simulate_presets, simulation_json
        from ballast.bench.simulation_setup import SimulationSetup, WorkloadOptions
        from ballast.bench.tables import kinds_text, runs_table, sizes_text
        from ballast.sim.cluster import parse_kinds
        from ballast.sim.cluster_files import read_cluster_files
        from ballast.sim.cost_switches import read_cost_switches

    counted = read_cost_switches(without, job_spread, drift, seed)
    kinds = parse_kinds(devices, lanes, engine, counted)
    found = read_cluster_files(links, placement, orders)
    part = start, spread, session_gap, trace_models
    wanted = WorkloadOptions(workload or GENERATED, rate, seconds, most_tokens, seed, *part)
    setup = SimulationSetup.of(load(fleet_file, simulated=True), preset, wanted)
    console = Console()
    print_plain(console, setup.described(), kinds_text(kinds))
    with arrivals(len(setup.workload.requests)) as progress:
        policy = placement if found.homes is None else None
        settings = (setup.fleet, setup.specs, kinds, setup.workload, setup.presets, policy)
        runs = list(simulate_presets(*settings, progress, story=story, files=found))
    console.print(runs_table(runs))
    sizes = sizes_text(setup.specs, runs[0])
    console.print(sizes, soft_wrap=True)
    if json is not None:
        write_json(json, simulation_json(kinds, setup.specs, setup.workload, runs))
    if html is not None:
        from ballast.bench.page import page

        title = f"{fleet_file.name} on {devices}"
        facts = (setup.described(), kinds_text(kinds), sizes)
        write_page(html, page(title, facts, [run.report for run in runs], runs), console)


DeviceKind = Annotated[str, typer.Option(help="The kind, as H100-80G, or a profile's file.")]
Target = Annotated[float, typer.Option(help="Share of requests within service levels.")]
Each = Annotated[
    bool, typer.Option("--each", help="Of every model's requests, not of all together.")
]
MostDevices = Annotated[
    int,
    typer.Option(help="Where the search ends; with --placement weights, at most one each."),
]
Seeds = Annotated[
    int,
    typer.Option(
        min=1,
        help="Most draws of the workload: search for one after the other, by the seeds from "
        "--seed on, until the interval of the answers settles. 1: one, without an interval.",
    ),
]
TriedFile = Annotated[
    Path | None, typer.Option(callback=writable, help="Write what was tried here.")
]


def plan(
    fleet_file: FleetFile,
    devices: DeviceKind,
    workload: Workload = None,
    target: Target = 0.99,
    each: Each = False,
    preset: Presets = None,
    placement: Placed = None,
    links: Links = None,
    lanes: Lanes = 1,
    engine: Engine = None,
    rate: Rate = None,
    seconds: Seconds = 600.0,
    most_tokens: MostTokens = None,
    most_devices: MostDevices = 1024,
    seed: Seed = 0,
    seeds: Seeds = 8,
    start: Start = 0.0,
    spread: Spread = None,
    session_gap: SessionGap = None,
    trace_models: TraceModels = None,
    json: TriedFile = None,
) -> None:
    """The fewest devices with which a fleet meets its service levels, under each preset."""
    from rich.console import Console

    with importing():
        from ballast.bench.planning import Question, plan_preset
        from ballast.bench.simulation_setup import SimulationSetup, WorkloadOptions
        from ballast.bench.tables import forecast_text, kinds_text, plans_table
        from ballast.sim.cluster import parse_kinds
        from ballast.sim.cluster_files import read_cluster_files

    kinds = parse_kinds(devices, lanes, engine)
    if len(kinds) > 1 or kinds[0].number > 1:
        raise ConfigError("--devices", devices, "one kind without a number, which is sought")
    part = start, spread, session_gap, trace_models
    wanted = WorkloadOptions(workload or GENERATED, rate, seconds, most_tokens, seed, *part)
    setup = SimulationSetup.of(load(fleet_file, simulated=True), preset, wanted)
    console = Console()
    print_plain(console, setup.described(), kinds_text(kinds))
    draws, found = setup.draws(seeds), read_cluster_files(links, placement, None)
    if found.homes is not None:
        raise ConfigError("--placement", placement, "a fleet policy: devices have no names yet")
    with arrivals(len(setup.workload.requests)) as progress:
        plans, fleet, specs = [], setup.fleet, setup.specs
        for name in setup.presets:
            question = Question(fleet, specs, kinds[0], name, target, placement, each, found)
            plans.append(plan_preset(question, draws, most=most_devices, progress=progress))
    console.print(plans_table(plans, target, each))
    console.print(forecast_text(kinds[0].profile), soft_wrap=True)
    if json is not None:
        asked = {"target": target, "each": each, "workload": setup.described(), "seeds": len(draws)}
        write_json(json, {**_described(kinds[0]), **asked, "presets": [p.to_json() for p in plans]})


def _described(kind: Kind) -> dict[str, object]:
    """Return what a plan's document says of its devices."""
    profile = kind.profile
    return {
        "device": profile.device,
        "engine": profile.engine,
        "lanes": kind.lanes,
        "capacity_errors": profile.capacity_errors,
    }


@contextmanager
def arrivals(requests: int) -> Iterator[Callable[[str, int], None]]:
    """Show how many requests have arrived in each run that is named."""
    from ballast.bench.progress import shown

    with shown() as at:
        yield lambda what, sent: at(what, sent, requests)
