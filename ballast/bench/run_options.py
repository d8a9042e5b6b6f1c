"""Resolve the options of a command line and a fleet file: workload, service levels, policy options.

Used by `ballast bench`, `ballast simulate` and `ballast demo`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ballast.core.errors import ConfigError
from ballast.core.settings import FleetSettings, Slo
from ballast.policy.presets import shared_options
from ballast.workload.bursty import BurstyGroups, bursty_groups
from ballast.workload.generators import independent
from ballast.workload.lengths import LogNormal
from ballast.workload.servegen import ServeGenSample
from ballast.workload.traces import detect, load_trace
from ballast.workload.workload import Workload

GENERATORS = ("bursty", "poisson", "gamma")
SPAN = 900.0
"""Seconds of bursty groups (Prism, appendix A.1) that are compressed to the requested time."""

RATE = 2.0
"""Default mean requests per second of a generator."""


def slos_of(fleet: FleetSettings) -> dict[str, Slo]:
    """Service levels by model and adapter."""
    slos = {m.name: m.slo for m in fleet.models}
    return slos | {a.name: a.slo for m in fleet.models for a in m.adapters}


def options_of(fleet: FleetSettings, preset: str) -> dict[str, float]:
    """The fleet's options, for its own preset; those of them that it has, for another one."""
    return fleet.options if preset == fleet.preset else shared_options(preset, fleet.options)


def workload_of(
    what: str,
    models: Sequence[str],
    *,
    rate: float | None = RATE,
    seconds: float = 60.0,
    most_tokens: int = 512,
    seed: int = 0,
    groups: BurstyGroups | None = None,
    start: float = 0.0,
    spread: float | None = None,
) -> Workload:
    """A generator's workload, or a trace file's with its models mapped by popularity.

    `rate` in requests per second, on average (None: a trace's own, a generator's `RATE`); prompts
    and outputs have at most half of `most_tokens` each; `groups` are the knobs of `bursty`. Of a
    trace: from `start` on, in seconds as recorded; `spread`: over all models by a power law of
    that exponent, drawn by `seed`, instead of mapped. Raises ConfigError for a name that is
    neither, for a `start` behind a trace's end, and for what generators do not have.
    """
    for key, value in (("rate", rate), ("seconds", seconds), ("most tokens", most_tokens)):
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(key, value, "positive")
    half = max(1, most_tokens // 2)
    if what not in GENERATORS:
        if not Path(what).is_file():
            raise ConfigError("workload", what, f"a trace file, or one of {', '.join(GENERATORS)}")
        trace = _trace(Path(what), rate, seconds, start, seed)
        trace = trace.scale_lengths(max_prompt=half, max_output=half)
        if spread is not None:
            return trace.spread_models(models, spread, seed)
        return trace.map_models(list(models))
    for key, value in (("start", start or None), ("spread", spread)):
        if value is not None:
            raise ConfigError(key, value, f"for traces; {what} has none")
    rate = RATE if rate is None else rate
    lengths = LogNormal.of_cv(max(1.0, half / 4), 1.0, most=half)
    if what != "bursty":
        cv = 1.0 if what == "poisson" else 3.0
        return independent(models, rate, seconds, cv=cv, prompt=lengths, output=lengths, seed=seed)
    knobs = groups or BurstyGroups()
    size = knobs.clump_requests
    for _ in range(2):
        made = bursty_groups(
            models,
            SPAN,
            groups=replace(knobs, clump_requests=size),
            prompt=lengths,
            output=lengths,
            seed=seed,
        ).scale_rate(SPAN / seconds)
        size = max(1.0, size * rate * seconds / max(1, len(made.requests)))
    return _thinned(made, round(rate * seconds), seed)


def _trace(file: Path, rate: float | None, seconds: float, start: float, seed: int) -> Workload:
    """So many seconds of it at a rate. Client statistics are drawn from, by `seed`."""
    kind = detect(file)
    if kind == "servegen":
        drawn = ServeGenSample(start=start, seconds=seconds, rate=rate, seed=seed)
        return load_trace(file, kind, servegen=drawn)
    trace = load_trace(file, kind)
    if start:
        if start > trace.seconds:
            raise ConfigError("start", start, f"at most {trace.seconds:g}: there the trace ends")
        trace = trace.window(start, math.nextafter(trace.seconds, math.inf))
    if rate is not None:
        recorded = trace.stats().rate
        if not recorded:
            raise ConfigError("rate", rate, "none: all requests of the trace come at one moment")
        trace = trace.scale_rate(rate / recorded)
    return trace.window(0.0, seconds)


def _thinned(workload: Workload, most: int, seed: int) -> Workload:
    """At most `most` of the requests, drawn by chance: bursts of one request are the smallest."""
    n = len(workload.requests)
    if n <= most:
        return workload
    kept = sorted(random.Random(seed).sample(range(n), most))
    requests = (workload.requests[i] for i in kept)
    label = f"{most} of {n} requests kept"
    return Workload.of(workload.name, requests, workload.source, (*workload.labels, label))
