"""Reports as tables for a terminal: one run model by model, several runs side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table

from ballast.bench.report import Report, Served, Spread

_LATENCIES: tuple[tuple[str, Callable[[Served], Spread | None]], ...] = (
    ("TTFT", lambda s: s.ttft),
    ("TPOT", lambda s: s.tpot),
    ("end to end", lambda s: s.e2e),
)


def report_table(report: Report) -> Table:
    """A row per model and one for all; latencies as P50 / P90 / P99."""
    table = Table(title=report.name, caption=_caption(report))
    table.add_column("model")
    for column in ("answered", "failed", "in SLO", *(name for name, _ in _LATENCIES), "tokens"):
        table.add_column(column, justify="right")
    for name, served in report.models.items():
        table.add_row(name, *_cells(served))
    table.add_section()
    table.add_row("all", *_cells(report.total))
    return table


def comparison_table(reports: Sequence[Report]) -> Table:
    """A column per report, a row per number; best values are not marked: goals differ by row."""
    table = Table(title="side by side")
    table.add_column("")
    for report in reports:
        table.add_column(report.name, justify="right")

    def row(name: str, cell: Callable[[Report], str]) -> None:
        table.add_row(name, *(cell(r) for r in reports))

    row("answered", lambda r: str(r.total.answered))
    row("failed", lambda r: str(r.total.failed))
    row("in SLO", lambda r: percent(r.total.attainment))
    row("in SLO, worst model", lambda r: percent(r.worst_attainment))
    row("output tokens/s", lambda r: f"{r.output_tokens_per_second:.1f}")
    row("requests/s", lambda r: f"{r.requests_per_second:.2f}")
    row("preemptions", lambda r: str(r.total.preemptions))
    for name, spread in _LATENCIES:
        table.add_section()
        for part in ("mean", "p50", "p90", "p99"):
            row(
                f"{name} {part}",
                lambda r, spread=spread, part=part: _part(spread(r.total), part),  # type: ignore[misc]
            )
    models = sorted({m for r in reports for m in r.models})
    table.add_section()
    for model in models:
        row(
            f"in SLO, {model}",
            lambda r, model=model: percent(r.models[model].attainment) if model in r.models else "",  # type: ignore[misc]
        )
    return table


def percent(share: float) -> str:
    """``0.9876 -> '98.8 %'``; never rounds up to 100."""
    shown = f"{share * 100:.1f}"
    return "99.9 %" if shown == "100.0" and share < 1 else f"{shown} %"


def seconds(value: float) -> str:
    """Seconds with a unit that keeps three digits."""
    if value < 1e-3:
        return f"{value * 1e6:.0f} us"
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3g} s" if value < 1000 else f"{value:.0f} s"


def _cells(served: Served) -> list[str]:
    latencies = [_spread(of(served)) for _, of in _LATENCIES]
    attained = percent(served.attainment) if served.requests else "-"
    return [
        str(served.answered),
        str(served.failed),
        attained,
        *latencies,
        str(served.output_tokens),
    ]


def _spread(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    return " / ".join(seconds(v) for v in (spread.p50, spread.p90, spread.p99))


def _part(spread: Spread | None, part: str) -> str:
    return "-" if spread is None else seconds(getattr(spread, part))


def _caption(report: Report) -> str:
    told = [
        f"{report.wall_seconds:.1f} s",
        f"{report.requests_per_second:.2f} requests/s",
        f"{report.output_tokens_per_second:.1f} output tokens/s",
    ]
    if report.latest_send > 0.1:
        told.append(f"sender up to {seconds(report.latest_send)} late")
    lines = [", ".join(told), *(f"{n} x {reason}" for reason, n in list(report.errors.items())[:3])]
    return "\n".join(lines)
