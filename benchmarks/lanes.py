"""What it brings to run jobs of two models at once: prefill beside decodes, and alike beside alike.

Two random Llamas in bfloat16 on one device, each under a closed loop of requests, so that both
always have work. One lane (jobs take turns, each with all threads) and two (jobs divide them), in
turns, round by round; for every power of two of threads that the machine has cores for. `work`: of
each model its tokens per second over what it does alone on the device with one lane, both added
up: above 1 where running together pays. `tpot`: seconds between tokens of the model that decodes;
`ttft`: of the one that is asked for long prompts. Ratios are two lanes over one. On one core there
is nothing to divide: lanes are at most as many as threads.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from ballast.bench.inprocess import InProcess
from ballast.core.event import FinishedOutput, Output, TokenOutput
from ballast.core.request import Submission
from ballast.core.settings import DeviceSettings, FleetSettings, ModelSettings
from ballast.core.units import MiB
from benchmarks.common import Samples, finish, interleave, options
from benchmarks.exactness import make_llama


@dataclass(frozen=True)
class Stream:
    """A closed loop of equal requests."""

    prompt: int
    output: int
    open: int

    @property
    def tokens(self) -> int:
        """Of a request, that count: those of the phase that it is for."""
        return self.output if self.output > 1 else self.prompt


PREFILL = Stream(prompt=448, output=1, open=2)
DECODE = Stream(prompt=32, output=64, open=8)
CASES: dict[str, dict[str, Stream]] = {
    "prefill beside decodes": {"a": PREFILL, "b": DECODE},
    "prefill beside prefill": {"a": PREFILL, "b": PREFILL},
    "decodes beside decodes": {"a": DECODE, "b": DECODE},
}
MEASURES = ("work", "tpot_median", "tpot_p99", "ttft_median")


@dataclass(frozen=True)
class Seen:
    """Of one round."""

    rate: dict[str, float]
    """Tokens per second, by model."""
    gaps: list[float]
    """Seconds between tokens."""
    ttfts: list[float]


class Served:
    """One device, kept from round to round."""

    def __init__(self, paths: Mapping[str, Path], threads: int, lanes: int) -> None:
        models = tuple(
            ModelSettings(name=n, path=str(p), dtype="bfloat16") for n, p in paths.items()
        )
        device = DeviceSettings(
            budget_bytes=1536 * MiB, threads=threads, lanes=lanes, prefix_cache=False
        )
        self._server = InProcess(FleetSettings(models=models, device=device))
        self._server.device.populate()
        self._server.listen = self._hear
        self._server.__enter__()
        self._sent = 0
        self._streams: Mapping[str, Stream] = {}
        self._until = 0.0
        self._open: dict[str, tuple[str, float]] = {}
        """Model, and when it was asked for, by request."""
        self._last: dict[str, float] = {}
        self._gaps: list[float] = []
        self._ttfts: list[float] = []
        self._done: defaultdict[str, int] = defaultdict(int)
        self._over = threading.Event()

    def round(self, streams: Mapping[str, Stream], seconds: float) -> Seen:
        """Serve them for so long. What counts is what was answered in that time."""
        self._streams = streams
        self._gaps, self._ttfts = [], []
        self._done.clear()
        self._over.clear()
        self._until = self._server.now + seconds
        for model, stream in streams.items():
            for _ in range(stream.open):
                self._send(model)
        self._over.wait()
        return Seen({m: self._done[m] / seconds for m in streams}, self._gaps, self._ttfts)

    def close(self) -> None:
        self._server.__exit__(None, None, None)

    def _send(self, model: str) -> None:
        stream = self._streams[model]
        n = self._sent
        self._sent += 1
        prompt = tuple((n * 7 + i * 13) % 509 for i in range(stream.prompt))
        id = f"r{n}"
        self._open[id] = model, self._server.now
        self._server.submit(
            Submission(id=id, model=model, prompt=prompt, max_tokens=stream.output, ignore_eos=True)
        )

    def _hear(self, now: float, output: Output) -> None:
        """On the loop's thread."""
        if isinstance(output, TokenOutput):
            model, asked = self._open[output.request_id]
            stream, in_time = self._streams[model], now < self._until
            if output.index == 0 and stream.output == 1:
                self._ttfts.append(now - asked)
                self._done[model] += in_time * stream.prompt
            elif output.index > 0 and in_time:
                self._gaps.append(now - self._last[output.request_id])
                self._done[model] += 1
            self._last[output.request_id] = now
        elif isinstance(output, FinishedOutput):
            model, _ = self._open.pop(output.request_id)
            self._last.pop(output.request_id, None)
            if now < self._until:
                self._send(model)
            elif not self._open:
                self._over.set()


