"""The demo's table, and by how much live and virtual time differ in it."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from ballast.bench.demo_result import PresetResult, agreement, result_table
from ballast.bench.record import RequestRecord
from ballast.bench.report import Report
from ballast.core.settings import Slo


def report(name: str, kept: int, of: int = 50) -> Report:
    """Of so many requests so many came in time; the others were refused."""
    records = [
        RequestRecord(
            id=n,
            model="m",
            at=float(n),
            sent=float(n),
            first_token=n + 0.5 if n < kept else None,
            end=n + 1.0,
            prompt_tokens=3,
            output_tokens=1 if n < kept else 0,
            error=None if n < kept else "no place",
        )
        for n in range(of)
    ]
    return Report.of(records, {"m": Slo(ttft=1.0)}, 60.0, name=name)


def compared(preset: str, live: int, virtual: int) -> PresetResult:
    return PresetResult(report(preset, live), report(preset, virtual))


def test_how_far_live_and_virtual_are_apart() -> None:
    results = [compared("swap", 30, 35), compared("balloon", 49, 50)]
    assert agreement(results) == (
        "In virtual time: swap 70 % and balloon 100 %; live differs by at most 10 points "
        "(swap, less), in the same order."
    )
    assert agreement([compared("swap", 35, 35)]) == (
        "In virtual time: swap 70 %; live is the same, in the same order."
    )


def test_another_order_is_named() -> None:
    results = [compared("swap", 45, 35), compared("balloon", 40, 50), compared("static", 10, 10)]
    assert agreement(results).endswith(
        "live differs by at most 20 points (swap, more), in another order: swap and balloon."
    )


def test_the_table_fits_80_columns() -> None:
    console = Console(width=80, record=True, file=StringIO())
    console.print(result_table([compared("balloon", 49, 50), compared("static", 30, 41)]))
    text = console.export_text()
    assert "…" not in text
    (row,) = (line for line in text.splitlines() if "balloon" in line)
    assert [cell.strip() for cell in row.strip("│ ").split("│")] == [
        "balloon", "98.0 %", "100.0 %", "-2", "98.0 %", "1", "500 ms", "500 ms",
    ]  # fmt: skip
