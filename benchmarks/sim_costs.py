"""What each modelled cost does to simulations: attainment and mean TTFT of every preset with and
without it, and whether the presets' order changes.

Virtual time; nothing depends on the machine. Costs are switched on one by one over none, and all at
once: calls that map pages (as profiles have them), jobs that spread (lognormal, `SPREAD`), a speed
that drifts (`DRIFT`). Copies beside compute are not here, for no profile has measured them.
`orders_changed` counts pairs of presets, over all settings and costs, of which the one that attains
more without any cost attains less with it, by more than `TIE` points either way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from rich.table import Table

from ballast.bench.cluster_run import run_cluster
from ballast.bench.run_options import workload_of
from ballast.core.settings import Slo
from ballast.policy.presets import resolve
from ballast.sim.cluster import parse_kinds
from ballast.sim.cost_switches import CostSwitches
from ballast.sim.model_catalogue import catalogue
from benchmarks.common import finish, options
from benchmarks.contenders import defaults

PRESETS = ("static", "swap", "recompute", "kvswap", "mirage", "balloon")
COMPARED = defaults(*PRESETS)
SPREAD, DRIFT = 0.2, 0.1
VARIANTS: dict[str, CostSwitches] = {
    "none": CostSwitches(without=("mapping", "spread")),
    "mapping": CostSwitches(without=("spread",)),
    "spread": CostSwitches(without=("mapping",), job_spread=SPREAD),
    "drift": CostSwitches(without=("mapping",), drift=DRIFT),
    "all": CostSwitches(job_spread=SPREAD, drift=DRIFT),
}
SLO = Slo(ttft=2.0, tpot=0.1)
CONTEXT = 2048
TIE = 0.5
"""Points of attainment within which two presets are as good as each other."""


@dataclass(frozen=True)
class Setting:
    """A device, its models, and how often these are asked."""

    device: str
    models: tuple[str, ...]
    rate: float


THREE = ("Llama-2-13b", "Llama-2-7b", "Llama-3-8b")
SETTINGS = {
    "3 models at 12/s": Setting("1xH100-80G", THREE, 12.0),
    "3 models at 20/s": Setting("1xH100-80G", THREE, 20.0),
    "8 models at 2/s": Setting(
        "1xH100-80G",
        (
            "Llama-2-13b",
            "Llama-2-7b",
            "Llama-3-8b",
            "Qwen2.5-7b",
            "Qwen3-8b",
            "Qwen3-4b",
            "Yi-1.5-9b-chat",
            "Yi-1.5-6b-chat",
        ),
        2.0,
    ),
}


@dataclass(frozen=True)
class Result:
    """What one run came to."""

    attainment: float
    ttft: float
    """Mean, in seconds."""


def measure(setting: Setting, preset: str, counted: CostSwitches, seconds: float) -> Result | None:
    """One run; None where the preset cannot serve the models on the device."""
    known = catalogue()
    served = [
        replace(known[n].spec(max_model_len=CONTEXT, slo=SLO), fingerprint=n)
        for n in setting.models
    ]
    work = workload_of(
        "bursty", setting.models, rate=setting.rate, seconds=seconds, most_tokens=1024, seed=1
    )
    chosen = resolve(COMPARED.rows[preset].preset, COMPARED.options(preset))
    kinds = parse_kinds(setting.device, modelled=counted)
    ran = run_cluster(chosen, kinds, served, work, dict.fromkeys(setting.models, SLO))
    total = ran.report.total
    ttft = float("nan") if total.ttft is None else total.ttft.mean
    return Result(total.attained / len(work.requests), ttft)


def changed(plain: Mapping[str, Result], costly: Mapping[str, Result]) -> list[str]:
    """Pairs of presets whose order of attainment is another."""

    def ahead(of: Mapping[str, Result], a: str, b: str) -> int:
        points = 100 * (of[a].attainment - of[b].attainment)
        return (points > TIE) - (points < -TIE)

    return [
        f"{a} and {b}"
        for a, b in combinations(plain, 2)
        if ahead(plain, a, b) * ahead(costly, a, b) < 0
    ]


def main(argv: Sequence[str] | None = None) -> None:
    args = options(__doc__, argv)
    seconds = 20.0 if args.quick else 60.0
    table = Table(title="in SLO in %, mean TTFT in s")
    for column in ("setting", "preset", *VARIANTS):
        table.add_column(column)
    found: dict[str, Any] = {}
    orders = 0
    for name, setting in SETTINGS.items():
        by = {
            cost: {
                preset: result
                for preset in PRESETS
                if (result := measure(setting, preset, counted, seconds)) is not None
            }
            for cost, counted in VARIANTS.items()
        }
        for preset in by["none"]:
            cells = (by[cost][preset] for cost in VARIANTS)
            table.add_row(name, preset, *(f"{100 * c.attainment:.1f}  {c.ttft:.3f}" for c in cells))
        pairs = {cost: changed(by["none"], by[cost]) for cost in VARIANTS if cost != "none"}
        orders += sum(map(len, pairs.values()))
        found[name] = {
            "changed": pairs,
            "runs": {
                cost: {p: {"attainment": r.attainment, "ttft": r.ttft} for p, r in rs.items()}
                for cost, rs in by.items()
            },
        }
        for cost, names in pairs.items():
            table.caption = (table.caption or "") + "".join(
                f"\n{name}, {cost}: {pair} change places" for pair in names
            )
    finish(args, "sim_costs", {"orders_changed": orders, "settings": found}, table)


if __name__ == "__main__":
    main()
