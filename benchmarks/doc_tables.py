"""Tables that a benchmark writes into the pages of the documentation, between markers.

A table lies where its marker is, whichever page that is. The marker names the table, and the
command whose JSON it is made of::

    <!-- begin NAME: COMMAND -->
    ...
    <!-- end NAME -->
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
_TABLE = re.compile(
    r"(?P<begin><!-- begin (?P<name>[\w.]+): (?P<command>[^>]*) -->\n)"
    r"(?P<text>.*?)"
    r"(?P<end><!-- end (?P=name) -->)",
    re.DOTALL,
)


def marked(page: str) -> dict[str, str]:
    """The commands of a page's tables, by the tables' names."""
    return {found["name"]: found["command"] for found in _TABLE.finditer(page)}


def renewed(page: str, tables: Mapping[str, str]) -> str:
    """The page with these tables; others stay. Raises KeyError for one that has no marker."""
    if unknown := tables.keys() - marked(page).keys():
        raise KeyError(f"no marker for {', '.join(sorted(unknown))}")

    def text(found: re.Match[str]) -> str:
        table = tables.get(found["name"])
        return found[0] if table is None else f"{found['begin']}{table}\n{found['end']}"

    return _TABLE.sub(text, page)


def places(docs: Path = DOCS) -> dict[str, Path]:
    """The page of each table. Raises ValueError where a table has two markers."""
    found: dict[str, Path] = {}
    for page in sorted(docs.rglob("*.md")):
        for name in marked(page.read_text(encoding="utf-8")):
            if name in found:
                raise ValueError(f"{name} has a marker in {found[name]} and in {page}")
            found[name] = page
    return found


def renew(tables: Mapping[str, str], docs: Path = DOCS) -> None:
    """Write each table to its place. Raises KeyError, and writes nothing, if one has none."""
    pages = places(docs)
    if unknown := tables.keys() - pages.keys():
        raise KeyError(f"no marker for {', '.join(sorted(unknown))}")
    for page in sorted({pages[name] for name in tables}):
        here = {name: table for name, table in tables.items() if pages[name] == page}
        page.write_text(renewed(page.read_text(encoding="utf-8"), here), encoding="utf-8")


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; cells are text."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def ratio(value: float | None) -> str:
    """A ratio with two decimals; `-`: it was not measured."""
    return "-" if value is None else f"{value:.2f}"


def row_of(values: Iterable[float | None]) -> str:
    """Ratios at one rate after another."""
    return " · ".join(map(ratio, values))
