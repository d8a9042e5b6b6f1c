"""Adapters through the API: listed with their base, streamed, counted under their own names."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
import yaml
from openai import OpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.adapters import RandomAdapter, merged, random_adapter
from tests.server.process import ServerProcess, server, until
from tests.server.test_api import sample

BASE = "atlas-chat"
MESSAGES: Any = [{"role": "user", "content": "What floats?"}]
TOKENS = 12
LATER = ("first", "second")
"""Adapters that are not in the fleet file."""
ADMIN = "sk-admin-of-the-tests"


class Fleet:
    """The made fleet, with three adapters of its first model, of which one is broken."""

    def __init__(self, made: Path, directory: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(made.parent / BASE, dtype=torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(made.parent / BASE)
        self.adapters: dict[str, RandomAdapter] = {
            name: random_adapter(self.model, directory / name, seed, strength=1.0)
            for seed, name in enumerate(("pirate", "poet"))
        }
        random_adapter(self.model, directory / "dora", 3, use_dora=True)
        for seed, name in enumerate(LATER, 7):
            self.adapters[name] = random_adapter(self.model, directory / name, seed, strength=1.0)
        result = yaml.safe_load(made.read_text())
        for model in result["models"]:
            model["path"] = str(made.parent / model["path"])
        result["models"] += [
            {"name": name, "adapter": name, "base": BASE} for name in ("pirate", "poet", "dora")
        ]
        result["server"] = {"admin_key": ADMIN}
        self.file = directory / "fleet.yaml"
        self.file.write_text(yaml.safe_dump(result))

    def text(self, name: str) -> str:
        """The greedy answer to `MESSAGES`."""
        ids = self.tokenizer.apply_chat_template(
            MESSAGES, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        n = ids.shape[1]
        with merged(self.model, self.adapters[name]) as model, torch.inference_mode():
            for _ in range(TOKENS):
                best = model(ids).logits[0, -1].topk(2)
                assert best.values[0] - best.values[1] > 1e-4, "a tie: choose another seed"
                ids = torch.cat([ids, best.indices[:1][None]], 1)
        return str(self.tokenizer.decode(ids[0, n:], skip_special_tokens=True))


@pytest.fixture(scope="module")
def fleet(fleet_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    return Fleet(fleet_file, tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def running(fleet: Fleet) -> Iterator[ServerProcess]:
    with server(fleet.file) as process:
        yield process


@pytest.fixture(scope="module")
def client(running: ServerProcess) -> OpenAI:
    return running.client


def test_adapters_are_models_with_a_parent(client: OpenAI, running: ServerProcess) -> None:
    listed = running.http.get("/v1/models").json()["data"]
    result = {m["id"]: (m["root"], m["parent"]) for m in listed}
    assert result == {
        BASE: (BASE, None),
        "pirate": (BASE, BASE),
        "poet": (BASE, BASE),
        "wren-mini": ("wren-mini", None),
    }
    assert client.models.retrieve("poet").id == "poet"
    failed = running.http.get("/health").json()["failed"]
    assert list(failed) == ["dora"]
    assert "DoRA" in failed["dora"]
    with pytest.raises(openai.NotFoundError, match="DoRA"):
        client.completions.create(model="dora", prompt="a")


@pytest.mark.parametrize("name", ["pirate", "poet"])
def test_a_stream_of_an_adapter_has_its_tokens(
    fleet: Fleet, client: OpenAI, running: ServerProcess, name: str
) -> None:
    chunks = list(
        client.chat.completions.create(
            model=name,
            messages=MESSAGES,
            temperature=0,
            max_tokens=TOKENS,
            stream=True,
            extra_body={"ignore_eos": True},
        )
    )
    assert {c.model for c in chunks} == {name}
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == fleet.text(name)
    counted = sample(running, "vllm_generation_tokens_total", model_name=name)
    assert counted == TOKENS


# -- while the server runs ----------------------------------------------------------------------


def order(running: ServerProcess, method: str, path: str, **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {ADMIN}"}
    return running.http.request(method, path, headers=headers, json=body or None)


def answer(client: OpenAI, model: str) -> tuple[str, str]:
    """The greedy answer to `MESSAGES`, and the fingerprint of what gave it."""
    found = client.chat.completions.create(
        model=model,
        messages=MESSAGES,
        temperature=0,
        max_tokens=TOKENS,
        extra_body={"ignore_eos": True},
    )
    return found.choices[0].message.content or "", found.system_fingerprint or ""


def test_an_adapter_comes_and_goes_while_its_base_serves(
    fleet: Fleet, client: OpenAI, running: ServerProcess
) -> None:
    before = answer(client, BASE), answer(client, "pirate")
    first, second = (fleet.text(name) for name in LATER)
    added = order(running, "POST", "/admin/models", name="late", adapter="first", base=BASE)
    assert (added.status_code, added.json()) == (201, {"name": "late", "status": "added"})
    text, fingerprint = answer(client, "late")
    assert text == first
    assert answer(client, "late") == (first, fingerprint), "from cached prefixes"
    assert (answer(client, BASE), answer(client, "pirate")) == before
    listed = client.models.retrieve("late").to_dict()
    assert (listed["root"], listed["parent"]) == (BASE, BASE)
    assert {m.id for m in client.models.list()} == {BASE, "pirate", "poet", "late", "wren-mini"}

    # A name that is taken is refused; its base stays while it does; the file is read again.
    for name, path in (("late", "second"), (BASE, "second"), ("poet", "second")):
        taken = order(running, "POST", "/admin/models", name=name, adapter=path, base=BASE)
        assert taken.status_code == 409, taken.text
    assert "late" in order(running, "DELETE", f"/admin/models/{BASE}").json()["error"]["message"]
    fleet.file.write_text(
        yaml.safe_dump({**yaml.safe_load(fleet.file.read_text()), "preset": "static"})
    )
    running.signal(signal.SIGHUP)
    running.until_said("the fleet file's preset counts at a restart")
    assert answer(client, "late") == (text, fingerprint)

    # The same name is another adapter: what was cached for the first serves nobody.
    assert order(running, "DELETE", "/admin/models/late").status_code == 200
    with pytest.raises(openai.NotFoundError):
        answer(client, "late")
    body = {"lora_name": "late", "lora_path": "second", "base_model_name": BASE}
    loaded = order(running, "POST", "/v1/load_lora_adapter", **body)
    assert (loaded.status_code, "late" in loaded.text) == (200, True), loaded.text
    again = answer(client, "late")
    assert again[0] == second
    assert again[1] != fingerprint
    unloaded = order(running, "POST", "/v1/unload_lora_adapter", lora_name="late")
    assert unloaded.status_code == 200, unloaded.text
    assert order(running, "POST", "/v1/unload_lora_adapter", lora_name="late").status_code == 404
    assert order(running, "POST", "/v1/unload_lora_adapter", lora_name="poet").status_code == 409
    assert answer(client, BASE) == before[0]


def test_its_weights_are_its_bases(client: OpenAI, running: ServerProcess) -> None:
    def pages() -> int:
        """Of weights, on the device."""
        owners = order(running, "GET", "/admin/state").json()["owners"]
        return sum(n for o, n in owners.items() if o.partition(":")[0] in ("weights", "shared"))

    def moved(from_pages: int) -> bool:
        return pages() != from_pages

    answer(client, BASE)
    until(lambda: pages() > 0)
    before = pages()
    assert order(
        running, "POST", "/admin/models", name="late", adapter="first", base=BASE
    ).is_success
    answer(client, "late")
    until(lambda: moved(before))
    models = order(running, "GET", "/admin/models").json()["models"]
    base = next(m["report"] for m in models if m["report"]["name"] == BASE)
    assert 0 < pages() - before < base["whole_pages"] / 2
    assert order(running, "DELETE", "/admin/models/late").is_success


@pytest.mark.parametrize(
    ("body", "status", "why"),
    [
        ({"adapter": "dora", "base": BASE}, 400, "DoRA"),
        ({"adapter": "nowhere", "base": BASE}, 400, "nowhere"),
        ({"adapter": "first", "base": "poet"}, 400, "base"),
        ({"adapter": "first", "base": "nobody"}, 400, "base"),
        ({"adapter": "first"}, 400, "base"),
        ({"adapter": "first", "base": BASE, "pinned": True}, 400, "pinned"),
        ({"adapter": "first", "base": BASE, "name": "a+b"}, 400, "name"),
    ],
)
def test_what_cannot_be_added_leaves_nothing(
    running: ServerProcess, body: dict[str, Any], status: int, why: str
) -> None:
    before = running.http.get("/v1/models").json()
    refused = order(running, "POST", "/admin/models", **{"name": "late", **body})
    assert refused.status_code == status, refused.text
    assert why in refused.json()["error"]["message"]
    assert running.http.get("/v1/models").json() == before
    models = order(running, "GET", "/admin/models").json()
    assert not any("+" in m["report"]["name"] for m in models["models"])
    assert models["changes"].get("added", []) == []


def test_adapters_are_added_by_operators_alone(running: ServerProcess) -> None:
    body = {"lora_name": "late", "lora_path": "first", "base_model_name": BASE}
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/admin/models"):
        assert running.http.post(path, json=body).status_code == 401
