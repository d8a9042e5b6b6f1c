"""docs/glossary.md names classes and modules that exist, and each term once."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")


def rows() -> Iterator[tuple[str, str, str]]:
    """The cells of the page's tables, without heads and rules."""
    for line in PAGE.splitlines():
        cells = re.findall(r"(?<=\|)[^|]*(?=\|)", line)
        if len(cells) == 3 and cells[0].strip() not in ("term", "---"):
            yield cells[0].strip(), cells[1].strip(), cells[2].strip()


def names_of_the_code() -> set[str]:
    """Names of classes, functions, modules and packages, without their paths."""
    names = set()
    for path in (ROOT / "ballast").rglob("*.py"):
        names |= {path.stem, path.parent.name}
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
    return names


def test_what_terms_are_called_in_the_code_is_there() -> None:
    names = names_of_the_code()
    found = {name for term, _, _ in rows() for name in re.findall(r"`([\w.*]+)`", term)}
    assert len(found) > 50
    unknown = set()
    for name in found:
        last = re.escape(name.rpartition(".")[2]).replace(r"\*", r"\w+")
        if not any(re.fullmatch(last, known) for known in names):
            unknown.add(name)
    assert unknown == set()


def test_every_term_has_a_meaning_and_its_name_elsewhere_once() -> None:
    terms = Counter(term for term, _, _ in rows())
    assert [term for term, count in terms.items() if count > 1] == []
    assert [term for term, meaning, elsewhere in rows() if not (meaning and elsewhere)] == []
