"""Compare runs of one workload in words: the one with most requests in time, and the margins.

Every statement follows from the reports; a difference is given in requests and in percentage
points, so that a reader sees how small it may be.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ballast.bench.report import Report
from ballast.bench.tables import percent, seconds
from ballast.core.settings import Slo
from ballast.core.units import format_bytes


def verdict(reports: Sequence[Report]) -> str:
    """One or two sentences; of a single run what it attained."""
    if len(reports) == 1:
        return _alone(reports[0])
    ranked = sorted(reports, key=lambda r: -r.total.attainment)
    best = ranked[0].total.attainment
    leaders = [r for r in ranked if r.total.attainment == best]
    others = ranked[len(leaders) :]
    if not others:
        return _level(ranked)
    called = _names(reports)
    names = listed([called[r.name] for r in leaders])
    first = leaders[0].total
    serve = "each serve" if len(leaders) > 1 else "serves"
    margins = [
        f"{_margin(leaders[0], r)} {called[r.name]} ({percent(r.total.attainment)})" for r in others
    ]
    head = f"{names} {serve} {percent(best)} of {first.requests} requests within service"
    return f"{head} levels, {listed(margins)}.{_besides(leaders[0], ranked[-1], reports)}"


def unbroken(text: str) -> str:
    """`text` with spaces between numbers and their units that end no line."""
    return re.sub(r"(?<=\d) (?=%|(?:s|ms|us)\b)", "\N{NO-BREAK SPACE}", text)


def best_of(reports: Sequence[Report]) -> frozenset[str]:
    """Names of the runs that attained most; none where all attained the same."""
    shares = {r.name: r.total.attainment for r in reports}
    best = max(shares.values())
    if min(shares.values()) == best:
        return frozenset()
    return frozenset(name for name, share in shares.items() if share == best)


def slos_text(slos: Mapping[str, Slo]) -> str:
    """The service levels of all models in words; as ranges where models differ."""
    if not slos:
        return "no service levels"
    ttft = _range([slo.ttft for slo in slos.values()])
    tpot = _range([slo.tpot for slo in slos.values()])
    text = f"first token within {ttft}, then at most {tpot} per token"
    return text if len(set(slos.values())) == 1 else f"{text}, by model"


def memory_text(report: Report) -> str:
    """Budget and devices, as `150MiB on cpu:0`; empty where memory was not sampled."""
    if not report.memory:
        return ""
    devices = report.memory[0].devices
    budget = format_bytes(sum(report.memory[0].owners.values()))
    return f"{budget} on " + (
        next(iter(devices)) if len(devices) == 1 else f"{len(devices)} devices"
    )


def title_of(reports: Sequence[Report]) -> str:
    """Return a title such as `8 models in 150MiB on cpu:0`."""
    models = len({m for r in reports for m in r.models})
    memory = next((text for r in reports if (text := memory_text(r))), "")
    return " in ".join(filter(None, (f"{models} model{'s' * (models != 1)}", memory)))


def _alone(report: Report) -> str:
    total = report.total
    text = f"{report.name} serves {percent(total.attainment)} of {total.requests} requests within"
    text += " service levels"
    requested = {name: served for name, served in report.models.items() if served.requests}
    if len(requested) < 2:
        return text + "."
    name, worst = min(requested.items(), key=lambda item: item[1].attainment)
    if worst.attainment == max(served.attainment for served in requested.values()):
        return f"{text}, the same share of every model's."
    return f"{text}; least of {name}, {percent(worst.attainment)}."


def _level(reports: Sequence[Report]) -> str:
    total = reports[0].total
    called = _names(reports)
    names = listed([called[r.name] for r in reports])
    text = f"No difference: {names} each serve {percent(total.attainment)} of {total.requests}"
    return f"{text} requests within service levels. This load does not tell them apart."


def _margin(best: Report, other: Report) -> str:
    """How much less `other` attained."""
    points = 100 * (best.total.attainment - other.total.attainment)
    text = f"{points:.1f} points" if points >= 0.05 else "less than 0.1 points"
    if best.total.requests == other.total.requests:
        n = best.total.attained - other.total.attained
        text += f" or {n} request{'s' * (n != 1)}"
    return f"{text} more than"


def _besides(best: Report, last: Report, reports: Sequence[Report]) -> str:
    """How many requests failed; if none did, P99 of TTFT of both ends of the ranking.

    Latencies are those of answered requests: a run that refuses many would look fast.
    """
    called = _names(reports)
    failed = [f"{r.total.failed} under {called[r.name]}" for r in reports if r.total.failed]
    if failed:
        return f" Requests that failed: {listed(failed)}."
    a, b = best.total.ttft, last.total.ttft
    if a is None or b is None:
        return ""
    text = f" P99 of the time to the first token: {called[best.name]} {seconds(a.p99)}"
    return f"{text}, {called[last.name]} {seconds(b.p99)}."


def _names(reports: Sequence[Report]) -> dict[str, str]:
    """Names of runs in sentences: `balloon, live` without the parts that all have in common, and
    otherwise in quotes, since their commas would divide a list."""
    parts = {r.name: r.name.partition(", ") for r in reports}
    if len({how for *_, how in parts.values()}) == 1:
        return {name: preset for name, (preset, *_) in parts.items()}
    return {name: f"“{name}”" if how else name for name, (*_, how) in parts.items()}


def _range(values: Sequence[float]) -> str:
    low, high = seconds(min(values)), seconds(max(values))
    return low if low == high else f"{low} to {high}"


def listed(parts: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    *head, last = parts
    return f"{', '.join(head)} and {last}" if head else last