def compare(
    served: Mapping[str, Served], streams: Mapping[str, Stream], seconds: float, rounds: int
) -> dict[str, Any]:
    """One lane against two under the same streams, and each stream alone on one lane."""
    seen: dict[str, list[Seen]] = defaultdict(list)

    def run(name: str, lanes: str, these: Mapping[str, Stream]) -> float:
        seen[name].append(served[lanes].round(these, seconds))
        return sum(seen[name][-1].rate.values())

    variants = {f"{m} alone": partial(run, f"{m} alone", "one", {m: streams[m]}) for m in streams}
    variants |= {lanes: partial(run, lanes, lanes, streams) for lanes in ("one", "two")}
    interleave(variants, rounds, warmup=1)
    measured = {
        name: {
            measure: Samples(values)
            for measure in MEASURES
            if (values := _values(measure, seen, name, streams))
        }
        for name in ("one", "two")
    }
    outcome: dict[str, Any] = {
        name: {key: s.to_json() for key, s in found.items()} for name, found in measured.items()
    }
    outcome["ratio"] = {
        key: measured["two"][key].over(measured["one"][key]).to_json() for key in measured["one"]
    }
    return outcome


def _values(
    measure: str, seen: Mapping[str, list[Seen]], name: str, streams: Mapping[str, Stream]
) -> tuple[float, ...]:
    """Of every round but the first; empty where the streams have no such thing."""
    kept = seen[name][1:]
    if measure == "work":
        alone = {m: [s.rate[m] for s in seen[f"{m} alone"][1:]] for m in streams}
        return tuple(sum(s.rate[m] / alone[m][i] for m in streams) for i, s in enumerate(kept))
    if measure == "ttft_median":
        return tuple(float(np.median(s.ttfts)) for s in kept if PREFILL in streams.values())
    share = {"tpot_median": 50, "tpot_p99": 99}[measure]
    return tuple(float(np.percentile(s.gaps, share)) for s in kept if DECODE in streams.values())


def main() -> None:
    args = options(__doc__)
    seconds, rounds = (4.0, 2) if args.quick else (8.0, 4)
    cores = len(os.sched_getaffinity(0))
    counts = [t for t in (2, 4, 8, 16, 32) if t <= cores]
    result: dict[str, Any] = {}
    table = Table("threads", "case", "measure", "one lane", "two lanes", "two / one", title="lanes")
    with tempfile.TemporaryDirectory() as scratch:
        paths = {
            name: make_llama(
                Path(scratch) / name,
                i,
                hidden_size=768,
                intermediate_size=2048,
                num_hidden_layers=12,
                num_attention_heads=12,
                num_key_value_heads=12,
            )
            for i, name in enumerate("ab")
        }
        for threads in counts:
            served = {"one": Served(paths, threads, 1), "two": Served(paths, threads, 2)}
            for case, streams in CASES.items():
                outcome = compare(served, streams, seconds, rounds)
                result[f"{case}, {threads} threads".replace(" ", "_")] = outcome
                for key, ratio in outcome["ratio"].items():
                    row = (f"{outcome[n][key]['median']:.4g}" for n in ("one", "two"))
                    spread = f"{ratio['median']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})"
                    table.add_row(str(threads), case, key, *row, spread)
            for one in served.values():
                one.close()
    finish(args, "lanes", {"cores": cores, **result}, table)


if __name__ == "__main__":
    main()
