"""What is installed under which name: nobody is sent to somebody else's package."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ballast.core.errors import DISTRIBUTION, ConfigError, install_extra
from ballast.policy.fleet.kv_pressure import KvDemand
from ballast.policy.fleet.optimal_placement import optimal
from ballast.policy.fleet.placement_problem import PlacementDevice
from tests.test_docs_site import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
TAKEN = {"ballast", "ballast-agents", "ballast-ai", "ballast-py"}
"""Other people's, on PyPI."""
TESTS_ALONE = {
    "pytest", "hypothesis", "mypy", "ruff", "mkdocs-material", "schemathesis", "litellm",
    "openai", "anthropic", "langchain-openai", "triton",
}  # fmt: skip


def names_of(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=\[;! ]", r, maxsplit=1)[0].lower() for r in requirements}


def texts() -> list[Path]:
    found = subprocess.run(
        ("git", "ls-files", "-z"), cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\0")
    kinds = (".py", ".md", ".toml", ".sh", ".yml", ".yaml", "")
    paths = (ROOT / name for name in found if name and Path(name).suffix in kinds)
    return [path for path in paths if path.is_file()]


def test_the_name_is_ours_and_the_command_and_the_import_stay() -> None:
    assert PROJECT["name"] == DISTRIBUTION
    assert DISTRIBUTION not in TAKEN
    assert PROJECT["scripts"] == {"ballast": "ballast.cli:main"}


def test_no_text_sends_a_reader_to_another_package() -> None:
    asked = re.compile(
        r"pip install [^\n]*?'?\b(ballast(?:-\w+)?)(?:\[(\w+)[^\]]*\])?'?(?=[\s`\"'.,)]|$)"
    )
    found = 0
    for path in texts():
        if path == Path(__file__) or path.name == "CHANGELOG.md":
            continue
        for name, extra in asked.findall(path.read_text(encoding="utf-8", errors="replace")):
            assert name == DISTRIBUTION, path
            assert not extra or extra in EXTRAS, path
            found += 1
    assert found, "the pattern finds nothing"


@pytest.mark.parametrize("extra", ["cuda", "otel", "placement"])
def test_extras_that_texts_name_are_there(extra: str) -> None:
    assert extra in EXTRAS
    assert install_extra(extra) == f"pip install '{DISTRIBUTION}[{extra}]'"


def test_an_installation_has_nothing_that_tests_alone_need() -> None:
    assert not names_of(PROJECT["dependencies"]) & TESTS_ALONE
    for extra, requirements in EXTRAS.items():
        assert extra == "dev" or not names_of(requirements) & TESTS_ALONE
    assert names_of(EXTRAS["dev"]) >= TESTS_ALONE - {"litellm"}


def test_the_package_imports_nothing_that_tests_alone_need() -> None:
    """Without a package of `dev` or `placement`, every command has its help."""
    code = (
        "import sys\n"
        "lacking = 'pytest hypothesis openai anthropic ortools pandas opentelemetry.sdk mypy'\n"
        "for name in lacking.split():\n"
        "    sys.modules[name] = None\n"
        "from typer.testing import CliRunner\n"
        "from ballast.cli import app\n"
        "import ballast.server.serve, ballast.sim.placement_answers, ballast.bench.plot\n"
        "import ballast.cluster.worker.process, ballast.live.device\n"
        "result = CliRunner().invoke(app, ['--help'])\n"
        "assert result.exit_code == 0, result.output\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_optimal_placement_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == "ortools"] + ["ortools"]:
        monkeypatch.setitem(sys.modules, name, None)
    devices = [PlacementDevice("g0", 100), PlacementDevice("g1", 100)]
    demands = [KvDemand(n, 10, 1.0, devices=("g0",)) for n in "ab"]
    with pytest.raises(ConfigError, match=r"pip install 'ballast-serve\[placement\]'"):
        optimal(demands, devices)


def test_readers_find_how_to_install() -> None:
    assert "\n## Install\n" in (ROOT / "README.md").read_text()
