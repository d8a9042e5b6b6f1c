"""What users of vLLM, llama-swap and Ollama look for: aliases, ttl, /running, /version, CORS."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

import ballast
from tests.server.process import ServerProcess, server, until
from tests.server.test_api import MODEL

ADMIN = {"authorization": "Bearer sk-admin-of-the-tests"}
USER = {"authorization": "Bearer sk-user-of-the-tests"}
PAGE = {"origin": "https://chat.example"}
ALIAS = "gpt-4o"


@pytest.fixture(scope="module")
def peers_file(fleet_file: Path) -> Path:
    """Two models, of which one has an alias; keys, and an origin whose pages may read."""
    file = fleet_file.with_name("peers.yaml")
    text = with_alias(fleet_file.read_text(), MODEL)
    server_section = """
server:
  admin_key: sk-admin-of-the-tests
  cors_origins: [https://chat.example]
  keys:
    - {name: all, key: sk-user-of-the-tests}
    - {name: one, key: sk-one-of-the-tests, models: [gpt-4o]}
"""
    file.write_text(text.rstrip() + server_section)
    return file


@pytest.fixture(scope="module")
def peers(peers_file: Path) -> Iterator[ServerProcess]:
    with server(peers_file) as running:
        running.http.headers.update(USER)
        yield running
        report = running.http.get("/admin/state", headers=ADMIN).json()
        held = sum(report["owners"].values())
        assert report["free"] + report["reclaiming"] + held == report["total"]


def with_alias(text: str, model: str) -> str:
    """The text of a fleet file in which a model has the alias, and no other model has it."""
    line, path = f"    aliases: [{ALIAS}]\n", f"    path: {model}\n"
    text = text.replace(line, "")
    assert path in text
    return text.replace(path, line + path)


def complete(to: ServerProcess, model: str, **more: object) -> httpx.Response:
    body = {"model": model, "prompt": "abc", "max_tokens": 2, **more}
    return to.http.post("/v1/completions", json=body)


def admin(to: ServerProcess, method: str, path: str, **more: object) -> httpx.Response:
    return to.http.request(method, f"/admin/{path}", headers=ADMIN, **more)  # type: ignore[arg-type]


def running(to: ServerProcess) -> dict[str, dict[str, object]]:
    return {m["model"]: m for m in to.http.get("/running").json()["running"]}


def listed(to: ServerProcess, **headers: str) -> list[str]:
    return [m["id"] for m in to.http.get("/v1/models", headers=headers).json()["data"]]


# -- aliases --------------------------------------------------------------------------------------


def test_every_route_takes_an_alias_and_answers_name_what_was_asked_for(
    peers: ServerProcess,
) -> None:
    with OpenAI(base_url=peers.url, api_key="sk-user-of-the-tests") as client:
        result = client.chat.completions.create(
            model=ALIAS, messages=[{"role": "user", "content": "abc"}], max_tokens=2
        )
        assert result.model == ALIAS
        chunks = client.completions.create(model=ALIAS, prompt="abc", max_tokens=2, stream=True)
        assert {chunk.model for chunk in chunks} == {ALIAS}
    assert complete(peers, MODEL).json()["model"] == MODEL
    for path, prompt in (
        ("messages", {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 2}),
        ("responses", {"input": "abc", "max_output_tokens": 16}),
    ):
        answer = peers.http.post(f"/v1/{path}", json={"model": ALIAS, **prompt})
        assert answer.json()["model"] == ALIAS
    encoded = peers.http.post("/tokenize", json={"model": ALIAS, "prompt": "abc"}).json()
    tokens = {"model": ALIAS, "tokens": encoded["tokens"]}
    assert peers.http.post("/detokenize", json=tokens).json()["prompt"] == "abc"
    refused = peers.http.post("/v1/embeddings", json={"model": ALIAS, "input": "abc"})
    assert refused.status_code == 400  # a model that is known, and does not embed
    assert ALIAS in listed(peers)
    found = peers.http.get(f"/v1/models/{ALIAS}").json()
    assert (found["id"], found["root"], found["parent"]) == (ALIAS, MODEL, None)
    assert admin(peers, "POST", f"models/{ALIAS}/activate").json()["status"] == "activated"
    metrics = peers.http.get("/metrics").text
    assert f'model_name="{MODEL}"' in metrics
    assert ALIAS not in metrics


def test_a_key_for_an_alias_is_for_its_model(peers: ServerProcess) -> None:
    one = {"authorization": "Bearer sk-one-of-the-tests"}
    assert listed(peers, **one) == [MODEL, ALIAS]
    body = {"model": MODEL, "prompt": "abc", "max_tokens": 1}
    assert peers.http.post("/v1/completions", json=body, headers=one).status_code == 200
    body["model"] = "wren-mini"
    assert peers.http.post("/v1/completions", json=body, headers=one).status_code == 404


def test_added_models_have_aliases_and_no_name_is_given_twice(peers: ServerProcess) -> None:
    def add(name: str, *aliases: str) -> httpx.Response:
        entry = {"name": name, "path": MODEL, "aliases": aliases}
        return admin(peers, "POST", "models", json=entry)

    for name, aliases in ((ALIAS, ()), ("x", (MODEL,)), ("x", (ALIAS,))):
        refused = add(name, *aliases)
        assert refused.status_code == 409
        assert "already" in refused.json()["error"]["message"]
    assert add("x", "x").status_code == 400
    assert add("x", "y").status_code == 201
    assert complete(peers, "y").json()["model"] == "y"
    assert add("y").status_code == 409
    assert admin(peers, "DELETE", "models/y").status_code == 200
    assert {complete(peers, name).status_code for name in ("x", "y")} == {404}


def test_an_alias_of_the_file_moves_while_its_models_serve(
    peers: ServerProcess, peers_file: Path
) -> None:
    def root() -> str:
        return str(peers.http.get(f"/v1/models/{ALIAS}").json().get("root"))

    for name in ("wren-mini", MODEL):
        peers_file.write_text(with_alias(peers_file.read_text(), name))
        peers.signal(signal.SIGHUP)
        until(lambda name=name: root() == name)  # type: ignore[misc]
        assert complete(peers, ALIAS).status_code == 200


# -- time to live, and what is there --------------------------------------------------------------


def test_an_idle_model_is_evicted_after_its_ttl_and_returns_when_asked(
    peers: ServerProcess,
) -> None:
    def expiries() -> list[dict[str, object]]:
        found = admin(peers, "GET", "story?last=1000&model=wren-mini").json()["decisions"]
        return [d for d in found if d.get("by") == "ttl"]

    assert complete(peers, "wren-mini").status_code == 200
    until(lambda: "wren-mini" in running(peers))  # its report is on its way
    assert running(peers)["wren-mini"]["ttl"] == 0
    assert not expiries()
    assert admin(peers, "PATCH", "models/wren-mini", json={"ttl": 0.05}).status_code == 200
    until(lambda: len(expiries()) == 1)
    assert expiries()[0]["why"] == "no request for 0.05 s, its ttl"
    until(lambda: "wren-mini" not in running(peers))
    assert complete(peers, "wren-mini").status_code == 200
    until(lambda: len(expiries()) == 2)
    assert admin(peers, "PATCH", "models/wren-mini", json={"ttl": 0}).status_code == 200


def test_running_models_are_listed_and_all_can_be_evicted(peers: ServerProcess) -> None:
    assert complete(peers, MODEL).status_code == 200
    until(lambda: running(peers).get(MODEL, {}).get("state") == "ready")
    found = running(peers)[MODEL]
    assert found["ttl"] == found["waiting"] == 0
    assert isinstance(found["memory"], int)
    assert found["memory"] > 0
    assert admin(peers, "POST", f"models/{MODEL}/pin").status_code == 200
    result = admin(peers, "POST", "models/evict").json()
    assert result["refused"] == {MODEL: f"{MODEL} is pinned"}
    assert admin(peers, "POST", f"models/{MODEL}/unpin").status_code == 200
    result = admin(peers, "POST", "models/evict").json()
    assert (set(result["evicted"]), result["refused"]) == ({MODEL, "wren-mini"}, {})
    until(lambda: not running(peers))
    assert complete(peers, MODEL).status_code == 200


def test_version(peers: ServerProcess) -> None:
    assert peers.http.get("/version").json() == {"version": ballast.__version__}


# -- pages of other origins -----------------------------------------------------------------------


def test_pages_of_an_origin_that_is_named_may_read_responses(peers: ServerProcess) -> None:
    wanted = {
        **PAGE,
        "authorization": "",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type, x-stainless-os",
    }
    preflight = peers.http.options("/v1/chat/completions", headers=wanted)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == PAGE["origin"]
    allowed = preflight.headers["access-control-allow-headers"]
    assert {"authorization", "content-type", "x-stainless-os"} <= {
        name.strip() for name in allowed.split(",")
    }
    for headers in (USER, {"authorization": "Bearer sk-wrong-of-the-tests"}):
        answer = peers.http.get("/v1/models", headers={**PAGE, **headers})
        assert answer.status_code == (200 if headers == USER else 401)
        assert answer.headers["access-control-allow-origin"] == PAGE["origin"]
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
    other = peers.http.get("/v1/models", headers={"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers
    wanted["origin"] = "https://evil.example"
    assert peers.http.options("/v1/models", headers=wanted).status_code == 400


def test_without_origins_no_page_may(echo: ServerProcess) -> None:
    wanted = {**PAGE, "access-control-request-method": "GET"}
    assert echo.http.options("/v1/models", headers=wanted).status_code == 405
    assert "access-control-allow-origin" not in echo.http.get("/v1/models", headers=PAGE).headers
