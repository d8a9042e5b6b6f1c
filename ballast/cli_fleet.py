"""The commands that make fleets and fleet files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ballast.cli_common import importing, load, print_plain, writable
from ballast.core.errors import ConfigError

if TYPE_CHECKING:
    from ballast.core.model import ModelSpec
    from ballast.fleet.fleet_draft import MachineMemory
    from ballast.fleet.make import MadeFleet
    from ballast.fleet.model_search import FoundModel, LeftOut

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


def init(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FOLDER]...",
            help="Where models lie: checkpoints, adapters, GGUF files; default: the hub's cache.",
        ),
    ] = None,
    file: Annotated[Path, typer.Option("--file", help="The fleet file to write.")] = Path(
        "fleet.yaml"
    ),
    preset: Annotated[str | None, typer.Option(help="Default: what serve takes.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Write a fleet file of the models in some folders, with budgets that this machine has."""
    from rich.console import Console

    if file.exists() and not force:
        raise ConfigError("--file", str(file), "it is there already: --force replaces it")
    writable(file)
    with importing():
        from huggingface_hub.constants import HF_HUB_CACHE

        from ballast.fleet.fleet_draft import draft
        from ballast.fleet.model_search import search
        from ballast.fleet.schema import FleetKeys
        from ballast.policy.presets import resolve

    preset = preset or str(FleetKeys.model_fields["preset"].default)
    resolve(preset)
    where = folders or [Path(HF_HUB_CACHE)]
    for folder in where:
        if not folder.is_dir():
            raise ConfigError("FOLDER", str(folder), "there is no such folder")
    found, left = search(where)
    specs, faults = _tried(found)
    left += faults
    found = [m for m in found if (m.base or m.name) in specs]
    console = Console(stderr=True)
    print_plain(console, *(f"left out: {one.path}: {one.reason}" for one in left))
    if not specs:
        searched = ", ".join(str(folder) for folder in where)
        raise ConfigError("FOLDER", searched, "no model that can be served lies there")
    file.write_text(draft(found, specs, left, _machine(), preset), encoding="utf-8")
    print_plain(Console(), f"{len(found)} models: {file}", f"next: ballast serve {file}")


def pull(
    wanted: Annotated[
        list[str],
        typer.Argument(metavar="ID|FLEET.yaml...", help="Hub ids, or fleet files that name some."),
    ],
) -> None:
    """Download models from the hub before they are served: weights, configuration and tokenizer,
    never code. What is there already is not downloaded again."""
    from rich.console import Console

    from ballast.fleet.entry_directory import ADAPTER, CHECKPOINT, find_directory
    from ballast.fleet.hub import fetch

    console = Console()
    for text in wanted:
        if text.endswith((".yaml", ".yml")):
            fleet = load(Path(text))  # which fetches what it names
            ends = [(m.name, m.path) for m in fleet.models]
            ends += [(a.name, a.path) for m in fleet.models for a in m.adapters]
        else:
            hub_id = f"hf:{text.removeprefix('hf:')}"
            path = Path(find_directory(hub_id, "ID", Path(), fetch, CHECKPOINT))
            if not any((path / kind.file).is_file() for kind in (CHECKPOINT, ADAPTER)):
                allowed = "it is neither a checkpoint nor an adapter: no config.json"
                raise ConfigError("ID", text, f"{allowed}; looked in {path}")
            ends = [(text, str(path))]
        print_plain(console, *(f"{name}: {path}" for name, path in ends))


def _tried(found: list[FoundModel]) -> tuple[dict[str, ModelSpec], list[LeftOut]]:
    """Return the specs of the models that can be served, by name, and the others."""
    from ballast.bench.progress import shown
    from ballast.core.errors import BallastError
    from ballast.core.settings import ModelSettings
    from ballast.fleet.entry_directory import CHECKPOINT, find_directory
    from ballast.fleet.model_search import LeftOut
    from ballast.weights.checkpoint import read_spec
    from ballast.weights.manifest import fork_zygote

    specs: dict[str, ModelSpec] = {}
    left: list[LeftOut] = []
    models = [m for m in found if not m.is_adapter]
    with fork_zygote() as isolation, shown() as progress:
        for i, model in enumerate(models):
            progress("models looked at", i, note=model.name)
            place = str(model.directory)
            try:
                path = find_directory(place, model.name, Path(), _never, CHECKPOINT)
                specs[model.name] = read_spec(
                    ModelSettings(name=model.name, path=path), 1, isolation
                )
            except BallastError as error:
                left.append(LeftOut(model.path, str(error)))
    bases = {m.name for m in models}.difference(specs)
    left += [LeftOut(m.path, f"its base {m.base} is left out") for m in found if m.base in bases]
    return specs, left


def _never(hub_id: str, key: str) -> str:
    raise AssertionError(f"{key}: {hub_id} was found in a folder")


def _machine() -> MachineMemory:
    from ballast.core.errors import DeviceError
    from ballast.fleet.fleet_draft import MachineMemory
    from ballast.memory.cuda.probe import gpu_bytes
    from ballast.memory.host_memory import available

    try:
        gpus = gpu_bytes()
    except DeviceError:
        gpus = []
    return MachineMemory(tuple(gpus), available()[0])


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
