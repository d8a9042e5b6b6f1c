"""Three ways to share devices, on this machine: apart, in turn, prefills beside decodes (MuxServe).

Two, then four random Llamas in bfloat16, asked by a power law, open loop, equal seeds. All rows
have the same memory, cores, options and requests, and run in turns:

- `spatial`: the models divide the cores, one for each device, and each device's memory is in fixed
  shares (`static`); with more models than cores, the most and the least popular share a device.
- `temporal`: one device with all cores, one job at a time, first come first served, one pool of KV
  (`recompute+fcfs`).
- `muxserve`: one device with all cores and two lanes: a prefill beside decodes, quotas of KV;
  on one lane, as its quotas and order of models do alone.

Rates are parts of what `temporal` answers per second of requests that all come at once. Service
levels are `SLO_SCALE` times what a request alone sees there. `throughput`: requests answered per
second after the warm-up and while others come, by model, weighted by rate, as the paper has it; the
attainment of the model served worst stands beside it. `over_spatial`, `over_temporal`: of
`muxserve`, round by round, at the highest rate. `kv_over_rate`: each model's share of the KV in use
over its share of the requests. Interference, a part of its own: one model decodes while another is
asked for a long prompt now and then; `interference` is the mean gap between tokens that a prefill
lies beside, over the mean of the others, in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import cycle, pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from rich.console import Group
from rich.table import Table

from ballast.bench.fairness import fairness_gap
from ballast.bench.inprocess import InProcess
from ballast.bench.record import RequestRecord
from ballast.bench.report import Report, RequestStats
from ballast.bench.servers import run_servers
from ballast.core.settings import DeviceSettings, FleetSettings, LinkSettings, ModelSettings, Slo
from ballast.core.units import GiB
from ballast.workload.generators import independent
from ballast.workload.lengths import LogNormal
from ballast.workload.workload import Workload, WorkloadRequest
from benchmarks.common import Samples, finish, interleave, options
from benchmarks.contenders import Comparison, Contender
from benchmarks.exactness import make_llama
from benchmarks.mux_sim import SLO_SCALE, TERMS, throughput

SIZES = {
    "hidden_size": 640,
    "intermediate_size": 1728,
    "num_hidden_layers": 10,
    "num_attention_heads": 10,
    "num_key_value_heads": 10,
}
PROMPT = LogNormal.of_cv(48.0, 0.8, 224)
OUTPUT = LogNormal.of_cv(96.0, 0.8, 256)
"""In the ratio of ShareGPT's."""
AT_ONCE = 24
"""Requests of mean length that the KV of the one device holds."""
COUNTS = (2, 4)
"""Models."""
INTERFERENCE = "interference"
PARTS = (*map(str, COUNTS), INTERFERENCE)
"""Of the benchmark."""
LOADS = (0.5, 0.8, 1.2)
"""Of what `temporal` answers per second."""
WARM_UP = 4.0
"""Seconds of arrivals whose requests do not count."""
MAX_MODEL_LEN = 512
STEP_TOKENS = 512
FLOOD = 120
"""Requests that come at once, to see what can be answered."""
COMPARED = Comparison(
    TERMS,
    {
        "spatial": Contender("static"),
        "temporal": Contender("recompute+fcfs"),
        "muxserve": Contender("muxserve"),
        "muxserve, one lane": Contender("muxserve"),
    },
)
LANES = {"muxserve": 2}
"""Jobs at once on a device; one where a row is not named."""
LONG_PROMPT, EVERY = 448, 1.0
"""Tokens of the prompts that come beside decodes, seconds between two."""
STREAMS = 6
"""Requests that decode meanwhile."""


