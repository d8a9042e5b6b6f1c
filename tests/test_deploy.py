"""What a deployment installs and how it is confined, without a container or systemd."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCKED = (ROOT / "scripts" / "locked.txt").read_text()
CONTAINER = (ROOT / "Containerfile").read_text()
UNIT = (ROOT / "deploy" / "ballast.service").read_text()
ENTRY = re.compile(r"^([a-z0-9-]+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", re.MULTILINE)


def locked() -> dict[str, tuple[str, list[str]]]:
    return {name: (version, hashes.split()) for name, version, hashes in ENTRY.findall(LOCKED)}


def required() -> list[Requirement]:
    extras = PROJECT["optional-dependencies"]
    texts = [*PROJECT["dependencies"], *extras["otel"]]
    return [r for r in map(Requirement, texts) if r.name != "torch"]


def test_every_package_of_a_deployment_is_locked_to_a_version_that_the_project_takes() -> None:
    have = locked()
    for requirement in required():
        version, _ = have[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), requirement


def test_the_lock_is_nothing_but_versions_and_hashes() -> None:
    rest = ENTRY.sub("", LOCKED)
    assert not [line for line in rest.splitlines() if line and not line.startswith("#")]
    assert "://" not in LOCKED
    assert "torch" not in locked(), "its hash depends on where it comes from"
    assert "/" not in rest.replace("scripts/lock", "")


def test_the_lock_and_the_constraints_agree() -> None:
    lines = (ROOT / "scripts" / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert "transformers" in pinned
    for name, version in pinned.items():
        assert name == "torch" or locked()[name][0] == version


@pytest.mark.parametrize(
    ("name", "least"),
    [("jinja2", "3.1.6"), ("fastapi", "0.121"), ("starlette", "0.49.1"), ("h11", "0.16")],
)
def test_releases_with_known_holes_are_not_taken(name: str, least: str) -> None:
    [floor] = [r for r in required() if r.name == name]
    bounds = [Version(s.version) for s in floor.specifier if s.operator == ">="]
    assert bounds == [Version(least)]


def test_the_container_installs_by_hash_and_resolves_nothing() -> None:
    installs = re.findall(r"pip install (.*?)(?: \\)?$", CONTAINER, re.MULTILINE)
    assert len(installs) == 3
    assert all("--no-deps" in options for options in installs)
    assert "--require-hashes --requirement scripts/locked.txt" in CONTAINER
    bases = re.findall(r"^FROM (\S+)", CONTAINER, re.MULTILINE)
    assert set(bases) == {"${IMAGE}"}, "one image, which a deployer names by its digest"


def test_the_unit_is_confined() -> None:
    lines = [line for line in UNIT.splitlines() if line and not line.startswith(("#", "["))]
    settings: dict[str, list[str]] = {}
    for line in lines:
        name, _, value = line.partition("=")
        settings.setdefault(name, []).append(value)
    assert settings["LimitCORE"] == ["0"]
    assert settings["UMask"] == ["0077"]
    assert settings["CapabilityBoundingSet"] == settings["AmbientCapabilities"] == [""]
    assert settings["RestrictAddressFamilies"] == ["AF_UNIX AF_INET AF_INET6"]
    assert settings["NoNewPrivileges"] == ["yes"]
    calls = " ".join(settings["SystemCallFilter"]).split()
    assert calls[0] == "@system-service"
    # What confines the children that read untrusted files: without these they would go unconfined.
    assert {"seccomp", "landlock_create_ruleset", "landlock_restrict_self"} <= set(calls)
    assert "MemoryDenyWriteExecute" not in settings, "kernels are compiled"


def test_the_documentation_has_the_unit_as_it_is() -> None:
    assert f"```ini\n{UNIT}```\n" in (ROOT / "docs" / "deploy.md").read_text()
