"""What models do: configurations, templates and numbers that are wrong, answers of many numbers.

Each attack is (name, what is expected, what does it).
"""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.resident import Memory
from benchmarks.robustness_target import (
    ADMIN_KEY,
    ENDLESS,
    MODEL,
    VICTIM,
    Target,
    statuses,
)

LOAD_SECONDS = 60.0
"""For a tiny checkpoint to be read and served, or refused."""
GROWTH_MIB = 1024
"""What reading one checkpoint may take of the memory of all processes together, for a while."""
MESSAGE = {"role": "user", "content": "a"}
NORM = "model.norm.weight"
REQUESTS = 16
EMBEDDINGS_ASKED, EMBEDDING_SIZE = 2048, 1024
"""As many as one request may ask for, and the numbers of each."""


def added(change: Callable[[Path], None]) -> Callable[[Target], str]:
    """Add a checkpoint by the admin route: it serves, or is refused; all others serve."""

    def run(target: Target) -> str:
        name = f"bad-{time.monotonic_ns()}"
        directory = target.fleet_file.parent / name
        shutil.copytree(target.fleet_file.parent / MODEL, directory)
        change(directory)
        with Memory(target.processes, 0.1) as memory:
            before = sum(memory.now().values())
            entry = {"name": name, "path": name}
            status, answer = target.ask("POST", "/admin/models", entry, ADMIN_KEY, LOAD_SECONDS)
            grown = sum(memory.peak().values()) - before
        seen, found = f"{status}", [status]
        if status == 201:
            for path, body in (
                ("/v1/completions", {"prompt": "a", "max_tokens": 2}),
                ("/v1/chat/completions", {"messages": [MESSAGE], "max_tokens": 2}),
            ):
                asked, _ = target.post(path, {"model": name, **body})
                seen += f", {path.removeprefix('/v1/')} {asked}"
                found.append(asked)
            removed, _ = target.ask("DELETE", f"/admin/models/{name}?patience=1", key=ADMIN_KEY)
            found.append(removed)
        else:
            why = answer["error"]["message"] if isinstance(answer, dict) else answer
            seen += f": {why:.90}"
        others = [target.complete(model=model)[0] for model in (MODEL, VICTIM)]
        health, _ = target.ask("GET", "/health")
        seen += f"; others {others}, /health {health}, {grown:+.0f} MiB"
        assert max(found) < 500, seen
        assert [*others, health] == [200, 200, 200], seen
        assert grown < GROWTH_MIB, seen
        return seen

    return run


def config(**values: Any) -> Callable[[Path], None]:
    """Write these into config.json."""

    def change(directory: Path) -> None:
        file = directory / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return change


def text(name: str, content: str) -> Callable[[Path], None]:
    """Write a file of the checkpoint anew."""

    def change(directory: Path) -> None:
        (directory / name).write_text(content)

    return change


def tokenizer(**values: Any) -> Callable[[Path], None]:
    """Write these into tokenizer.json."""

    def change(directory: Path) -> None:
        file = directory / "tokenizer.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return change


def generation(**values: Any) -> Callable[[Path], None]:
    """Write these into config.json and generation_config.json."""

    def change(directory: Path) -> None:
        config(**values)(directory)
        file = directory / "generation_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return change


def overflowing_model(target: Target) -> str:
    """Ask a model of finite weights whose every answer is NaN, beside others."""
    name = f"overflows-{time.monotonic_ns()}"
    directory = target.fleet_file.parent / name
    shutil.copytree(target.fleet_file.parent / MODEL, directory)
    tensors = load_file(directory / "model.safetensors")
    tensors[NORM].fill_(3e38)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    entry = {"name": name, "path": name}
    status, answer = target.ask("POST", "/admin/models", entry, ADMIN_KEY)
    assert status == 201, f"{status}: {answer}"
    before = target.processes
    forms: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 5, "logprobs": 3},
        {"echo": True, "logprobs": 2},
    ]
    with ThreadPoolExecutor(2 * REQUESTS) as threads:
        bad = [
            threads.submit(target.complete, model=name, **forms[i % len(forms)])
            for i in range(REQUESTS)
        ]
        good = [threads.submit(target.complete, model=MODEL) for _ in range(REQUESTS)]
        answers, healthy = [b.result() for b in bad], [g.result() for g in good]
    later, refused = target.complete(model=name)
    _, listed = target.ask("GET", f"/v1/models/{name}")
    removed, _ = target.ask("DELETE", f"/admin/models/{name}?patience=1", key=ADMIN_KEY)
    codes = Counter(a["error"]["code"] for _, a in answers)
    shown = ", ".join(f"{n} x {code}" for code, n in sorted(codes.items()))
    value = listed["status"]["value"]
    seen = f"{shown}; then {later}, {value}; others {statuses(healthy)}; removed {removed}"
    assert set(codes) <= {"not_finite", "model_failed"}, seen
    assert codes["not_finite"] > 0, seen
    assert refused["error"]["code"] == "model_failed", seen
    assert (value, removed) == ("failed", 200), seen
    assert "set aside" in listed["status"]["reason"], seen
    assert all(s == 200 for s, _ in healthy), seen
    workers = [pid for name, pid in before.items() if name.startswith("ballast-worker")]
    assert set(workers) <= set(target.processes.values()), f"{seen}; a worker has died"
    return seen


