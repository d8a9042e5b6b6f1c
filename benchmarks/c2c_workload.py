"""Arrivals of `c2c_live`: the long tail of a public trace, with the lengths of another one.

The trace of many models is of an image service (Alibaba's GenTD26), so it has no tokens; lengths
are those of Azure's conversations, made shorter for small models. Any such mix is synthetic, and
its label says so. Where the traces are not at hand, a power law stands in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ballast.workload.generators import independent
from ballast.workload.lengths import LogNormal
from ballast.workload.traces import load_trace
from ballast.workload.workload import Workload, WorkloadRequest
from benchmarks.arbiter_workloads import TRACES

TAIL = "gentd26_lora_requests_20241115-20241201.csv.gz"
LENGTHS = "azure2023_conv_until1845.csv.gz"
SHORTER = (24, 9)
"""By what Azure's prompts and outputs are divided: means of 52 and 25 tokens are left."""
LONGEST_PROMPT, LONGEST_OUTPUT = 224, 96
PROMPTS = LogNormal.of_cv(52.0, 0.8, LONGEST_PROMPT)
OUTPUTS = LogNormal.of_cv(25.0, 0.8, LONGEST_OUTPUT)
"""Lengths where there is no trace."""
ALPHA = 1.5
"""Of the power law: the first model gets half of the requests."""


def long_tail(names: Sequence[str], rate: float, seconds: float, seed: int) -> Workload:
    """Return `rate * seconds` requests of the windows with the most models, `seed` 0 the one with
    most; the image service's time runs as much faster as that needs."""
    n = max(2, round(rate * seconds))
    if not all((TRACES / file).is_file() for file in (TAIL, LENGTHS)):
        return independent(
            names, rate, seconds, alpha=ALPHA, prompt=PROMPTS, output=OUTPUTS, seed=seed
        ).labelled("synthetic: a power law")
    tail, lengths = load_trace(TRACES / TAIL), load_trace(TRACES / LENGTHS)
    part = window(tail.requests, n, seed)
    start, end = part[0].at, part[-1].at
    taken = lengths.requests[seed * n :][:n]
    made = (
        replace(
            r,
            at=(r.at - start) * seconds / max(end - start, 1.0),
            prompt_tokens=min(LONGEST_PROMPT, max(4, of.prompt_tokens // SHORTER[0])),
            output_tokens=min(LONGEST_OUTPUT, max(2, of.output_tokens // SHORTER[1])),
            session=None,
        )
        for r, of in zip(part, taken, strict=True)
    )
    faster = (end - start) / seconds
    label = f"synthetic mix: {faster:.0f} times faster, lengths of {lengths.name} made shorter"
    return Workload.of("long tail", made, tail.source, (label,)).map_models(names)


def window(requests: Sequence[WorkloadRequest], n: int, rank: int) -> Sequence[WorkloadRequest]:
    """Return the window of `n` requests that is at `rank` by its number of models; windows follow
    each other."""
    parts = [requests[i : i + n] for i in range(0, len(requests) - n + 1, n)]
    ranked = sorted(parts, key=lambda part: (-len({r.model for r in part}), part[0].at))
    return ranked[rank % len(ranked)]
