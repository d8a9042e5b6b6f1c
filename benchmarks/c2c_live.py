"""C2CServe on this machine: models whose weights stay in host memory, and what a switch costs.

Switching: two random Llamas in bfloat16 of 110M and of 500M parameters under `c2cserve`, over HTTP,
16 prompt tokens, nothing else asked meanwhile, the link unpaced. A model is asked for that an
operator has just evicted (its weights are mapped anew), then one that did not run last, then the
same again: its bare prefill.

Traffic: 12 models of which 2 fit, popular by a power law (synthetic: the long tail's skew, short
chats), on a link paced to GH200's ratio of link to device memory, and unpaced. In turns,
on equal terms, with the same requests and levels (TTFT 5 times and TPOT twice the P95 of models
that are asked one by one, all of them resident).

- `switch_ms_110m`, `switch_ms_500m`: first token of a model that is mapped anew, medians (goals 20,
  60). `over_prefill_ms_...`: what it takes beyond the bare prefill (goal 5).
- `p95_ttft`, `attained`: by link and row.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from ballast.bench.inprocess import InProcess
from ballast.bench.report import Report, RequestStats
from ballast.bench.server_process import serving
from ballast.bench.servers import run_servers
from ballast.core.link import LinkSettings
from ballast.core.settings import DeviceSettings, FleetSettings, ModelSettings, Slo
from ballast.core.units import GiB
from ballast.fleet.text import documents
from ballast.fleet.tokenizer import train_tokenizer
from ballast.workload.generators import independent
from ballast.workload.lengths import LogNormal
from ballast.workload.workload import Workload, WorkloadRequest
from benchmarks.common import finish, interleave, options
from benchmarks.contenders import Comparison, Contender
from benchmarks.exactness import make_llama
from benchmarks.raw_http import Connections
from benchmarks.single_model import SIZES, Size
from benchmarks.switch import PROMPT, first_token

ADMIN_KEY = "of-the-benchmark"
N_MODELS, N_FIT = 12, 2
LLAMA = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
PROMPTS, OUTPUTS = LogNormal.of_cv(48.0, 0.8, 224), LogNormal.of_cv(24.0, 0.8, 96)
AT_ONCE = 8
"""Requests of mean length whose KV fits beside the weights of `N_FIT` models."""
ALPHA = 1.5
"""Of the power law: the first model gets half of the requests."""
LINK_OF_MEMORY = 450e9 / 4000e9
"""GH200: NVLink-C2C one way over HBM3."""
COMPARED = Comparison(
    {},
    {
        "swap": Contender("swap+deadline"),
        "lru": Contender("lru+deadline"),
        "balloon": Contender("balloon"),
        "prism": Contender("prism"),
        "c2cserve": Contender("c2cserve"),
    },
)


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
    """Medians in milliseconds of first tokens: `anew`, `turn` and `bare`."""
    directory = scratch / size.name
    directory.mkdir()
    seen: dict[str, list[float]] = {"anew": [], "turn": [], "bare": []}
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


@dataclass(frozen=True)
class Setting:
    """Models, the memory that they share, and what this machine reads."""

    models: tuple[ModelSettings, ...]
    budget: int
    page: int
    roomy: int
    link: float
    """Bytes per second of the paced link."""

    @property
    def names(self) -> list[str]:
        return [m.name for m in self.models]

    def fleet(self, row: str, *, paced: bool, budget: int | None = None) -> FleetSettings:
        device = DeviceSettings(
            budget_bytes=budget or self.budget, page_bytes=self.page, prefix_cache=False
        )
        return FleetSettings(
            models=self.models,
            device=device,
            link=LinkSettings(bytes_per_second=self.link if paced else None),
            preset=COMPARED.rows[row].preset,
            options=COMPARED.options(row),
        )


def prepare(scratch: Path) -> Setting:
    """Make the models; the budget is for two of them, and KV of some requests."""
    models = tuple(
        ModelSettings(
            name=f"m{seed:02}",
            path=str(make_llama(scratch / f"m{seed:02}", seed, **LLAMA)),
            dtype="bfloat16",
            max_model_len=512,
        )
        for seed in range(N_MODELS)
    )
    device = DeviceSettings(budget_bytes=4 * GiB, prefix_cache=False)
    with InProcess(FleetSettings(models=models, device=device, preset="balloon")) as server:
        state = server.device.state
        page = server.device.fleet.device.page_bytes
        m = next(iter(state.models.values()))
        tokens = AT_ONCE * (PROMPTS.mean + OUTPUTS.mean)
        kv = round(tokens * m.spec.kv_bytes_per_token / page) + N_MODELS
        pages = state.arena.pages + N_FIT * m.weights.pages + kv
        roomy = state.arena.pages + N_MODELS * m.weights.pages + 4 * kv
        n_bytes = sum(m.spec.segment_bytes)
    setting = Setting(models, pages * page, page, roomy * page, 1.0)
    alone = run(setting, "balloon", one_by_one(setting), None, paced=False, budget=setting.roomy)
    tpot = statistics.median(r.tpot for r in alone.records if r.tpot is not None)
    return replace(setting, link=LINK_OF_MEMORY * n_bytes / tpot)


def one_by_one(setting: Setting) -> Workload:
    """Requests of mean length that don't meet, two of each model."""
    prompt, output = round(PROMPTS.mean), round(OUTPUTS.mean)
    return Workload.of(
        "one by one",
        [
            WorkloadRequest(
                id=n, at=0.5 * n, model=name, prompt_tokens=prompt, output_tokens=output
            )
            for n, name in enumerate(setting.names * 2)
        ],
    )


