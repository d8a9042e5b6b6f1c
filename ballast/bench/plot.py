"""Reports as one picture: latency distributions, attainment per model, memory over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ballast.bench.record import RequestRecord
from ballast.bench.report import Report
from ballast.core.errors import ConfigError
from ballast.core.units import GiB, MiB

POINTS = 400
"""Of a curve."""


def plot(reports: Sequence[Report], path: str | Path) -> None:
    """Write a PNG of one or more reports, told apart by their names."""
    if not reports:
        raise ConfigError("reports", [], "at least one")
    with_memory = [r for r in reports if r.memory]
    rows = 2 + len(with_memory)
    figure = Figure(figsize=(12, 3.6 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(rows, 3)
    latencies: tuple[tuple[str, Callable[[RequestRecord], float | None]], ...] = (
        ("time to first token, s", lambda r: r.ttft),
        ("time per output token, s", lambda r: r.tpot),
        ("end to end, s", lambda r: r.e2e),
    )
    for column, (label, of) in enumerate(latencies):
        distribution(figure.add_subplot(grid[0, column]), reports, label, of)
    _attainment(figure.add_subplot(grid[1, :]), reports)
    for row, report in enumerate(with_memory, start=2):
        memory(figure.add_subplot(grid[row, :]), report)
    figure.savefig(path, dpi=110, format="png")


def distribution(
    axes: Axes,
    reports: Sequence[Report],
    label: str,
    of: Callable[[RequestRecord], float | None],
) -> None:
    """Share of all requests below a latency: curves of runs with failures end below 1."""
    for report in reports:
        values = sorted(v for r in report.records if r.answered and (v := of(r)) is not None)
        if values:
            # Every one of a few, else as many as a picture can show; the last among them.
            at = np.unique(np.linspace(0, len(values) - 1, POINTS).round().astype(int))
            shares = (at + 1) / len(report.records)
            shown = np.maximum(np.array(values)[at], 1e-4)
            axes.step(shown, shares, where="post", label=report.name)
    axes.set_xscale("log")
    axes.tick_params(axis="x", which="both", labelsize=7, labelrotation=30)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel(label)
    axes.set_ylabel("share of requests")
    axes.grid(alpha=0.3)
    if axes.get_lines():
        axes.legend(fontsize="small")


def _attainment(axes: Axes, reports: Sequence[Report]) -> None:
    models = sorted({m for r in reports for m in r.models})
    names = [*models, "all"]
    width = 0.8 / len(reports)
    for place, report in enumerate(reports):
        shares = [report.models[m].attainment if m in report.models else 0.0 for m in models]
        shares.append(report.total.attainment)
        offset = (place - (len(reports) - 1) / 2) * width
        axes.bar(np.arange(len(names)) + offset, shares, width, label=report.name)
    axes.set_xticks(np.arange(len(names)), names, rotation=20, ha="right", fontsize="small")
    axes.set_ylim(0, 1.02)
    axes.set_ylabel("share in SLO")
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))


def memory(axes: Axes, report: Report) -> None:
    """Owners stacked over time; free memory is what is left white."""
    owners = sorted({o for s in report.memory for o in s.owners if o != "free"}, key=_order)
    times = [s.at for s in report.memory]
    totals = [sum(s.owners.values()) for s in report.memory]
    unit, size = ("GiB", GiB) if max(totals) >= 10 * GiB else ("MiB", MiB)
    series = [[s.owners.get(o, 0) / size for s in report.memory] for o in owners]
    axes.stackplot(times, series, labels=owners, colors=_colours(owners), step="post")
    whole = [n / size for n in totals]
    axes.step(times, whole, where="post", color="black", linewidth=0.8, label="all, with free")
    axes.set_xlabel("seconds")
    axes.set_ylabel(f"{unit}, {report.name}")
    axes.legend(fontsize="x-small", ncols=2, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _order(owner: str) -> tuple[str, int, str]:
    """What is no model's first, then each model's weights and KV together."""
    kind, _, model = owner.partition(":")
    return (model, _SHADES[kind], kind) if kind in _SHADES else ("", 0, owner)


_SHADES = {"slots": 0, "weights": 0, "kv": 1}
"""Of a model's colour pair: weights dark, KV light."""


def _colours(owners: Sequence[str]) -> list[tuple[float, float, float, float]]:
    models: dict[str, int] = {}
    colours = []
    for n, owner in enumerate(owners):
        kind, _, model = owner.partition(":")
        if kind in _SHADES:
            place = models.setdefault(model, len(models))
            colours.append(colormaps["tab20"]((2 * place + _SHADES[kind]) % 20))
        else:
            colours.append(colormaps["Greys"](0.5 + 0.1 * (n % 4)))
    return colours
