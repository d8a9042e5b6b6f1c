"""Ten times what a server can do, for a minute: what becomes of requests, memory and rate.

A random Llama of 110M parameters, `ballast serve` in a process of its own, at most 64 requests
waiting. The client is `benchmarks.open_loop`, on the same cores. First the sustainable rate is
found by a closed loop; then half of it is offered, ten times it, and half of it again.

- `answered`, `refused` (429, `without_retry_after` of them without that header) and `other`
  (anything else; listed in `others`) are of the requests offered in the overload.
- `rss_mib`: resident memory of server and worker before, at its peak and after.
- `recovered_ratio`: requests answered per second at half the sustainable rate, after over before.
- `ttft_s`: of answered requests, from when they were due to the first event.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ballast.bench.server_process import Serving, serving
from benchmarks.common import finish, options
from benchmarks.llamas import LLAMA_110M, TOKENS, make_fleet_file
from benchmarks.open_loop import Exchange, OpenLoop
from benchmarks.resident import Memory

TIMES = 10
PROMPT, OUTPUT = 32, 16
WAITING = 64
STREAMS = 64
CONNECTIONS = 1024


@dataclass(frozen=True)
class Shape:
    """Seconds of each phase."""

    search: float
    half: float
    overload: float


def measure(running: Serving, client: OpenLoop, shape: Shape) -> dict[str, Any]:
    """The result."""
    client.closed(STREAMS, 1.0)  # connections, and what a first time makes
    began = time.perf_counter()
    done = [e for e in client.closed(STREAMS, shape.search) if e.complete]
    sustainable = len(done) / (max(e.ended or began for e in done) - began)
    half = sustainable / 2
    with Memory({"server": running.pid, "worker": running.worker}) as memory:
        before = _phase(client.at_rate(half, shape.half))
        rss_before = memory.now()
        over = client.at_rate(TIMES * sustainable, shape.overload)
        rss = {"before": rss_before, "peak": memory.peak(), "after": memory.now()}
        after = _phase(client.at_rate(half, shape.half))
    answered = [e for e in over if e.status == 200 and e.complete]
    refused = [e for e in over if e.status == 429]
    kept = {id(e) for e in (*answered, *refused)}
    others = Counter(str(e.status) for e in over if id(e) not in kept)
    spread = max(e.sent for e in over) - min(e.sent for e in over)
    return {
        "sustainable_rps": sustainable,
        "offered_rps": len(over) / spread,
        "offered_times": len(over) / spread / sustainable,
        "late_s": max(e.sent - e.due for e in over),
        "offered": len(over),
        "answered": len(answered),
        "refused": len(refused),
        "without_retry_after": sum(e.retry_after is None for e in refused),
        "other": len(over) - len(kept),
        "others": dict(others),
        "answered_rps": len(answered) / (max(e.ended or 0.0 for e in answered) - over[0].due),
        "refusal_s": _quantiles([(e.ended or e.sent) - e.sent for e in refused]),
        "ttft_s": _quantiles([(e.first or e.due) - e.due for e in answered]),
        "rss_mib": rss,
        "before": before,
        "after": after,
        "recovered_rps": after["answered_rps"],
        "recovered_ratio": after["answered_rps"] / before["answered_rps"],
    }


def _phase(exchanges: Sequence[Exchange]) -> dict[str, Any]:
    answered = [e for e in exchanges if e.status == 200 and e.complete]
    seconds = max(e.ended or e.due for e in exchanges) - exchanges[0].due
    return {
        "offered": len(exchanges),
        "answered": len(answered),
        "answered_rps": len(answered) / seconds,
        "ttft_s": _quantiles([(e.first or e.due) - e.due for e in answered]),
    }


def _quantiles(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    p50, p99 = np.quantile(seconds, [0.5, 0.99])
    return {"p50": float(p50), "p99": float(p99)}


def main(argv: Sequence[str] | None = None) -> int:
    args = options(__doc__, argv)
    shape = Shape(5.0, 6.0, 15.0) if args.quick else Shape(15.0, 30.0, 60.0)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        name = LLAMA_110M.name
        file = make_fleet_file(scratch, {name: LLAMA_110M}, limits=f"{{waiting: {WAITING}}}")
        running = stack.enter_context(serving(file, "--log-level", "warning"))
        drawn = random.Random(0)
        body = {
            "model": name,
            "prompt": [drawn.choice(TOKENS) for _ in range(PROMPT)],
            "max_tokens": OUTPUT,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        client = OpenLoop(running.url, "/v1/completions", body, CONNECTIONS)
        result = measure(running, stack.enter_context(client), shape)
    finish(args, "overload", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
