#!/usr/bin/env python3
"""Write docs/cli.md, the commands and options of `ballast`, from their own help texts.

.venv/bin/python scripts/cli_page.py
"""

from __future__ import annotations

from pathlib import Path

import typer.main
from click import Context
from typer.cli import get_docs_for_click

from ballast.cli import app

PAGE = Path(__file__).parents[1] / "docs/cli.md"
HEAD = """# The command line

Written from the commands' own help by `scripts/cli_page.py`. Exit codes: 0; 1 where a check or a
comparison found something; 2 for what was asked in the wrong way, said in one line.

"""


def page() -> str:
    """The page as it should be."""
    command = typer.main.get_command(app)
    with Context(command, info_name="ballast") as context:
        text = get_docs_for_click(obj=command, ctx=context, name="ballast")
    return (
        HEAD
        + "\n".join(f"#{line}" if line.startswith("#") else line for line in text.splitlines())
        + "\n"
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