@dataclass(frozen=True)
class Setting:
    """Models, and the memory they share."""

    models: tuple[ModelSettings, ...]
    """The most popular first."""
    budget: int
    """Bytes, of all devices together."""
    page: int
    cores: int
    kv_bytes: int
    """Beside weights and activations, on one device with one lane."""
    token: int
    """Bytes of KV of a token, of any of the models."""

    @property
    def names(self) -> list[str]:
        return [m.name for m in self.models]

    def fleet(self, row: str) -> FleetSettings:
        """All of it as a row has it."""
        n = min(self.cores, len(self.models)) if row == "spatial" else 1
        device = DeviceSettings(
            budget_bytes=self.budget // self.page // n * self.page,
            page_bytes=self.page,
            threads=self.cores // n,
            lanes=LANES.get(row, 1),
            step_tokens=STEP_TOKENS,
            prefix_cache=False,
        )
        devices = [replace(device, name=f"cpu:{i}") for i in range(n)]
        homes = dict(zip(self.names, back_and_forth(n), strict=False))
        return FleetSettings(
            models=tuple(replace(m, devices=(devices[homes[m.name]].name,)) for m in self.models),
            device=devices[0],
            link=LinkSettings(device=devices[0].name),
            others=tuple(devices[1:]),
            other_links=tuple(LinkSettings(device=d.name) for d in devices[1:]),
            preset=COMPARED.rows[row].preset,
            options=COMPARED.options(row),
        )

    def workload(self, rate: float, seconds: float, alpha: float, seed: int) -> Workload:
        """`rate` requests per second of all models, for the warm-up and `seconds` more."""
        total = WARM_UP + seconds
        return independent(
            self.names, rate, total, alpha=alpha, prompt=PROMPT, output=OUTPUT, seed=seed
        )


def back_and_forth(n: int) -> Iterator[int]:
    """0, 1, ... n-1, n-1, ... 1, 0, 0, 1, ...: where the next most popular model goes."""
    there = list(range(n))
    return cycle([*there, *reversed(there)])


def prepare(scratch: Path, count: int) -> Setting:
    """Make the models, and set the memory to their weights, a job's activations, and KV."""
    models = tuple(
        ModelSettings(
            name=name,
            path=str(make_llama(scratch / name, seed, **SIZES)),
            dtype="bfloat16",
            max_model_len=MAX_MODEL_LEN,
        )
        for seed, name in enumerate("abcd"[:count])
    )
    device = DeviceSettings(budget_bytes=4 * GiB, step_tokens=STEP_TOKENS, prefix_cache=False)
    with InProcess(FleetSettings(models=models, device=device)) as server:
        state = server.device.state
        page = server.device.fleet.device.page_bytes
        token = next(iter(state.models.values())).spec.kv_bytes_per_token
        kv_pages = round(AT_ONCE * (PROMPT.mean + OUTPUT.mean) * token / page)
        pages = state.arena.pages + sum(m.weights.pages for m in state.models.values()) + kv_pages
    cores = len(os.sched_getaffinity(0))
    return Setting(models, pages * page, page, cores, kv_pages * page, token)


def run(
    setting: Setting, row: str, work: Workload, slos: Mapping[str, Slo] | None = None
) -> Report:
    """Serve a workload under a row. Raises RuntimeError where a request isn't answered."""
    levels = slos or dict.fromkeys(setting.names, Slo())
    served = asyncio.run(run_servers([setting.fleet(row)], work, levels, name=row))
    if served.report.errors:
        raise RuntimeError(f"{row}: {served.report.errors}")
    return served.report


def _request(n: int, at: float, model: str, prompt: int, output: int) -> WorkloadRequest:
    return WorkloadRequest(id=n, at=at, model=model, prompt_tokens=prompt, output_tokens=output)


def one_by_one(setting: Setting) -> Workload:
    """Requests of mean length that don't meet, three of each model."""
    requests = (
        _request(n, 2.0 * n, name, round(PROMPT.mean), round(OUTPUT.mean))
        for n, name in enumerate(setting.names * 3)
    )
    return Workload.of("one by one", requests)


def levels_of(setting: Setting) -> dict[str, Slo]:
    """`SLO_SCALE` times what a request sees that is alone under `temporal`, but for the first of
    each model."""
    records = run(setting, "temporal", one_by_one(setting)).records[len(setting.names) :]
    found = {}
    for name in setting.names:
        own = [r for r in records if r.model == name]
        ttft, tpot = (fmean(getattr(r, what) for r in own) for what in ("ttft", "tpot"))
        found[name] = Slo(ttft=SLO_SCALE * ttft, tpot=SLO_SCALE * tpot)
    return found


def capacity(setting: Setting, alpha: float) -> float:
    """Requests per second that `temporal` answers of some that come within a moment, but for the
    first and the last quarter."""
    work = setting.workload(FLOOD / WARM_UP, 0.0, alpha, seed=0).scale_rate(100.0)
    ends = sorted(r.end for r in run(setting, "temporal", work).records if r.end is not None)
    first, last = len(ends) // 4, len(ends) * 3 // 4
    return (last - first) / (ends[last] - ends[first])


@dataclass(frozen=True)
class Result:
    """One row at one rate, in one round."""

    throughput: float
    attainment: Mapping[str, float]
    """By model."""
    kv_over_rate: Mapping[str, float]
    """By model."""
    fairness_gap: float | None
    preemptions: int

    @property
    def worst(self) -> float:
        return min(self.attainment.values())


