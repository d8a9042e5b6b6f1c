"""Operators' changes survive a restart; the fleet file is followed at SIGHUP."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.server.process import ServerProcess, server, until
from tests.server.test_admin import add, ask, order, pinned
from tests.server.test_api import MODEL

OTHER = "wren-mini"


@pytest.fixture
def file(fleet_file: Path, tmp_path: Path) -> Path:
    """A fleet of its own, with two checkpoints that may be added."""
    shutil.copytree(fleet_file.parent, tmp_path, dirs_exist_ok=True)
    for name in ("more", "late"):
        shutil.copytree(tmp_path / OTHER, tmp_path / name)
    text = (tmp_path / "fleet.yaml").read_text().rstrip()
    (tmp_path / "fleet.yaml").write_text(text + "\nserver: {admin_key: sk-admin-of-the-tests}\n")
    return tmp_path / "fleet.yaml"


def kept(file: Path) -> Path:
    return file.with_suffix(".changes.json")


def serving(file: Path) -> ServerProcess:
    return ServerProcess(file, "--echo", "--changes", str(kept(file)))


def models(of: ServerProcess) -> list[str]:
    headers = {"authorization": "Bearer sk-admin-of-the-tests"}
    return [m["id"] for m in of.http.get("/v1/models", headers=headers).json()["data"]]


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def reload(of: ServerProcess, done: Callable[[], bool]) -> None:
    of.signal(signal.SIGHUP)
    until(done)


def code(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def test_changes_survive_a_kill(file: Path) -> None:
    with server(file, "--echo", "--changes", str(kept(file))) as first:
        assert add(first, name="new", path="more", slo={"ttft": 3}).status_code == 201
        assert order(first, "POST", f"models/{MODEL}/pin").status_code == 200
        assert order(first, "PATCH", "models/new", json={"slo": {"tpot": 1}}).status_code == 200
        assert order(first, "DELETE", f"models/{OTHER}?patience=1").status_code == 200
        first.signal(signal.SIGKILL)
        first.wait()
    with server(file, "--echo", "--changes", str(kept(file))) as second:
        result = order(second, "GET", "models").json()["changes"]
        assert (result["removed"], [e["name"] for e in result["added"]]) == ([OTHER], ["new"])
        assert models(second) == [MODEL, "new"]
        result = {m["report"]["name"]: m for m in order(second, "GET", "models").json()["models"]}
        assert "wren" not in second.output
        assert ask(second, "new").status_code == 200
        assert ask(second, OTHER).status_code == 404
        assert set(result) == {MODEL, "new"}
        assert order(second, "DELETE", "models/new?patience=1").status_code == 200
        again = {"name": OTHER, "path": OTHER, "pinned": True}
        assert add(second, **again).status_code == 201


def test_what_cannot_be_kept_is_not_made_and_what_is_refused_is_not_kept(file: Path) -> None:
    with server(file, "--echo", "--changes", str(file.parent / "no" / "c.json")) as running:
        before = pinned(running)
        refusals = [
            add(running, name="new", path="more"),
            order(running, "POST", f"models/{MODEL}/pin"),
            order(running, "PATCH", f"models/{MODEL}", json={"priority": 2}),
            order(running, "DELETE", f"models/{MODEL}"),
        ]
        assert [code(r) for r in refusals] == [(507, "not_kept")] * 4
        until(lambda: pinned(running) == before)
        assert ask(running, "new").status_code == 404
        assert ask(running, MODEL).status_code == 200
        assert order(running, "POST", f"models/{MODEL}/evict").status_code == 200
        (file.parent / "no").mkdir()
        assert add(running, name="new", path="more").status_code == 201

        record = file.parent / "no" / "c.json"
        before = record.read_text()
        shutil.copytree(file.parent / "more", file.parent / "deadly")
        assert add(running, name="x", path="deadly").status_code == 503
        until(lambda: running.http.get("/health").status_code == 200)
        assert add(running, name=MODEL, path="more").status_code == 409
        assert record.read_text() == before
        for name in (OTHER, "new"):
            assert order(running, "DELETE", f"models/{name}?patience=1").status_code == 200
        before = record.read_text()
        assert order(running, "DELETE", f"models/{MODEL}").status_code == 409
        assert record.read_text() == before


def homes(of: ServerProcess) -> dict[str, list[str]]:
    return {m["report"]["name"]: m["devices"] for m in order(of, "GET", "state").json()["models"]}


def moved(of: ServerProcess, how: str, model: str, device: str) -> int:
    return order(of, "POST", f"models/{model}/{how}?device={device}").status_code


@pytest.mark.parametrize("placement", ["weights", "follow"])
def test_where_operators_put_models_survives_a_kill_unless_the_policy_moves_them(
    file: Path, placement: str
) -> None:
    """The file names the devices of one model, and leaves the other's to the server."""
    edit(file, f"name: {OTHER}", f'name: {OTHER}\n    devices: ["cpu:0", "cpu:1"]')
    edit(
        file,
        "devices:\n",
        f"placement: {placement}\ndevices:\n  - {{budget: 64MiB}}\n",
    )
    with server(file, "--echo", "--changes", str(kept(file))) as first:
        (chosen,) = homes(first)[MODEL]
        other = {"cpu:0": "cpu:1", "cpu:1": "cpu:0"}[chosen]
        assert moved(first, "withdraw", OTHER, "cpu:0") == 200
        assert moved(first, "withdraw", OTHER, "cpu:1") == 409
        assert moved(first, "place", MODEL, other) == 200
        edit(file, "preset: ballast", "preset: swap")
        reload(first, lambda: "preset counts at a restart" in first.output)
        assert "counts once" not in first.output
        first.signal(signal.SIGKILL)
        first.wait()
    with server(file, "--echo", "--changes", str(kept(file))) as second:
        expected = {chosen, other} if placement == "weights" else {chosen}
        assert (set(homes(second)[MODEL]), homes(second)[OTHER]) == (expected, ["cpu:1"])
        record = kept(file).read_text()
        kept(file).write_text(record + " ")  # somebody else's change
        assert moved(second, "place", OTHER, "cpu:0") == 507
        assert homes(second)[OTHER] == ["cpu:1"]
        kept(file).write_text(record)
        assert moved(second, "place", OTHER, "cpu:0") == 200
        result = order(second, "GET", "models").json()["changes"]["homes"]
        assert result.keys() == ({MODEL} if placement == "weights" else set())


