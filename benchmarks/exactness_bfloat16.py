"""In bfloat16 no text depends on what else is served, where the device is `invariant`.

The reference is the same request by itself: one at a time, in whole chunks, with ample memory, or,
behind a server, on a device that nothing disturbs.

- `batches`: a dense model, one with experts, one with windows and capped scores, and one with three
  LoRA adapters, on both paths with packed weights: six prompts at once, in jobs of 24 and of 96
  tokens, which cut prompts into other chunks and put other rows beside them.
- `pressure`: three models in a pool so small that models are evicted and requests preempted in
  mid-generation; greedy and sampled.
- `crash`: 20 streams over HTTP, the worker killed amid (`benchmarks/crash.py`).
- `migration`: streams that move to another device with their KV, and anew
  (`benchmarks/migration.py`).
- `control`: `pressure` once more with `invariant: 0`, on a machine where oneDNN would take over
  from two rows on: requests that differ (`differing`), without which the rest would prove nothing.

`wrong`: tokens of all parts but `control` that are not the reference's (of `crash` and `migration`:
streams with such a token, or lost). `inexact`: log-probabilities that differ in any bit.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from ballast.bench.inprocess import Answer, InProcess
from ballast.core.request import Submission
from ballast.core.settings import AdapterSettings, FleetSettings
from ballast.core.units import MiB
from ballast.kernels import choices
from benchmarks import crash, migration
from benchmarks.adapters import random_adapter
from benchmarks.common import finish, options
from benchmarks.exactness import (
    Verdict,
    asked,
    fleet,
    make_llama,
    reference,
    run_tight,
    tight,
)
from benchmarks.families import config, make

BFLOAT16: dict[str, Any] = {"dtype": "bfloat16", "linear": "packed"}
PATHS = ("fused", "generic")
FAMILIES = ("llama", "qwen3_moe", "gemma2")
ADAPTERS: tuple[dict[str, Any], ...] = (
    {"rank": 8},
    {"rank": 3, "only": ("q_proj", "k_proj"), "rs": True},
    {"rank": 17, "only": ("up_proj", "lm_head")},
)
STEP_TOKENS = (24, 96)
"""Bounds of the jobs of `batches`; the reference's is the default."""
PARTS = ("batches", "pressure", "crash", "migration", "control")


@dataclass
class Comparison(Verdict):
    """Answers compared with those of the same requests by themselves, token by token."""

    differing: int = 0
    """Requests with another token."""
    inexact: int = 0
    """Log-probabilities, after equal tokens, that differ in any bit."""

    def add(self, ours: Mapping[str, Answer], alone: Mapping[str, Answer]) -> None:
        for request, answer in ours.items():
            mine, theirs = answer.tokens, alone[request].tokens
            assert answer.finished.output_tokens == len(mine) == len(theirs)
            self.tokens += len(mine)
            self.chosen.update(mine)
            wrong = sum(a != b for a, b in zip(mine, theirs, strict=True))
            self.wrong += wrong
            self.differing += wrong > 0
            if not wrong:
                pairs = zip(answer.logprobs, alone[request].logprobs, strict=True)
                self.inexact += sum(a != b for a, b in pairs)

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "tokens": self.tokens,
            "wrong": self.wrong,
            "differing": self.differing,
            "inexact": self.inexact,
            "most_repeated": self.most_repeated,
        }


class FromTwoRows:
    """Choices of a machine on which oneDNN is the faster one from two rows on."""

    def from_rows(self, shape: object) -> int:
        return 2


@contextmanager
def onednn_from_two_rows() -> Iterator[None]:
    """Where nothing is `invariant`, models built within multiply several rows by oneDNN."""
    before = choices._choices
    choices._choices = cast(Any, FromTwoRows)
    try:
        yield
    finally:
        choices._choices = before


def settled(settings: FleetSettings, *, invariant: bool = True, **device: Any) -> FleetSettings:
    """`settings` with a device that is `invariant` or not, and `device` of its other settings."""
    return replace(settings, device=replace(settings.device, invariant=invariant, **device))


def one_by_one(settings: FleetSettings, requests: Sequence[Submission]) -> dict[str, Answer]:
    """Each request alone on a device with ample memory, its prompt in one chunk."""
    alone = settled(settings, budget_bytes=512 * MiB, step_tokens=512)
    found: dict[str, Answer] = {}
    with InProcess(replace(alone, preset="static")) as server:
        for r in requests:
            found |= server.generate([r])
    return found


