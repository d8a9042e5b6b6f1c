"""C2CServe on one paced link that two or three worker processes share (part of `c2c_live`).

Placement: the long tail's requests, routed by the link's budget, or each model on one device drawn
at random. Contention: two devices, a model each, prompts that come at once; what both lose of the
sum of the throughput that each has alone, in small chunks and in whole prompts (C2CServe, 3.3.2).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ballast.bench.report import Report, RequestStats
from ballast.core.settings import FleetSettings
from benchmarks.c2c_setting import CONTEXT, Setting, asked, p95_ttft, run
from benchmarks.c2c_workload import long_tail

CHUNKS = {"chunks of 64": 64, "whole prompts": CONTEXT}
PROMPT, PROMPTS = 448, 6
"""Tokens of a prompt, and prompts of each model, where devices contend."""


def devices(setting: Setting, n: int, *, step_tokens: int | None = None) -> FleetSettings:
    """`n` devices of a thread each, with an equal part of the budget, over one paced link."""
    fleet = setting.fleet("in host memory", paced=True)
    device = replace(fleet.device, threads=1, budget_bytes=fleet.device.budget_bytes // n)
    if step_tokens is not None:
        device = replace(device, step_tokens=step_tokens)
    named = [replace(device, name=f"cpu:{i}") for i in range(n)]
    links = [replace(fleet.link, device=d.name, shared=True) for d in named]
    return replace(
        fleet,
        device=named[0],
        others=tuple(named[1:]),
        link=links[0],
        other_links=tuple(links[1:]),
    )


def at_random(fleet: FleetSettings, seed: int) -> FleetSettings:
    """Each model on one device, drawn by a seed."""
    drawn, names = random.Random(seed), list(fleet.devices)
    models = (replace(m, devices=(drawn.choice(names),)) for m in fleet.models)
    return replace(fleet, models=tuple(models))


def placements(setting: Setting, n: int, rate: float, seconds: float, rounds: int) -> Any:
    """P95 TTFT and attainment, by placement."""
    seen: dict[str, list[Report]] = {"by the link": [], "at random": []}
    for seed in range(rounds):
        work = long_tail(setting.names, rate, seconds, seed)
        linked = devices(setting, n)
        for row, fleet in (("by the link", linked), ("at random", at_random(linked, seed))):
            seen[row].append(run(fleet, work, row))
    return {
        row: {"p95_ttft": p95_ttft(reports), "attained": attainment(reports, setting)}
        for row, reports in seen.items()
    }


def attainment(reports: Sequence[Report], setting: Setting) -> float:
    """Part of all requests that keep both levels."""
    slos = dict.fromkeys(setting.names, setting.slo)
    return RequestStats.of([r for report in reports for r in report.records], slos).attainment


def contention(setting: Setting) -> dict[str, float]:
    """Part of the summed throughput of two models alone that is lost when both run."""
    found: dict[str, float] = {}
    for row, chunk in CHUNKS.items():
        both = devices(setting, 2, step_tokens=chunk)
        both = replace(both, options={**both.options, "whole": 1})
        pair = [
            replace(m, devices=(d,)) for m, d in zip(both.models[:2], both.devices, strict=True)
        ]

        def per_second(names: Sequence[str], fleet: FleetSettings) -> float:
            work = asked((0.0, name, PROMPT, 1) for name in names for _ in range(PROMPTS))
            report = run(fleet, work, "contention")
            return PROMPTS * len(names) * PROMPT / report.wall_seconds

        fleet = replace(both, models=tuple(pair))
        alone = sum(per_second([m.name], fleet) for m in pair)
        found[row] = 1 - per_second([m.name for m in pair], fleet) / alone
    return found
