"""What checkpoints do: configurations, templates and adapters that are wrong in some way.

Each attack is (name, what is expected, what does it), and False where a witness may notice.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.resident import Memory
from benchmarks.robustness_target import (
    ADMIN_KEY,
    ENDLESS,
    MODEL,
    VICTIM,
    Target,
)

LOAD_SECONDS = 60.0
"""For a tiny checkpoint to be read and served, or refused."""
GROWTH_MIB = 1024
"""What reading one checkpoint may take of the memory of all processes together, for a while."""
MESSAGE = {"role": "user", "content": "a"}
PATTERN = "(a+)+" * 8 + "(.*.*)*b"
"""A pattern that takes Python's `re` exponential time."""


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


def panics_at_times(target: Target) -> str:
    """A model whose tokenizer panics where it decodes `a`, and nowhere else."""
    name = f"panics-{time.monotonic_ns()}"
    directory = target.fleet_file.parent / name
    shutil.copytree(target.fleet_file.parent / MODEL, directory)
    tokenizer(decoder={"type": "Strip", "content": "a", "start": 9, "stop": 9})(directory)
    entry = {"name": name, "path": name}
    added, answer = target.ask("POST", "/admin/models", entry, ADMIN_KEY, LOAD_SECONDS)
    assert added == 201, f"{added}: {answer}"
    _, encoded = target.post("/tokenize", {"model": name, "prompt": "a"})
    found = []
    for tokens in (encoded["tokens"], [40, 41], encoded["tokens"]):
        status, _ = target.post("/detokenize", {"model": name, "tokens": tokens})
        found.append(status)
    asked, _ = target.complete(model=name)
    others = [target.complete(model=model)[0] for model in (MODEL, VICTIM)]
    health, _ = target.ask("GET", "/health")
    removed, _ = target.ask("DELETE", f"/admin/models/{name}?patience=1", key=ADMIN_KEY)
    seen = f"decoding {found}, completions {asked}; others {others}, /health {health}"
    assert found == [422, 200, 422], seen
    assert [*others, health, removed] == [200] * 4, seen
    assert asked in (200, 422), seen
    return seen


def generation(**values: Any) -> Callable[[Path], None]:
    """Write these into config.json and generation_config.json."""

    def change(directory: Path) -> None:
        config(**values)(directory)
        file = directory / "generation_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return change


def endless_template_again(target: Target) -> str:
    """Conversations with the fleet's own model whose template never ends, at once."""
    body = {"model": "endless", "messages": [MESSAGE], "max_tokens": 2}
    found = [target.post("/v1/chat/completions", body)[0] for _ in range(5)]
    asked, _ = target.complete(model="endless")
    seen = f"conversations {found}, completions {asked}"
    assert all(400 <= status < 500 for status in found), seen
    assert asked == 200, seen
    return seen


def endless_pattern(target: Target) -> str:
    """An adapter whose `rank_pattern` is a pattern that never ends, beside its base."""
    import torch
    from transformers import AutoModelForCausalLM

    from ballast.bench.server_process import serving
    from benchmarks.adapters import random_adapter

    home = target.fleet_file.parent
    base = AutoModelForCausalLM.from_pretrained(home / MODEL, dtype=torch.float32)
    random_adapter(base, home / "lora", seed=1, rank_pattern={PATTERN: 4})
    fleet = target.fleet_file.read_text().partition("\n  - {name: few")[0]
    file = home / "adapter.yaml"
    file.write_text(fleet + f"\n  - {{name: lora, adapter: lora, base: {MODEL}}}\n")
    began = time.monotonic()
    with serving(file, "--no-changes", "--log-level", "error") as running:
        seconds = time.monotonic() - began
        second = Target(running.url, running.pid, file, target.log)
        status, _ = second.complete(key="")
        adapted, _ = second.complete(key="", model="lora")
    seen = f"started in {seconds:.0f} s; the base {status}, the adapter {adapted}"
    assert status == 200, seen
    assert adapted in (200, 404), seen
    return seen


SERVES = "it serves or is refused; others serve"
CHECKPOINT_ATTACKS: tuple[tuple[Any, ...], ...] = (
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
    ("a tokenizer that panics at times", "422 then; it serves", panics_at_times),
    ("conversations without end", "refused; completions 200", endless_template_again),
    ("a pattern without end", "the base serves", endless_pattern, False),
)