def result_of(setting: Setting, report: Report, seconds: float) -> Result:
    counted = [r for r in report.records if r.at >= WARM_UP]
    samples = [m for m in report.memory if WARM_UP <= m.at <= WARM_UP + seconds]
    late = replace(report, records=tuple(counted), memory=tuple(samples))
    asked = Counter(r.model for r in counted)
    held = {n: sum(m.owners.get(f"kv:{n}", 0) for m in samples) for n in setting.names}
    total = max(1, sum(held.values()))
    return Result(
        throughput(report, WARM_UP, WARM_UP + seconds),
        {
            n: RequestStats.of((r for r in counted if r.model == n), report.slos).attainment
            for n in setting.names
            if asked[n]
        },
        {n: held[n] / total / (asked[n] / len(counted)) for n in setting.names if asked[n]},
        fairness_gap(late, dict.fromkeys(setting.names, setting.token)),
        sum(r.preemptions for r in counted),
    )


def measure(
    setting: Setting,
    slos: Mapping[str, Slo],
    rates: Mapping[float, float],
    rounds: int,
    seconds: float,
    alpha: float,
) -> dict[str, dict[float, list[Result]]]:
    """All rows at all rates, by load, in turns; requests differ from round to round."""
    found: dict[str, dict[float, list[Result]]] = {row: {} for row in COMPARED.rows}

    def once(row: str, load: float) -> float:
        seen = found[row].setdefault(load, [])
        work = setting.workload(rates[load], seconds, alpha, seed=1 + len(seen))
        seen.append(result_of(setting, run(setting, row, work, slos), seconds))
        return seen[-1].throughput

    for load in rates:
        interleave({row: partial(once, row, load) for row in found}, rounds)
    return found


def beside_prompts(setting: Setting, seconds: float) -> Workload:
    """The first model decodes, the second is asked for long prompts now and then."""
    decoding, asked = setting.names[:2]
    most = MAX_MODEL_LEN - 32
    streams = [_request(n, 0.0, decoding, 32, most) for n in range(STREAMS)]
    times = np.arange(2.0, seconds, EVERY).tolist()
    prompts = [_request(STREAMS + n, at, asked, LONG_PROMPT, 1) for n, at in enumerate(times)]
    return Workload.of("beside prompts", [*streams, *prompts])


@dataclass(frozen=True)
class Interference:
    """What a prefill does to the tokens of a model that decodes. Seconds."""

    beside: float
    """Mean gap between tokens that such a prefill lies beside."""
    apart: float
    """Mean of the other gaps."""
    longest: float
    prefill: float
    """Median TTFT of the prompts that came while it decoded."""

    @property
    def ratio(self) -> float:
        return self.beside / self.apart


def interference(records: Sequence[RequestRecord]) -> Interference:
    """Of requests of which those with one token are the prompts. A prompt lies beside tokens from
    when it is sent until it is answered. The first second does not count."""
    decoded = max(r.token_times[-1] for r in records if r.output_tokens > 1)
    prompts = [r for r in records if r.output_tokens == 1 and r.sent < decoded]
    spans = [(r.sent, r.first_token or math.inf) for r in prompts]
    last = max(end for _, end in spans)
    beside: list[float] = []
    apart: list[float] = []
    for r in records:
        if r.output_tokens == 1:
            continue
        for a, b in pairwise(r.token_times):
            if a >= 1.0 and b <= last + EVERY:
                hit = any(a < end and start < b for start, end in spans)
                (beside if hit else apart).append(b - a)
    ttft = median(r.ttft or math.inf for r in prompts)
    return Interference(fmean(beside), fmean(apart), max(beside), ttft)


def summary(results: Mapping[str, Mapping[float, Sequence[Result]]]) -> dict[str, Any]:
    """Of one number of models."""
    most = max(results["muxserve"])

    def samples(row: str) -> Samples:
        return Samples(tuple(r.throughput for r in results[row][most]))

    ours = samples("muxserve")
    return {
        f"over_{row}": ours.over(samples(row)).to_json()
        for row in results
        if not row.startswith("muxserve")
    } | {
        "rows": {
            row: {
                f"{load:g}": {
                    "throughput": Samples(tuple(r.throughput for r in rs)).to_json(),
                    "attainment": _means([r.attainment for r in rs]),
                    "worst": fmean(r.worst for r in rs),
                    "kv_over_rate": _means([r.kv_over_rate for r in rs]),
                    "fairness_gap": fmean(r.fairness_gap or 0.0 for r in rs),
                    "preemptions": fmean(r.preemptions for r in rs),
                }
                for load, rs in by.items()
            }
            for row, by in results.items()
        }
    }


