"""The commands about stories: what a run did, entry by entry, in a file."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from ballast.cli_common import writable

app = typer.Typer(help="Replay and compare the stories of runs.", no_args_is_help=True)

StoryPath = Annotated[Path, typer.Argument(metavar="FILE", help="As `--story` writes it.")]


@app.command()
def replay(story: StoryPath) -> None:
    """Feed a story's events to the same loop and policies: do they do the same again?

    Exit code 1, and the first difference, if they do not, or if a part cannot be replayed.
    """
    from rich.console import Console

    from ballast.bench.story_tables import headless_text, replay_text
    from ballast.sim.replay import replay as follow
    from ballast.sim.story_reader import read_story

    console = Console()
    read = read_story(story)
    same = not read.headless
    for device, n in read.headless.items():
        console.print(headless_text(device, n), markup=False, highlight=False, soft_wrap=True)
    for life in read.lives:
        found = follow(life)
        same = same and found.difference is None and found.stray is None
        console.print(replay_text(life, found), markup=False, highlight=False, soft_wrap=True)
    if not same:
        raise typer.Exit(1)


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="A story, as `--story` writes it.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another: live or simulated.")],
    json: Annotated[
        Path | None,
        typer.Option(callback=writable, help="Write the comparison here.", show_default=False),
    ] = None,
) -> None:
    """Two runs side by side: latencies, service levels, jobs, and where decisions first differ."""
    from rich.console import Console

    from ballast.bench.story_report import report_story
    from ballast.bench.story_tables import comparison_json, difference_lines, story_table
    from ballast.bench.tables import report_table
    from ballast.sim.story_reader import read_device_stories

    console = Console()
    one = report_story(read_device_stories(a), f"A: {a.name}")
    other = report_story(read_device_stories(b), f"B: {b.name}")
    for report in (one, other):
        console.print(report_table(report.report))
    console.print(story_table(one, other))
    for line in difference_lines(one, other):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if json is not None:
        json.parent.mkdir(parents=True, exist_ok=True)
        json.write_text(dumps(comparison_json(one, other), indent=2) + "\n", encoding="utf-8")