def many_embeddings(target: Target) -> str:
    """Ask an embedder for 2,048 embeddings of 1,024 floats, written as numbers and as base64."""
    name = f"embedder-{time.monotonic_ns()}"
    make_embedder(target.fleet_file.parent, name)
    status, answer = target.ask("POST", "/admin/models", {"name": name, "path": name}, ADMIN_KEY)
    assert status == 201, f"{status}: {answer}"
    sizes = {}
    for form in ("float", "base64"):
        inputs = [[40 + i % 50, 40 + i // 50] for i in range(EMBEDDINGS_ASKED)]
        body = {"model": name, "input": inputs, "encoding_format": form}
        status, answer = target.post("/v1/embeddings", body)
        assert status == 200, f"{status}: {answer!s:.120}"
        vectors = [item["embedding"] for item in answer["data"]]
        assert len(vectors) == EMBEDDINGS_ASKED
        assert form == "base64" or {len(v) for v in vectors} == {EMBEDDING_SIZE}
        sizes[form] = len(json.dumps(answer)) >> 20
    removed, _ = target.ask("DELETE", f"/admin/models/{name}?patience=1", key=ADMIN_KEY)
    assert removed == 200, str(removed)
    return ", ".join(f"{size} MiB as {form}" for form, size in sizes.items())


def make_embedder(home: Path, name: str) -> None:
    """Write an embedder of one small layer and wide vectors, with the attacked model's
    tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shutil.copytree(home / MODEL, home / name)
    vocab = json.loads((home / name / "config.json").read_text())["vocab_size"]
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=EMBEDDING_SIZE,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(home / name)
    kinds = ("Transformer", "Pooling", "Normalize")
    paths = ("", "1_Pooling", "2_Normalize")
    steps = [
        {"path": path, "type": f"sentence_transformers.models.{kind}"}
        for path, kind in zip(paths, kinds, strict=True)
    ]
    (home / name / "modules.json").write_text(json.dumps(steps))
    (home / name / "1_Pooling").mkdir()
    pooling = {"pooling_mode_lasttoken": True}
    (home / name / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


SERVES = "it serves or is refused; others serve"
MODEL_ATTACKS: tuple[tuple[str, str, Callable[[Target], str]], ...] = (
    *(
        (f"eos_token_id {value!r:.20}", SERVES, added(generation(eos_token_id=value)))
        for value in ("x", ["x"], [[1]], 10**30)
    ),
    *(
        (f"num_hidden_layers {value}", SERVES, added(config(num_hidden_layers=value)))
        for value in (0, -3, 10**7)
    ),
    ("200,000 brackets", SERVES, added(text("config.json", "[" * 200_000))),
    ("an endless template", SERVES, added(text("chat_template.jinja", ENDLESS))),
    (
        "a template of 10 GB",
        SERVES,
        added(text("chat_template.jinja", "{{ 'a' * 10**10 }}")),
    ),
    (
        "a tokenizer that panics",
        SERVES,
        added(tokenizer(pre_tokenizer={"type": "FixedLength", "length": 0})),
    ),
    ("a model that computes NaN", "it is set aside; others 200, no worker dies", overflowing_model),
    (f"{EMBEDDINGS_ASKED:,} embeddings", "200; nobody else notices", many_embeddings),
)
