#!/usr/bin/env python3
"""Write docs/cli.md, the commands and options of `ballast`, from their own help texts.

.venv/bin/python scripts/cli_page.py
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import typer.main
from click import Context
from typer.cli import get_docs_for_click

from ballast.cli import app

PAGE = Path(__file__).parents[1] / "docs/cli.md"
HEAD = """# The command line

Written from the commands' help by `scripts/cli_page.py`. Every command has `--help`. Exit codes: 0;
1 where a check or a comparison found something; 2 for a wrong call, named in one line.

"""
_LEFT_OUT = re.compile(
    r"\*\*Usage\*\*:\n\n|\*\*Commands\*\*:\n\n(\* .*\n)+\n|\* `--help`: .*\n|(?<=  )\[required\]"
)
"""Headings without a text, lists of commands that have sections, and what usage lines say."""
_OPTION = re.compile(r"\* `(--[a-z-]+).*")
SHARED = 2
"""Commands from which on an option with the same text stands once, at the end of the page."""
_EMPTY = re.compile(r"\*\*Options\*\*:\n\n(?!\* )")


def page() -> str:
    """The page as it should be."""
    command = typer.main.get_command(app)
    with Context(command, info_name="ballast") as context:
        text = get_docs_for_click(obj=command, ctx=context, name="ballast")
    text = "\n".join(f"#{line}" if line.startswith("#") else line for line in text.splitlines())
    text = _EMPTY.sub("", _LEFT_OUT.sub("", f"{text}\n\n"))
    lines = [line.rstrip() for line in text.splitlines()]
    seen = Counter(line for line in lines if _OPTION.fullmatch(line))
    shared = [line for line, n in seen.items() if n >= SHARED]
    text = re.sub("\n{3,}", "\n\n", "\n".join(_referred(lines, shared))).rstrip()
    return f"{HEAD}{text}\n\n## Shared options\n\n" + "\n".join(shared) + "\n"


def _referred(lines: Sequence[str], shared: Collection[str]) -> Iterator[str]:
    """Yield the page's lines, with a reference at the end of a list for all its shared options."""
    names: list[str] = []
    for line in (*lines, ""):
        if line in shared and (found := _OPTION.fullmatch(line)):
            names.append(f"`{found[1]}`")
            continue
        if names and not line.startswith("* "):
            yield f"* [Shared](#shared-options): {', '.join(names)}"
            names = []
        yield line


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
