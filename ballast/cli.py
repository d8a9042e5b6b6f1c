"""argv -> settings -> one call. Imports what a command needs when it runs, and no sooner."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ballast.core.errors import BallastError

if TYPE_CHECKING:
    from ballast.core.settings import FleetSettings
    from ballast.fleet.make import MadeFleet

app = typer.Typer(
    help="Many language models served from one elastic pool of device memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
fleet_app = typer.Typer(help="Make fleets.", no_args_is_help=True)
app.add_typer(fleet_app, name="fleet")

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


@fleet_app.command("make")
def fleet_make(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write the fleet.")],
    models: Annotated[int, typer.Option(help="How many models, 1 to 64.")] = 8,
    size: Annotated[str, typer.Option(help="tiny (for tests) or small.")] = "small",
    steps: Annotated[int, typer.Option(help="Training steps; 0: no training.")] = 160,
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


def load(file: Path) -> FleetSettings:
    """The fleet file, resolved against the presets there are."""
    from ballast.fleet.file import load_fleet
    from ballast.policy.presets import PRESETS

    return load_fleet(file, presets=PRESETS)


if __name__ == "__main__":
    main()
