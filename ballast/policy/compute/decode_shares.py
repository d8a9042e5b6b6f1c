"""Find the smallest part of a device's compute on which a model's decode steps serve its rate.

MuxServe (Duan et al., 2024), section 3.2, Algorithm 2, by Equation 3 (`policy.fleet.mux_estimate`)
and the traffic and costs seen so far. Used by the compute policy `adbs`; `policy.fleet
.mux_placement` runs the same search before anything is placed.
"""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean

from ballast.core.compute import WorkView
from ballast.core.cost import StepCosts, Traffic
from ballast.policy.fleet.mux_estimate import Tenant, estimate
from ballast.policy.fleet.mux_placement import ENOUGH

REACH = 2.0
"""Part of the memory bandwidth that a decode step reaches, over its part of the compute: on an A100
with 30 and 50 % of its multiprocessors, by MuxServe's published profile."""


def least_parts(work: WorkView, parts: int) -> int:
    """Return the fewest of a device's `parts` equal parts of compute on which a model, alone with
    its prefills on the whole device, serves the rate of its recent requests within the pace that
    they allow; all parts if none of them is enough."""
    traffic = _traffic(work)
    pace = min((d.pace for d in work.decodes), default=math.inf)

    def costs(devices: int, share: float) -> StepCosts:
        return on_share(work.costs, share)

    tenant = Tenant(work.model, 0.0, 0.0, traffic, pace, costs)
    for n in range(1, parts):
        found = estimate([tenant], {work.model: n / parts}, 1, 0.0)
        if found is not None and found[work.model].rate >= ENOUGH * traffic.rate:
            return n
    return parts


def on_share(costs: StepCosts, share: float) -> StepCosts:
    """Estimate job costs on a share of a device's compute (above 0, at most 1): arithmetic runs at
    that share, reading at up to `REACH` times it."""
    reading = min(1.0, REACH * share)
    return replace(
        costs,
        base=costs.base / reading,
        hidden=costs.hidden / reading,
        per_context=costs.per_context / reading,
        per_token=costs.per_token / share,
        per_sequence=costs.per_sequence / share,
        per_pair=costs.per_pair / share,
        per_tile=costs.per_tile / share,
        expert_reading=costs.expert_reading / reading,
    )


def _traffic(work: WorkView) -> Traffic:
    """Return the traffic seen, with the outputs expected of present requests while none has
    ended."""
    seen = work.traffic
    if seen.output_tokens or not work.decodes:
        return seen
    return replace(seen, output_tokens=fmean(d.generated + d.outputs for d in work.decodes))
