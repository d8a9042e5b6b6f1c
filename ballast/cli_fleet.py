"""The commands that make fleets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ballast.cli_common import importing

if TYPE_CHECKING:
    from ballast.fleet.make import MadeFleet

app = typer.Typer(help="Make fleets.", no_args_is_help=True)


@app.command("make")
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

    from ballast.bench.progress import shown, training

    with importing():
        from ballast.fleet import smollm2
        from ballast.fleet.make import make_fleet

    real = smollm2.find()
    with shown() as progress:
        progress(f"making {models} models", 0)
        made = make_fleet(
            directory,
            n_models=models,
            size=size,
            steps=steps,
            seed=seed,
            dtype=dtype,
            budget=budget,
            force=force,
            real=real,
            progress=training(progress),
        )
    _show(made, Console())
    Console().print(smollm2.MISSING if real is None else f"{smollm2.NAME}: {smollm2.TITLE}")


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
