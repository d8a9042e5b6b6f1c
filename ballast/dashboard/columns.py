"""Draw the table of models: one row for each model and adapter, with the columns that fit the
width."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from ballast.core.units import format_bytes
from ballast.dashboard.formatting import rate_of, seconds_of
from ballast.dashboard.memory import model_bar
from ballast.dashboard.reader import Rates
from ballast.server.observe.latency import Quantiles
from ballast.server.observe.server_state import ModelNow, NameNow, ServerNow

_STATES = {
    "loaded": ("●", "green"),
    "loading": ("◐", "yellow"),
    "evicted": ("○", "bright_black"),
    "failed": ("✗", "bold red"),
}
_GAP = 2
_NAME_LEAST, _BAR = 12, 16
"""Widths in terminal cells: the least of the names, and that of a model's bar."""


@dataclass(frozen=True, slots=True)
class ModelRow:
    """Row of a model, of an adapter (`adapter`), or of a model that is not served."""

    name: str
    status: str
    model: ModelNow | None = None
    served: NameNow | None = None
    adapter: bool = False


@dataclass(frozen=True, slots=True)
class Column:
    """Column of the table. Those with the highest `order` are dropped first where there is no
    room."""

    title: str
    order: int
    cell: Callable[[ModelRow], Text]
    right: bool = True


def rows(now: ServerNow, most: int | None) -> tuple[list[ModelRow], list[str]]:
    """Choose at most `most` rows, in the fleet's order; returns them, and the states of the models
    left out. Where some are left out, one row less, for a line that says so.

    Models without requests are left out first, of these evicted ones before others.
    """

    def rank(item: tuple[int, list[ModelRow]]) -> tuple[bool, bool, int]:
        position, (row, *_) = item
        report = row.model.report if row.model is not None else None
        busy = report is not None and report.running + report.waiting > 0
        return (not busy, row.status == "evicted", position)

    groups = [
        [
            ModelRow(n.name, m.status if i == 0 else "", m, n, adapter=i > 0)
            for i, n in enumerate(m.names)
        ]
        for m in now.models
    ]
    served = {m.report.name for m in now.models}
    groups += [[ModelRow(name, "failed")] for name in now.failed if name not in served]
    all_of_them = sum(map(len, groups))
    room = all_of_them if most is None or all_of_them <= most else most - 1
    kept: set[int] = set()
    for position, group in sorted(enumerate(groups), key=rank):
        if len(group) <= room:
            kept.add(position)
            room -= len(group)
        elif room > 0 and position not in kept:
            groups[position] = group[:room]
            kept.add(position)
            room = 0
    shown = [row for i, group in enumerate(groups) if i in kept for row in group]
    return shown, [group[0].status for i, group in enumerate(groups) if i not in kept]


def table(
    now: ServerNow, rates: Rates, shown: Sequence[ModelRow], width: int, pages: bool
) -> Table:
    """Draw these rows; memory in pages, or in bytes."""
    columns = _fitting(_columns(now, rates, pages), shown, width)
    drawn = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="bright_black")
    first, *others = (_widest(column, cells) for column, cells in columns)
    first = min(first, max(1, width - sum(_GAP + cells for cells in others) - _GAP))
    for (column, _), cells in zip(columns, (first, *others), strict=True):
        drawn.add_column(
            column.title,
            justify="right" if column.right else "left",
            no_wrap=True,
            overflow="ellipsis",
            width=cells,
        )
    for i in range(len(shown)):
        drawn.add_row(*(cells[i] for _, cells in columns))
    return drawn


def _columns(now: ServerNow, rates: Rates, pages: bool) -> list[Column]:
    def memory(of: Callable[[ModelNow], int]) -> Callable[[ModelRow], Text]:
        def cell(row: ModelRow) -> Text:
            if row.model is None or row.adapter:
                return Text()
            n = of(row.model)
            return Text(f"{n}" if pages else format_bytes(n * now.page_bytes), "" if n else _FAINT)

        return cell

    found = [
        Column("model", 0, _name, right=False),
        Column("state", 1, _state, right=False),
        Column("run", 1, _count(lambda m: m.report.running)),
        Column("wait", 1, _count(lambda m: m.report.waiting, alarming=True)),
        Column("tok/s", 2, lambda row: _rate(rates.by_name.get(row.name))),
        Column("weights", 4, memory(lambda m: m.report.weight_pages)),
        Column("KV", 4, memory(lambda m: m.report.kv_pages)),
        Column("cached", 6, memory(lambda m: m.report.cached_pages)),
        Column("TTFT p50", 5, _ttft(lambda q: q.p50)),
        Column("TTFT p99", 3, _ttft(lambda q: q.p99)),
        Column("TPOT p50", 5, _tpot(lambda q: q.p50)),
        Column("TPOT p99", 3, _tpot(lambda q: q.p99)),
        Column("evictions", 8, _count(lambda m: m.report.evictions)),
        Column("preemptions", 9, _count(lambda m: m.report.preemptions)),
        Column("share of the pool", 7, lambda row: _share(row, now.total), right=False),
    ]
    if any(m.report.rotating_layers or m.report.loads for m in now.models):
        found[7:7] = [
            Column("layers", 4, _layers),
            Column("lent by layers", 6, memory(lambda m: m.report.lent_pages)),
            Column("layer stalls", 7, _stalls),
        ]
    if any(m.guarantee or m.limit is not None for m in now.models):
        found[8:8] = [
            Column("guarantee", 4, _bound(lambda m: m.guarantee or None)),
            Column("limit", 4, _bound(lambda m: m.limit)),
        ]
    if len(now.devices) > 1:
        found.insert(2, Column("device", 2, _devices, right=False))
    if any(m.pinned for m in now.models):
        found.insert(2, Column("pin", 4, _pin, right=False))
    return found


