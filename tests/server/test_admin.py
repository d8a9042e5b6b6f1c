"""What an operator may change while a server runs, over a device that echoes."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.process import ServerProcess, server
from tests.server.test_api import MODEL

ADMIN = {"authorization": "Bearer sk-admin-of-the-tests"}


@pytest.fixture(scope="module")
def ruled(fleet_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("ruled")
    shutil.copytree(fleet_file.parent, directory, dirs_exist_ok=True)
    model = next(path for path in sorted(directory.iterdir()) if path.is_dir())
    shutil.copytree(model, directory / "more")
    shutil.copytree(model, directory / "broken")
    file = directory / "fleet.yaml"
    file.write_text(file.read_text().rstrip() + "\nserver: {admin_key: sk-admin-of-the-tests}\n")
    with server(file, "--echo") as running:
        yield running


def order(to: ServerProcess, method: str, path: str, **more: object) -> httpx.Response:
    return to.http.request(method, f"/admin/{path}", headers=ADMIN, **more)  # type: ignore[arg-type]


def add(to: ServerProcess, **entry: object) -> httpx.Response:
    return order(to, "POST", "models", json=entry)


def ask(to: ServerProcess, model: str) -> httpx.Response:
    body = {"model": model, "prompt": "abc", "max_tokens": 2}
    return to.http.post("/v1/completions", json=body)


def pinned(to: ServerProcess) -> dict[str, bool]:
    models = order(to, "GET", "models").json()["models"]
    return {m["report"]["name"]: m["pinned"] for m in models}


def test_a_model_is_added_answers_and_is_removed(ruled: ServerProcess) -> None:
    assert ask(ruled, "org/more").status_code == 404
    assert add(ruled, name="org/more", path="more", slo={"ttft": 1}).status_code == 201
    assert ask(ruled, "org/more").status_code == 200
    assert order(ruled, "DELETE", "models/org/more?patience=1").status_code == 200
    assert ask(ruled, "org/more").status_code == 404
    assert order(ruled, "DELETE", "models/org/more").status_code == 404
    assert ask(ruled, MODEL).status_code == 200


@pytest.mark.parametrize(
    ("entry", "param"),
    [
        ({"name": "x", "path": "nowhere"}, "path"),
        ({"name": "x"}, "path"),
        ({"name": "x", "path": "more", "colour": "red"}, "colour"),
        ({"name": "x", "path": "more", "priority": 1000}, "priority"),
        ({"name": "x", "adapter": "more", "base": MODEL}, "adapter"),
        ({"name": "x", "path": "broken"}, None),
        ({"name": "x", "path": "more", "tool_parser": "none"}, "tool_parser"),
    ],
)
def test_entries_that_cannot_be_are_refused(
    ruled: ServerProcess, entry: dict[str, object], param: str | None
) -> None:
    result = add(ruled, **entry)
    assert result.status_code == 400
    assert result.json()["error"]["param"] == param
    assert ask(ruled, "x").status_code == 404


def test_models_are_pinned_evicted_and_activated(ruled: ServerProcess) -> None:
    for act in ("pin", "evict", "activate"):
        assert order(ruled, "POST", f"models/{MODEL}/{act}").status_code == 200
    assert pinned(ruled)[MODEL]
    assert order(ruled, "POST", f"models/{MODEL}/unpin").status_code == 200
    assert not pinned(ruled)[MODEL]
    unknown = order(ruled, "POST", f"models/{MODEL[:-1]}/pin").json()["error"]
    assert unknown["code"] == "model_not_found"
    assert f"did you mean {MODEL!r}?" in unknown["message"]
    elsewhere = order(ruled, "POST", f"models/{MODEL}/evict?devise=cpu:1")
    assert (elsewhere.status_code, elsewhere.json()["error"]["param"]) == (400, "devise")
    assert "did you mean 'device'?" in elsewhere.json()["error"]["message"]
    mistyped = order(ruled, "POST", f"models/{MODEL}/evct").json()["error"]["message"]
    assert mistyped.endswith("did you mean 'evict'?")


def test_the_story_tells_decisions(ruled: ServerProcess) -> None:
    result = order(ruled, "GET", f"story?last=1&model={MODEL}").json()["decisions"]
    assert [(d["action"], d["model"], d["why"]) for d in result] == [("Activate", MODEL, "a test")]
    assert abs(result[0]["time"] - time.time()) < 3600
    assert MODEL in [d["model"] for d in order(ruled, "GET", "state").json()["decisions"]]
    assert order(ruled, "GET", "story?last=0").json()["decisions"] == []
    assert order(ruled, "GET", "story?last=many").status_code == 400


def test_it_takes_the_admin_key(ruled: ServerProcess) -> None:
    assert ruled.http.post("/admin/models", json={"name": "x", "path": "more"}).status_code == 401


def test_levels_are_changed(ruled: ServerProcess) -> None:
    path = f"models/{MODEL}"
    levels = {"slo": {"ttft": 0.5}, "priority": 3, "limits": {"queue_seconds": None}}
    assert order(ruled, "PATCH", path, json=levels).status_code == 200
    (slo,) = (
        m["names"][0]["slo"]
        for m in order(ruled, "GET", "models").json()["models"]
        if m["report"]["name"] == MODEL
    )
    assert slo == {"ttft": 0.5, "tpot": 0.2}
    assert order(ruled, "PATCH", "models/none", json=levels).status_code == 404
    wrong_query = order(ruled, "DELETE", f"{path}?patience=-1")
    assert (wrong_query.status_code, wrong_query.json()["error"]["param"]) == (400, "patience")
    for wrong, param in (
        ({"dtype": "float32"}, "dtype"),
        ({"limits": {"context": 3}}, "limits"),
        ({"priority": 1000}, "priority"),
        ({"slo": {"ttft": 0}}, "slo"),
    ):
        result = order(ruled, "PATCH", path, json=wrong)
        assert (result.status_code, result.json()["error"]["param"]) == (400, param)
    for wrong, says in (
        ({"slo": {"tfft": 1}}, "slo.tfft: there is no such key; did you mean 'ttft'?"),
        ({"max_num_seqs": 3}, "max_num_seqs: there is no such key; what it sets is `models[i].lim"),
        ({"slo": {"ttft": 0}}, "slo.ttft: 0: it should be greater than 0"),
    ):
        assert order(ruled, "PATCH", path, json=wrong).json()["error"]["message"].startswith(says)