def run(
    setting: Setting,
    row: str,
    work: Workload,
    slos: Mapping[str, Slo] | None,
    *,
    paced: bool,
    budget: int | None = None,
) -> Report:
    levels = slos or dict.fromkeys(setting.names, Slo())
    fleet = setting.fleet(row, paced=paced, budget=budget)
    fleet = replace(fleet, models=tuple(replace(m, slo=levels[m.name]) for m in fleet.models))
    return asyncio.run(run_servers([fleet], work, levels, name=row)).report


def levels_of(setting: Setting) -> dict[str, Slo]:
    report = run(setting, "balloon", one_by_one(setting), None, paced=False, budget=setting.roomy)
    late = report.records[len(setting.names) :]
    ttft = float(np.percentile([r.ttft for r in late if r.ttft is not None], 95))
    tpot = float(np.percentile([r.tpot for r in late if r.tpot is not None], 95))
    return dict.fromkeys(setting.names, Slo(ttft=5 * ttft, tpot=2 * tpot))


def traffic(setting: Setting, rate: float, seconds: float, rounds: int) -> dict[str, Any]:
    """P95 TTFT and attainment of each row on each link."""
    slos = levels_of(setting)
    found: dict[str, Any] = {}
    for link, paced in (("paced", True), ("unpaced", False)):
        seen: dict[str, list[Report]] = {row: [] for row in COMPARED.rows}

        def once(row: str, paced: bool = paced, seen: dict[str, list[Report]] = seen) -> float:
            work = independent(
                setting.names,
                rate,
                seconds,
                alpha=ALPHA,
                prompt=PROMPTS,
                output=OUTPUTS,
                seed=len(seen[row]),
            )
            seen[row].append(run(setting, row, work, slos, paced=paced))
            return RequestStats.of(seen[row][-1].records, slos).attainment

        samples = interleave({row: partial(once, row) for row in seen}, rounds)
        found[link] = {
            row: {"attained": samples[row].median, "p95_ttft": p95_ttft(seen[row])} for row in seen
        }
    return found


def p95_ttft(reports: Sequence[Report]) -> float | None:
    """Of all requests that got a first token; None: none did."""
    times = [r.ttft for report in reports for r in report.records if r.ttft is not None]
    return float(np.percentile(times, 95)) if times else None


def main(argv: Sequence[str] | None = None) -> None:
    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--rate", type=float, default=2.0, help="requests per second")
        parser.add_argument("--part", choices=("switch", "traffic"), help="this alone")

    args = options(__doc__, argv, extra)
    result: dict[str, Any] = {}
    table = Table("", "value", title="c2c_live")
    with tempfile.TemporaryDirectory() as scratch:
        if args.part != "traffic":
            for size in SIZES:
                ms = switching(size, 3 if args.quick else 9, Path(scratch))
                name = size.name.lower()
                result[f"switch_ms_{name}"] = ms["anew"]
                result[f"over_prefill_ms_{name}"] = ms["anew"] - ms["bare"]
                result[f"turn_ms_{name}"] = ms["turn"]
                result[f"prefill_ms_{name}"] = ms["bare"]
        if args.part != "switch":
            setting = prepare(Path(scratch))
            seconds, rounds = (12.0, 1) if args.quick else (60.0, 3)
            result["link_bytes_per_second"] = setting.link
            result["link_over_memory"] = LINK_OF_MEMORY
            result["traffic"] = traffic(setting, args.rate, seconds, rounds)
    for key, value in result.items():
        if key != "traffic":
            table.add_row(key, f"{value:.4g}")
    for link, rows in result.get("traffic", {}).items():
        for row, of in rows.items():
            ttft = "none" if of["p95_ttft"] is None else f"{of['p95_ttft']:.3f} s"
            table.add_row(f"{link}, {row}", f"attained {of['attained']:.1%}, P95 TTFT {ttft}")
    finish(args, "c2c_live", result, table)


if __name__ == "__main__":
    main()
