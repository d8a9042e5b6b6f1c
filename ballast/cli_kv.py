"""The commands about a server's KV tiers: see them, change their sizes, scrub what they hold."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from ballast.cli_common import HERE, Key, Url, ordered

app = typer.Typer(
    help="See, resize and scrub a server's KV tiers (kv_host, kv_disk).", no_args_is_help=True
)

Size = Annotated[
    str | None, typer.Option(metavar="SIZE", help="As 2GiB, up to the fleet file's; 0: keep none.")
]


@app.command("list")
def tiers(
    url: Url = HERE,
    key: Key = None,
    json: Annotated[bool, typer.Option("--json", help="The answer, as one line.")] = False,
) -> None:
    """List the tiers: size, use, blocks, bytes by API key, and what has happened since the start.

    Exit code 1 if the server has none, does not answer or refuses the key.
    """
    _show(ordered(url, key, "kv", method="GET"), json=json)


@app.command()
def resize(host: Size = None, disk: Size = None, url: Url = HERE, key: Key = None) -> None:
    """Change the tiers' sizes while the server runs, until its end; what is beyond them goes.

    Exit code 1 if it cannot be done, with the reason.
    """
    sizes = {name: size for name, size in (("host", host), ("disk", disk)) if size is not None}
    if not sizes:
        print("ballast: nothing is to change: name --host, --disk or both", file=sys.stderr)
        raise typer.Exit(2)
    _show(ordered(url, key, "kv", sizes, method="PATCH"), json=False)


@app.command()
def scrub(
    model: Annotated[str | None, typer.Option(help="A model's KV, its adapters' included.")] = None,
    api_key: Annotated[
        str | None, typer.Option(help="The KV of an API key, by its name in the fleet file.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All KV.")] = False,
    url: Url = HERE,
    key: Key = None,
) -> None:
    """Remove kept KV from all devices and tiers, and overwrite it: a model's, an API key's, or what
    is both. Running requests keep theirs until they end.

    Exit code 1 if it cannot be done, with the reason.
    """
    query = {n: v for n, v in (("model", model), ("key", api_key)) if v is not None}
    if bool(query) == everything:
        print("ballast: name --model, --api-key or both, or else --all", file=sys.stderr)
        raise typer.Exit(2)
    document = ordered(url, key, "kv", method="DELETE", query=query)
    print(f"{document['scrubbed']} blocks are gone from the tiers")


def _show(document: dict[str, Any], *, json: bool) -> None:
    """Print the tiers as a table, and what has happened in them."""
    if json:
        from json import dumps

        print(dumps(document))
        return
    from rich.console import Console
    from rich.table import Table

    from ballast.core.units import format_bytes

    table = Table("tier", "size", "in use", "blocks", "by API key")
    for tier in document["tiers"]:
        by_key = sorted(tier["bytes_of"].items(), key=lambda item: -item[1])
        table.add_row(
            tier["tier"],
            format_bytes(tier["capacity_bytes"]),
            format_bytes(tier["used_bytes"]),
            str(tier["blocks"]),
            ", ".join(f"{name or 'none'} {format_bytes(n)}" for name, n in by_key),
        )
    console = Console(highlight=False)
    console.print(table)
    print(", ".join(f"{n} {what}" for what, n in document["counts"].items()))
    if document["disk_fault"]:
        print(f"disk: {document['disk_fault']}")
