"""The scenarios of `mirage_sim`: which runs there are, and the ratios between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ballast.sim.profile import device_profile
from ballast.workload.workload import Workload
from benchmarks.mirage_run import run
from benchmarks.mirage_setting import (
    ALONE,
    ALPACA,
    C1,
    C2,
    LONG,
    MEMORY,
    SHAREGPT,
    SHORT,
    Device,
    Lengths,
    Setting,
    link_of,
)

STATED = 1.0, 10.0
"""Requests per second of OPT-13b alone that the text names."""
Variant = tuple[str, dict[str, float]]
VARIANTS: dict[str, Variant] = {
    "recompute": ("recompute", {}),
    "ample": ("recompute", {}),
    "kvswap": ("kvswap", {}),
    "kvswap_dirty": ("kvswap", {"dirty": 1}),
    "mirage": ("mirage", {}),
    "pooled": ("recompute", {"pooled": 1}),
    "unpooled": ("mirage", {"pooled": 0}),
    "lru": ("mirage", {"pooled": 0, "lru": 1}),
    "beta1": ("mirage", {"beta": 1}),
    "beta2": ("mirage", {"beta": 2}),
    "uncapped": ("mirage", {"cap": 0}),
    "kept": ("mirage", {"reversion": 0}),
    "kept_uncapped": ("mirage", {"reversion": 0, "cap": 0}),
}
AMPLE = 2
"""Times the memory that variant `ample` has: it is never short."""
"""What is run: a preset and its options. KV of all models in one pool is part of `mirage`;
`unpooled` is `mirage` without it, `pooled` it without layers that are lent."""
BASE = "recompute", "ample", "kvswap", "mirage"
METRICS = "throughput", "p99_ttft", "p99_tbt"


@dataclass(frozen=True, slots=True)
class Group:
    """Cases whose ratios the text averages."""

    settings: Mapping[str, Setting]
    variants: tuple[str, ...] = BASE
    temporal: bool = False
    rates: tuple[float, ...] = ()
    """Requests per second; none: multiples of where recomputation is short."""
    as_in: str = ""
    """It is run at the rates of this group."""
    then: float = 0.0
    """After the first half of the arrivals the rate is this part of it, and only what clients
    hear after that counts."""


def both(fractions: Mapping[str, float], apart: bool = False) -> dict[str, Setting]:
    return {
        "Alpaca": Setting.of(fractions, ALPACA, apart),
        "ShareGPT": Setting.of(fractions, SHAREGPT, apart),
    }


def weighted(**weights: float) -> Setting:
    """C2 with other rates for its models, the large one's first."""
    base = Setting.of(C2, SHAREGPT)
    return replace(base, weights=dict(zip(C2, weights.values(), strict=True)))


def mixed(*lengths: Lengths) -> Setting:
    return replace(Setting.of(C2, SHAREGPT), lengths=dict(zip(C2, lengths, strict=True)))


MANY = (*BASE, "pooled", "unpooled")
GROUPS: dict[str, Group] = {
    "temporal_c1": Group(both(C1), (*MANY, "lru"), temporal=True),
    "temporal_c2": Group(both(C2), MANY, temporal=True),
    "rates_c2": Group(
        {"3:1": weighted(large=3, small=1), "1:3": weighted(large=1, small=3)}, temporal=True
    ),
    "inputs_c2": Group({"L+S": mixed(LONG, SHORT), "S+L": mixed(SHORT, LONG)}, temporal=True),
    "mps_c1": Group(both(C1), MANY),
    "mig_c1": Group(both(C1, apart=True)),
    "alone": Group(both(ALONE), (*BASE, "kvswap_dirty", "beta1", "beta2")),
    "alone_stated": Group({"Alpaca": Setting.of(ALONE, ALPACA)}, rates=STATED),
    "alone_wide": Group({"Alpaca": replace(Setting.of(ALONE, ALPACA), sequences=1024)}),
    "reversion": Group(both(ALONE), ("mirage", "kept", "kept_uncapped"), as_in="alone", then=0.2),
    "cap": Group(both(ALONE), ("mirage", "uncapped"), as_in="alone"),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One run."""

    group: str
    setting: str
    rate: float
    seed: int
    variant: str
    kind: str = "GH200-96G"
    link: float | None = None
    """Its nominal bytes per second, in place of the device's own."""


Runs = Mapping[Case, Mapping[str, float]]


def measure(case: Case, arrivals: Workload) -> dict[str, float]:
    """What a run comes to; in a process of its own, maybe."""
    group = GROUPS[case.group]
    setting = group.settings[case.setting]
    workload = setting.requests(arrivals, case.rate, case.seed)
    since = 0.0
    if group.then:
        since = workload.seconds / 2
        workload = slowed(workload, since, group.then)
    preset, chosen = VARIANTS[case.variant]
    chosen = {**chosen, "temporal": float(group.temporal)}
    memory = MEMORY[case.kind] * (AMPLE if case.variant == "ample" else 1)
    device = Device(device_profile(case.kind), memory)
    if case.link is not None:
        device = replace(device, link=link_of(case.link))
    told = run(setting, workload, preset, chosen, device)
    return told.summary(since)


def slowed(workload: Workload, since: float, factor: float) -> Workload:
    """The same requests, those after `since` at `factor` times the rate."""
    moved = [
        replace(r, at=r.at if r.at < since else since + (r.at - since) / factor)
        for r in workload.requests
    ]
    return Workload.of(workload.name, moved, workload.source)


def ratios(runs: Runs, of: str, over: str, metric: str) -> list[float]:
    """Case by case, one variant's metric over another's."""
    others = {c: r[metric] for c, r in runs.items() if c.variant == over}
    return [
        r[metric] / others[replace(c, variant=over)]
        for c, r in runs.items()
        if c.variant == of and others[replace(c, variant=over)] > 0
    ]


def in_group(runs: Runs, group: str) -> Runs:
    return {case: told for case, told in runs.items() if case.group == group}


def summaries(runs: Runs) -> dict[str, Any]:
    """By group: mean ratios, and every run."""
    told: dict[str, Any] = {}
    for group in dict.fromkeys(case.group for case in runs):
        own = in_group(runs, group)
        there = {case.variant for case in own}
        told[group] = {
            f"{metric}_over_{base}": float(np.mean(ratios(own, "mirage", base, metric)))
            for base in ("recompute", "kvswap")
            if base in there
            for metric in METRICS
        }
        told[group]["cases"] = [
            {
                "lengths": c.setting,
                "rate": c.rate,
                "seed": c.seed,
                "variant": c.variant,
                **r,
            }
            for c, r in own.items()
        ]
    return told
