"""What HTTP costs: `ballast serve` in a process of its own against the same requests in process.

Two random Llamas in bfloat16, without prefix cache, held by both. Rounds take turns, so that the
two are compared within seconds of each other. The client is `benchmarks.raw_http`, on the same
cores: what it spends counts against HTTP.

- `throughput_ratio`: output tokens per second of 16 streams, prompts included, over HTTP (an event
  for each token) over in process, by round; that of 110M parameters. In `models` also for 6M, whose
  steps take so little that every microsecond of a token shows.
- `ttft_added_ms`: of one request at a time, from sending it on a kept-alive connection to the first
  event, less the time from handing it in to its first token; by pairs, next to each other.
- `longest_gap_s`: the longest time between two tokens of one of 16 running streams of 110M
  parameters, while another such model is added (POST /admin/models) and, in turns, while none is.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from ballast.bench.inprocess import Answer, InProcess
from ballast.bench.server_process import Serving, serving
from ballast.core.request import Submission
from ballast.fleet.fleet_file import load_fleet
from ballast.policy.presets import PRESETS
from benchmarks.common import Samples, finish, interleave, options
from benchmarks.crash import until_spare_waits
from benchmarks.llamas import ADMIN_KEY, LLAMA_6M, LLAMA_110M, TOKENS, make_fleet_file
from benchmarks.raw_http import Connections, Stream

STREAMS, PROMPT = 16, 32
TTFT_OUTPUT = 2
HTTP, IN_PROCESS = "http", "in_process"

Prompts = Sequence[Sequence[int]]

OUTPUT_TOKENS = {LLAMA_110M.name: 48, LLAMA_6M.name: 448}
"""Of each stream in a round, by model: a round takes some seconds."""
GAP_TOKENS = 160
"""Of each stream while a model is added; twice as many where they end before it is there."""
LARGEST, SMALLEST = LLAMA_110M.name, LLAMA_6M.name
ADDED = "spare-110M"


class Here:
    """The device in this process."""

    def __init__(self, engine: InProcess) -> None:
        self._engine = engine
        self._number = itertools.count()

    def rate(self, model: str, prompts: Prompts, new_tokens: int) -> float:
        """Tokens per second of all at once."""
        began = self._engine.now
        answers = self._run(model, prompts, new_tokens)
        tokens = sum(len(a.tokens) for a in answers)
        return tokens / (max(a.times[-1] for a in answers) - began)

    def first(self, model: str, prompt: Sequence[int]) -> float:
        """Seconds to the first token."""
        began = self._engine.now
        (answer,) = self._run(model, [prompt], TTFT_OUTPUT)
        return answer.times[0] - began

    def _run(self, model: str, prompts: Prompts, new_tokens: int) -> list[Answer]:
        wanted = [
            Submission(
                id=f"r{next(self._number)}",
                model=model,
                prompt=tuple(prompt),
                max_tokens=new_tokens,
                ignore_eos=True,
            )
            for prompt in prompts
        ]
        answers = self._engine.generate(wanted)
        assert all(a.finished.output_tokens == new_tokens for a in answers.values())
        return list(answers.values())


class There:
    """The server."""

    def __init__(self, running: Serving, connections: Connections) -> None:
        self._running, self._connections = running, connections
        self._gap_tokens = GAP_TOKENS

    def rate(self, model: str, prompts: Prompts, new_tokens: int) -> float:
        """Tokens per second of all at once."""
        began = time.perf_counter()
        streams = self._streams(model, prompts, new_tokens)
        wall = time.perf_counter() - began
        assert all(s.output_tokens == new_tokens for s in streams)
        return len(prompts) * new_tokens / wall

    def first(self, model: str, prompt: Sequence[int]) -> float:
        """Seconds to the first event."""
        (stream,) = self._streams(model, [prompt], TTFT_OUTPUT)
        return stream.times[0] - stream.sent

    def longest_gap(self, prompts: Prompts, add: str | None) -> float:
        """Seconds between two tokens of a stream, of the largest model; meanwhile a model is added
        if one is named."""
        while True:
            with ThreadPoolExecutor(1) as pool:
                adding = pool.submit(self._add, add) if add is not None else None
                streams = self._streams(LARGEST, prompts, self._gap_tokens)
                ended = time.perf_counter()
            if adding is None:
                break
            added = adding.result()
            self._admin("DELETE", f"/{add}")
            if added < ended:
                break
            self._gap_tokens *= 2  # the streams ended before the model was there
        running = max(s.times[0] for s in streams)  # all of them; before, prompts are computed
        gaps = (b - a for s in streams for a, b in itertools.pairwise(s.times) if a >= running)
        return max(gaps)

    def _add(self, name: str) -> float:
        """When it was there, by `time.perf_counter`. It begins with the streams under way."""
        time.sleep(1.0)
        self._admin("POST", "", {"name": name, "path": name})
        return time.perf_counter()

    def _admin(self, method: str, path: str, body: object = None) -> None:
        url = f"{self._running.url}/admin/models{path}"
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        answer = httpx.request(method, url, json=body, headers=headers, timeout=60.0)
        answer.raise_for_status()

    def _streams(self, model: str, prompts: Prompts, new_tokens: int) -> list[Stream]:
        bodies = [
            {
                "model": model,
                "prompt": list(prompt),
                "max_tokens": new_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            for prompt in prompts
        ]
        return self._connections.streams("/v1/completions", bodies)


@dataclass(frozen=True)
class Shape:
    """How much is measured."""

    rounds: int
    pairs: int
    gaps: int


def measure(
    here: Here, there: There, prompts: Callable[[int], list[list[int]]], shape: Shape
) -> dict[str, Any]:
    """The result."""
    found: dict[str, Any] = {"streams": STREAMS, "prompt_tokens": PROMPT, "models": {}}
    batch = prompts(STREAMS)
    for name, new in OUTPUT_TOKENS.items():
        rates = interleave(
            {
                HTTP: partial(there.rate, name, batch, new),
                IN_PROCESS: partial(here.rate, name, batch, new),
            },
            shape.rounds,
            warmup=1,
        )
        found["models"][name] = {
            "output_tokens": new,
            "throughput_ratio": rates[HTTP].over(rates[IN_PROCESS]).to_json(),
            "tokens_per_second": {which: taken.to_json() for which, taken in rates.items()},
        }
    firsts = interleave(
        {
            HTTP: lambda: 1e3 * there.first(SMALLEST, prompts(1)[0]),
            IN_PROCESS: lambda: 1e3 * here.first(SMALLEST, prompts(1)[0]),
        },
        shape.pairs,
        warmup=3,
    )
    pairs = zip(firsts[HTTP].values, firsts[IN_PROCESS].values, strict=True)
    added = Samples(tuple(over - within for over, within in pairs))
    gaps = interleave(
        {
            "adding": partial(there.longest_gap, batch, ADDED),
            "without": partial(there.longest_gap, batch, None),
        },
        shape.gaps,
    )
    found["longest_gap_s"] = max(gaps["adding"].values)
    found["gaps_s"] = {name: taken.to_json() for name, taken in gaps.items()}
    found["throughput_ratio"] = found["models"][LARGEST]["throughput_ratio"]["median"]
    found["ttft_ms"] = {name: taken.to_json() for name, taken in firsts.items()}
    found["ttft_added_ms"] = added.to_json()
    return found


def main(argv: Sequence[str] | None = None) -> int:
    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--rounds", type=int, metavar="N", help="of throughput")

    args = options(__doc__, argv, more)
    shape = Shape(2, 20, 1) if args.quick else Shape(12, 100, 3)
    shape = replace(shape, rounds=args.rounds or shape.rounds)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sizes = {s.name: s for s in (LLAMA_110M, LLAMA_6M)}
        file = make_fleet_file(scratch, {**sizes, ADDED: LLAMA_110M})
        engine = stack.enter_context(InProcess(load_fleet(file, presets=PRESETS)))
        engine.device.populate()
        running = stack.enter_context(serving(file, "--log-level", "warning", "--no-changes"))
        until_spare_waits(running.pid)
        there = There(running, stack.enter_context(Connections(running.url, STREAMS)))
        drawn = random.Random(0)

        def prompts(n: int) -> list[list[int]]:
            return [[drawn.choice(TOKENS) for _ in range(PROMPT)] for _ in range(n)]

        result = measure(Here(engine), there, prompts, shape)
    finish(args, "http_overhead", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
