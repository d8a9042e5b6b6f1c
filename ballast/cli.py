"""argv -> settings -> one call. Imports what a command needs when it runs, and no sooner."""

from __future__ import annotations

import sys
from typing import Annotated

from ballast.isolation.hangup import note_hangup

if sys.argv[1:2] == ["serve"]:
    note_hangup()  # before the imports below, which take a moment

import typer

from ballast import (
    cli_bench,
    cli_fleet,
    cli_kv,
    cli_place,
    cli_serve,
    cli_simulate,
    cli_story,
)
from ballast.core.errors import BallastError

app = typer.Typer(
    help="Many language models served from one elastic pool of device memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(cli_fleet.app, name="fleet")
app.add_typer(cli_kv.app, name="kv")
app.add_typer(cli_story.app, name="story")


def main() -> None:
    """The console script: a fault of the user's is one line on stderr and exit code 2."""
    try:
        app()
    except BallastError as error:
        print(f"ballast: {error}", file=sys.stderr)
        sys.exit(2)


def _version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Many language models served from one elastic pool of device memory."""


@app.command()
def version() -> None:
    """Print the version."""
    from ballast import __version__

    print(__version__)


for command in (
    cli_fleet.init,
    cli_fleet.pull,
    cli_serve.doctor,
    cli_serve.serve,
    cli_serve.ps,
    cli_serve.top,
    cli_serve.drain,
    cli_serve.release,
    cli_bench.bench,
    cli_simulate.simulate,
    cli_simulate.plan,
    cli_place.place,
    cli_bench.demo,
    cli_bench.profile,
):
    app.command()(command)


if __name__ == "__main__":
    main()
