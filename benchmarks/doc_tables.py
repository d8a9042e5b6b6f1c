"""Tables that a benchmark writes into a page of the documentation, between markers.

A marker names the table, and the command whose JSON it is made of::

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


def renew(name: str, tables: Mapping[str, str]) -> None:
    """Write these tables into the page `docs/NAME`."""
    file = DOCS / name
    file.write_text(renewed(file.read_text(encoding="utf-8"), tables), encoding="utf-8")


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
