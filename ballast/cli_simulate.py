"""The commands that serve in virtual time, on devices that need not be here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ballast.cli_common import (
    FleetFile,
    Presets,
    Rate,
    Seed,
    Spread,
    Start,
    StoryTo,
    Workload,
    importing,
    load,
    writable,
    write_json,
    write_page,
)
from ballast.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

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
        help="What serves on devices that name none, as H100-80G@eager does: graphs, eager or one "
        "of your profile's; default: the profile's own."
    ),
]
Placed = Annotated[
    str | None,
    typer.Option(
        "--placement",
        help="weights, work, follow, both or kvpr: by weights, or by expected work as well; for "
        "good, as the load goes, or to the least KV pressure. Default: the fleet file's, else the "
        "preset's own. For simulate also a .toml file that names each model's devices.",
    ),
]
Links = Annotated[
    Path | None,
    typer.Option("--links", help="A .toml file: devices per host, and what links they share."),
]
Orders = Annotated[
    Path | None,
    typer.Option("--orders", help="A .toml file: what devices lend each other, and recall, when."),
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
    workload: Workload = "bursty",
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
    wanted = WorkloadOptions(workload, rate, seconds, most_tokens, seed, start, spread)
    setup = SimulationSetup.of(load(fleet_file, simulated=True), preset, wanted)
    console = Console()
    _print_plain(console, setup.described(), kinds_text(kinds))
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
    workload: Workload = "bursty",
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
    wanted = WorkloadOptions(workload, rate, seconds, most_tokens, seed, start, spread)
    setup = SimulationSetup.of(load(fleet_file, simulated=True), preset, wanted)
    console = Console()
    _print_plain(console, setup.described(), kinds_text(kinds))
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
        document = {
            **_described(kinds[0]),
            "target": target,
            "each": each,
            "workload": setup.workload.describe(),
            "seeds": len(draws),
            "capacity_errors": kinds[0].profile.capacity_errors,
            "presets": [plan.to_json() for plan in plans],
        }
        write_json(json, document)


def _print_plain(console: Console, *lines: str) -> None:
    """Print lines as they are, however long."""
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _described(kind: Kind) -> dict[str, str | int]:
    """Return what a plan's document says of its devices."""
    return {"device": kind.profile.device, "engine": kind.profile.engine, "lanes": kind.lanes}


@contextmanager
def arrivals(requests: int) -> Iterator[Callable[[str, int], None]]:
    """Show how many requests have arrived in each run that is named."""
    from ballast.bench.progress import shown

    with shown() as at:
        yield lambda what, sent: at(what, sent, requests)
