"""Entries of a fleet file that cannot be served, as their directories are not there or what they
hold would hang, crash or fill a server: all are named, the others are served; so too where the file
is read again, or is checked by the doctor."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ballast.cli import app
from tests.server.process import error_line, server, until
from tests.server.test_admin import ADMIN, add, ask
from tests.server.test_api import MODEL

OTHER = "wren-mini"


def dangling(path: Path) -> None:
    path.symlink_to(path.parent / "volume" / "model")


def empty(path: Path) -> None:
    path.mkdir()


def of_a_file(path: Path) -> None:
    path.write_bytes(b"GGUF")


def without_shards(path: Path) -> None:
    shutil.copytree(path.parent / OTHER, path)
    (path / "model.safetensors").unlink()
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


def downloading(path: Path) -> None:
    shutil.copytree(path.parent / OTHER, path)
    (path / "model.safetensors").rename(path / "model.safetensors.incomplete")


def cut(path: Path) -> None:
    shutil.copytree(path.parent / OTHER, path)
    os.truncate(path / "model.safetensors", (path / "model.safetensors").stat().st_size - 1)


def pointer(path: Path) -> None:
    shutil.copytree(path.parent / OTHER, path)
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1000\n"
    (path / "model.safetensors").write_text(text)


def no_tokenizer_yet(path: Path) -> None:
    shutil.copytree(path.parent / OTHER, path)
    for file in path.glob("*token*"):
        file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")


def changed(file: str, **values: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        shutil.copytree(path.parent / OTHER, path)
        known = json.loads((path / file).read_text())
        (path / file).write_text(json.dumps({**known, **values}))

    return change


def brackets(path: Path) -> None:
    shutil.copytree(path.parent / OTHER, path)
    (path / "config.json").write_text("[" * 200_000)


BAD: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "dangling": ("dangling", dangling, "a link to "),
    "unmounted": ("unmounted", empty, "is its volume mounted?"),
    "gone": ("/no/such/volume", lambda path: None, "is its volume mounted?"),
    "cached": ("hf:no-org/no-model", lambda path: None, "not in the local cache"),
    "either": ("no-org/no-model", lambda path: None, "there is no directory"),
    "gguf": ("model-q4.gguf", of_a_file, "not a GGUF file"),
    "shards": ("shards", without_shards, "an unfinished download: 2 of the 2 shards"),
    "downloading": ("downloading", downloading, "an unfinished download"),
    "cut": ("cut", cut, "as an unfinished download is"),
    "pointer": ("pointer", pointer, "git lfs pull"),
    "mute": ("mute", no_tokenizer_yet, "git lfs pull"),
    "brackets": ("brackets", brackets, "nested too deeply"),
    "end": ("end", changed("generation_config.json", eos_token_id=[[1]]), "eos_token_id"),
    "layers": ("layers", changed("config.json", num_hidden_layers=10**7), "num_hidden_layers"),
    "dialect": ("more\n    tool_parser: none-such", lambda path: None, "none-such"),
}
"""Path of each bad entry, how its directory is made, and what the reason names."""


@pytest.fixture
def file(fleet_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fleet with bad entries between the good ones, and an adapter that is not there."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    shutil.copytree(fleet_file.parent, tmp_path, dirs_exist_ok=True)
    shutil.copytree(tmp_path / OTHER, tmp_path / "more")
    text = (tmp_path / "fleet.yaml").read_text()
    for name, (path, make, _) in BAD.items():
        make(tmp_path / path)
        text = text.replace("models:", f"models:\n  - name: {name}\n    path: {path}", 1)
    text = f"{text.rstrip()}\n  - {{name: lora, adapter: gone/lora/x, base: {OTHER}}}"
    (tmp_path / "fleet.yaml").write_text(text + "\nserver: {admin_key: sk-admin-of-the-tests}\n")
    return tmp_path / "fleet.yaml"


def test_bad_entries_are_all_named_and_the_others_served(file: Path) -> None:
    with server(file) as running:

        def failed() -> dict[str, str]:
            found = running.http.get("/health", headers=ADMIN).json()["failed"]
            assert isinstance(found, dict)
            return found

        health = running.http.get("/health", headers=ADMIN).json()
        assert (health["serving"], health["models"]) == (2, 3 + len(BAD))
        assert health["failed"].keys() == {*BAD, "lora"}
        for name, (path, _, reason) in BAD.items():
            assert reason in health["failed"][name]
            running.until_said(f"{name} is not served")
            if "\n" not in path:
                assert path.removeprefix("hf:") in health["failed"][name], "where it was looked for"
        assert str(file.parent / "gone" / "lora" / "x") in health["failed"]["lora"]
        listed = running.http.get("/v1/models").json()["data"]
        assert {m["id"] for m in listed} == {MODEL, OTHER}
        assert ask(running, OTHER).status_code == 200
        refused = ask(running, "unmounted")
        assert refused.status_code == 404
        assert "is its volume mounted?" in refused.json()["error"]["message"]

        # What an operator adds is tried in the same way.
        for name in ("brackets", "layers"):
            refused = add(running, name="new", path=name)
            assert refused.status_code == 400
            assert BAD[name][2] in refused.json()["error"]["message"]
        assert ask(running, OTHER).status_code == 200
        assert ask(running, "new").status_code == 404

        # The volume is mounted again, another one goes, and a new entry is bad.
        shutil.rmtree(file.parent / "unmounted")
        (file.parent / "more").rename(file.parent / "unmounted")
        (file.parent / OTHER).rename(file.parent / "away")
        text = file.read_text().replace("models:", "models:\n  - {name: late, path: nowhere}", 1)
        file.write_text(text.replace("name: gone", "name: renamed"))
        running.signal(signal.SIGHUP)
        until(lambda: failed().keys() == {*BAD, "lora", "late", "renamed"} - {"unmounted", "gone"})
        assert str(file.parent / "nowhere") in failed()["late"]
        for name in ("unmounted", OTHER):
            assert ask(running, name).status_code == 200
        file.write_text(text.replace("\n  - {name: late, path: nowhere}", ""))
        running.signal(signal.SIGHUP)
        until(lambda: failed().keys() == {*BAD, "lora"} - {"unmounted"})


def ballast(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "ballast", *arguments)
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_a_server_without_a_good_entry_ends_and_names_all(file: Path) -> None:
    file.write_text(
        "models:\n  - {name: a, path: dangling}\n  - {name: b, path: gone/model}\n"
        "  - {name: c, path: gone.gguf}\ndevices:\n  - {budget: 64MiB}\n"
    )
    ended = ballast("serve", str(file), "--port", "0")
    assert ended.returncode == 2
    line = error_line(ended.stderr)
    for part in ("models[0].path", "models[1].path", "models[2].path", str(file.parent / "gone")):
        assert part in line


def test_the_doctor_fails_each_bad_entry_and_checks_adapters(file: Path) -> None:
    file.write_text(
        f"models:\n  - {{name: good, path: {OTHER}}}\n  - {{name: a, path: dangling}}\n"
        "  - {name: b, path: cut}\n  - {name: lora-a, adapter: more, base: a}\n"
        "  - {name: lora-b, adapter: more, base: good}\ndevices:\n  - {budget: 64MiB}\n"
    )
    ended = CliRunner().invoke(app, ["doctor", str(file)])
    assert ended.exit_code == 1
    failing = [line for line in ended.stdout.splitlines() if " fail " in line.lower()]
    for name in ("a", "b", "lora-a", "lora-b"):
        assert any(f" {name} " in line for line in failing), ended.stdout
    assert not any(" good " in line for line in failing)


@pytest.mark.parametrize("when", ["first line", "until it serves"])
def test_a_reload_while_the_server_starts_does_not_end_it(
    fleet_file: Path, tmp_path: Path, when: str
) -> None:
    """What was asked for is done once it can be."""
    file, good = tmp_path / "fleet.yaml", fleet_file.parent / OTHER
    file.write_text(f"models:\n  - {{name: good, path: {good}}}\ndevices:\n  - {{budget: 64MiB}}\n")
    command = (sys.executable, "-m", "ballast", "serve", str(file), "--port", "0")
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as starting:
        assert starting.stdout is not None
        output: list[str] = []
        serves = reloaded = False
        for line in starting.stdout:  # which ends with the process
            if not serves and (not output or when == "until it serves"):
                starting.send_signal(signal.SIGHUP)
            output.append(line)
            serves |= line.startswith("ballast: serving ")
            reloaded |= "the fleet file was read" in line
            if serves and reloaded:
                break
        assert reloaded, "".join(output)
        starting.terminate()
        output += starting.stdout
        assert starting.wait(240) == 0, "".join(output)
