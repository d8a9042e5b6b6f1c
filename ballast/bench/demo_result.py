"""Tabulate the results of `ballast demo`: each preset's attainment, live and in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from ballast.bench.report import Report
from ballast.bench.tables import percent, seconds
from ballast.bench.verdict import listed


@dataclass(frozen=True, slots=True)
class PresetResult:
    """One preset."""

    live: Report
    virtual: Report

    @property
    def preset(self) -> str:
        return self.live.name

    @property
    def difference(self) -> float:
        """Attainment live less that in virtual time, in percentage points."""
        return 100 * (self.live.total.attainment - self.virtual.total.attainment)


def result_table(results: Sequence[PresetResult]) -> Table:
    """A row per preset; fits 80 columns."""
    table = Table(title="requests within their service levels")
    table.add_column("preset")
    columns = ("live", "virtual", "points", "worst model", "refused", "TTFT p50", "p90")
    for column in columns:
        table.add_column(column, justify="right")
    for result in results:
        live = result.live
        ttft = live.total.ttft
        table.add_row(
            result.preset,
            percent(live.total.attainment),
            percent(result.virtual.total.attainment),
            f"{result.difference:+.0f}",
            percent(live.worst_attainment),
            str(live.total.failed),
            "-" if ttft is None else seconds(ttft.p50),
            "-" if ttft is None else seconds(ttft.p90),
        )
    return table


def agreement(results: Sequence[PresetResult]) -> str:
    """One sentence: by how much live and virtual differ, and which pairs they rank otherwise."""
    worst = max(results, key=lambda r: abs(r.difference))
    shares = listed([f"{r.preset} {_whole(r.virtual)}" for r in results])
    text = f"In virtual time: {shares}; "
    if worst.difference == 0:
        text += "live is the same"
    else:
        more = "more" if worst.difference > 0 else "less"
        text += (
            f"live differs by at most {abs(worst.difference):.0f} points ({worst.preset}, {more})"
        )
    swapped = [
        f"{a.preset} and {b.preset}"
        for i, a in enumerate(results)
        for b in results[i + 1 :]
        if (a.live.total.attained - b.live.total.attained)
        * (a.virtual.total.attained - b.virtual.total.attained)
        < 0
    ]
    order = f"in another order: {listed(swapped)}" if swapped else "in the same order"
    return f"{text}, {order}."


def _whole(report: Report) -> str:
    """Attainment without digits; never rounds up to 100."""
    share = report.total.attainment
    shown = round(100 * share)
    return f"{min(shown, 99) if share < 1 else shown} %"
