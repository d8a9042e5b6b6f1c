"""KV in 8 bits and deltas of both kinds behind a server, beside normal models: no answer changes
when models are evicted and the worker is killed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from ballast.bench.fleet_delta import make_delta
from tests.server.process import ServerProcess, server, until
from tests.server.test_crash import TOKENS, Stream, streamed_amid

ROUNDED, LOW, FEW = "rounded", "low", "few"
BASES = {ROUNDED: "atlas-chat", LOW: "wren-mini", FEW: "wren-mini"}
ADMIN = "sk-admin-of-the-tests"
AS_ADMIN = {"Authorization": f"Bearer {ADMIN}"}
MESSAGES: Any = [{"role": "user", "content": "What floats?"}]


def tuned(base: Path, path: Path, rank: int) -> Path:
    """Write a fine-tune of a checkpoint: all matrices of its layers are changed."""
    torch.manual_seed(rank)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    for layer in model.model.layers:
        for module in layer.modules():
            if isinstance(module, torch.nn.Linear):
                n, k = module.weight.shape
                change = torch.randn(n, rank) @ torch.randn(rank, k)
                module.weight.data += change * (0.03 * module.weight.norm() / change.norm())
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def running(fleet_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    made = tmp_path_factory.mktemp("forms")
    fleet = yaml.safe_load(fleet_file.read_text())
    for model in fleet["models"]:
        model["path"] = str(fleet_file.parent / model["path"])
    base = Path(next(m["path"] for m in fleet["models"] if m["name"] == BASES[LOW]))
    rounded = next(m for m in fleet["models"] if m["name"] == BASES[ROUNDED])
    fleet["models"].append({**rounded, "name": ROUNDED, "kv_dtype": "int8"})
    for name, rank in ((LOW, 1), (FEW, 40)):
        delta = make_delta(base, tuned(base, made / f"{name}-tune", rank), made / name, rank=4)
        assert bool(delta.bits) == (name == FEW)
        assert bool(delta.ranks) == (name == LOW)
        fleet["models"].append({"name": name, "adapter": str(made / name), "base": base.name})
    fleet["server"] = {"admin_key": ADMIN}
    file = made / "fleet.yaml"
    file.write_text(yaml.safe_dump(fleet))
    with server(file) as process:
        yield process


@pytest.fixture(scope="module")
def undisturbed(running: ServerProcess) -> dict[str, list[list[str]]]:
    return streamed(running, kill=False)


def streamed(running: ServerProcess, *, kill: bool) -> dict[str, list[list[str]]]:
    """The tokens of two streams of each model, greedy and sampled."""
    names = [*BASES, *dict.fromkeys(BASES.values())]
    streams = [Stream(name, seed, float(seed)) for name in names for seed in (0, 1)]
    amid = running.kill_worker if kill else None
    found = asyncio.run(streamed_amid(running, streams, amid))
    return {name: found[2 * i : 2 * i + 2] for i, name in enumerate(names)}


def residency(running: ServerProcess, name: str) -> str:
    models = running.http.get("/admin/state", headers=AS_ADMIN).json()["models"]
    return str(next(m["report"]["residency"] for m in models if m["report"]["name"] == name))


def test_they_are_served_and_are_not_their_bases(
    running: ServerProcess, undisturbed: dict[str, list[list[str]]]
) -> None:
    assert running.http.get("/health").json()["status"] == "ok"
    for name, base in BASES.items():
        assert all(len(tokens) == TOKENS for tokens in undisturbed[name])
        assert undisturbed[name] != undisturbed[base]
    assert undisturbed[LOW] != undisturbed[FEW]


@pytest.mark.parametrize("name", BASES)
def test_a_chat_streamed_is_the_chat(running: ServerProcess, name: str) -> None:
    given: dict[str, Any] = {"model": name, "messages": MESSAGES, "temperature": 0, "max_tokens": 9}
    whole = running.client.chat.completions.create(**given).choices[0].message.content
    parts = running.client.chat.completions.create(**given, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in parts if c.choices) == whole


def test_they_come_back_as_they_were(
    running: ServerProcess, undisturbed: dict[str, list[list[str]]]
) -> None:
    own = [ROUNDED, *dict.fromkeys(BASES.values())]  # an adapter goes and comes with its base
    for name in own:
        asked = running.http.post(f"/admin/models/{name}/evict", headers=AS_ADMIN)
        assert asked.status_code == 200, asked.text
        until(lambda name=name: residency(running, name) == "absent")  # type: ignore[misc]
    assert streamed(running, kill=False) == undisturbed


def test_a_worker_killed_in_mid_answer(
    running: ServerProcess, undisturbed: dict[str, list[list[str]]]
) -> None:
    worker = running.worker_pid
    assert streamed(running, kill=True) == undisturbed
    assert running.worker_pid != worker