def test_a_damaged_file_of_changes_is_named(file: Path) -> None:
    kept(file).write_text("{")
    with pytest.raises(RuntimeError, match=r"fleet\.changes\.json': it is damaged"):
        serving(file)


def test_the_fleet_file_is_followed(file: Path) -> None:
    good = file.read_text()
    with server(file, "--echo", "--changes", str(kept(file))) as running:
        assert add(running, name="new", path="more").status_code == 201
        assert add(running, name="twice", path="more").status_code == 201
        assert order(running, "POST", f"models/{MODEL}/pin").status_code == 200

        edit(file, "models:", "models:\n  - {name: late, path: late}\n  - {name: x, pat: no}")
        reload(running, lambda: "all stays as it was: models[1].pat" in running.output)
        assert set(models(running)) == {MODEL, OTHER, "new", "twice"}

        file.write_text(good)
        edit(
            file, "models:", "models:\n  - {name: late, path: late}\n  - {name: twice, path: late}"
        )
        key = "{name: k, key: sk-k-of-the-tests, models: [late, typo]}"
        edit(
            file,
            "{admin_key: sk-admin-of-the-tests}",
            f"{{admin_key: sk-admin-of-the-tests, keys: [{key}]}}",
        )
        running.kill_worker()  # the next one is waited for
        reload(running, lambda: "late" in models(running))
        assert set(models(running)) == {MODEL, OTHER, "new", "twice", "late"}
        until(lambda: pinned(running)[MODEL])
        running.until_said(
            "key 'k' is for models that there are not: ['typo']",
            "twice was added; the fleet file's entry counts",
            "twice: path counts once it is added again",
        )
        assert ask(running, MODEL).status_code == 401
        body = {"model": "late", "prompt": "abc", "max_tokens": 2}
        headers = {"authorization": "Bearer sk-k-of-the-tests"}
        assert running.http.post("/v1/completions", json=body, headers=headers).is_success

        edit(file, "  - {name: late, path: late}", "")
        edit(file, "preset: ballast", "preset: static")
        edit(file, f"path: {OTHER}", f"path: {OTHER}\n    block_tokens: 8\n    pinned: true")
        reload(running, lambda: "preset counts at a restart" in running.output)
        running.until_said(f"{OTHER}: block_tokens counts once it is added again")
        until(lambda: "late" not in models(running))
        until(lambda: pinned(running)[MODEL] and pinned(running)[OTHER])
