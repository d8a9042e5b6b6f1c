"""What a deployment installs and how it is confined, without a container or systemd."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
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


INSTRUCTIONS = {"ARG", "FROM", "ENV", "RUN", "WORKDIR", "COPY", "USER", "VOLUME", "EXPOSE"} | {
    *("STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT", "CMD")
}


def instructions() -> list[tuple[str, str]]:
    """Instructions of the Containerfile with their arguments, continued lines joined."""
    lines = [line for line in CONTAINER.splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [
        (name, rest)
        for line in joined.splitlines()
        if line
        for name, _, rest in [line.partition(" ")]
    ]


def test_the_container_has_known_instructions_whose_commands_can_be_parsed() -> None:
    """No image is built here: what a builder would refuse before its first step, and shells'
    syntax."""
    found = instructions()
    assert {name for name, _ in found} == INSTRUCTIONS
    shell = shutil.which("dash") or shutil.which("sh")
    assert shell is not None
    for name, rest in found:
        if name == "RUN":
            subprocess.run((shell, "-n", "-c", rest), check=True)
        exec_form = rest.partition("CMD ")[2] if name == "HEALTHCHECK" else rest
        if name in ("CMD", "ENTRYPOINT", "HEALTHCHECK"):
            words = json.loads(exec_form)
            assert all(isinstance(word, str) for word in words)
            if "-c" in words:
                compile(words[words.index("-c") + 1], "HEALTHCHECK", "exec")


def test_what_the_container_copies_is_there_and_not_ignored() -> None:
    # The only name that both Docker and Podman read.
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    kept = [line.removeprefix("!") for line in ignore if line.startswith("!")]
    assert "*" in ignore
    assert all((ROOT / name).exists() for name in kept)
    copied = [rest.split() for name, rest in instructions() if name == "COPY"]
    sources = [name for words in copied if "--from" not in words[0] for name in words[:-1]]
    assert sources
    assert all(name == "." or name in kept for name in sources)
    packaged = {"ballast", "pyproject.toml", PROJECT["readme"]}
    assert packaged <= set(kept), "what the image installs Ballast from"
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert {canonicalize_name(Requirement(r).name) for r in needed} <= locked().keys()
    stages = [rest.partition(" AS ")[2] for name, rest in instructions() if name == "FROM"]
    froms = [words[0].partition("=")[2] for words in copied if words[0].startswith("--from")]
    assert set(froms) <= set(stages)


def test_the_image_starts_the_server_by_options_that_it_has() -> None:
    [command] = [json.loads(rest) for name, rest in instructions() if name == "CMD"]
    verb, _, *options = command
    (entry,) = [json.loads(rest) for name, rest in instructions() if name == "ENTRYPOINT"]
    assert PROJECT["scripts"].keys() >= set(entry)
    reference = (ROOT / "docs" / "cli.md").read_text()
    part = reference.partition(f"### `ballast {verb}`")[2].partition("\n### ")[0]
    assert part
    assert all(f"`{o} " in part or f"`{o}`" in part for o in options if o.startswith("--"))


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


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="there is no systemd-analyze")
def test_systemd_understands_every_line_of_the_unit(tmp_path: Path) -> None:
    """All but the command, which is installed elsewhere: any that there is stands for it."""
    unit, command = tmp_path / "ballast.service", shutil.which("true")
    written, n = re.subn(r"(?<=^ExecStart=)\S+", str(command), UNIT, flags=re.MULTILINE)
    assert n == 1
    unit.write_text(written)
    done = subprocess.run(
        ["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    unit.write_text(written.replace("LimitCORE=0", "LimitCore=0"))
    wrong = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert "LimitCore" in wrong.stderr


def test_the_documentation_has_the_unit_as_it_is() -> None:
    assert f"```ini\n{UNIT}```\n" in (ROOT / "docs" / "systemd.md").read_text()


def test_compose_runs_the_image_as_it_is_built() -> None:
    compose = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
    service = compose["services"]["ballast"]
    build = ROOT / "deploy" / service["build"]["context"] / service["build"]["dockerfile"]
    assert build.resolve() == ROOT / "Containerfile"
    [command] = re.findall(r"^CMD (\[\"serve.*)$", CONTAINER, re.MULTILINE)
    assert service["command"] == yaml.safe_load(command)
    [port] = re.findall(r"^EXPOSE (\d+)$", CONTAINER, re.MULTILINE)
    [published] = service["ports"]
    assert published.startswith("127.0.0.1:")
    assert published.endswith(f":{port}")
    places = [
        volume.split(":")[-2 if volume.endswith(":ro") else -1] for volume in service["volumes"]
    ]
    for name in ("VOLUME", "WORKDIR"):
        assert re.findall(rf"^{name} (\S+)$", CONTAINER, re.MULTILINE)[-1] in places
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    variables = set(re.findall(r"\$\{(\w+)", (ROOT / "deploy" / "compose.yaml").read_text()))
    page = (ROOT / "docs" / "container.md").read_text()
    assert {name for name in variables if f"`{name}`" in page} == variables


def chart() -> Any:
    """The module `scripts/render_chart`."""
    path = str(ROOT / "scripts" / "render_chart")
    loader = importlib.machinery.SourceFileLoader("render_chart", path)
    spec = importlib.util.spec_from_loader("render_chart", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_the_manifest_is_the_chart_with_its_defaults() -> None:
    render = chart()
    assert (ROOT / "deploy" / "kuberay.yaml").read_text() == render.rendered(render.defaults())


def test_the_chart_uses_every_value_and_names_none_that_is_missing() -> None:
    render = chart()
    values = render.defaults()
    marked = {
        key: f"mark-{key}" if isinstance(value, str) else {k: f"mark-{key}-{k}" for k in value}
        for key, value in values.items()
    }
    text = render.rendered(marked, "mark-release")
    assert "{{" not in text
    for mark in (m for v in marked.values() for m in ([v] if isinstance(v, str) else v.values())):
        assert mark in text
    with pytest.raises(KeyError):
        render.rendered({**values, "hosts": {}})


def test_nodes_of_a_cluster_are_closed_and_confined() -> None:
    cluster, service = yaml.safe_load_all((ROOT / "deploy" / "kuberay.yaml").read_text())
    spec = cluster["spec"]
    assert spec["authOptions"] == {"mode": "token"}, "Ray runs code for who reaches it"
    head = spec["headGroupSpec"]["template"]
    pods = [head["spec"], *(g["template"]["spec"] for g in spec["workerGroupSpecs"])]
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] is True
        (container,) = pod["containers"]
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["resources"]["limits"].keys() == {"memory"}, "no limit of CPU"
        assert (
            container["resources"]["limits"]["memory"]
            == container["resources"]["requests"]["memory"]
        )
        assert container["volumeMounts"] == [
            {"name": "models", "mountPath": "/models", "readOnly": True}
        ]
    assert spec["headGroupSpec"]["rayStartParams"]["include-dashboard"] == "false"
    assert "--ray auto" in head["spec"]["containers"][0]["args"][0]
    # Every node answers, by its relay.
    templates = [head, *(group["template"] for group in spec["workerGroupSpecs"])]
    assert [t["metadata"]["labels"] for t in templates] == [service["spec"]["selector"]] * 2
    [target] = [port["targetPort"] for port in service["spec"]["ports"]]
    ports = [p for pod in pods for p in pod["containers"][0]["ports"] if p["name"] == target]
    assert len(ports) == len(pods)
    [port] = {port["containerPort"] for port in ports}
    assert f"--hosts-http {port}" in head["spec"]["containers"][0]["args"][0]
    probes = {
        k: p["httpGet"]["path"]
        for k, p in head["spec"]["containers"][0].items()
        if k.endswith("Probe")
    }
    assert probes == {
        "startupProbe": "/live",
        "livenessProbe": "/live",
        "readinessProbe": "/health",
    }
