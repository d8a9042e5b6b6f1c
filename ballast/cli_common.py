"""Share options, loading and output among the commands of several groups."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ballast.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from ballast.core.settings import FleetSettings

FleetFile = Annotated[Path, typer.Argument(metavar="FLEET.yaml", help="The fleet file.")]
StoryTo = Annotated[
    Path | None,
    typer.Option(
        "--story",
        help="Write all that happens to this file; of several presets, to one each, with the "
        "preset in its name.",
    ),
]
Workload = Annotated[
    list[str] | None,
    typer.Option(
        "--workload",
        help="bursty, poisson, gamma, or a trace file, as FILE or KIND:FILE; several at once by "
        "giving it several times. Default: bursty.",
    ),
]
GENERATED = ("bursty",)
"""The workload where none is named."""
Presets = Annotated[
    str | None,
    typer.Option(
        "--preset",
        help="One or more, comma separated; default: the fleet file's, and lru and recompute.",
    ),
]
Rate = Annotated[
    float | None,
    typer.Option(
        help="Requests per second, on average, of all workloads together, in the seconds asked "
        "for; default: a trace's own, else 2."
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Of the workload.")]
Start = Annotated[float, typer.Option(min=0.0, help="Seconds into a trace, as recorded.")]
Spread = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        help="Spread a trace over all models by a power law of this exponent, instead of mapping "
        "its models; for traces of one service.",
    ),
]
SessionGap = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        help="Seconds between the starts of two sessions of a trace whose times are the sessions' "
        "own (agentic); default: 60.",
    ),
]
TraceModels = Annotated[
    str | None,
    typer.Option(
        help="The trace's models whose requests are taken, comma separated; default: all."
    ),
]

Url = Annotated[str, typer.Option(help="The server.")]
Key = Annotated[
    str | None,
    typer.Option(
        envvar=["BALLAST_ADMIN_KEY", "BALLAST_API_KEY"],
        help="The admin key; without one, any API key; without keys, none.",
    ),
]
HERE = "http://127.0.0.1:8000"
"""The server where none is named."""
LONGEST_ORDER = 600.0
"""Seconds: models come to other devices meanwhile."""


@contextmanager
def importing() -> Iterator[None]:
    """Say so where imports take long."""
    from ballast.bench.progress import shown

    with shown() as progress:
        progress("importing", 0)
        yield


def load(
    file: Path,
    *,
    simulated: bool = False,
    partial: bool = False,
    fetch_hub: Callable[[str, str], str] | None = None,
) -> FleetSettings:
    """The fleet file, resolved against the presets there are and the checkpoints' sizes; options as
    of `load_fleet`."""
    from ballast.fleet.fleet_file import load_fleet
    from ballast.fleet.hub import fetch
    from ballast.policy.presets import PRESETS
    from ballast.weights.page_size import with_page_sizes

    fleet = load_fleet(
        file,
        presets=PRESETS,
        simulated=simulated,
        partial=partial,
        fetch_hub=fetch_hub or fetch,
    )
    return with_page_sizes(fleet)


def with_preset(fleet: FleetSettings, preset: str | None) -> FleetSettings:
    """The fleet under another preset, whose options are its defaults. Raises ConfigError."""
    from ballast.policy.presets import preset_of

    if preset is not None and preset != fleet.preset:
        fleet = replace(fleet, preset=preset, options={})
    preset_of(fleet)
    return fleet


def writable(file: Path | None) -> Path | None:
    """Refuse an option's output file before a long run if it could not be written after it; creates
    the folder. A pipe is not tried: its reader would take the trial for all. Raises ConfigError."""
    if file is None or file.is_fifo():
        return file
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        there = file.exists()
        with file.open("ab"):
            pass
        if not there:
            file.unlink()
    except OSError as error:
        raise ConfigError(str(file), error.strerror, "a file that can be written") from error
    return file


def print_plain(console: Console, *lines: str) -> None:
    """Print lines as they are, however long."""
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def write_json(file: Path, document: object) -> None:
    """Indented; creates the folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(dumps(document, indent=2) + "\n", encoding="utf-8")


def write_page(file: Path, html: str, console: Console) -> None:
    """Write a page with pictures; creates the folder, and says where the page is."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(html, encoding="utf-8")
    console.print(f"drawn: {file}", soft_wrap=True)


def ordered(
    url: str,
    key: str | None,
    path: str,
    body: Mapping[str, object] | None = None,
    *,
    method: str = "POST",
    query: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Give a server an order below `/admin` and return its answer. Says why, and exits, where there
    is none."""
    import httpx

    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        answer = httpx.request(
            method,
            f"{url.rstrip('/')}/admin/{path}",
            params=query,
            json=body,
            headers=headers,
            timeout=LONGEST_ORDER,
        )
        document: dict[str, Any] = answer.json()
    except (httpx.HTTPError, ValueError) as error:
        print(f"ballast: {url}: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    if answer.is_error:
        why = document.get("error", {}).get("message", answer.reason_phrase)
        print(f"ballast: {url}: {why}", file=sys.stderr)
        raise typer.Exit(1)
    return document