_FAINT = "bright_black"


def _name(row: ModelRow) -> Text:
    return Text(f"└ {row.name}" if row.adapter else row.name, "" if row.adapter else "bold")


def _state(row: ModelRow) -> Text:
    if not row.status:
        return Text()
    mark, style = _STATES[row.status]
    return Text(f"{mark} {row.status}", style)


def _devices(row: ModelRow) -> Text:
    here = [] if row.model is None or row.adapter else row.model.devices
    return Text(", ".join(here), _FAINT)


def _pin(row: ModelRow) -> Text:
    pinned = row.model is not None and row.model.pinned and not row.adapter
    return Text("pin" if pinned else "", "cyan")


def _bound(of: Callable[[ModelNow], int | None]) -> Callable[[ModelRow], Text]:
    def cell(row: ModelRow) -> Text:
        n = None if row.model is None or row.adapter else of(row.model)
        return Text("" if n is None else format_bytes(n), _FAINT)

    return cell


def _count(of: Callable[[ModelNow], int], alarming: bool = False) -> Callable[[ModelRow], Text]:
    def cell(row: ModelRow) -> Text:
        if row.model is None or row.adapter:
            return Text()
        n = of(row.model)
        return Text(f"{n}", _FAINT if n == 0 else "yellow" if alarming else "")

    return cell


def _layers(row: ModelRow) -> Text:
    """Layers on the device, of all; highlighted where some rotate."""
    if row.model is None or row.adapter:
        return Text()
    m = row.model.report
    here = m.layers - m.absent_layers
    return Text(f"{here}/{m.layers}", "cyan" if m.rotating_layers else "" if here else _FAINT)


def _stalls(row: ModelRow) -> Text:
    if row.model is None or row.adapter:
        return Text()
    seconds = row.model.report.stall_seconds
    return Text(seconds_of(seconds) if seconds else "-", "" if seconds else _FAINT)


def _ttft(of: Callable[[Quantiles], float]) -> Callable[[ModelRow], Text]:
    def cell(row: ModelRow) -> Text:
        served = row.served
        level = None if served is None or served.slo is None else served.slo.ttft
        return _latency(None if served is None else served.ttft, of, level)

    return cell


def _tpot(of: Callable[[Quantiles], float]) -> Callable[[ModelRow], Text]:
    def cell(row: ModelRow) -> Text:
        served = row.served
        level = None if served is None or served.slo is None else served.slo.tpot
        return _latency(None if served is None else served.tpot, of, level)

    return cell


def _latency(q: Quantiles | None, of: Callable[[Quantiles], float], level: float | None) -> Text:
    """Format a latency, in red where it exceeds the service level."""
    if q is None:
        return Text("-", _FAINT)
    missed = level is not None and of(q) > level
    return Text(seconds_of(of(q)), "red" if missed else "")


def _rate(rate: float | None) -> Text:
    return Text("-" if rate is None else rate_of(rate), "" if rate else _FAINT)


def _share(row: ModelRow, total: int) -> Text:
    if row.model is None or row.adapter:
        return Text()
    return model_bar(row.model.report, total, _BAR)


def _fitting(
    columns: Iterable[Column], shown: Sequence[ModelRow], width: int
) -> list[tuple[Column, list[Text]]]:
    """Choose the columns that fit `width`; returns them with their cells."""
    found = [(column, [column.cell(row) for row in shown]) for column in columns]

    def needed() -> int:
        first, *others = (_widest(column, cells) for column, cells in found)
        return min(first, _NAME_LEAST) + sum(_GAP + cells for cells in others) + _GAP

    while needed() > width and len(found) > 1:
        last = max(range(len(found)), key=lambda i: (found[i][0].order, i))
        del found[last]
    return found


def _widest(column: Column, cells: Iterable[Text]) -> int:
    return max(len(column.title), *(cell.cell_len for cell in cells), 0)
