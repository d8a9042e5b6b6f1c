"""The documentation is a site that needs no network, without a dead link or a page apart."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
NAVIGATION = "\nnav:\n"


def build(config: Path, to: Path) -> subprocess.CompletedProcess[str]:
    """Build a site strictly."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", config, "-d", to]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


class Html(HTMLParser):
    """What a page of the site refers to, and what can be referred to on it."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.anchors: set[str] = {""}
        self.links: list[str] = []
        self.assets: list[str] = []
        self.paragraphs: list[str] = []
        self._open = False
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif "src" in given or tag == "link":
            self.assets.append(given.get("src", given.get("href", "")))
        if tag == "p":
            self.paragraphs.append("")
            self._open = True

    def handle_endtag(self, tag: str) -> None:
        if tag == "p":
            self._open = False

    def handle_data(self, data: str) -> None:
        if self._open:
            self.paragraphs[-1] += data


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Html]:
    """The pages of the documentation's site."""
    to = tmp_path_factory.mktemp("site").resolve()
    done = build(ROOT / "mkdocs.yml", to)
    assert done.returncode == 0, done.stdout + done.stderr
    return {page: Html(page) for page in to.rglob("*.html") if page.name != "404.html"}


def test_no_link_is_dead_and_nothing_is_fetched_from_elsewhere(site: dict[Path, Html]) -> None:
    dead = []
    for page, html in site.items():
        for target in [*html.links, *html.assets]:
            if re.match(r"(https?|mailto):", target):
                continue
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            if not file.exists() or (file in site and anchor not in site[file].anchors):
                dead.append(f"{page.name}: {target}")
        assert not [asset for asset in html.assets if re.match(r"(https?:)?//", asset)]
    assert dead == []


def test_lists_are_lists(site: dict[Path, Html]) -> None:
    """On the site, unlike elsewhere, a list begins after an empty line only."""
    flat = re.compile(r"\n(- |\d{1,2}\. )")
    found = [
        f"{page.name}: {text[:60]}"
        for page, html in site.items()
        for text in html.paragraphs
        if flat.search(text)
    ]
    assert found == []


def test_what_lies_outside_and_folders_are_pages(site: dict[Path, Html]) -> None:
    names = {page.name for page in site}
    assert {"index.html", "contributing.html", "changelog.html"} <= names
    decisions = {page.name for page in site if page.parent.name == "decisions"}
    written = {page.stem for page in (ROOT / "docs" / "decisions").glob("*.md")}
    assert decisions == {"index.html"} | {f"{name}.html" for name in written - {"README"}}


def test_faults_are_errors(tmp_path: Path) -> None:
    """A dead page, a dead anchor, a page without a place, and a link out of the site."""
    (tmp_path / "docs" / "decisions").mkdir(parents=True)
    (tmp_path / "scripts").mkdir()
    hooks = (ROOT / "scripts" / "site_pages.py").read_text(encoding="utf-8")
    (tmp_path / "scripts" / "site_pages.py").write_text(hooks, encoding="utf-8")
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    settings, _, _ = text.partition(NAVIGATION)
    config = tmp_path / "mkdocs.yml"
    config.write_text(
        f"{settings}{NAVIGATION}  - index.md\n  - contributing.md\n  - changelog.md\n"
    )
    with config.open("a") as file:
        file.write("  - Decisions: decisions/\n")
    (tmp_path / "CONTRIBUTING.md").write_text("# Contributing\n")
    (tmp_path / "CHANGELOG.md").write_text("# Changes\n")
    (tmp_path / "docs" / "decisions" / "001-one.md").write_text("# One\n[home](../../README.md)\n")
    readme = tmp_path / "README.md"
    readme.write_text("# Title\n[one](docs/decisions/001-one.md#one) [to](CONTRIBUTING.md)\n")
    done = build(config, tmp_path / "site")
    assert done.returncode == 0, done.stdout + done.stderr
    with readme.open("a") as file:
        file.write("[a](docs/none.md) [b](docs/decisions/001-one.md#two) [c](served.py)\n")
    (tmp_path / "docs" / "apart.md").write_text("# Apart\n")
    done = build(config, tmp_path / "site")
    assert done.returncode == 1
    faults = [line for line in done.stderr.splitlines() if line.startswith("WARNING")]
    for fault in ("none.md", "#two", "served.py"):
        assert len([line for line in faults if fault in line]) == 1
    assert "apart.md" in done.stderr
    assert len(faults) == 4, done.stderr


def site_pages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "scripts" / "site_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("source", "folder", "text", "expected"),
    [
        (".", ".", "[a](docs/kv.md#words)", "[a](kv.md#words)"),
        (".", ".", "[a](docs/decisions/)", "[a](decisions/README.md)"),
        (".", ".", '<img src="docs/pictures/a.png">', '<img src="pictures/a.png">'),
        (".", ".", "[a](CHANGELOG.md) [b](#here)", "[a](changelog.md) [b](#here)"),
        (".", ".", "[a]: docs/kv.md\n", "[a]: kv.md\n"),
        ("docs", ".", "[a](../README.md#why) [b](kv.md)", "[a](index.md#why) [b](kv.md)"),
        ("docs/decisions", "decisions", "[a](../../CONTRIBUTING.md)", "[a](../contributing.md)"),
        ("docs/decisions", "decisions", "[a](../kv.md)", "[a](../kv.md)"),
        ("docs", ".", "[a](https://a.b/docs/c.md)", "[a](https://a.b/docs/c.md)"),
        (".", ".", "[a](ballast/cli.py)", "[a](ballast/cli.py)"),
    ],
)
def test_links_are_those_of_the_site(source: str, folder: str, text: str, expected: str) -> None:
    assert site_pages().linked(text, source, folder, ROOT) == expected


def test_pages_that_code_and_scripts_name_exist() -> None:
    named = re.compile(r"\bdocs/[\w/-]+\.(?:md|html)\b")
    files = [
        *(
            file
            for folder in ("ballast", "benchmarks", "tests")
            for file in (ROOT / folder).rglob("*.py")
        ),
        *(file for file in (ROOT / "scripts").iterdir() if file.is_file()),
        ROOT / "Makefile",
        ROOT / "CONTRIBUTING.md",
    ]
    missing = {
        f"{file.relative_to(ROOT)}: {page}"
        for file in files
        if file != Path(__file__)
        for page in named.findall(file.read_text(encoding="utf-8"))
        if not (ROOT / page).exists()
    }
    assert missing == set()


def test_contributing_draws_the_layers_that_are_checked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["id"] == "layers")
    checked = [set(layer.split(" | ")) for layer in layers if not re.match("cli_|__main__", layer)]
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    drawing = re.search(r"```\n(cli -> .*?)```", text, re.DOTALL)
    assert drawing is not None
    drawn = [set(layer.split(" | ")) for layer in re.split(r"\s+->\s+", drawing[1].strip())]
    assert drawn == checked


def test_the_index_of_decisions_names_each_once() -> None:
    index = (ROOT / "docs/decisions/README.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| \[\d{3}\]\((\S+)\)", index, re.MULTILINE)
    records = {path.name for path in (ROOT / "docs/decisions").glob("[0-9]*.md")}
    assert set(named) == records
    assert len(named) == len(records)
