"""What the contents of models do: numbers that are none, and files that change beneath a server.

Each attack is (name, what is expected, what does it), and False where a witness may notice: those
have servers, and witnesses, of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
import yaml
from safetensors.torch import load_file, save_file

from ballast.bench.server_process import Serving, children_of, serving
from ballast.fleet.make import make_fleet
from benchmarks.adapters import random_adapter
from benchmarks.crash import Stream, until_spare_waits
from benchmarks.robustness_target import ADMIN_KEY, MODEL, VICTIM, Target, statuses
from benchmarks.witness import witness

FILE = "model.safetensors"
EMBEDDINGS, NORM = "model.embed_tokens.weight", "model.norm.weight"
STREAMS, NEW_TOKENS = 20, 380
GAP_SECONDS = 0.25
"""Goal: the longest between two tokens of a stream on the device whose worker lives."""
DEADLINE = 120.0
REQUESTS = 16
EMBEDDINGS_ASKED, EMBEDDING_SIZE = 2048, 1024
"""As many as one request may ask for, and the numbers of each."""


def copied(target: Target, change: Callable[[dict[str, torch.Tensor]], object]) -> str:
    """Copy the attacked model beside it, with other tensors; returns its name."""
    name = f"content-{time.monotonic_ns()}"
    directory = target.fleet_file.parent / name
    shutil.copytree(target.fleet_file.parent / MODEL, directory)
    tensors = load_file(directory / FILE)
    change(tensors)
    save_file(tensors, directory / FILE, {"format": "pt"})
    return name


def nonfinite_checkpoints(target: Target) -> str:
    """Add checkpoints with one element that is no number, in three dtypes and places."""
    found: list[tuple[int, Any]] = []
    for value in (math.nan, math.inf, -math.inf):
        for tensor in (EMBEDDINGS, NORM):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):

                def change(
                    tensors: dict[str, torch.Tensor],
                    tensor: str = tensor,
                    value: float = value,
                    dtype: torch.dtype = dtype,
                ) -> None:
                    tensors.update({n: t.to(dtype) for n, t in tensors.items()})
                    tensors[tensor].view(-1)[-1] = value

                name = copied(target, change)
                entry = {"name": name, "path": name}
                status, answer = target.ask("POST", "/admin/models", entry, ADMIN_KEY)
                found.append((status, answer))
                why = answer["error"]["message"] if isinstance(answer, dict) else str(answer)
                assert status == 400, f"{value} in {tensor}: {status}: {why:.120}"
                assert f"{FILE}, tensor {tensor!r}" in why, why
    others = [target.complete(model=model)[0] for model in (MODEL, VICTIM)]
    seen = f"{statuses(found)}; others {others}"
    assert others == [200, 200], seen
    return seen


def overflowing_model(target: Target) -> str:
    """Ask a model of finite weights whose every answer is NaN, beside others."""
    name = copied(target, lambda tensors: tensors[NORM].fill_(3e38))
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


def nonfinite_adapters(target: Target) -> str:
    """Start a server whose adapters are NaN, infinite, and sound: its base and the last serve."""
    from transformers import AutoModelForCausalLM

    home = target.fleet_file.parent
    base = AutoModelForCausalLM.from_pretrained(home / MODEL, dtype=torch.float32)
    values = {"lora-nan": math.nan, "lora-inf": -math.inf, "lora-sound": 0.5}
    fleet = target.fleet_file.read_text().partition("\n  - {name: few")[0]
    for name, value in values.items():
        random_adapter(base, home / name, seed=1)
        file = home / name / "adapter_model.safetensors"
        tensors = load_file(file)
        next(iter(tensors.values())).view(-1)[0] = value
        save_file(tensors, file, {"format": "pt"})
        fleet += f"\n  - {{name: {name}, adapter: {name}, base: {MODEL}}}"
    path = home / "adapters.yaml"
    path.write_text(fleet + "\n")
    with serving(path, "--no-changes", "--log-level", "error") as running:
        second = Target(running.url, running.pid, path, target.log)
        found = {n: second.complete(key="", model=n)[0] for n in (MODEL, VICTIM, *values)}
        _, health = second.ask("GET", "/health", key="")
    seen = f"{found}; failed: {sorted(health['failed'])}"
    assert found == {MODEL: 200, VICTIM: 200, "lora-sound": 200, "lora-nan": 404, "lora-inf": 404}
    assert all("adapter_model.safetensors" in why for why in health["failed"].values()), seen
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


# -- files that change beneath a server ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Served:
    """A server of two devices; `MODEL` alone is on the first, `VICTIM` alone on the second."""

    running: Serving
    directory: Path
    """Of `MODEL`."""

    def kill(self) -> None:
        """Kill the worker that serves `MODEL`."""
        pid = next(pid for pid in children_of(self.running.pid) if _has_weights(pid, MODEL))
        os.kill(pid, signal.SIGKILL)

    def restarts(self) -> int:
        state = httpx.get(f"{self.running.url}/admin/state", headers=_KEY, timeout=DEADLINE).json()
        return sum(device["restarts"] for device in state["devices"])


_KEY = {"Authorization": f"Bearer {ADMIN_KEY}"}


def _has_weights(pid: int, model: str) -> bool:
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if f"memfd:ballast-{model}" in str(link.readlink()):
                return "ballast-worker" in Path(f"/proc/{pid}/comm").read_text()
    return False


@contextlib.contextmanager
def _two_devices(directory: Path) -> Iterator[_Served]:
    made = make_fleet(
        directory, n_models=2, steps=0, size="tiny", dtype="float32", budget="32MiB", seed=2
    )
    fleet = yaml.safe_load(made.file.read_text())
    (device,) = fleet["devices"]
    fleet["devices"] = [device | {"name": name, "threads": 1} for name in ("cpu:0", "cpu:1")]
    for model in fleet["models"]:
        model["devices"] = ["cpu:0" if model["name"] == MODEL else "cpu:1"]
    fleet["server"] = {"admin_key": ADMIN_KEY}
    made.file.write_text(yaml.safe_dump(fleet))
    with serving(made.file, "--no-changes", "--log-level", "error") as running:
        yield _Served(running, directory / MODEL)


def retrained(directory: Path) -> None:
    """Put other weights in place of these, as a download does."""
    tensors = {name: tensor + 0.5 for name, tensor in load_file(directory / FILE).items()}
    save_file(tensors, directory / "other", {"format": "pt"})
    os.replace(directory / "other", directory / FILE)


def gone(directory: Path) -> None:
    """Take the directory away, as a volume that is unmounted."""
    directory.rename(directory.with_name("elsewhere"))


def reconfigured(directory: Path) -> None:
    """Write a configuration of another shape."""
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_hidden_layers": 1}))


async def _streams(served: _Served, change: Callable[[Path], None] | None) -> list[Stream]:
    """Read all streams; amid them `change` the files and kill the worker."""
    streams = [Stream(MODEL, i, NEW_TOKENS) for i in range(STREAMS)]
    limits = httpx.Limits(max_connections=STREAMS + 2)
    async with httpx.AsyncClient(
        base_url=served.running.url, timeout=DEADLINE, limits=limits
    ) as client:
        reading = [asyncio.create_task(stream.run(client)) for stream in streams]
        for stream in streams:
            await stream.begun.wait()
        if change is not None:
            await asyncio.to_thread(change, served.directory)
            served.kill()
        await asyncio.gather(*reading)
    return streams


def _compared(before: Sequence[Stream], after: Sequence[Stream]) -> tuple[int, int]:
    """Return the numbers of streams that were lost, and of those with other tokens."""
    pairs = list(zip(before, after, strict=True))
    lost = sum(not b.ended or len(b.tokens) < len(a.tokens) for a, b in pairs)
    return lost, sum(b.tokens != a.tokens[: len(b.tokens)] for a, b in pairs)


def files_replaced(target: Target) -> str:
    """Replace a model's files under twenty streams and kill its worker, once for each change."""
    directory = target.fleet_file.parent / f"content-{time.monotonic_ns()}"
    lost = changed = 0
    gaps: list[float] = []
    with _two_devices(directory) as served, witness(served.running.url, "", VICTIM) as by:
        undisturbed = asyncio.run(_streams(served, None))
        changes = (retrained, reconfigured, gone)
        for change in changes:
            until_spare_waits(served.running.pid)
            by.begin()
            found = _compared(undisturbed, asyncio.run(_streams(served, change)))
            noticed = by.end()
            assert not noticed.errors, noticed.errors[:3]
            lost, changed = lost + found[0], changed + found[1]
            gaps.append(noticed.gap)
        restarts = served.restarts()
        again = _compared(undisturbed, asyncio.run(_streams(served, None)))
    seen = f"lost {lost}, changed {changed} of {len(changes) * STREAMS}; {restarts} restarts; "
    seen += f"others' gap {max(gaps):.3f} s; later lost and changed {again}"
    assert all(len(s.tokens) == NEW_TOKENS for s in undisturbed), "the streams were short"
    assert (lost, changed, restarts, again) == (0, 0, len(changes), (0, 0)), seen
    assert max(gaps) <= GAP_SECONDS, seen
    return seen


CONTENT_ATTACKS: tuple[tuple[Any, ...], ...] = (
    (
        "checkpoints with NaN",
        "each is refused by file and tensor; others 200",
        nonfinite_checkpoints,
    ),
    ("a model that computes NaN", "it is set aside; others 200, no worker dies", overflowing_model),
    ("adapters with NaN", "refused by file; base and others 200", nonfinite_adapters, False),
    (f"{EMBEDDINGS_ASKED:,} embeddings", "200; nobody else notices", many_embeddings),
    ("files replaced under 20 streams", "lost 0, changed 0, gap <= 0.25 s", files_replaced, False),
)
