"""The command that places models on devices which need not be here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def place(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A problem in JSON, or a list; - for stdin.")
    ],
    algorithm: Annotated[str, typer.Option(help="muxserve, greedy or optimal.")] = "muxserve",
    device: Annotated[
        str, typer.Option(help="What the devices are: a device's name, or a profile's file.")
    ] = "A100-80G",
    per_host: Annotated[
        int, typer.Option(min=1, help="Devices of a host, over which a model may be spread.")
    ] = 8,
    threshold: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="greedy: share of its device's KV pressure by which another device's must be "
            "lower for a model to move.",
        ),
    ] = 0.0,
) -> None:
    """Say which devices are to serve which models (docs/placement.md); JSON in, JSON out."""
    import json

    from ballast.core.errors import ConfigError
    from ballast.sim.placement_answers import PlacementInputs, answers, problems_of
    from ballast.sim.profile import device_profile

    where = "stdin" if str(file) == "-" else str(file)
    try:
        text = sys.stdin.read() if where == "stdin" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("file", where, f"it cannot be read: {error}") from error
    problems, several = problems_of(text, where)
    found = answers(
        problems, algorithm, PlacementInputs(device_profile(device), per_host, threshold)
    )
    print(json.dumps(found if several else found[0], indent=2))
