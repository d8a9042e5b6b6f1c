"""Each kind of KV under pressure: no token changes.

One model of each kind (`KINDS`) in a pool so small that models are evicted and requests preempted
in mid-generation, while every seventh job of all models raises after it has computed. Greedy output
is compared with `transformers`, token by token, as in `benchmarks/exactness.py`. Keys, by kind and
in sum: `wrong` (0), `tokens`, `evictions`, `preemptions`, `failed_jobs`.

`--kv-dtype int8`: the same with KV in 8 bits, against `transformers` with keys and values rounded
to the same 8 bits (`rounded_kv`). An element that lies between two of its steps may be rounded to
either, so a choice within `ROUNDING` of the best is a tie.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from ballast.bench.inprocess import Answer, InProcess
from ballast.core.event import JobResult
from ballast.core.job import SequenceWork
from ballast.core.request import Submission
from ballast.core.settings import FleetSettings
from benchmarks.common import finish, options
from benchmarks.exactness import Verdict, asked, compare, reference, tight
from benchmarks.families import make
from benchmarks.tiny import tiny

LATENT = "latent attention"
KINDS: dict[str, str] = {
    "gated delta net": "qwen3_next",
    "Mamba2": "bamba",
    "short convolutions": "lfm2",
    LATENT: "deepseek_v3",
    "heads by layer": "gemma4_text",
    "windows and all": "gemma3_text",
    "windows alone": "mistral",
}
"""A family of each kind, made small."""
ROUNDING = 2e-3
"""Margin of logits with KV in 8 bits: what a few elements rounded the other way change."""
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


def measure(
    scratch: Path, n: int, kv_dtype: str, only: Sequence[str] = tuple(KINDS)
) -> dict[str, Any]:
    """By kind: the verdict, and how often memory moved."""
    kinds = {kind: KINDS[kind] for kind in only if kv_dtype == "auto" or kind != LATENT}
    paths = {family: scratch / family for family in kinds.values()}
    for family, path in paths.items():
        make(path, tiny(family))
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


def table(found: Mapping[str, Mapping[str, Any]]) -> Table:
    columns = ("tokens", "wrong", "ties", "evictions", "preemptions", "failed_jobs")
    shown = Table("", "ok", *columns, "log-prob. error")
    for kind, v in found.items():
        error = f"{v['logprob_error']:.1e}"
        shown.add_row(kind, str(v["ok"]), *(str(v[c]) for c in columns), error)
    return shown


def main() -> None:
    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--kv-dtype", choices=("auto", "int8"), default="auto")
        parser.add_argument("--only", nargs="+", choices=KINDS, default=[*KINDS], help="kinds")

    args = options(__doc__, extra=extra)
    with tempfile.TemporaryDirectory() as scratch:
        found = measure(Path(scratch), 2 if args.quick else 10, args.kv_dtype, args.only)
    sums = {
        key: sum(v[key] for v in found.values())
        for key in ("wrong", "tokens", "evictions", "preemptions", "failed_jobs")
    }
    disturbed = all(sums[key] > 0 for key in ("evictions", "preemptions", "failed_jobs"))
    ok = disturbed and all(v["ok"] for v in found.values())
    finish(args, "kv_kinds", {"kinds": found, **sums, "ok": ok}, table(found))


if __name__ == "__main__":
    main()
