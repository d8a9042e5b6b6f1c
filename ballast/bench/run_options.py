"""Resolve the options of a command line and a fleet file: workload, service levels, policy options.

Used by `ballast bench`, `ballast simulate` and `ballast demo`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ballast.bench.report import Report
from ballast.bench.trace_part import TracePart, named_trace
from ballast.core.errors import ConfigError
from ballast.core.kv_tiers import KvTierSettings
from ballast.core.settings import FleetSettings, Slo
from ballast.policy.presets import JOIN, resolve, shared_options
from ballast.workload.bursty import BurstyGroups, bursty_groups
from ballast.workload.generators import independent
from ballast.workload.lengths import LogNormal
from ballast.workload.traces import SESSION_GAP
from ballast.workload.workload import Workload

GENERATORS = ("bursty", "poisson", "gamma")
SPAN = 900.0
"""Seconds of bursty groups (Prism, appendix A.1) that are compressed to the requested time."""

CLUMP_SIZES = 8
"""Most sizes of clumps tried for a number of requests."""

RATE = 2.0
"""Default mean requests per second of a generator."""


def slos_of(fleet: FleetSettings) -> dict[str, Slo]:
    """Service levels by model and adapter."""
    slos = {m.name: m.slo for m in fleet.models}
    return slos | {a.name: a.slo for m in fleet.models for a in m.adapters}


BASELINES = ("lru", "recompute")
"""Presets that another one is compared with by default: what people run today."""


def compared_presets(fleet: FleetSettings, named: str | None) -> list[str]:
    """Return the presets to compare: those of a comma separated list, or by default the baselines,
    in the order of compute of the fleet's preset, and that preset. Raises ConfigError."""
    if named is not None:
        return list(dict.fromkeys(name.strip() for name in named.split(",")))
    own = fleet.preset.partition(JOIN)[0]
    order = resolve(fleet.preset, fleet.options).order
    return [*(f"{name}{JOIN}{order}" for name in BASELINES if name != own), fleet.preset]


TIERS = ("with", "without", "both")


def by_tiers(fleet: FleetSettings, which: str) -> dict[str, FleetSettings]:
    """Return the fleet with its KV tiers, without them, or both, by what is added to the names of
    runs. Raises ConfigError."""
    if which not in TIERS:
        raise ConfigError("--tiers", which, f"use one of {', '.join(TIERS)}")
    if which != "with" and not fleet.kv.host_bytes:
        raise ConfigError("--tiers", which, "the fleet file sets no kv_host")
    bare = replace(fleet, kv=KvTierSettings())
    found = {"": fleet, ", no tiers": bare}
    return found if which == "both" else {"": fleet if which == "with" else bare}


def with_suffix(reports: Iterable[Report], suffix: str) -> list[Report]:
    """Return the reports with a suffix to their names."""
    return [replace(report, name=f"{report.name}{suffix}") for report in reports]


def options_of(fleet: FleetSettings, preset: str) -> dict[str, float]:
    """The fleet's options, for its own preset; those of them that it has, for another one."""
    return fleet.options if preset == fleet.preset else shared_options(preset, fleet.options)


