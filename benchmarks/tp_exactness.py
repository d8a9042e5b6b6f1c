"""A model over two ranks gives the tokens of one, in float32.

- `greedy`: Llamas and a Qwen2 (biases, norms and all drawn at random) on one device of 2 ranks, so
  small that models are evicted and requests preempted in mid-generation, against `transformers`,
  token by token, as `benchmarks/exactness.py` does it: with ties counted. `as_one_rank`: requests
  that have the very tokens of a device of one rank.
- `sampling`: seeded sampling under the same pressure, against one rank with memory for all.
- `speed`: output tokens per second of one model on 1 rank of 2 threads, on 2 ranks of 1 thread that
  meet in shared memory, and the same through gloo, in turns, for so many requests at once. No part
  of `ok`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table

from ballast.bench.inprocess import InProcess
from ballast.core.settings import FleetSettings
from ballast.core.units import MiB
from benchmarks.common import Samples, finish, interleave, options
from benchmarks.exactness import (
    NEW_TOKENS,
    Verdict,
    asked,
    compare,
    fleet,
    make_llama,
    reference,
    run_tight,
)
from benchmarks.families import config, make

RANKS = 2
BATCHES = (1, 8)
FUSED = {"model_impl": "fused", "linear": "packed"}


def over_ranks(settings: FleetSettings, ranks: int = RANKS) -> FleetSettings:
    """The same models and budget on a device of so many ranks, one thread each."""
    device = replace(settings.device, tensor_parallel=ranks, threads=ranks)
    return replace(settings, device=device)


def make_models(scratch: Path) -> dict[str, Path]:
    """Three that are in each other's way."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
    make(scratch / "qwen2", config("qwen2", **sizes, **heads, initializer_range=0.1), 2)
    return {
        "llama": make_llama(scratch / "llama", 0),
        "more_heads": make_llama(scratch / "more_heads", 1, num_key_value_heads=8),
        "qwen2": scratch / "qwen2",
    }


def cramped(paths: Mapping[str, Path]) -> FleetSettings:
    """A budget for the arena, the weights of two models and the KV of a few requests."""
    roomy = over_ranks(fleet(paths, 512 * MiB, FUSED))
    with InProcess(roomy) as server:
        state = server.device.state
        weights = max(m.weights.pages for m in state.models.values())
        kv = max(m.kv.layout.pages(-(-264 // m.spec.block_tokens)) for m in state.models.values())
        pages = state.arena.pages + 2 * weights + 4 * kv
    budget = pages * roomy.device.page_bytes * RANKS
    return replace(roomy, device=replace(roomy.device, budget_bytes=budget))


def check_greedy(paths: dict[str, Path], tight: FleetSettings, n: int) -> dict[str, Any]:
    requests = asked(list(paths), n, seed=2)
    answers, moved = run_tight(tight, requests)
    verdict = Verdict()
    models = {name: reference(path) for name, path in paths.items()}
    for r in requests:
        compare(models[r.model], r.prompt, answers[r.id], verdict)
    with InProcess(fleet(paths, 512 * MiB, FUSED)) as server:
        alone = server.generate(requests)
    same = sum(alone[r.id].tokens == answers[r.id].tokens for r in requests)
    pressed = moved["evictions"] > 0 and moved["preemptions"] > 0
    figures = {**verdict.to_json(), **moved, "requests": len(requests), "as_one_rank": same}
    return {**figures, "ok": verdict.ok and pressed}


def check_sampling(paths: dict[str, Path], tight: FleetSettings, n: int) -> dict[str, Any]:
    requests = asked(list(paths), n, seed=3, temperature=0.8)
    answers, moved = run_tight(tight, requests)
    with InProcess(fleet(paths, 512 * MiB, FUSED)) as server:
        alone = server.generate(requests)
    differing = [r.id for r in requests if answers[r.id].tokens != alone[r.id].tokens]
    ok = not differing and moved["preemptions"] > 0
    return {"ok": ok, "requests": len(requests), "differing": differing, **moved}


def measure(path: Path, rounds: int) -> dict[str, dict[str, Samples]]:
    """By batch and way, tokens per second."""
    plain = fleet({"model": path}, 512 * MiB, FUSED)
    one = replace(plain, device=replace(plain.device, threads=RANKS))
    found = {}
    shared = over_ranks(plain)
    gloo = replace(shared, device=replace(shared.device, exchange="gloo"))
    with InProcess(one) as single, InProcess(shared) as group, InProcess(gloo) as slow:
        for batch in BATCHES:

            def run(server: InProcess, batch: int = batch) -> float:
                requests = asked(["model"], batch, seed=4)
                began = server.now
                server.generate(requests)
                return batch * NEW_TOKENS / (server.now - began)

            ways = {
                "one_rank": lambda: run(single),
                "ranks": lambda: run(group),
                "ranks_gloo": lambda: run(slow),
            }
            found[f"batch_{batch}"] = interleave(ways, rounds, warmup=1)
    return found


def table(result: Mapping[str, Any]) -> Table:
    shown = Table("", "ok", "what")
    g, s = result["greedy"], result["sampling"]
    shown.add_row(
        "greedy",
        str(g["ok"]),
        f"{g['tokens']} tokens, {g['wrong']} wrong, {g['ties']} ties, log-prob. error "
        f"{g['logprob_error']:.1e}, {g['evictions']} evictions, {g['preemptions']} preemptions; "
        f"{g['as_one_rank']} of {g['requests']} requests as on one rank",
    )
    shown.add_row(
        "sampling", str(s["ok"]), f"{len(s['differing'])} of {s['requests']} requests differ"
    )
    for batch, found in result["speed"].items():
        outcome = (f"{way} {of['median']:.0f}" for way, of in found.items())
        shown.add_row(f"speed, {batch}", "", f"tokens/s: {', '.join(outcome)}")
    return shown


def main() -> None:
    args = options(__doc__)
    n = 4 if args.quick else 10
    with tempfile.TemporaryDirectory() as scratch:
        paths = make_models(Path(scratch))
        tight = cramped(paths)
        greedy = check_greedy(paths, tight, n)
        sampling = check_sampling(paths, tight, n)
        speed = measure(paths["llama"], 3 if args.quick else 7)
    result = {
        "ok": greedy["ok"] and sampling["ok"],
        "ranks": RANKS,
        "greedy": greedy,
        "sampling": sampling,
        "speed": {
            batch: {way: s.to_json() for way, s in found.items()} for batch, found in speed.items()
        },
    }
    finish(args, "tp_exactness", result, table(result))


if __name__ == "__main__":
    main()
