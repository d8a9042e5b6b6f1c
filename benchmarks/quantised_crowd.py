"""Twelve copies of one GGUF file, each with other bytes, in memory for four: no token may change.

    python -m benchmarks.quantised_crowd FILE.gguf

Every copy differs in each layer, so that no two share a segment. All are asked at once and in
turns; weights are evicted and brought back, and answers compared with those of each copy alone in
roomy memory, which `benchmarks.quantised` compares with `transformers`. Without a file a small one
with random blocks is made.

- `differing`: requests that got other tokens.
- `evictions`, `activations`, `preemptions`: of all copies.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ballast.bench.inprocess import Answer, InProcess
from ballast.core.request import Submission
from ballast.core.settings import DeviceSettings, FleetSettings, ModelSettings
from ballast.core.units import GiB, KiB
from ballast.fleet.gguf_entry import gguf_directory
from ballast.fleet.gguf_header import read_gguf
from benchmarks import gguf_files
from benchmarks.common import finish, options
from benchmarks.exactness import run_tight

COPIES, ROOM = 12, 4
CHANGED = 8
"""Bytes in the midst of each matrix that a copy changes by its number."""
NEW_TOKENS = 16


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


def settings_of(paths: dict[str, Path], budget: int) -> FleetSettings:
    models = tuple(ModelSettings(name=n, path=str(p), dtype="float32") for n, p in paths.items())
    device = DeviceSettings(budget_bytes=budget, page_bytes=256 * KiB, step_tokens=96)
    return FleetSettings(models=models, device=device)


def requests_of(names: list[str], rounds: int) -> list[Submission]:
    rng = np.random.default_rng(0)
    return [
        Submission(
            id=f"{name}-{i}",
            model=name,
            prompt=tuple(int(t) for t in rng.integers(1, 250, 20)),
            max_tokens=NEW_TOKENS,
            ignore_eos=True,
        )
        for i in range(rounds)
        for name in names
    ]


def crowd(source: Path, scratch: Path, rounds: int) -> dict[str, Any]:
    """Serve the copies alone, then together in memory for `ROOM`."""
    paths = {}
    for i in range(COPIES):
        target = scratch / f"copy{i}" / source.name
        target.parent.mkdir()
        copy_changed(source, target, i)
        paths[f"copy{i}"] = Path(gguf_directory(target, "path", target.name))
    asked = requests_of(list(paths), rounds)
    expected: dict[str, Answer] = {}
    pages, room = 0, 0
    for name, path in paths.items():
        with InProcess(settings_of({name: path}, 2 * GiB)) as server:
            own = [r for r in asked if r.model == name]
            expected |= server.generate(own)
            state = server.device.state
            (model,) = state.models.values()
            kv = model.kv.layout.pages(-(-(20 + NEW_TOKENS) // model.spec.block_tokens))
            pages, room = state.arena.pages, max(room, model.weights.pages + rounds * kv)
            page_bytes = state.settings.page_bytes
    budget = (pages + ROOM * room) * page_bytes
    tight = settings_of(paths, budget)
    answers, moved = run_tight(replace(tight), asked)
    differing = [r.id for r in asked if answers[r.id].tokens != expected[r.id].tokens]
    texts = {tuple(a.tokens) for a in expected.values()}
    return {
        "models": COPIES,
        "room_for": ROOM,
        "budget_bytes": budget,
        "requests": len(asked),
        "distinct_answers": len(texts),
        "differing": len(differing),
        **moved,
    }


def more_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("gguf", type=Path, nargs="?", help="the file (default: a small one)")


def main() -> None:
    args = options(__doc__, extra=more_options)
    with tempfile.TemporaryDirectory() as scratch:
        source = args.gguf
        if source is None:
            source = Path(scratch) / "small.gguf"
            gguf_files.write(source, gguf_files.values(), gguf_files.tensors("Q4_K"))
        result = crowd(source, Path(scratch), 1 if args.quick else 3)
    finish(args, "quantised_crowd", result)


if __name__ == "__main__":
    main()