def workload_of(
    what: str | Sequence[str],
    models: Sequence[str],
    *,
    rate: float | None = None,
    seconds: float = 60.0,
    most_tokens: int = 512,
    most_of_traces: int | None = None,
    seed: int = 0,
    groups: BurstyGroups | None = None,
    start: float = 0.0,
    spread: float | None = None,
    session_gap: float | None = None,
    trace_models: Sequence[str] | None = None,
) -> Workload:
    """Generators' workloads, and trace files' with their models mapped by popularity, all at once.

    `rate` in requests per second, on average, of all together, each an equal share of it (None: a
    trace's own, a generator's `RATE`); prompt and output have at most `most_tokens` together, of a
    generator half of it each, of a trace `most_of_traces` (None: the same); `groups` are the knobs
    of `bursty`. Of a trace: from `start` on, in seconds as recorded; `spread`: over all models by a
    power law of that exponent, drawn by `seed`, instead of mapped; `session_gap`, `trace_models`:
    see `TracePart`. Raises ConfigError for a name that is neither, for a `start` behind a trace's
    end, and for what generators do not have.
    """
    for key, value in (("rate", rate), ("seconds", seconds), ("most tokens", most_tokens)):
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(key, value, "positive")
    named = [what] if isinstance(what, str) else list(what)
    files = [named_trace(name) for name in named if name not in GENERATORS]
    asked = {"start": start or None, "spread": spread, "session gap": session_gap}
    _check_traces(named, files, {**asked, "trace models": trace_models})
    share = None if rate is None else rate / len(named)
    made = [
        _generated(name, models, share or RATE, seconds, max(1, most_tokens // 2), seed, groups)
        for name in named
        if name in GENERATORS
    ]
    if files:
        gap = SESSION_GAP if session_gap is None else session_gap
        chosen = None if trace_models is None else tuple(trace_models)
        part = TracePart(seconds, share, start, seed, gap, chosen)
        trace = Workload.apart([part.of(kind, file) for kind, file in files])
        trace = trace.within(most_of_traces or most_tokens)
        spread_out = spread is not None and trace.spread_models(models, spread, seed)
        made.append(spread_out or trace.map_models(models))
    return made[0] if len(made) == 1 else Workload.merge("+".join(w.name for w in made), made)


def _check_traces(
    named: Sequence[str], files: Sequence[tuple[str | None, Path]], asked: Mapping[str, object]
) -> None:
    """Raise ConfigError for a file that is not there, and for what was asked of traces where there
    are none."""
    for _, file in files:
        if not file.is_file():
            allowed = f"a trace file, or one of {', '.join(GENERATORS)}"
            raise ConfigError("workload", str(file), allowed)
    for key, value in asked.items():
        if value is not None and not files:
            raise ConfigError(key, value, f"for traces; {', '.join(named)} has none")


def _generated(
    what: str,
    models: Sequence[str],
    rate: float,
    seconds: float,
    most: int,
    seed: int,
    groups: BurstyGroups | None,
) -> Workload:
    """A generator's workload; `most`: tokens of a prompt, and of an output."""
    lengths = LogNormal.of_cv(max(1.0, most / 4), 1.0, most=most)
    if what != "bursty":
        cv = 1.0 if what == "poisson" else 3.0
        return independent(models, rate, seconds, cv=cv, prompt=lengths, output=lengths, seed=seed)
    return _bursty(models, rate, seconds, lengths, seed, groups or BurstyGroups())


def _bursty(
    models: Sequence[str],
    rate: float,
    seconds: float,
    lengths: LogNormal,
    seed: int,
    knobs: BurstyGroups,
) -> Workload:
    """Bursty groups with exactly `rate * seconds` requests: clumps are scaled until they have as
    many, and the rest is drawn away. Fewer if that fails `CLUMP_SIZES` times."""
    asked = round(rate * seconds)
    size, n = knobs.clump_requests, 0
    for draw in range(CLUMP_SIZES):
        if draw:
            size = max(1.0, size * max(asked / n, 1.05 if n < asked else 0.0))
        made = bursty_groups(
            models,
            SPAN,
            groups=replace(knobs, clump_requests=size),
            prompt=lengths,
            output=lengths,
            seed=seed,
        ).scale_rate(SPAN / seconds)
        n = len(made.requests)
        if draw and n >= asked:
            break
    return _thinned(made, asked, seed)


def _thinned(workload: Workload, most: int, seed: int) -> Workload:
    """At most `most` of the requests, drawn by chance: bursts of one request are the smallest."""
    n = len(workload.requests)
    if n <= most:
        return workload
    kept = sorted(random.Random(seed).sample(range(n), most))
    requests = (workload.requests[i] for i in kept)
    label = f"{most} of {n} requests kept"
    return Workload.of(workload.name, requests, workload.source, (*workload.labels, label))
