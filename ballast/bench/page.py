"""Write runs of one workload as a self-contained HTML page: pictures, verdict and tables.

Used by `ballast bench` and `ballast simulate`. Equal runs give equal pages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from html import escape
from importlib.resources import files

from ballast.bench.cluster_run import ClusterRun
from ballast.bench.page_data import MARKED, devices_of, page_data
from ballast.bench.report import LatencyStats, Report, RequestStats
from ballast.bench.sample import DecisionRecord
from ballast.bench.tables import percent, seconds
from ballast.bench.verdict import best_of, memory_text, slos_text, unbroken, verdict
from ballast.core.units import format_bytes

_LATENCIES: tuple[tuple[str, Callable[[RequestStats], LatencyStats | None]], ...] = (
    ("TTFT", lambda s: s.ttft),
    ("TPOT", lambda s: s.tpot),
)
_LISTED = 200
"""Decisions of a run that are listed in words."""


def page(
    title: str, facts: Sequence[str], reports: Sequence[Report], clusters: Sequence[ClusterRun] = ()
) -> str:
    """Return a whole HTML document. `facts`: sentences that describe the runs; `clusters`: device
    data of simulations. Equal runs give equal pages."""
    lines = [*facts, f"Service levels: {slos_text(reports[0].slos)}."]
    if memory := next((text for r in reports if (text := memory_text(r))), ""):
        lines.append(f"Memory: {memory}.")
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="verdict">{escape(unbroken(verdict(reports)))}</p>',
        *(f'<p class="facts">{escape(line)}</p>' for line in lines),
        _cards(reports),
        _memory(reports),
        "<h2>Presets side by side</h2>" + _sides(reports, clusters),
        "<h2>Latencies</h2><p class='note'>Share of all requests below a time; failed requests "
        "keep a curve below 100 %. Dashed upright lines: service levels.</p>"
        '<div class="pair" id="latencies"></div>',
        "<h2>Models</h2><p class='note'>Memory over time on one scale for each model (full: "
        "weights, lighter: KV, lightest: cached prefixes), and its requests in service level.</p>"
        '<div id="models"></div>',
        "<details><summary>Models in numbers</summary>" + _models(reports) + "</details>",
        *(_devices(run) for run in clusters),
        *(_decisions(r) for r in reports if r.decisions),
    ]
    data = json.dumps(page_data(title, reports), separators=(",", ":")).replace("<", "\\u003c")
    return "\n".join(
        (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            f"<title>{escape(title)}</title>",
            '<meta name="viewport" content="width=device-width">',
            f"<style>{_file('page.css')}</style></head>\n<body><main>",
            *parts,
            '</main><div id="tip" role="status"></div>',
            f'<script type="application/json" id="data">{data}</script>',
            f"<script>{_file('page.js')}</script></body></html>\n",
        )
    )


def _file(name: str) -> str:
    return (files("ballast.bench") / name).read_text(encoding="utf-8")


def _cards(reports: Sequence[Report]) -> str:
    best = best_of(reports)
    cards = []
    for r in reports:
        total = r.total
        lines = (
            f"{total.attained} of {total.requests} in service level",
            f"worst model {percent(r.worst_attainment)}",
            *(f"{name} P99 {_part(of(total), 'p99')}" for name, of in _LATENCIES),
        )
        small = "".join(f"<small>{escape(unbroken(line))}</small>" for line in lines)
        kind = "card best" if r.name in best else "card"
        share = f'<span class="share">{percent(total.attainment)}</span>'
        cards.append(f'<div class="{kind}"><b>{escape(r.name)}</b>{share}{small}</div>')
    return f'<div class="cards">{"".join(cards)}</div>'


def _memory(reports: Sequence[Report]) -> str:
    """The frame of the panels, which `page.js` draws."""
    devices = devices_of(reports)
    choice = ""
    if len(devices) > 1:
        names = "".join(f"<option>{escape(d)}</option>" for d in devices)
        choice = f'<label>device <select id="device"><option value="">all {len(devices)}</option>'
        choice += f"{names}</select></label>"
    return (
        "<h2>Memory, decisions and queue over time</h2>"
        "<p class='note'>Weights grow from below, KV hangs from the budget (the line above); what "
        "is between them is free. Pages that one gives up can be the other's. Point at a moment "
        "for its values.</p>"
        f'<div class="controls">{choice}<label>colours <select id="view">'
        '<option value="use">by use</option><option value="model">by model</option>'
        "</select></label></div>"
        '<div class="legend" id="legend"></div><div id="panels"></div>'
        "<noscript><p>Pictures are drawn by a script on this page, which is off.</p></noscript>"
    )


def _sides(reports: Sequence[Report], clusters: Sequence[ClusterRun]) -> str:
    rows: list[list[str]] = []

    def row(name: str, cell: Callable[[Report], str]) -> None:
        rows.append([_cell(name), *(_cell(cell(r)) for r in reports)])

    row("in SLO", lambda r: percent(r.total.attainment))
    row("in SLO, worst model", lambda r: percent(r.worst_attainment))
    row("answered", lambda r: str(r.total.answered))
    row("failed", lambda r: str(r.total.failed))
    row("output tokens/s", lambda r: f"{r.output_tokens_per_second:.1f}")
    for name, of in _LATENCIES:
        for part in ("p50", "p90", "p99"):
            row(f"{name} {part}", lambda r, of=of, part=part: _part(of(r.total), part))  # type: ignore[misc]
    if clusters:
        for what in ("activations", "evictions", "preemptions"):
            rows.append([_cell(what), *(_cell(str(c.total(what))) for c in clusters)])
        for moved in ("placed", "withdrawn"):
            rows.append(
                [_cell(f"models {moved}"), *(_cell(str(getattr(c, moved))) for c in clusters)]
            )
    return _table(["", *(r.name for r in reports)], rows)


def _models(reports: Sequence[Report]) -> str:
    """A row per model, shaded by attainment, with latencies under each preset."""
    names = sorted(reports[0].models)
    head = ["model", "requests"]
    for report in reports:
        head += [report.name, "TTFT p99", "TPOT p99"]
    rows = []
    for name in names:
        row = [_cell(name), _cell(str(reports[0].models[name].requests))]
        for report in reports:
            served = report.models[name]
            row.append(_shaded(served) if served.requests else _cell("-"))
            row += [_cell(_part(of(served), "p99")) for _, of in _LATENCIES]
        rows.append(row)
    return _table(head, rows)


def _devices(run: ClusterRun) -> str:
    counted = ("jobs", "activations", "evictions", "preemptions")
    rows = [
        [
            _cell(name),
            _cell(format_bytes(did["memory_bytes"])),
            _cell(format_bytes(did["weights_bytes"])),
            *(_cell(str(did[what])) for what in counted),
            _cell(", ".join(did["models"])),
        ]
        for name, did in run.devices.items()
    ]
    table = _table(["device", "memory", "weights of its models", *counted, "models"], rows)
    return f"<h2>Devices under {escape(run.report.name)}</h2>{table}"


def _decisions(report: Report) -> str:
    rows = [_decision(d) for d in report.decisions[:_LISTED]]
    n = len(report.decisions)
    note = f"the first {len(rows)} of {n}" if n > len(rows) else str(n)
    if n > MARKED:
        note += f"; pictures show the first {MARKED}"
    head = ["at", "decision", "model", "device", "why"]
    table = _table(head, rows).replace("<table>", '<table class="words">')
    name = escape(report.name)
    return f"<details><summary>Decisions under {name} ({note})</summary>{table}</details>"


def _decision(d: DecisionRecord) -> list[str]:
    why = d.why if d.refused is None else f"{d.why} (not done: {d.refused})"
    return [_cell(text) for text in (f"{d.at:.2f} s", d.action, d.model, d.device, why)]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """`rows` of cells that are HTML already."""
    top = "".join(f"<th>{escape(h)}</th>" for h in head)
    body = "\n".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return (
        f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _cell(text: str) -> str:
    return f"<td>{escape(text)}</td>"


def _shaded(served: RequestStats) -> str:
    """Redder the more requests missed their service level; half of them is as red as it gets."""
    missed = min(1.0, 2 * (1 - served.attainment))
    colour = f"hsl(8 80% {98 - 22 * missed:.0f}%)"
    return f'<td style="background:{colour}">{percent(served.attainment)}</td>'


def _part(spread: LatencyStats | None, part: str) -> str:
    return "-" if spread is None else seconds(getattr(spread, part))
