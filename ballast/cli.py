"""argv -> settings -> one call. Imports what a command needs when it runs, and no sooner."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ballast import cli_story
from ballast.core.errors import BallastError, ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from ballast.bench.report import Report
    from ballast.core.settings import FleetSettings, ServerSettings
    from ballast.fleet.make import MadeFleet

app = typer.Typer(
    help="Many language models served from one elastic pool of device memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
fleet_app = typer.Typer(help="Make fleets.", no_args_is_help=True)
app.add_typer(fleet_app, name="fleet")
app.add_typer(cli_story.app, name="story")

FleetFile = Annotated[Path, typer.Argument(metavar="FLEET.yaml", help="The fleet file.")]


def main() -> None:
    """The console script: a fault of the user's is one line on stderr and exit code 2."""
    try:
        app()
    except BallastError as error:
        print(f"ballast: {error}", file=sys.stderr)
        sys.exit(2)


@app.command()
def version() -> None:
    """Print the version."""
    from ballast import __version__

    print(__version__)


@app.command()
def doctor(
    fleet_file: Annotated[
        Path | None, typer.Argument(metavar="[FLEET.yaml]", help="Also check this fleet.")
    ] = None,
) -> None:
    """Check this machine, and optionally a fleet file; exit code 1 if something cannot work."""
    from rich.console import Console

    from ballast.bench.doctor import examine, table
    from ballast.bench.finding import Verdict
    from ballast.engine.inbox import MonotonicClock

    fleet = None if fleet_file is None else load(fleet_file)
    findings = list(examine(fleet, MonotonicClock()))
    Console().print(table(findings))
    if any(finding.verdict is Verdict.FAIL for finding in findings):
        raise typer.Exit(1)


@app.command()
def serve(
    fleet_file: FleetFile,
    host: Annotated[str, typer.Option(help="Address to bind; loopback by default.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8000,
    preset: Annotated[str | None, typer.Option(help="Instead of the fleet file's.")] = None,
    story: Annotated[
        Path | None,
        typer.Option(help="Append every event and decision to this file, as JSON lines."),
    ] = None,
    drain_seconds: Annotated[
        float | None,
        typer.Option(min=0, help="For open requests, after SIGTERM; default: the file's."),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="BALLAST_API_KEY", help="A key that opens all models, beside any."),
    ] = None,
    changes: Annotated[
        Path | None,
        typer.Option(
            envvar="BALLAST_CHANGES",
            help="Keep operators' changes here; default: FLEET.changes.json.",
        ),
    ] = None,
    no_changes: Annotated[
        bool, typer.Option("--no-changes", help="Forget operators' changes at the end.")
    ] = False,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    log_format: Annotated[
        str, typer.Option(envvar="BALLAST_LOG_FORMAT", help="text or json.")
    ] = "text",
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(help="Send traces to this OpenTelemetry collector: http://HOST:4318."),
    ] = None,
) -> None:
    """Serve a fleet over HTTP (the OpenAI API)."""
    from ballast.cluster.logs import set_up
    from ballast.fleet.source import Source
    from ballast.policy.presets import PRESETS
    from ballast.server.serve import serve as run

    set_up("server", log_format, log_level)

    def adjust(fleet: FleetSettings) -> FleetSettings:
        """What the command line says instead of the file."""
        fleet = with_preset(fleet, preset)
        if story is not None:
            fleet = replace(fleet, story_path=str(story))
        return replace(fleet, server=_with_options(fleet.server, drain_seconds, api_key))

    kept = None if no_changes else changes or fleet_file.with_suffix(".changes.json")
    source = Source(fleet_file, presets=PRESETS, changes=kept, adjust=adjust)
    raise typer.Exit(run(source, host, port, otlp_endpoint=otlp_endpoint))


