"""docs/cli.md names every command and option; `scripts/cli_page.py` writes it anew."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from ballast.cli import app

PAGE = Path(__file__).parents[1] / "docs/cli.md"


def commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Of Click, which may be a part of Typer, so that its classes are not named here."""
    yield path, command
    for name, found in getattr(command, "commands", {}).items():
        yield from commands(found, f"{path} {name}")


def test_every_command_and_option_is_on_the_page() -> None:
    parts = re.split(r"^##+ `", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    described = {part.split("`")[0]: part for part in parts}
    known = dict(commands(typer.main.get_command(app), "ballast"))
    assert described.keys() == known.keys()
    for path, command in known.items():
        for param in command.params:
            for name in param.opts if param.param_type_name == "option" else ():
                assert name in described[path], (path, name)
