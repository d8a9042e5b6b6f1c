#!/usr/bin/env python3
"""Write docs/cli.md, the commands and options of `ballast`, from their own help texts.

.venv/bin/python scripts/cli_page.py
"""

from __future__ import annotations

import re
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
_EMPTY = re.compile(r"\*\*Options\*\*:\n\n(?!\* )")


def page() -> str:
    """The page as it should be."""
    command = typer.main.get_command(app)
    with Context(command, info_name="ballast") as context:
        text = get_docs_for_click(obj=command, ctx=context, name="ballast")
    text = "\n".join(f"#{line}" if line.startswith("#") else line for line in text.splitlines())
    text = _EMPTY.sub("", _LEFT_OUT.sub("", f"{text}\n\n"))
    text = "\n".join(line.rstrip() for line in text.splitlines())
    return HEAD + re.sub("\n{3,}", "\n\n", text).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
