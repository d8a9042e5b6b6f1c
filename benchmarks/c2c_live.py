"""C2CServe on this machine: models whose weights stay in host memory, and what a switch costs.

Switching: two random Llamas in bfloat16 of 110M and of 500M parameters under `c2cserve`, over HTTP,
16 prompt tokens, nothing else asked meanwhile, the link unpaced. A model is asked for that an
operator has just evicted (its weights are mapped anew), then the same again (its bare prefill),
then after the other one has run.

Traffic: 12 models of which 2 fit, arrivals of a public long-tail trace with another trace's lengths
(synthetic; a power law where the traces are not at hand), on a link paced to GH200's ratio of link
to device memory, and unpaced. In turns, with equal options, order, budget, requests and levels
(TTFT 5 times and TPOT twice the P95 of models that are asked one by one, all of them resident).

Shared link: two and three worker processes over one paced link (`c2c_shared`).

- `switch_ms_110m`, `switch_ms_500m`: first token of a model that is mapped anew, medians (goals 20,
  60). `over_prefill_ms_...`: what it takes beyond the bare prefill, medians of pairs (goal 5).
- `traffic`: `attained`, `p95_ttft` by link and row.
- `shared`: the same by number of devices and placement. `contention`: part of the throughput that
  two models lose beside each other, by chunk (the paper: 0.02 in chunks of 512, 0.42 whole).
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import urllib.error
import urllib.request
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from ballast.bench.report import Report
from ballast.bench.server_process import serving
from ballast.fleet.text import documents
from ballast.fleet.tokenizer import train_tokenizer
from benchmarks.c2c_setting import COMPARED, LINK_OF_MEMORY, Setting, p95_ttft, prepare, run
from benchmarks.c2c_shared import attainment, contention, placements
from benchmarks.c2c_workload import long_tail
from benchmarks.common import finish, flatten, interleave, options
from benchmarks.raw_http import Connections
from benchmarks.single_model import SIZES, Size
from benchmarks.switch import PROMPT, first_token

ADMIN_KEY = "of-the-benchmark"
PARTS = ("switch", "traffic", "shared")


def switch_file(size: Size, directory: Path) -> Path:
    """A fleet file of two models under `c2cserve`."""
    tokenizer = train_tokenizer(documents(), 4000, 1024)
    for seed, name in enumerate("ab"):
        size.make(directory / name, seed)
        tokenizer.save_pretrained(directory / name)
    weights = sum(f.stat().st_size for f in (directory / "a").glob("*.safetensors"))
    file = directory / "fleet.yaml"
    file.write_text(
        f"preset: c2cserve\ndevices: [{{budget: {(weights >> 20) + 64}MiB, prefix_cache: false}}]\n"
        "models: [{name: a, path: a}, {name: b, path: b}]\n"
        f"server: {{admin_key: {ADMIN_KEY}}}\n"
    )
    return file


def switching(size: Size, rounds: int, scratch: Path) -> dict[str, float]:
    """Medians in milliseconds of first tokens: `anew`, `turn` and `bare`; `over`: of what `anew`
    takes beyond the bare one after it."""
    directory = scratch / size.name
    directory.mkdir()
    seen: dict[str, list[float]] = {"anew": [], "turn": [], "bare": [], "over": []}
    drawn = random.Random(0)
    file = switch_file(size, directory)
    with (
        serving(file, "--log-level", "warning", "--no-changes") as running,
        Connections(running.url, 1) as connections,
    ):

        def ask(model: str) -> float:
            prompt = [drawn.randrange(10, 1000) for _ in range(PROMPT)]
            return 1e3 * first_token(connections, model, prompt)

        for i in range(rounds + 1):
            for model, other in (("a", "b"), ("b", "a")):
                evict(running.url, model)
                times = {"anew": ask(model), "bare": ask(model)}
                times["over"] = times["anew"] - times["bare"]
                ask(other)
                times["turn"] = ask(model)
                if i:  # the first round warms up
                    for what, value in times.items():
                        seen[what].append(value)
    return {what: statistics.median(values) for what, values in seen.items()}


def evict(url: str, model: str) -> None:
    """Have an operator evict a model. Raises URLError."""
    request = urllib.request.Request(
        f"{url}/admin/models/{model}/evict",
        method="POST",
        headers={"Authorization": f"Bearer {ADMIN_KEY}"},
    )
    try:
        urllib.request.urlopen(request).read()
    except urllib.error.HTTPError as error:
        if error.code != 409:  # it has not been asked for yet
            raise


def traffic(setting: Setting, rate: float, seconds: float, rounds: int) -> dict[str, Any]:
    """P95 TTFT and attainment of each row on each link."""
    found: dict[str, Any] = {}
    for link, paced in (("paced", True), ("unpaced", False)):
        seen: dict[str, list[Report]] = {row: [] for row in COMPARED.rows}

        def once(row: str, paced: bool = paced, seen: dict[str, list[Report]] = seen) -> float:
            work = long_tail(setting.names, rate, seconds, len(seen[row]))
            seen[row].append(run(setting.fleet(row, paced=paced), work, row))
            return attainment(seen[row][-1:], setting)

        samples = interleave({row: partial(once, row) for row in seen}, rounds)
        found[link] = {
            row: {"attained": samples[row].median, "p95_ttft": p95_ttft(seen[row])} for row in seen
        }
    return found


def main(argv: Sequence[str] | None = None) -> None:
    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--rate", type=float, default=2.0, help="requests per second")
        parser.add_argument("--seconds", type=float, default=14.0, help="of requests, in each run")
        parser.add_argument("--rounds", type=int, default=1, help="windows of the trace")
        parser.add_argument("--part", choices=PARTS, help="this alone")

    args = options(__doc__, argv, extra)
    parts = (args.part,) if args.part else PARTS
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        if "switch" in parts:
            for size in SIZES:
                ms = switching(size, 3 if args.quick else 9, Path(scratch))
                name = size.name.lower()
                result[f"switch_ms_{name}"] = ms["anew"]
                result[f"over_prefill_ms_{name}"] = ms["over"]
                result[f"turn_ms_{name}"] = ms["turn"]
                result[f"prefill_ms_{name}"] = ms["bare"]
        if parts != ("switch",):
            setting = prepare(Path(scratch))
            given = args.rate, 5.0 if args.quick else args.seconds, args.rounds
            result["workload"] = long_tail(setting.names, *given[:2], 0).describe()
            result["link_bytes_per_second"] = setting.link
            result["link_over_memory"] = LINK_OF_MEMORY
            if "traffic" in parts:
                result["traffic"] = traffic(setting, *given)
            if "shared" in parts:
                result["shared"] = {str(n): placements(setting, n, *given) for n in (2, 3)}
                result["contention"] = contention(setting)
    table = Table("", "value", title="c2c_live")
    for key, value in flatten(result).items():
        table.add_row(key, f"{value:.4g}" if isinstance(value, float) else str(value))
    finish(args, "c2c_live", result, table)


if __name__ == "__main__":
    main()
