"""Adapters through the API: listed with their base, streamed, counted under their own names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import yaml
from openai import OpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.adapters import RandomAdapter, merged, random_adapter
from tests.server.process import ServerProcess, server
from tests.server.test_api import sample

BASE = "atlas-chat"
MESSAGES: Any = [{"role": "user", "content": "What floats?"}]
TOKENS = 12


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
        result = yaml.safe_load(made.read_text())
        for model in result["models"]:
            model["path"] = str(made.parent / model["path"])
        result["models"] += [
            {"name": name, "adapter": name, "base": BASE} for name in ("pirate", "poet", "dora")
        ]
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