def _with_options(
    server: ServerSettings, drain_seconds: float | None, api_key: str | None
) -> ServerSettings:
    """With what the command line adds. Raises ConfigError."""
    from ballast.core.settings import KeySettings

    if drain_seconds is not None:
        server = replace(server, drain_seconds=drain_seconds)
    if api_key:
        secret = KeySettings(name="default", key=api_key)
        taken = [k.name for k in server.keys if k.name == secret.name or k.key == api_key]
        if taken or server.admin_key == api_key:
            where = taken[0] if taken else "admin_key"
            raise ConfigError("--api-key", "(hidden)", f"the fleet file has it already: {where}")
        server = replace(server, keys=(*server.keys, secret))
    return server


@app.command()
def top(
    url: Annotated[str, typer.Option(help="The server.")] = "http://127.0.0.1:8000",
    key: Annotated[
        str | None,
        typer.Option(
            envvar=["BALLAST_ADMIN_KEY", "BALLAST_API_KEY"],
            help="The admin key, where there is one; else any key, where there are some.",
        ),
    ] = None,
    interval: Annotated[float, typer.Option(min=0.05, help="Seconds between readings.")] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="One frame, as text; so too where there is no terminal.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Readings as lines of JSON; with --once, one.")
    ] = False,
) -> None:
    """Watch a server: memory, models, queues, latencies and the last decisions.

    With --once and --json, exit code 1 if the server does not answer or refuses the key.
    """
    import asyncio

    from rich.console import Console

    from ballast.dashboard import top as screen
    from ballast.dashboard.reader import Unreadable

    console = Console(highlight=False)
    try:
        if json:
            asyncio.run(screen.lines(url, key, interval, forever=not once))
        elif once or not console.is_terminal:
            asyncio.run(screen.once(url, key, interval, console))
        else:
            asyncio.run(screen.live(url, key, interval, console))
    except Unreadable as error:
        print(f"ballast: {url}: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


StoryTo = Annotated[
    Path | None,
    typer.Option(
        "--story",
        help="Write all that happens to this file; of several presets, to one each, with the "
        "preset in its name.",
    ),
]


@app.command()
def bench(
    fleet_file: FleetFile,
    workload: Annotated[
        str, typer.Option(help="bursty, poisson, gamma, or a trace file.")
    ] = "bursty",
    preset: Annotated[
        str | None, typer.Option(help="One or more, comma separated; default: the fleet file's.")
    ] = None,
    rate: Annotated[float, typer.Option(help="Requests per second, on average.")] = 2.0,
    seconds: Annotated[float, typer.Option(help="Length of the workload.")] = 60.0,
    most_tokens: Annotated[int, typer.Option(help="Longest prompt and output together.")] = 512,
    seed: Annotated[int, typer.Option(help="Of the workload.")] = 0,
    url: Annotated[
        str | None, typer.Option(help="A server that runs already, instead of this process.")
    ] = None,
    virtual: Annotated[bool, typer.Option("--virtual", help="In virtual time.")] = False,
    profile: Annotated[
        str | None,
        typer.Option(
            help="With --virtual: a device, as H100-80G, or a file by `ballast profile`; default: "
            "this machine, measured now."
        ),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the reports here.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the reports here.")] = None,
    story: StoryTo = None,
) -> None:
    """Replay a workload open loop: latencies, service levels, memory by owner; presets compared."""
    from rich.console import Console

    from ballast.bench.choose import slos_of, workload_of
    from ballast.bench.run import compare_live, compare_virtual, replay_http
    from ballast.sim.profile import device_profile

    if profile is not None and not virtual:
        raise ConfigError("--profile", profile, "it goes with --virtual")
    if story is not None and url is not None:
        raise ConfigError("--story", str(story), "with --url it is the server's: `serve --story`")
    device = None if profile is None else device_profile(profile)
    fleet = load(fleet_file)
    names = list(slos_of(fleet))
    work = workload_of(
        workload, names, rate=rate, seconds=seconds, most_tokens=most_tokens, seed=seed
    )
    console = Console()
    console.print(f"{len(work.requests)} requests: {work.describe()}")
    presets = preset.split(",") if preset else [fleet.preset]
    for name in presets:
        with_preset(fleet, name)
    if url is not None:
        show_reports([replay_http(url, fleet, work)], console, json, png)
    elif virtual:
        show_reports(list(compare_virtual(fleet, work, presets, device, story)), console, json, png)
    else:
        show_reports(list(compare_live(fleet, work, presets, story)), console, json, png)


Devices = Annotated[
    str, typer.Option(help="As 4xH100-80G,2xL4: how many of which device, or profile's file.")
]
Workload = Annotated[
    str, typer.Option("--workload", help="bursty, poisson, gamma, or a trace file.")
]
Presets = Annotated[
    str | None,
    typer.Option("--preset", help="One or more, comma separated; default: the fleet file's."),
]
Rate = Annotated[
    float | None,
    typer.Option(help="Requests per second, on average; default: a trace's own, else 2."),
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
Seed = Annotated[int, typer.Option(help="Of the workload.")]
Placed = Annotated[
    str,
    typer.Option(
        "--placement",
        help="weights, work, follow or both: by weights, or by expected work as well; for good, or "
        "as the load goes.",
    ),
]


@app.command()
def simulate(
    fleet_file: FleetFile,
    devices: Devices,
    workload: Workload = "bursty",
    preset: Presets = None,
    placement: Placed = "work",
    lanes: Lanes = 1,
    rate: Rate = None,
    seconds: Seconds = 600.0,
    most_tokens: MostTokens = None,
    seed: Seed = 0,
    json: Annotated[Path | None, typer.Option(help="Write the reports here.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with pictures here.")] = None,
    story: StoryTo = None,
) -> None:
    """Serve a fleet in virtual time on devices that need not be here; presets side by side."""
    from rich.console import Console

    from ballast.bench.asked import Asked
    from ballast.bench.show import runs_table, sizes_text
    from ballast.bench.simulating import simulate_presets, simulation_json
    from ballast.policy.fleets import placement_of
    from ballast.sim.cluster import kinds_of

    kinds, placed = kinds_of(devices, lanes), placement_of(placement)
    work = (workload, rate, seconds, most_tokens, seed)
    asked = Asked.of(load(fleet_file, simulated=True), preset, *work)
    console = Console()
    console.print(asked.described(), markup=False, highlight=False, soft_wrap=True)
    with arrivals_bar(len(asked.workload.requests)) as progress:
        runs = list(
            simulate_presets(
                asked.fleet,
                asked.specs,
                kinds,
                asked.workload,
                asked.presets,
                placed,
                progress,
                story=story,
            )
        )
    console.print(runs_table(runs))
    sizes = sizes_text(asked.specs, runs[0])
    console.print(sizes, soft_wrap=True)
    if json is not None:
        write_json(json, simulation_json(kinds, asked.specs, asked.workload, placed, runs))
    if html is not None:
        from ballast.bench.page import page

        html.parent.mkdir(parents=True, exist_ok=True)
        title = f"{fleet_file.name} on {devices}"
        html.write_text(page(title, (asked.described(), sizes), runs), encoding="utf-8")
        console.print(f"drawn: {html}", soft_wrap=True)


@app.command()
def plan(
    fleet_file: FleetFile,
    devices: Annotated[str, typer.Option(help="The kind, as H100-80G, or a profile's file.")],
    workload: Workload = "bursty",
    target: Annotated[float, typer.Option(help="Share of requests within service levels.")] = 0.99,
    each: Annotated[
        bool, typer.Option("--each", help="Of every model's requests, not of all together.")
    ] = False,
    preset: Presets = None,
    placement: Placed = "work",
    lanes: Lanes = 1,
    rate: Rate = None,
    seconds: Seconds = 600.0,
    most_tokens: MostTokens = None,
    most_devices: Annotated[
        int,
        typer.Option(help="Where the search ends; with --placement weights, at most one each."),
    ] = 1024,
    seed: Seed = 0,
    json: Annotated[Path | None, typer.Option(help="Write what was tried here.")] = None,
) -> None:
    """The fewest devices with which a fleet meets its service levels, under each preset."""
    from rich.console import Console

    from ballast.bench.asked import Asked
    from ballast.bench.planning import plan_preset
    from ballast.bench.show import plans_table
    from ballast.policy.fleets import placement_of
    from ballast.sim.cluster import kinds_of

    kinds, placed = kinds_of(devices, lanes), placement_of(placement)
    if len(kinds) > 1 or kinds[0].number > 1:
        raise ConfigError("--devices", devices, "one kind without a number, which is sought")
    work = (workload, rate, seconds, most_tokens, seed)
    asked = Asked.of(load(fleet_file, simulated=True), preset, *work)
    console = Console()
    console.print(asked.described(), markup=False, highlight=False, soft_wrap=True)
    with arrivals_bar(len(asked.workload.requests)) as progress:
        plans = [
            plan_preset(
                asked.fleet,
                asked.specs,
                kinds[0],
                asked.workload,
                name,
                target,
                placed,
                each=each,
                most=most_devices,
                progress=progress,
            )
            for name in asked.presets
        ]
    console.print(plans_table(plans, target, each))
    if json is not None:
        document = {
            "device": kinds[0].profile.device,
            "lanes": kinds[0].lanes,
            "target": target,
            "each": each,
            "placement": placed.name,
            "workload": asked.workload.describe(),
            "presets": [plan.to_json() for plan in plans],
        }
        write_json(json, document)


@app.command()
def demo(
    directory: Annotated[Path, typer.Option(help="Where the fleet is, or will be made.")] = Path(
        "fleets/demo"
    ),
    seconds: Annotated[float, typer.Option(help="Length of the workload.")] = 45.0,
    rate: Annotated[float, typer.Option(help="Requests per second, on average.")] = 3.0,
    steps: Annotated[int | None, typer.Option(help="Training steps, where it is made.")] = None,
) -> None:
    """Eight small models, one memory budget, a bursty workload: live, then in virtual time."""
    from rich.console import Console

    from ballast.bench.demo import run_demo

    run_demo(directory, seconds, rate, steps, Console(), load)


@app.command()
def profile(
    fleet_file: FleetFile,
    to: Annotated[Path, typer.Option(help="The profile's file.")] = Path("profile.toml"),
    device: Annotated[str, typer.Option(help="What the profile calls this machine.")] = "here",
    rounds: Annotated[int, typer.Option(min=1, help="More are slower and steadier.")] = 4,
) -> None:
    """Measure what jobs of a fleet's models cost here, for simulations. Needs an idle machine."""
    from rich.console import Console
    from rich.table import Table

    from ballast.bench.others import DISTURBED, Others
    from ballast.core.units import format_bytes
    from ballast.sim.calibrate import calibrate
    from ballast.sim.profile import profile_of
    from ballast.sim.toml_file import as_toml

    fleet = load(fleet_file)
    with Others() as others:
        measured = profile_of(device, calibrate(fleet, rounds), fleet.device)
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(as_toml(measured, "Written by ballast profile."), encoding="utf-8")
    table = Table()
    for column in ("model", "decode step, ms", "prefill of 128 tokens, ms"):
        table.add_column(column)
    for row in measured.measured:
        costs = measured.costs(row.model)
        step = costs.base + costs.per_sequence
        table.add_row(row.model, f"{1e3 * step:.3g}", f"{1e3 * costs.prefill_seconds(128):.3g}")
    console = Console()
    console.print(table)
    rates = measured.link.rates
    link = " to the device, ".join(f"{format_bytes(r)}/s" for r in (rates.to_device, rates.to_host))
    link += f" to the host, {format_bytes(rates.mixed)}/s both together"
    console.print(f"link {link}; {1e3 * measured.overhead_seconds:.2g} ms more at every job")
    if others.cores > DISTURBED:
        console.print(
            f"other processes took {others.cores:.1f} cores meanwhile: measure again when idle"
        )
    console.print(f"next: ballast bench {fleet_file} --virtual --profile {to}", soft_wrap=True)


@fleet_app.command("make")
def fleet_make(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write the fleet.")],
    models: Annotated[int, typer.Option(help="How many models, 1 to 64.")] = 8,
    size: Annotated[str, typer.Option(help="tiny (for tests) or small.")] = "small",
    steps: Annotated[int, typer.Option(help="Training steps; 0: no training.")] = 200,
    seed: Annotated[int, typer.Option(help="Of weights, text and training.")] = 0,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    budget: Annotated[
        str | None,
        typer.Option(help="Device memory, as 512MiB; default: 40 % of what fixed shares need."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Remake a fleet that is there.")] = False,
) -> None:
    """Make small real-architecture models, some trained here (minutes), and their fleet file."""
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from ballast.fleet.make import make_fleet

    console = Console()
    tasks: dict[str, TaskID] = {}
    with Progress(console=console) as bar:

        def progress(name: str, step: int, of: int, loss: float) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=of)
            bar.update(tasks[name], completed=step, description=f"training {name}, loss {loss:.2f}")

        made = make_fleet(
            directory,
            n_models=models,
            size=size,
            steps=steps,
            seed=seed,
            dtype=dtype,
            budget=budget,
            force=force,
            progress=progress,
        )
    _show(made, console)


def _show(made: MadeFleet, console: object) -> None:
    from rich.console import Console
    from rich.table import Table

    from ballast.core.units import format_bytes

    assert isinstance(console, Console)
    table = Table()
    for column in ("model", "parameters", "weights", "KV a token", "made", "loss before -> after"):
        table.add_column(column)
    for model in made.models:
        loss = model.training
        table.add_row(
            model.name,
            f"{model.parameters / 1e6:.2g}M",
            format_bytes(model.weight_bytes),
            format_bytes(model.kv_bytes_per_token),
            model.made,
            f"{loss.loss_before:.2f} -> {loss.loss_after:.2f}" if loss else "",
        )
    console.print(table)
    console.print(
        f"budget {format_bytes(made.budget_bytes)}; "
        f"fixed shares would need {format_bytes(made.fixed_bytes)}"
    )
    console.print(f"next: ballast serve {made.file}", soft_wrap=True)


@contextmanager
def arrivals_bar(requests: int) -> Iterator[Callable[[str, int], None]]:
    """A bar on a terminal's stderr for each run that is named: its requests' arrivals."""
    from rich.console import Console
    from rich.progress import Progress, TaskID

    tasks: dict[str, TaskID] = {}
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:

        def progress(what: str, sent: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=requests)
            bar.update(tasks[what], completed=sent)

        yield progress


def write_json(file: Path, document: object) -> None:
    """Indented; creates the folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(dumps(document, indent=2) + "\n", encoding="utf-8")


def load(file: Path, *, simulated: bool = False) -> FleetSettings:
    """The fleet file, resolved against the presets there are."""
    from ballast.fleet.file import load_fleet
    from ballast.policy.presets import PRESETS

    return load_fleet(file, presets=PRESETS, simulated=simulated)


def with_preset(fleet: FleetSettings, preset: str | None) -> FleetSettings:
    """The fleet under another preset, whose options are its defaults. Raises ConfigError."""
    from ballast.policy.presets import resolve

    if preset is not None and preset != fleet.preset:
        fleet = replace(fleet, preset=preset, options={})
    resolve(fleet.preset, fleet.options)
    return fleet


def show_reports(
    reports: Sequence[Report], console: Console, json: Path | None, png: Path | None
) -> None:
    """Tables on the console; JSON and a picture where asked for."""
    from ballast.bench.plot import plot
    from ballast.bench.show import comparison_table, report_table

    for report in reports:
        console.print(report_table(report))
    if len(reports) > 1:
        console.print(comparison_table(reports))
    if json is not None:
        write_json(json, [report.to_json() for report in reports])
    if png is not None:
        png.parent.mkdir(parents=True, exist_ok=True)
        plot(reports, png)
        console.print(f"drawn: {png}")


if __name__ == "__main__":
    main()
