"""Each kind of KV under pressure, moved, and after a crash: no token changes.

- `pressure`: one model of each kind (`KINDS`) in a pool so small that models are evicted and
  requests preempted in mid-generation, while every seventh job of all models raises after it has
  computed.
- `moved`: running requests of each kind migrate to another device, with their KV but for those of
  models with windows.
- `killed`: the worker that runs them dies (both of `benchmarks/kv_moves.py`, which also have KV in
  8 bits beside the others).

Greedy output is compared with `transformers`, token by token, as in `benchmarks/exactness.py`.
Keys, in sum: `wrong` (0), `tokens`, `evictions`, `preemptions`, `failed_jobs`, `moved` and
`killed`, the requests that moved and that ran when their worker died, and of those that moved
`with_kv`; by kind in `kinds`,
`moved_by_kind` and `killed_by_kind`.

`--kv-dtype int8`: the same with KV in 8 bits, against `transformers` with keys and values rounded
to the same 8 bits (`rounded_kv`). An element that lies between two of its steps may be rounded to
either, so a choice within `ROUNDING` of the best is a tie.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from ballast.bench.inprocess import Answer, InProcess
from ballast.core.event import JobResult
from ballast.core.job import SequenceWork
from ballast.core.request import Submission
from ballast.core.settings import FleetSettings
from benchmarks import kv_moves
from benchmarks.architectures import SPECIAL
from benchmarks.common import finish, options
from benchmarks.exactness import Verdict, asked, compare, reference, tight
from benchmarks.families import make
from benchmarks.kv_moves import FAULTS
from benchmarks.tiny import tiny

LATENT, SHARED = "latent attention", "layers that share KV"
KINDS: dict[str, str] = {
    "gated delta net": "qwen3_next",
    "Mamba2": "bamba",
    "short convolutions": "lfm2",
    LATENT: "deepseek_v3",
    "heads by layer": "gemma4_text",
    "windows and all": "gemma3_text",
    "windows alone": "mistral",
    SHARED: "gemma3n_text",
}
"""A family of each kind, made small."""
ROUNDED = "KV in 8 bits"
"""A kind that only `moved` and `killed` have: under pressure all kinds are, by `--kv-dtype`."""
ROUNDING = 2e-3
"""Margin of logits with KV in 8 bits: what a few elements rounded the other way change."""
PRESSURE = "pressure"
EVERY_FAULT = [PRESSURE, *FAULTS]
DISTURBANCES = ("evictions", "preemptions", "failed_jobs")
"""What is counted under pressure."""
_EVERY = 7
"""Of this many jobs of a model one fails."""


class FailingJobs:
    """Has every `_EVERY`th job of a model raise, once it has computed."""

    def __init__(self, server: InProcess, model: str) -> None:
        self.failed = self._jobs = 0
        (executor,) = server.device.executors[model]
        self._run = executor.run
        executor.run = self.run  # type: ignore[method-assign]

    def run(self, work: Sequence[SequenceWork]) -> list[JobResult]:
        results = self._run(work)
        self._jobs += 1
        # A request that fails alone is at fault: only jobs of several fail here.
        if self._jobs % _EVERY == 0 and len(work) > 1:
            self.failed += 1
            raise RuntimeError("a job that fails")
        return results


def pressed(
    settings: FleetSettings, requests: Sequence[Submission]
) -> tuple[dict[str, Answer], dict[str, dict[str, int]]]:
    """The answers, and by model how often memory moved."""
    with InProcess(settings) as server:
        failing = {m.name: FailingJobs(server, m.name) for m in settings.models}
        answers = server.generate(requests)
        report = server.device.snapshot()
    moved = {
        m.name: {
            "evictions": m.evictions,
            "preemptions": m.preemptions,
            "failed_jobs": failing[m.name].failed,
        }
        for m in report.models
    }
    return answers, moved


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Return keys or values (..., head_dim) as KV in 8 bits keeps them."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round().clamp(-127, 127).nan_to_num() * scale


@contextmanager
def rounded_kv(model: torch.nn.Module) -> Iterator[None]:
    """Have a model of `transformers` attend to rounded keys and values."""
    model.set_attn_implementation("eager")  # type: ignore[operator]
    modeling: Any = sys.modules[type(model).__module__]
    eager = modeling.eager_attention_forward

    def attend(module: Any, query: Any, key: Any, value: Any, *args: Any, **more: Any) -> Any:
        return eager(module, query, rounded(key), rounded(value), *args, **more)

    modeling.eager_attention_forward = attend
    try:
        yield
    finally:
        modeling.eager_attention_forward = eager


def made(kind: str, scratch: Path) -> Path:
    """Return the checkpoint of a kind, made if it is not there."""
    family = KINDS.get(kind, "llama")
    changes: dict[str, Any] = SPECIAL[family]["shared keys"] if kind == SHARED else {}
    if not (scratch / family).exists():
        make(scratch / family, tiny(family, **changes))
    return scratch / family


def faulty(
    scratch: Path, kv_dtype: str, only: Sequence[str], faults: Sequence[str] = FAULTS
) -> dict[str, dict[str, dict[str, Any]]]:
    """By fault and kind: the verdict, and how many requests the fault met."""
    kinds = [k for k in only if kv_dtype == "auto" or k != LATENT]
    rounded = [*kinds, ROUNDED] if kv_dtype == "int8" else [ROUNDED]
    models = {
        kind: {
            "path": str(made(kind, scratch)),
            "kv_dtype": "int8" if kind in rounded else "auto",
        }
        for kind in [*kinds, ROUNDED]
    }
    return kv_moves.measure(models, faults, dict.fromkeys(rounded, (ROUNDING, rounded_kv)))


def measure(
    scratch: Path, n: int, kv_dtype: str, only: Sequence[str] = tuple(KINDS)
) -> dict[str, Any]:
    """By kind: the verdict, and how often memory moved."""
    kinds = {kind: KINDS[kind] for kind in only if kv_dtype == "auto" or kind != LATENT}
    paths = {family: made(kind, scratch) for kind, family in kinds.items()}
    requests = asked([*paths], n, seed=2)
    more = {"block_tokens": 16, "kv_dtype": kv_dtype}
    answers, moved = pressed(tight(paths, more=more, models=1), requests)
    found: dict[str, Any] = {}
    for kind, family in kinds.items():
        verdict, model = Verdict(), reference(paths[family])
        if kv_dtype != "auto":
            verdict.margin = ROUNDING
        with nullcontext() if kv_dtype == "auto" else rounded_kv(model):
            for r in requests:
                if r.model == family:
                    compare(model, r.prompt, answers[r.id], verdict)
        found[kind] = {**verdict.to_json(), **moved[family]}
    return found


def main() -> None:
    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--kv-dtype", choices=("auto", "int8"), default="auto")
        parser.add_argument("--only", nargs="+", choices=KINDS, default=[*KINDS], help="kinds")
        parser.add_argument("--faults", nargs="*", choices=EVERY_FAULT, default=EVERY_FAULT)

    args = options(__doc__, extra=extra)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        if PRESSURE in args.faults:
            requests = 2 if args.quick else 10
            found = measure(Path(scratch), requests, args.kv_dtype, args.only)
        others = [fault for fault in FAULTS if fault in args.faults]
        met = faulty(Path(scratch), args.kv_dtype, args.only, others) if others else {}
    every = [*found.values(), *(v for by_kind in met.values() for v in by_kind.values())]
    sums: dict[str, int] = {key: sum(v[key] for v in every) for key in ("wrong", "tokens")}
    if found:
        sums |= {key: sum(v[key] for v in found.values()) for key in DISTURBANCES}
    sums |= {fault: sum(v["met"] for v in by_kind.values()) for fault, by_kind in met.items()}
    if "moved" in met:
        sums["with_kv"] = sum(v["with_kv"] for v in met["moved"].values())
    ok = all(v["ok"] for v in every) and all(sums[key] > 0 for key in sums if key != "wrong")
    by_fault = {f"{fault}_by_kind": by_kind for fault, by_kind in met.items()}
    finish(args, "kv_kinds", {"kinds": found, **by_fault, **sums, "ok": ok})


if __name__ == "__main__":
    main()
