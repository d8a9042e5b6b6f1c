"""Plot runs of one workload as one PNG: attainment of each, above its memory use over time.

Used by `ballast bench` and `ballast demo`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ballast.bench import palette
from ballast.bench.report import LatencyStats, Report
from ballast.bench.tables import percent, seconds
from ballast.bench.timeline import FROM_ABOVE, FROM_BELOW, Band, Timeline, stacked
from ballast.bench.verdict import best_of, slos_text, title_of, unbroken, verdict
from ballast.core.errors import ConfigError
from ballast.core.units import GiB, MiB

# Inches.
WIDTH = 10.0
LEFT, RIGHT, GAP = 1.2, 0.3, 0.3
FIGURES, MEMORY, MARKS, QUEUE = 1.18, 2.15, 0.72, 0.62
"""Heights of the parts of a panel, from above."""
BETWEEN, AXIS, LEGEND = 0.1, 0.42, 0.3
DPI = 180
IN_A_ROW = 4
"""Panels, at most; rows are filled evenly."""
OUTLINED = 20
"""Models, up to which bands are set apart by white lines."""
SHAPES = {"activations": "^", "evictions": "v", "preemptions": "x", "refused requests": "o"}


def plot(reports: Sequence[Report], path: str | Path) -> None:
    """Write `figure_of` one or more reports as a PNG. Raises ConfigError where there are none."""
    figure_of(reports).savefig(path, dpi=DPI, format="png", metadata={"Software": None})


def figure_of(reports: Sequence[Report]) -> Figure:
    """Title, verdict and facts; then a panel for each report, all on the same axes.

    A panel shows attainment, memory (weights from below, KV from the budget down), marks and the
    queue. Raises ConfigError where there are no reports.
    """
    if not reports:
        raise ConfigError("reports", [], "at least one")
    models = sorted({m for r in reports for m in r.models})
    timelines = [Timeline.of(r, models) for r in reports]
    return _Picture(reports, timelines).figure


class _Picture:
    """Lays out panels, from the top left corner, in inches."""

    def __init__(self, reports: Sequence[Report], timelines: Sequence[Timeline]) -> None:
        self.reports, self.timelines = reports, timelines
        rows = ceil(len(reports) / IN_A_ROW)
        self.columns = ceil(len(reports) / rows)
        self.best = best_of(reports)
        self.sampled = any(t.at.size for t in timelines)
        self.panel = FIGURES
        if self.sampled:
            self.panel += MEMORY + MARKS + QUEUE + 2 * BETWEEN + AXIS
        head = self._head()
        self.height = sum(size for _, _, _, size in head) + rows * self.panel + 0.1
        self.height += LEGEND if self.sampled else 0.0
        self.figure = Figure(figsize=(WIDTH, self.height))
        FigureCanvasAgg(self.figure)
        self._write(head)
        self._share_axes()
        top = sum(size for _, _, _, size in head)
        for i, (report, timeline) in enumerate(zip(reports, timelines, strict=True)):
            row, column = divmod(i, self.columns)
            self._panel(report, timeline, column, top + row * self.panel)
        if self.sampled:
            self._legend()

    def _head(self) -> list[tuple[str, float, str, float]]:
        """Lines: text, points, colour, inches that it takes."""
        r = self.reports[0]
        facts = filter(None, (r.workload, f"service levels: {slos_text(r.slos)}"))
        return [
            ("", 1, "", 0.12),
            (title_of(self.reports), 17, palette.INK, 0.4),
            *((line, 11, palette.INK, 0.24) for line in _wrapped(verdict(self.reports), 116)),
            ("", 1, "", 0.06),
            *((line, 8.5, palette.MUTED, 0.19) for fact in facts for line in _wrapped(fact, 158)),
            ("", 1, "", 0.14),
        ]

    def _write(self, head: Sequence[tuple[str, float, str, float]]) -> None:
        top = 0.0
        for text, points, colour, size in head:
            if text:
                weight = "bold" if points > 15 else "normal"
                self._text(0.2, top, text, size=points, color=colour, weight=weight, va="top")
            top += size

    def _share_axes(self) -> None:
        """One scale for all panels."""
        largest = max((t.budget for t in self.timelines), default=0.0)
        self.unit, self.size = ("GiB", GiB) if largest >= 10 * GiB else ("MiB", MiB)
        self.most_memory = max(largest / self.size, 1e-9)
        self.last = max(r.wall_seconds for r in self.reports)
        longest = max((float(t.waiting.max(initial=0)) for t in self.timelines), default=0.0)
        self.most_waiting = max(longest, 1.0)

    def _panel(self, report: Report, timeline: Timeline, column: int, top: float) -> None:
        width = (WIDTH - LEFT - RIGHT - (self.columns - 1) * GAP) / self.columns
        left = LEFT + column * (width + GAP)
        self._figures(report, left, top)
        if not self.sampled:
            return
        top += FIGURES
        memory = self._axes(left, top, width, MEMORY)
        top += MEMORY + BETWEEN
        marks = self._axes(left, top, width, MARKS)
        top += MARKS + BETWEEN
        queue = self._axes(left, top, width, QUEUE)
        self._memory(memory, timeline)
        self._marks(marks, timeline, labelled=column == 0)
        self._queue(queue, timeline)
        for axes in (memory, marks, queue):
            axes.set_xlim(0, self.last)
            axes.tick_params(labelbottom=axes is queue)
            if column:
                axes.tick_params(labelleft=False)
        if column == 0:
            memory.set_ylabel(f"memory, {self.unit}", size=8.5, color=palette.INK)
            queue.set_ylabel("waiting\nrequests", size=8.5, color=palette.INK)
        queue.set_xlabel("seconds", size=8.5, color=palette.MUTED, labelpad=1)

    def _figures(self, report: Report, left: float, top: float) -> None:
        """Attainment as large as it matters."""
        total, best = report.total, report.name in self.best
        colour = palette.BEST if best else palette.INK
        self._text(left, top, report.name, size=12, weight="bold", color=colour, va="top")
        self._text(
            left, top + 0.2, percent(total.attainment), size=25, weight="bold", color=colour,
            va="top",
        )  # fmt: skip
        counts = f"{total.attained} of {total.requests} in service level"
        late = f"P99: TTFT {_p99(total.ttft)}, TPOT {_p99(total.tpot)}"
        self._text(left, top + 0.66, counts, size=8.5, color=palette.MUTED, va="top")
        self._text(left, top + 0.83, late, size=8.5, color=palette.MUTED, va="top")

    def _memory(self, axes: Axes, timeline: Timeline) -> None:
        axes.set_ylim(0, self.most_memory)
        axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        many = len({b.model for b in (*timeline.below, *timeline.above)})
        edge = 0.35 if many <= OUTLINED else 0.0
        budget, end = timeline.budget / self.size, timeline.at[-1:]
        axes.fill_between([0, *end], budget, color=palette.EMPTY, linewidth=0)

        def fill(bands: Sequence[Band], hang: bool) -> None:
            shades: dict[str, int] = {}
            for band, (lower, upper) in zip(bands, stacked(bands), strict=True):
                shade = shades[band.use] = shades.get(band.use, 0) + 1
                colour = palette.tint(palette.USES[band.use], 0.0 if shade % 2 else 0.22)
                low, high = lower / self.size, upper / self.size
                if hang:
                    low, high = budget - high, budget - low
                axes.fill_between(
                    timeline.at, low, high, step="post", color=colour, edgecolor="white",
                    linewidth=edge if band.use == "weights" else 0.0,
                )  # fmt: skip

        fill(timeline.below, hang=False)
        fill(timeline.above, hang=True)
        axes.plot([0, *end], [budget] * (1 + end.size), color=palette.INK, linewidth=0.9)

    def _marks(self, axes: Axes, timeline: Timeline, labelled: bool) -> None:
        rows = list(palette.MARKS)
        for row, kind in enumerate(rows):
            times = timeline.marks[kind]
            axes.scatter(
                times, [row] * len(times), s=13, marker=SHAPES[kind], color=palette.MARKS[kind],
                alpha=0.8, linewidths=0.9 if SHAPES[kind] == "x" else 0.0, clip_on=False,
            )  # fmt: skip
            axes.text(
                1.0, row, f" {len(times)}", transform=axes.get_yaxis_transform(), size=7,
                color=palette.MUTED, va="center", ha="left",
            )  # fmt: skip
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_yticks(range(len(rows)), rows if labelled else [""] * len(rows))
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x", visible=False)

    def _queue(self, axes: Axes, timeline: Timeline) -> None:
        axes.fill_between(
            timeline.at, timeline.waiting, step="post", color=palette.MUTED, linewidth=0
        )
        axes.set_ylim(0, self.most_waiting * 1.05)
        axes.yaxis.set_major_locator(MaxNLocator(2, integer=True))

    def _legend(self) -> None:
        there = {use for t in self.timelines for use in t.uses}
        shown = [use for use in (*FROM_BELOW, *FROM_ABOVE) if use in there]
        patches = [
            Patch(facecolor=palette.USES[use], label=palette.USE_NAMES[use]) for use in shown
        ]
        free = Patch(facecolor=palette.EMPTY, edgecolor="#aab3bf", label=palette.USE_NAMES["free"])
        self.figure.legend(
            handles=[*patches, free], loc="lower center", ncols=len(patches) + 1, frameon=False,
            fontsize=9, handlelength=1.1, handleheight=1.0, columnspacing=1.6,
            bbox_to_anchor=(0.5, 0.08 / self.height),
        )  # fmt: skip

    def _axes(self, left: float, top: float, width: float, height: float) -> Axes:
        box = (
            left / WIDTH,
            1 - (top + height) / self.height,
            width / WIDTH,
            height / self.height,
        )
        axes = self.figure.add_axes(box)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        for side in ("bottom", "left"):
            axes.spines[side].set_color("#aab3bf")
        axes.tick_params(labelsize=8, colors=palette.MUTED, length=2.5)
        axes.xaxis.set_major_locator(MaxNLocator(5 if self.columns < 3 else 4, integer=True))
        return axes

    def _text(self, left: float, top: float, text: str, **style: Any) -> None:
        self.figure.text(left / WIDTH, 1 - top / self.height, text, **style)


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(unbroken(text), width)


def _p99(spread: LatencyStats | None) -> str:
    return "-" if spread is None else seconds(spread.p99)
