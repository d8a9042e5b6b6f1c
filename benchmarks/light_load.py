"""One small model, one request at a time, three a second: what idleness between them costs.

A random Llama of 6M parameters in bfloat16; 32 prompt tokens, 48 new ones. In process and over HTTP
(`ballast serve` in a process of its own, a stream of events); with a pause before each request and,
for comparison, without. Both with compute threads bound to CPUs, as they are by default, and not
(`OMP_PROC_BIND=false`), in turns. Of a round the median of its requests counts.

`tpot_over_busy.WAY` and `ttft_over_busy.WAY`: bound, with pauses over without.
`tpot_unbound_over_bound.WAY` and `ttft_...`: with pauses. Medians of the rounds' ratios.
"""

from __future__ import annotations

import itertools
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from ballast.bench.inprocess import InProcess
from ballast.bench.server_process import serving
from ballast.core.request import Submission
from ballast.fleet.fleet_file import load_fleet
from ballast.policy.presets import PRESETS
from benchmarks.common import finish, options
from benchmarks.crash import until_spare_waits
from benchmarks.llamas import LLAMA_6M, TOKENS, make_fleet_file
from benchmarks.raw_http import Connections

PROMPT, NEW = 32, 48
PAUSE = 0.33
"""Seconds before each request: about three a second."""
UNBOUND = {"OMP_PROC_BIND": "false"}
WAYS = ("in_process", "http")

Latency = tuple[float, float]
"""TTFT and TPOT in seconds."""
Ask = Callable[[list[int]], Latency]


def in_process(engine: InProcess, number: Iterator[int], prompt: list[int]) -> Latency:
    asked = Submission(
        id=f"r{next(number)}",
        model=LLAMA_6M.name,
        prompt=tuple(prompt),
        max_tokens=NEW,
        ignore_eos=True,
    )
    began = engine.now
    (answer,) = engine.generate([asked]).values()
    return answer.times[0] - began, (answer.times[-1] - answer.times[0]) / (NEW - 1)


def over_http(connections: Connections, prompt: list[int]) -> Latency:
    body = {
        "model": LLAMA_6M.name,
        "prompt": prompt,
        "max_tokens": NEW,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    (stream,) = connections.streams("/v1/completions", [body])
    assert stream.output_tokens == NEW
    return stream.times[0] - stream.sent, (stream.times[-1] - stream.times[0]) / (NEW - 1)


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Of this process, for a while."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def one_round(ask: Ask, n: int, pause: float) -> Latency:
    """Medians of `n` requests."""
    drawn = random.Random(0)
    found = []
    for _ in range(n):
        time.sleep(pause)
        found.append(ask([drawn.choice(TOKENS) for _ in range(PROMPT)]))
    ttft, tpot = zip(*found, strict=True)
    return statistics.median(ttft), statistics.median(tpot)


def measure(asks: dict[tuple[str, bool], Ask], rounds: int, n: int) -> dict[str, Any]:
    """`asks`: by the way, and whether threads are bound."""
    seen: dict[tuple[str, bool, bool], list[Latency]] = {}
    for ask in asks.values():
        one_round(ask, 5, 0.0)
    for i in range(rounds):
        order = list(itertools.product(asks.items(), (True, False)))
        for ((way, bound), ask), idle in order[:: 1 if i % 2 == 0 else -1]:
            latency = one_round(ask, n, PAUSE if idle else 0.0)
            seen.setdefault((way, bound, idle), []).append(latency)

    def over(way: str, which: int, a: tuple[bool, bool], b: tuple[bool, bool]) -> float:
        """Of two variants (bound, with pauses), round by round."""
        pairs = zip(seen[way, *a], seen[way, *b], strict=True)
        return statistics.median(x[which] / y[which] for x, y in pairs)

    found: dict[str, Any] = {"rounds": rounds, "requests": n, "milliseconds": {}}
    for (way, bound, idle), latencies in seen.items():
        name = f"{way}, {'bound' if bound else 'unbound'}, {'pauses' if idle else 'busy'}"
        found["milliseconds"][name] = {
            what: [1e3 * latency[which] for latency in latencies]
            for which, what in enumerate(("ttft", "tpot"))
        }
    for way, (which, what) in itertools.product(WAYS, enumerate(("ttft", "tpot"))):
        ratios = {
            f"{what}_over_busy": over(way, which, (True, True), (True, False)),
            f"{what}_unbound_over_bound": over(way, which, (False, True), (True, True)),
        }
        for name, ratio in ratios.items():
            found.setdefault(name, {})[way] = ratio
    return found


def show(found: dict[str, Any]) -> Table:
    table = Table("", "TTFT ms", "TPOT ms", title="light_load: medians of rounds (least-greatest)")
    for name, seen in found["milliseconds"].items():
        cells = (
            f"{statistics.median(v):.2f} ({min(v):.2f}-{max(v):.2f})"
            for v in (seen["ttft"], seen["tpot"])
        )
        table.add_row(name, *cells)
    for what in ("over_busy", "unbound_over_bound"):
        for way in WAYS:
            cells = (f"{found[f'{m}_{what}'][way]:.2f}" for m in ("ttft", "tpot"))
            table.add_row(f"{what.replace('_', ' ')}, {way}", *cells)
    return table


def main() -> None:
    args = options(__doc__)
    rounds, n = (1, 12) if args.quick else (5, 24)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        file = make_fleet_file(scratch, {LLAMA_6M.name: LLAMA_6M})
        asks: dict[tuple[str, bool], Ask] = {}
        for bound in (True, False):
            with environment(**({} if bound else UNBOUND)):
                engine = stack.enter_context(InProcess(load_fleet(file, presets=PRESETS)))
                engine.device.populate()
                quiet = ("--log-level", "warning", "--no-changes")
                running = stack.enter_context(serving(file, *quiet))
                until_spare_waits(running.pid)
            asks["in_process", bound] = partial(in_process, engine, itertools.count())
            connections = stack.enter_context(Connections(running.url, 1))
            asks["http", bound] = partial(over_http, connections)
        result = measure(asks, rounds, n)
    finish(args, "light_load", result, show(result))


if __name__ == "__main__":
    main()