def _means(of: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: fmean(one[name] for one in of) for name in of[0]}


def table_of(count: int, outcome: Mapping[str, Any]) -> Table:
    columns = (
        "",
        "load",
        "req/s by rate",
        "attained, by model",
        "KV over rate",
        "gap",
        "preempted",
    )
    table = Table(*columns, title=f"mux_live: {count} models")
    for row, by in outcome["rows"].items():
        for load, of in by.items():
            t = of["throughput"]
            table.add_row(
                row,
                load,
                f"{t['median']:.2f} ({t['low']:.2f}-{t['high']:.2f})",
                ", ".join(f"{a:.0%}" for a in of["attainment"].values()),
                ", ".join(f"{a:.2f}" for a in of["kv_over_rate"].values()),
                f"{of['fairness_gap']:.2f}",
                f"{of['preemptions']:.0f}",
            )
    over = (f"{key} {outcome[key]['median']:.2f}" for key in outcome if key.startswith("over_"))
    table.caption = ", ".join(over)
    return table


def interference_table(outcome: Mapping[str, Mapping[str, Any]]) -> Table:
    columns = ("", "beside / apart", "beside, ms", "apart, ms", "longest, ms", "prefill, ms")
    table = Table(*columns, title="a prefill beside decodes")
    for row, of in outcome.items():
        ratio = of["ratio"]
        milliseconds = (f"{1e3 * of[key]:.1f}" for key in ("beside", "apart", "longest", "prefill"))
        spread = f"{ratio['median']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})"
        table.add_row(row, spread, *milliseconds)
    return table


def interferences(setting: Setting, rounds: int, seconds: float) -> dict[str, dict[str, Any]]:
    """By row, medians over the rounds; with memory enough for all streams in either half."""
    work = beside_prompts(setting, seconds)
    seen: dict[str, list[Interference]] = {row: [] for row in COMPARED.rows}

    def once(row: str) -> float:
        seen[row].append(interference(run(roomy, row, work).records))
        return seen[row][-1].ratio

    kv = STREAMS * MAX_MODEL_LEN * setting.token
    roomy = replace(setting, budget=setting.budget + 2 * kv)
    ratios = interleave({row: partial(once, row) for row in seen}, rounds)
    return {
        row: {
            "ratio": ratios[row].to_json(),
            **{
                key: median(getattr(one, key) for one in found)
                for key in ("beside", "apart", "longest", "prefill")
            },
        }
        for row, found in seen.items()
    }


def main(argv: Sequence[str] | None = None) -> None:
    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--alpha", type=float, default=0.9)
        parser.add_argument("--parts", default=",".join(PARTS), help="default all")
        parser.add_argument("--rounds", type=int, help="default 3, quick 1")
        parser.add_argument("--seconds", type=float, help="of arrivals; default 12, quick 8")

    args = options(__doc__, argv, extra)
    rounds = args.rounds or (1 if args.quick else 3)
    seconds = args.seconds or (8.0 if args.quick else 12.0)
    result: dict[str, Any] = {"alpha": args.alpha, "seconds": seconds, "rounds": rounds}
    shown: list[Table] = []
    parts = args.parts.split(",")
    with tempfile.TemporaryDirectory() as scratch:
        for count in COUNTS:
            wanted = str(count) in parts, INTERFERENCE in parts and count == COUNTS[0]
            if not any(wanted):
                continue
            setting = prepare(Path(scratch) / str(count), count)
            if wanted[0]:
                slos = levels_of(setting)
                rate = capacity(setting, args.alpha)
                rates = {load: load * rate for load in LOADS}
                outcome = summary(measure(setting, slos, rates, rounds, seconds, args.alpha))
                facts = {"budget": setting.budget, "kv_bytes": setting.kv_bytes, "capacity": rate}
                levels = {name: asdict(slo) for name, slo in slos.items()}
                result[f"models_{count}"] = {**facts, "slos": levels, **outcome}
                shown.append(table_of(count, outcome))
            if wanted[1]:
                result["interference"] = interferences(setting, rounds, seconds)
                shown.append(interference_table(result["interference"]))
    finish(args, "mux_live", result, Group(*shown))


if __name__ == "__main__":
    main()
