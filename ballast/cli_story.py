"""The commands about stories: what a run did, entry by entry, in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Replay and compare the stories of runs.", no_args_is_help=True)

StoryPath = Annotated[Path, typer.Argument(metavar="FILE", help="As `--story` writes it.")]


@app.command()
def replay(story: StoryPath) -> None:
    """Feed a story's events to the same loop and policies: do they do the same again?

    Exit code 1, and the first difference, if they do not, or if a part cannot be replayed.
    """
    from rich.console import Console

    from ballast.bench.retelling import retell
    from ballast.sim.lives import read_lives
    from ballast.sim.replay import replay as follow

    console = Console()
    same = True
    for life in read_lives(story):
        found = follow(life)
        same = same and found.difference is None and found.stray is None
        console.print(retell(life, found), markup=False, highlight=False, soft_wrap=True)
    if not same:
        raise typer.Exit(1)