def check_batches(scratch: Path, n: int) -> dict[str, Any]:
    """`ok`, and the comparison of each model on each path."""
    found: dict[str, Any] = {}
    for family in FAMILIES:
        make(scratch / family, config(family))
    base = scratch / FAMILIES[0]
    model = reference(base)
    adapters = tuple(
        AdapterSettings(
            name=f"a{i}", path=str(random_adapter(model, scratch / f"a{i}", i, **of).path)
        )
        for i, of in enumerate(ADAPTERS)
    )
    cases: dict[str, tuple[str, dict[str, Any]]] = {family: (family, {}) for family in FAMILIES}
    cases["adapters"] = (FAMILIES[0], {"adapters": adapters})
    for name, (family, more) in cases.items():
        served = ["model", *(a.name for a in more.get("adapters", ()))]
        requests = asked(served, n, seed=1, new_tokens=48)
        for path in PATHS:
            how = {**BFLOAT16, "model_impl": path, **more}
            settings = settled(fleet({"model": scratch / family}, 96 * MiB, how))
            alone = one_by_one(settings, requests)
            comparison = Comparison()
            for tokens in STEP_TOKENS:
                with InProcess(settled(settings, step_tokens=tokens)) as server:
                    comparison.add(server.generate(requests), alone)
            found[f"{name} {path}"] = comparison.to_json()
    return {"ok": all(f["ok"] for f in found.values()), **found}


def _three(scratch: Path) -> dict[str, Path]:
    return {
        "llama": make_llama(scratch / "a", 0),
        "second": make_llama(scratch / "b", 1, num_hidden_layers=3),
        "third": make_llama(scratch / "c", 2, num_key_value_heads=8),
    }


def check_pressure(scratch: Path, n: int) -> dict[str, Any]:
    """`ok`; by path the comparison, and how often models went and requests were preempted."""
    paths = _three(scratch)
    found: dict[str, Any] = {}
    for path in PATHS:
        settings = settled(tight(paths, more={**BFLOAT16, "model_impl": path}))
        comparison = Comparison()
        greedy = asked(list(paths), n, seed=2)
        sampled = asked(list(paths), n, seed=3, temperature=0.8)
        moved: dict[str, int] = {}
        for requests in (greedy, sampled):
            answers, counted = run_tight(settings, requests)
            moved = {key: moved.get(key, 0) + count for key, count in counted.items()}
            comparison.add(answers, one_by_one(settings, requests))
        was_tight = moved["evictions"] > 0 and moved["preemptions"] > 0
        found[path] = {**comparison.to_json(), **moved, "ok": comparison.ok and was_tight}
    return {"ok": all(f["ok"] for f in found.values()), **found}


def check_control(scratch: Path, n: int) -> dict[str, Any]:
    """`pressure` on the fast path without invariance: `ok` if a request differs."""
    paths = _three(scratch)
    requests = asked(list(paths), n, seed=2)
    with onednn_from_two_rows():
        settings = settled(tight(paths, more=BFLOAT16), invariant=False)
        answers, _ = run_tight(settings, requests)
        comparison = Comparison()
        comparison.add(answers, one_by_one(settings, requests))
    return {
        **comparison.to_json(),
        "requests": len(requests),
        "ok": comparison.differing > 0,
    }


def check_crash(scratch: Path, kills: int, new_tokens: int) -> dict[str, Any]:
    scratch.mkdir()
    found = crash.measure(crash.fleet_file(scratch, "bfloat16"), new_tokens, kills)
    lost = found["lost"] + found["poison"]["lost"]
    changed = found["changed"] + found["poison"]["changed"]
    return {
        "ok": lost == changed == 0,
        "tokens": found["streams"] * new_tokens * (kills + 1),
        "wrong": lost + changed,
        "kills": kills,
        "lost": lost,
        "changed": changed,
    }


def check_migration(scratch: Path, rounds: int, contexts: Sequence[int]) -> dict[str, Any]:
    scratch.mkdir()
    file = migration.two_devices(scratch, dtype="bfloat16")
    found = asyncio.run(migration.measure(file, contexts, rounds))
    streams = found["streams"] * len(migration.WAYS)
    return {
        "ok": found["changed"] == 0 and found["moved"] > 0,
        "tokens": streams * (migration.BEFORE + migration.AFTER),
        "wrong": found["changed"],
        "streams": streams,
        "moved": found["moved"],
    }


def main(argv: Sequence[str] | None = None) -> None:
    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="some parts")

    args = options(__doc__, argv, extra)
    quick = args.quick
    n = 4 if quick else 10
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        for part in args.only:
            at = scratch / part
            if part == "batches":
                result[part] = check_batches(at, 6)
            elif part == "pressure":
                result[part] = check_pressure(at, n)
            elif part == "control":
                result[part] = check_control(at, n)
            elif part == "crash":
                result[part] = check_crash(at, *((3, 40) if quick else (6, 120)))
            else:
                contexts = migration.CONTEXTS[1:2] if quick else migration.CONTEXTS
                result[part] = check_migration(at, 1 if quick else 2, contexts)
    compared = [
        v
        for part, found in result.items()
        if part != "control"
        for v in ((found,) if "tokens" in found else found.values())
        if isinstance(v, dict)
    ]
    result["wrong"] = sum(v["wrong"] for v in compared)
    result["tokens"] = sum(v["tokens"] for v in compared)
    result["ok"] = all(result[part]["ok"] for part in args.only)
    finish(args, "exactness_bfloat16", result)


if __name__ == "__main__":
    main()
