"""Two models, memory for one: how long a request to the absent one waits for its first token.

Random Llamas in bfloat16 of 110M and 500M parameters, two of each, in turns: each request needs the
model that is not there, in host memory, and the other has to go. 16 prompt tokens, over HTTP
(`ballast serve` in a process of its own, a stream of events), nothing else asked meanwhile.
Beside it the same request again, to the model that is there then. Two servers in turns: one
evicts models whole; the other has memory for one model and two thirds of the other, so that a third
of each has to come back, its last layers.

`switch_ms_110m`, `switch_ms_500m`: medians. `copy_of_bandwidth`: of the 500M model, the seconds in
which this machine copies as many bytes from memory to memory, over those that the absence of a
model adds to a first token (eviction, page tables and all else included): 1 is as fast as memory
allows.
`third_of_whole_110m`, `third_of_whole_500m`: what the absence of a third adds to a first token,
over what that of the whole adds; medians of the rounds' ratios.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ballast.bench.server_process import serving
from ballast.fleet.text import documents
from ballast.fleet.tokenizer import train_tokenizer
from benchmarks.common import Samples, finish, options
from benchmarks.raw_http import Connections
from benchmarks.single_model import SIZES, Size

PROMPT, NEW = 16, 4
WHOLE, THIRD = KINDS = "whole", "third"


def fleet_files(size: Size, directory: Path) -> tuple[dict[str, Path], int]:
    """Fleets of models `a` and `b`, by kind of server, and the bytes of one model."""
    tokenizer = train_tokenizer(documents(), 4000, 1024)
    for seed, name in enumerate("ab"):
        size.make(directory / name, seed)
        tokenizer.save_pretrained(directory / name)
    weights = sum(f.stat().st_size for f in (directory / "a").glob("*.safetensors"))
    whole = directory / "whole.yaml", weights * 3 // 2, 0
    third = directory / "third.yaml", weights * 5 // 3, 1
    for file, budget, segments in (whole, third):
        file.write_text(
            f"preset: balloon\noptions: {{segments: {segments}}}\n"
            f"devices: [{{budget: {(budget >> 20) + 32}MiB, prefix_cache: false}}]\n"
            "models: [{name: a, path: a}, {name: b, path: b}]\n"
        )
    return {WHOLE: whole[0], THIRD: third[0]}, weights


@contextmanager
def servers(files: dict[str, Path]) -> Iterator[dict[str, Connections]]:
    """One of each kind."""
    with ExitStack() as stack:
        found = {}
        for kind, file in files.items():
            served = serving(file, "--log-level", "warning", "--no-changes")
            url = stack.enter_context(served).url
            found[kind] = stack.enter_context(Connections(url, 1))
        yield found


def first_token(connections: Connections, model: str, prompt: list[int]) -> float:
    """Seconds."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": NEW,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    (stream,) = connections.streams("/v1/completions", [body])
    assert stream.output_tokens == NEW
    return stream.times[0] - stream.sent


class Copying:
    """What this machine copies a second, of memory that is there: the best of one and two threads,
    `memmove` each."""

    def __init__(self, n_bytes: int) -> None:
        self._from, self._to = np.ones(n_bytes, np.uint8), np.ones(n_bytes, np.uint8)
        self._threads = ThreadPoolExecutor(2)

    def seconds(self) -> float:
        return min(self._seconds(1), self._seconds(2))

    def _seconds(self, threads: int) -> float:
        parts = zip(
            np.array_split(self._to, threads), np.array_split(self._from, threads), strict=True
        )
        began = time.perf_counter()
        for job in [self._threads.submit(np.copyto, to, source) for to, source in parts]:
            job.result()
        return time.perf_counter() - began


def measure(size: Size, rounds: int, scratch: Path) -> dict[str, Any]:
    """One size: medians in milliseconds, and ratios of rounds."""
    directory = scratch / size.name
    directory.mkdir()
    files, weights = fleet_files(size, directory)
    copying = Copying(weights)
    drawn = random.Random(0)
    seen: dict[str, list[float]] = {}
    with servers(files) as found:
        for i in range(rounds + 1):
            for kind in KINDS[:: 1 if i % 2 == 0 else -1]:
                times: dict[str, list[float]] = {"cold": [], "warm": []}
                for model in "abab":
                    prompt = [drawn.randrange(10, 1000) for _ in range(PROMPT)]
                    times["cold"].append(first_token(found[kind], model, prompt))
                    prompt = [drawn.randrange(10, 1000) for _ in range(PROMPT)]
                    times["warm"].append(first_token(found[kind], model, prompt))
                if i:  # the first round brings all in
                    for what, values in times.items():
                        seen.setdefault(f"{kind}, {what}", []).append(statistics.median(values))
            if i:
                seen.setdefault("copy", []).append(copying.seconds())
    samples = {name: Samples(tuple(values)) for name, values in seen.items()}
    bringing, third = (
        [c - w for c, w in zip(seen[f"{kind}, cold"], seen[f"{kind}, warm"], strict=True)]
        for kind in KINDS
    )
    return {
        "weights_bytes": weights,
        "milliseconds": {
            name: [1e3 * v for v in (s.median, *s.spread)] for name, s in samples.items()
        },
        "copy_of_bandwidth": samples["copy"].over(Samples(tuple(bringing))).median,
        "third_of_whole": Samples(tuple(third)).over(Samples(tuple(bringing))).median,
    }


def main() -> None:
    args = options(__doc__)
    rounds = 3 if args.quick else 9
    with tempfile.TemporaryDirectory() as scratch:
        sizes = {size.name: measure(size, rounds, Path(scratch)) for size in SIZES}
    keys = {
        f"switch_ms_{name.lower()}": of["milliseconds"][f"{WHOLE}, cold"][0]
        for name, of in sizes.items()
    }
    keys |= {f"third_of_whole_{n.lower()}": of["third_of_whole"] for n, of in sizes.items()}
    keys["copy_of_bandwidth"] = sizes[SIZES[-1].name]["copy_of_bandwidth"]
    finish(args, "switch", {**keys, "rounds": rounds, "sizes": sizes})


if __name__ == "__main__":
    main()
