"""Simulations as one page of HTML that needs nothing else: tables, and pictures as inline SVG."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from html import escape

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from ballast.bench.clusters import ClusterRun
from ballast.bench.plot import distribution, memory
from ballast.bench.report import Served, Spread
from ballast.bench.show import percent, seconds
from ballast.core.units import format_bytes

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2430; max-width: 68rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
p.what { color: #556; } svg { width: 100%; height: auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #e3e6ec; }
th:first-child, td:first-child { text-align: left; } thead th { border-bottom: 2px solid #9aa5b5; }
"""
_LATENCIES: tuple[tuple[str, Callable[[Served], Spread | None]], ...] = (
    ("TTFT", lambda s: s.ttft),
    ("TPOT", lambda s: s.tpot),
)


def page(title: str, what: Sequence[str], runs: Sequence[ClusterRun]) -> str:
    """`what`: sentences on what was run. Equal runs give equal pages."""
    said = "".join(f'<p class="what">{escape(line)}</p>' for line in what)
    parts = [
        f"<h1>{escape(title)}</h1>{said}",
        "<h2>Presets side by side</h2>" + _sides(runs),
        "<h2>Latencies: share of all requests below a time</h2>" + _latencies(runs),
        "<h2>Share of requests in SLO, by model</h2>" + _models(runs),
        "<h2>Memory of all devices over time</h2>" + _memories(runs),
        *(f"<h2>Devices under {escape(r.report.name)}</h2>" + _devices(r) for r in runs),
    ]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    view = '<meta name="viewport" content="width=device-width">'
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}{view}</head>\n<body>{body}</body></html>\n'
    )


def _sides(runs: Sequence[ClusterRun]) -> str:
    rows: list[list[str]] = []

    def row(name: str, cell: Callable[[ClusterRun], str]) -> None:
        rows.append([_cell(name), *(_cell(cell(r)) for r in runs)])

    row("in SLO", lambda r: percent(r.report.total.attainment))
    row("in SLO, worst model", lambda r: percent(r.report.worst_attainment))
    row("answered", lambda r: str(r.report.total.answered))
    row("failed", lambda r: str(r.report.total.failed))
    row("output tokens/s", lambda r: f"{r.report.output_tokens_per_second:.1f}")
    for name, of in _LATENCIES:
        for part in ("p50", "p90", "p99"):
            row(f"{name} {part}", lambda r, of=of, part=part: _part(of(r.report.total), part))  # type: ignore[misc]
    for what in ("activations", "evictions", "preemptions"):
        row(what, lambda r, what=what: str(r.total(what)))  # type: ignore[misc]
    row("models placed", lambda r: str(r.placed))
    row("models withdrawn", lambda r: str(r.withdrawn))
    return _table(["", *(r.report.name for r in runs)], rows)


def _models(runs: Sequence[ClusterRun]) -> str:
    """A row per model, shaded by attainment, with latencies under each preset."""
    names = sorted(runs[0].report.models)
    head = ["model", "requests"]
    for run in runs:
        head += [run.report.name, "TTFT p99", "TPOT p99"]
    rows = []
    for name in names:
        row = [_cell(name), _cell(str(runs[0].report.models[name].requests))]
        for run in runs:
            served = run.report.models[name]
            row.append(_shaded(served) if served.requests else _cell("-"))
            row += [_cell(_part(of(served), "p99")) for _, of in _LATENCIES]
        rows.append(row)
    return _table(head, rows)


def _devices(run: ClusterRun) -> str:
    counted = ("jobs", "activations", "evictions", "preemptions")
    rows = [
        [
            _cell(name),
            _cell(format_bytes(told["memory_bytes"])),
            _cell(format_bytes(told["weights_bytes"])),
            *(_cell(str(told[what])) for what in counted),
            _cell(", ".join(told["models"])),
        ]
        for name, told in run.devices.items()
    ]
    return _table(["device", "memory", "weights of its models", *counted, "models"], rows)


def _latencies(runs: Sequence[ClusterRun]) -> str:
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    reports = [r.report for r in runs]
    axes = figure.subplots(1, 2)
    distribution(axes[0], reports, "time to first token, s", lambda r: r.ttft)
    distribution(axes[1], reports, "time per output token, s", lambda r: r.tpot)
    return _svg(figure)


def _memories(runs: Sequence[ClusterRun]) -> str:
    figure = Figure(figsize=(11, 2.6 * len(runs)), layout="constrained")
    for axes, run in zip(figure.subplots(len(runs), squeeze=False)[:, 0], runs, strict=True):
        memory(axes, run.report)
    return _svg(figure)


def _svg(figure: Figure) -> str:
    """The `<svg>` element alone, with text as text, and nothing that differs between runs."""
    FigureCanvasSVG(figure)
    drawn = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "ballast"}):
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    text = drawn.getvalue()
    return text[text.index("<svg") :]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """`rows` of cells that are HTML already."""
    top = "".join(f"<th>{escape(h)}</th>" for h in head)
    body = "\n".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return (
        f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _cell(text: str) -> str:
    return f"<td>{escape(text)}</td>"


def _shaded(served: Served) -> str:
    """Redder the more requests missed their service level; half of them is as red as it gets."""
    missed = min(1.0, 2 * (1 - served.attainment))
    colour = f"hsl(8 80% {98 - 22 * missed:.0f}%)"
    return f'<td style="background:{colour}">{percent(served.attainment)}</td>'


def _part(spread: Spread | None, part: str) -> str:
    return "-" if spread is None else seconds(getattr(spread, part))
