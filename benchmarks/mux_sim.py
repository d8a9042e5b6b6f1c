"""MuxServe's schedulers in virtual time (Duan et al., 2024, Figure 10): one unit of four A100s.

Two settings: LLaMA-30B, 13B and 7B, asked 2 : 8 : 8 times a second with requests of lengths in the
ratio 2 : 1 : 1, and LLaMA-65B and 30B, 1 : 8 times, 4 : 1. All models of a unit are on one group of
four A100s-80G. What the text leaves open is chosen, and said in the result: a length of 1 is a
request of ShareGPT (`--length` multiplies it), within LLaMA's context of 2,048 tokens; the engine
is of the paper's time (`eager`); a service level is eight times what a request alone would see,
which other figures of the paper go by.

`fcfs` and `round-robin` are `recompute` under these orders: weights stay, and KV comes from one
pool, first come first served, as the paper's baselines have it ("our unified KV cache"). Every row
has the same lanes but where its name says otherwise, computes prompts in jobs of their own as
engines of that time do, admits requests as they come, and has the same requests. A turn of `fcfs`
lasts until the model's oldest request has ended, or for `--longest-turn` seconds.

`throughput`: requests per second of each model that were answered in the second half of the time in
which requests come, weighted by the models' rates, as the paper has it; beside it the attainment of
every model, which that mean hides.
`throughput_over_fcfs`, `throughput_over_round_robin`: of `muxserve`, beside the paper's.
`fairness_gap`: Equation 2's epsilon (`ballast.bench.fairness`), relative to the mean.
`off_by_a_third`: settings in which a ratio differs from the paper's by more than a third.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from ballast.bench.cluster_run import ClusterRun, run_cluster
from ballast.bench.fairness import fairness_gap
from ballast.bench.report import Report
from ballast.core.cost import StepCosts
from ballast.core.job import JobLoad
from ballast.core.model import ModelSpec
from ballast.core.settings import Slo
from ballast.policy.presets import resolve
from ballast.sim.cluster import Kind, parse_kinds
from ballast.sim.model_catalogue import facts
from ballast.workload.generators import poisson
from ballast.workload.lengths import SHAREGPT_OUTPUT, SHAREGPT_PROMPT, LogNormal
from ballast.workload.workload import Workload, WorkloadRequest
from benchmarks.common import finish, options
from benchmarks.contenders import Comparison, Contender
from benchmarks.sweep import Sweep, add_processes, plain

DEVICE = "A100-80G:tp4"
ENGINE = "eager"
CONTEXT = 2048
SLO_SCALE = 8.0
LANES = 3
THIRD = 1 / 3


@dataclass(frozen=True)
class Setting:
    """Models of one unit: how often each is asked, and how long its requests are."""

    rates: Mapping[str, float]
    """Requests per second."""
    lengths: Mapping[str, float]
    paper: Mapping[str, float]
    """The throughput that the figure states, by row."""


SETTINGS = {
    "10a": Setting(
        {"LLaMA-30b": 2.0, "LLaMA-13b": 8.0, "LLaMA-7b": 8.0},
        {"LLaMA-30b": 2.0, "LLaMA-13b": 1.0, "LLaMA-7b": 1.0},
        {"fcfs": 3.8, "round-robin": 4.1, "muxserve": 6.2},
    ),
    "10b": Setting(
        {"LLaMA-65b": 1.0, "LLaMA-30b": 8.0},
        {"LLaMA-65b": 4.0, "LLaMA-30b": 1.0},
        {"fcfs": 3.2, "round-robin": 4.9, "muxserve": 6.6},
    ),
}
TERMS = {"late_last": 0.0, "fair_shares": 0.0, "separate": 1.0}
COMPARED = Comparison(
    TERMS,
    {
        "fcfs": Contender("recompute+fcfs"),
        "round-robin": Contender("recompute+round-robin"),
        "muxserve": Contender("muxserve"),
        "adbs": Contender("recompute+adbs"),
        "round-robin, one lane": Contender("recompute+round-robin"),
        "muxserve, one lane": Contender("muxserve"),
    },
)
"""`adbs`: its order of compute alone, with one pool of KV."""
FACTORS = (0.25, 0.5, 1.0, 2.0)
"""On the rates of the figure, which is at 1."""


def lanes_of(row: str) -> int:
    """FCFS serves one job at a time; so do rows that say so."""
    return 1 if row == "fcfs" or row.endswith("one lane") else LANES


def workload(setting: Setting, factor: float, length: float, seconds: float, seed: int) -> Workload:
    """Poisson arrivals; lengths of ShareGPT, each model's scaled, within the context."""
    drawn: list[tuple[float, str, int, int]] = []
    for place, (model, rate) in enumerate(setting.rates.items()):
        rng = np.random.default_rng([seed, place])
        times = poisson(rate * factor, seconds, rng)
        scale = length * setting.lengths[model]
        prompts = _scaled(SHAREGPT_PROMPT, scale).sample(rng, len(times))
        outputs = _scaled(SHAREGPT_OUTPUT, scale).sample(rng, len(times))
        for at, p, o in zip(times.tolist(), prompts.tolist(), outputs.tolist(), strict=True):
            prompt = min(p, CONTEXT // 2)
            drawn.append((at, model, prompt, min(o, CONTEXT - prompt)))
    requests = (
        WorkloadRequest(id=n, at=at, model=model, prompt_tokens=p, output_tokens=o)
        for n, (at, model, p, o) in enumerate(sorted(drawn))
    )
    return Workload.of("figure 10", requests, f"generated: {seconds:g} s, seed {seed}", ())


def _scaled(lengths: LogNormal, by: float) -> LogNormal:
    return LogNormal(lengths.mu + float(np.log(by)), lengths.sigma, CONTEXT)


def specs_of(setting: Setting, kind: Kind, length: float) -> list[ModelSpec]:
    """The models, with service levels of `SLO_SCALE` times a request of mean length alone."""
    found = []
    for name in setting.rates:
        spec = facts(name).spec(max_model_len=CONTEXT, fingerprint=name, max_running=256)
        prompt = round(length * setting.lengths[name] * SHAREGPT_PROMPT.mean)
        found.append(replace(spec, slo=level(kind.costs(spec), prompt)))
    return found


def level(costs: StepCosts, prompt: int) -> Slo:
    """`SLO_SCALE` times what a request with such a prompt sees that is alone."""
    step = costs.of(JobLoad(0, 0, 0, 1, prompt))
    return Slo(ttft=SLO_SCALE * costs.prefill_seconds(prompt), tpot=SLO_SCALE * step)


@dataclass(frozen=True)
class Result:
    """One row at one rate."""

    throughput: float
    attainment: Mapping[str, float]
    """By model."""
    fairness_gap: float | None
    requests: int
    preemptions: int
    kv_shares: Mapping[str, float]
    """By model: of the KV in use, on average."""

    @property
    def worst(self) -> float:
        return min(self.attainment.values())


def measure(
    name: str,
    row: str,
    factor: float,
    length: float,
    seconds: float,
    engine: str,
    longest_turn: float = 0.0,
) -> Result:
    """Run a row. `longest_turn`: of `fcfs`, in seconds, 0 being none."""
    setting, contender = SETTINGS[name], COMPARED.rows[row]
    (kind,) = parse_kinds(DEVICE, lanes_of(row), engine)
    specs = specs_of(setting, kind, length)
    work = workload(setting, factor, length, seconds, seed=1)
    own = {"longest_turn": longest_turn} if row == "fcfs" else {}
    preset = resolve(contender.preset, COMPARED.options(row) | own)
    ran = run_cluster(preset, [kind], specs, work, {s.name: s.slo for s in specs})
    return _result(ran, specs, seconds)


def ended_within(report: Report, since: float, until: float) -> Counter[str]:
    """Requests that were answered within a time, by model."""
    ended = (r for r in report.records if r.answered and since < (r.end or 0.0) <= until)
    return Counter(r.model for r in ended)


def throughput(report: Report, since: float, until: float) -> float:
    """Requests per second that were answered within a time, by model, weighted by the models' parts
    of all requests."""
    ended = ended_within(report, since, until)
    weighted = sum(n * report.models[model].requests for model, n in ended.items())
    return weighted / report.total.requests / (until - since)


def _result(ran: ClusterRun, specs: Sequence[ModelSpec], seconds: float) -> Result:
    report = ran.report
    held = {s.name: sum(m.owners.get(f"kv:{s.name}", 0) for m in report.memory) for s in specs}
    total = max(1, sum(held.values()))
    return Result(
        throughput(report, seconds / 2, seconds),
        {name: served.attainment for name, served in report.models.items()},
        fairness_gap(report, {s.name: s.kv_bytes_per_token for s in specs}),
        report.total.requests,
        ran.total("preemptions"),
        {name: n / total for name, n in held.items()},
    )


def summary(results: Mapping[str, Mapping[str, Mapping[float, Result]]]) -> dict[str, Any]:
    """`results` by setting, row and factor; ratios at the figure's rates."""
    outcome: dict[str, Any] = {}
    for base in ("fcfs", "round-robin"):
        ours, paper = {}, {}
        for name, rows in results.items():
            stated = SETTINGS[name].paper
            ours[name] = rows["muxserve"][1.0].throughput / rows[base][1.0].throughput
            paper[name] = stated["muxserve"] / stated[base]
        key = f"throughput_over_{base.replace('-', '_')}"
        outcome |= {key: ours, f"{key}_paper": paper}
        off = [n for n in ours if abs(ours[n] / paper[n] - 1) > THIRD]
        outcome.setdefault("off_by_a_third", {})[base] = off
    outcome["fairness_gap"] = {
        name: {row: by[1.0].fairness_gap for row, by in rows.items()}
        for name, rows in results.items()
    }
    return outcome


def table_of(name: str, rows: Mapping[str, Mapping[float, Result]]) -> Table:
    factors = sorted(next(iter(rows.values())))
    columns = ["", *(f"{f:g} x" for f in factors), "paper, 1 x", "worst, 1 x", "gap", "preempted"]
    table = Table(*columns, "KV shares", title=f"figure {name}: req/s, weighted by rate")
    for row, by in rows.items():
        at = by[1.0]
        stated = SETTINGS[name].paper.get(row)
        table.add_row(
            row,
            *(f"{by[f].throughput:.2f}" for f in factors),
            "" if stated is None else f"{stated:g}",
            f"{at.worst:.0%}",
            "" if at.fairness_gap is None else f"{at.fairness_gap:.2f}",
            str(at.preemptions),
            ", ".join(f"{share:.0%}" for share in at.kv_shares.values()),
        )
    return table


def main(argv: Sequence[str] | None = None) -> None:
    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--length", type=float, default=1.0, help="of a request; default 1")
        parser.add_argument("--engine", default=ENGINE)
        parser.add_argument("--settings", default=",".join(SETTINGS), help="default all")
        parser.add_argument("--seconds", type=float, help="of arrivals; default 180, quick 60")
        parser.add_argument("--longest-turn", type=float, default=0.0, help="of fcfs, s")
        add_processes(parser)

    args = options(__doc__, argv, extra)
    seconds = args.seconds or (60.0 if args.quick else 180.0)
    factors = (1.0,) if args.quick else FACTORS
    terms = {"length": args.length, "seconds": seconds, "engine": args.engine}
    run = partial(measure, **terms, longest_turn=args.longest_turn)
    with Sweep(args.processes) as sweep:
        results = sweep.over((args.settings.split(","), COMPARED.rows, factors), run)
    console = Console(width=150)
    for name, rows in results.items():
        console.print(table_of(name, rows))
    outcome = summary(results)
    result = {
        **outcome,
        "device": DEVICE,
        "engine": args.engine,
        "length": args.length,
        "longest_turn": args.longest_turn,
        "seconds": seconds,
        "lanes": {row: lanes_of(row) for row in COMPARED.rows},
        "rows": plain(results),
    }
    shown = Table("", *results, title="mux_sim")
    for key in ("throughput_over_fcfs", "throughput_over_round_robin"):
        for k in (key, f"{key}_paper"):
            shown.add_row(k, *(f"{outcome[k][name]:.2f}" for name in results))
    finish(args, "mux_sim", result, shown)


if __name__ == "__main__":
    main()
