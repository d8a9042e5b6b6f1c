"""What HTTP costs: `ballast serve` in a process of its own against the same requests in process.

Two random Llamas in bfloat16, without prefix cache, held by both. Rounds take turns, so that the
two are compared within seconds of each other. The client is `benchmarks.raw_http`, on the same
cores: what it spends counts against HTTP.

- `throughput_ratio`: output tokens per second of 16 streams, prompts included, over HTTP (an event
  for each token) over in process, by round; that of 110M parameters. In `models` also for 6M, whose
  steps take so little that every microsecond of a token shows.
- `ttft_added_ms`: of one request at a time, from sending it on a kept-alive connection to the first
  event, less the time from handing it in to its first token; by pairs, next to each other.
- `cores`: CPU seconds over wall seconds of each process while streaming.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from ballast.bench.inprocess import Answer, InProcess
from ballast.bench.serving import Serving, serving
from ballast.core.request import Submission
from ballast.fleet.file import load_fleet
from ballast.fleet.text import documents
from ballast.fleet.tokenizer import train_tokenizer
from ballast.policy.presets import PRESETS
from benchmarks.common import Samples, finish, interleave, options
from benchmarks.raw_http import Connections, Stream

STREAMS, PROMPT = 16, 32
CONTEXT = 1024
VOCAB = 16_000
"""At most; as many as the texts give."""
THROUGHPUT_GOAL, TTFT_GOAL_MS = 0.95, 3.0
TTFT_OUTPUT = 2
HTTP, IN_PROCESS = "http", "in_process"

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Size:
    """A random Llama."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    output_tokens: int
    """Of each stream in a round: a round takes some seconds."""


SIZES = (
    Size("110M", 768, 2048, 12, 12, output_tokens=48),
    Size("6M", 256, 704, 6, 4, output_tokens=448),
)
SMALLEST = SIZES[-1].name


def make_fleet_file(directory: Path) -> tuple[Path, int]:
    """The models, their tokenizer and a fleet file; and the size of the vocabulary."""
    tokenizer = train_tokenizer(documents(), VOCAB, CONTEXT)
    torch.manual_seed(0)
    models = []
    for size in SIZES:
        config = LlamaConfig(
            hidden_size=size.hidden,
            intermediate_size=size.intermediate,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.heads,
            vocab_size=len(tokenizer),
            max_position_embeddings=CONTEXT,
            initializer_range=0.05,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory / size.name)
        tokenizer.save_pretrained(directory / size.name)
        models.append(f"{{name: {size.name}, path: {size.name}}}")
    file = directory / "fleet.yaml"
    device = "{budget: 1GiB, prefix_cache: false}"
    file.write_text(f"devices: [{device}]\nmodels: [{', '.join(models)}]\n")
    return file, len(tokenizer)


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
        self.cores: dict[str, list[dict[str, float]]] = {size.name: [] for size in SIZES}
        """By model and round, CPU seconds over wall seconds of each process."""

    def rate(self, model: str, prompts: Prompts, new_tokens: int) -> float:
        """Tokens per second of all at once."""
        spent = self._spent()
        began = time.perf_counter()
        streams = self._streams(model, prompts, new_tokens)
        wall = time.perf_counter() - began
        cores = {name: (after - spent[name]) / wall for name, after in self._spent().items()}
        self.cores[model].append(cores)
        assert all(s.output_tokens == new_tokens for s in streams)
        return len(prompts) * new_tokens / wall

    def first(self, model: str, prompt: Sequence[int]) -> float:
        """Seconds to the first event."""
        (stream,) = self._streams(model, [prompt], TTFT_OUTPUT)
        return stream.times[0] - stream.sent

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

    def _spent(self) -> dict[str, float]:
        """CPU seconds so far."""
        return {
            "server": cpu_seconds(self._running.pid),
            "worker": cpu_seconds(self._running.worker),
            "client": time.process_time(),
        }


def cpu_seconds(pid: int) -> float:
    """Of all threads of a process, user and system."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Shape:
    """How much is measured."""

    rounds: int
    pairs: int


def measure(
    here: Here, there: There, prompts: Callable[[int], list[list[int]]], shape: Shape
) -> dict[str, Any]:
    """The result."""
    found: dict[str, Any] = {"streams": STREAMS, "prompt_tokens": PROMPT, "models": {}}
    batch = prompts(STREAMS)
    for size in SIZES:
        name, new = size.name, size.output_tokens
        rates = interleave(
            {
                HTTP: partial(there.rate, name, batch, new),
                IN_PROCESS: partial(here.rate, name, batch, new),
            },
            shape.rounds,
            warmup=1,
        )
        cores = there.cores[name][1:]
        found["models"][name] = {
            "output_tokens": new,
            "throughput_ratio": rates[HTTP].over(rates[IN_PROCESS]).to_json(),
            "tokens_per_second": {which: taken.to_json() for which, taken in rates.items()},
            "cores": {who: Samples(tuple(c[who] for c in cores)).to_json() for who in cores[0]},
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
    found["throughput_ratio"] = found["models"][SIZES[0].name]["throughput_ratio"]["median"]
    found["ttft_ms"] = {name: taken.to_json() for name, taken in firsts.items()}
    found["ttft_added_ms"] = added.to_json()
    return found


def show(result: dict[str, Any]) -> Table:
    """For people."""
    table = Table("", "median", "quartiles", "goal", title="http_overhead")

    def row(name: str, told: dict[str, Any], digits: int, goal: str = "") -> None:
        low, high = told["low"], told["high"]
        shown = f"{told['median']:.{digits}f}", f"{low:.{digits}f}-{high:.{digits}f}"
        table.add_row(name, *shown, goal)

    for model, of in result["models"].items():
        goal = f">= {THROUGHPUT_GOAL}" if model == SIZES[0].name else ""
        row(f"{model}: throughput_ratio", of["throughput_ratio"], 3, goal)
        for name, told in of["tokens_per_second"].items():
            row(f"{model}: tokens/s, {name}", told, 0)
        for name, told in of["cores"].items():
            row(f"{model}: cores of the {name}", told, 2)
    for name, told in result["ttft_ms"].items():
        row(f"{SMALLEST}: TTFT ms, {name}", told, 2)
    row("ttft_added_ms", result["ttft_added_ms"], 2, f"<= {TTFT_GOAL_MS:g}")
    return table


def main(argv: Sequence[str] | None = None) -> int:
    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--rounds", type=int, metavar="N", help="of throughput")

    args = options(__doc__, argv, more)
    shape = Shape(2, 20) if args.quick else Shape(12, 100)
    shape = Shape(args.rounds or shape.rounds, shape.pairs)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        file, vocab = make_fleet_file(scratch)
        engine = stack.enter_context(InProcess(load_fleet(file, presets=PRESETS)))
        engine.device.populate()
        running = stack.enter_context(serving(file))
        there = There(running, stack.enter_context(Connections(running.url, STREAMS)))
        drawn = random.Random(0)

        def prompts(n: int) -> list[list[int]]:
            return [[drawn.randrange(10, vocab) for _ in range(PROMPT)] for _ in range(n)]

        result = measure(Here(engine), there, prompts, shape)
    finish(args, "http_overhead", result, show(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
