"""Numbers, tables, JSON and pictures of runs."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from ballast.bench.plot import plot
from ballast.bench.record import RequestRecord
from ballast.bench.report import LatencyStats, Report, RequestStats
from ballast.bench.sample import DecisionRecord, DeviceSample, MemorySample
from ballast.bench.tables import comparison_table, percent, report_table, seconds
from ballast.cli_bench import show_reports
from ballast.core.errors import ConfigError
from ballast.core.settings import Slo
from ballast.core.units import MiB

SLOS = {"a": Slo(ttft=1.0, tpot=0.1), "b": Slo(ttft=2.0, tpot=0.2), "quiet": Slo()}


def record(
    n: int,
    model: str = "a",
    ttft: float = 0.5,
    tpot: float = 0.05,
    tokens: int = 11,
    error: str | None = None,
) -> RequestRecord:
    at = float(n)
    first, end = at + ttft, at + ttft + tpot * (tokens - 1)
    return RequestRecord(
        id=n, model=model, at=at, sent=at + 0.01, first_token=first, end=end, prompt_tokens=100,
        output_tokens=tokens, token_times=(first, end), error=error, cached_tokens=10,
    )  # fmt: skip


RECORDS = (
    record(0),
    record(1, ttft=1.5),
    record(2, tpot=0.15),
    record(3, error="HTTP 503: draining"),
    record(4, "b", ttft=1.5, tpot=0.15),
    record(5, "b", tokens=1),
)
MEMORY = (
    MemorySample(0.0, {"d": DeviceSample({"weights:a": 4 * MiB, "free": 6 * MiB})}),
    MemorySample(
        1.0, {"d": DeviceSample({"weights:a": 4 * MiB, "kv:a": 5 * MiB, "free": MiB}, {"a": 2})}
    ),
)
DECISIONS = (
    DecisionRecord(0.5, "d", "Evict", "b", "idle", "it has requests"),
    DecisionRecord(0.1, "d", "Activate", "a", "a request waits"),
)


def report(name: str = "balloon") -> Report:
    return Report.of(RECORDS, SLOS, 10.0, MEMORY, DECISIONS, name=name, workload="made up")


def test_attainment_takes_both_levels_and_all_requests() -> None:
    r = report()
    a = r.models["a"]
    assert (a.requests, a.answered, a.failed) == (4, 3, 1)
    assert (a.attained, a.attained_ttft, a.attained_tpot) == (1, 2, 2)
    assert a.attainment == 0.25
    assert r.models["b"].attainment == 1.0
    assert r.total.attainment == 3 / 6
    assert r.worst_attainment == 0.25
    assert r.models["quiet"].attainment == 1.0


def test_throughput_counts_answered_requests() -> None:
    r = report()
    assert r.requests_per_second == 0.5
    assert r.output_tokens_per_second == (11 * 4 + 1) / 10
    assert r.errors == {"HTTP 503: draining": 1}
    assert r.latest_send == pytest.approx(0.01)


def test_spreads_leave_out_what_failed_and_what_has_no_value() -> None:
    served = RequestStats.of(RECORDS, SLOS)
    assert served.ttft is not None
    assert served.ttft.mean == pytest.approx((0.5 + 1.5 + 0.5 + 1.5 + 0.5) / 5)
    assert served.tpot is not None
    assert served.tpot.p50 == pytest.approx(0.1)
    assert LatencyStats.of([None]) is None
    hundred = LatencyStats.of(float(i) for i in range(101))
    assert hundred == LatencyStats(50.0, 50.0, 90.0, 99.0)


def test_reports_need_levels_and_time() -> None:
    with pytest.raises(ConfigError, match="service level"):
        Report.of(RECORDS, {"a": Slo()}, 1.0)
    with pytest.raises(ConfigError, match="wall_seconds"):
        Report.of(RECORDS, SLOS, 0.0)


def test_json_has_stable_keys(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    report().write_json(path)
    result = json.loads(path.read_text())
    assert list(result) == [
        "name", "workload", "wall_seconds", "requests_per_second", "output_tokens_per_second",
        "rate_weighted_requests_per_second", "worst_attainment", "latest_send", "total", "models",
        "errors", "memory", "decisions",
    ]  # fmt: skip
    assert set(result["total"]) == {
        "attainment", "requests", "answered", "failed", "attained", "attained_ttft",
        "attained_tpot", "prompt_tokens", "cached_tokens", "recomputed_tokens", "output_tokens",
        "preemptions", "ttft", "tpot", "e2e",
    }  # fmt: skip
    assert set(result["total"]["ttft"]) == {"mean", "p50", "p90", "p99"}
    assert result["models"]["a"]["slo"] == {"ttft": 1.0, "tpot": 0.1}
    assert result["models"]["quiet"]["ttft"] is None
    assert result["memory"]["at"] == [0.0, 1.0]
    assert result["memory"]["bytes"]["kv:a"] == [0, 5 * MiB]
    assert result["memory"]["peak"]["free"] == 6 * MiB
    assert result["memory"]["uses"]["weights"] == [4 * MiB, 4 * MiB]
    assert result["memory"]["waiting"] == {"a": [0, 2]}
    assert result["decisions"] == {"Activate": 1}


def test_an_empty_run_has_a_report(tmp_path: Path) -> None:
    empty = Report.of((), SLOS, 1.0, name="empty")
    assert empty.total.requests == 0
    assert empty.total.attainment == 1.0
    assert shown(report_table(empty))
    plot([empty], tmp_path / "p.png")


def shown(table: object, width: int = 160) -> str:
    written = io.StringIO()
    Console(width=width, file=written).print(table)
    return written.getvalue()


def test_the_table_of_models_fits_80_cells_and_names_its_percentiles() -> None:
    name = "a-model-of-a-longer-name-than-most/v2"
    slow = [record(n, name, ttft=0.0123 * n, tpot=0.0987, tokens=4567) for n in range(9)]
    levels = {name: Slo(ttft=1.0, tpot=0.1)}
    text = shown(report_table(Report.of(slow, levels, 1234.5, name="static")), 80)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].strip() == "static"
    head = [line.split() for line in lines[1:4]]
    assert ["TTFT", "TTFT", "TPOT", "TPOT"] in head
    assert ["model", "ok", "failed", "in", "SLO", "p50", "p99", "p50", "p99", "tokens"] in head
    assert "..." not in text
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    assert "".join(line[:14].strip() for line in lines[5:8]) == name
    spread = Report.of(slow, levels, 1234.5).total.ttft
    assert spread is not None
    row = next(line for line in lines if line.split()[:1] == ["all"])
    assert seconds(spread.p50) in row
    assert seconds(spread.p99) in row


def test_the_comparison_comes_before_the_tables_of_each(capsys: pytest.CaptureFixture[str]) -> None:
    show_reports([report(), report("static")], Console(width=80), None, None)
    text = capsys.readouterr().out
    assert text.index("side by side") < text.index(" ok ")
    show_reports([report()], Console(width=80), None, None)
    assert "side by side" not in capsys.readouterr().out


def test_tables_show_every_model_and_every_run() -> None:
    text = shown(report_table(report()))
    for word in ("balloon", "quiet", "all", "25.0 %", "1 x HTTP 503: draining"):
        assert word in text
    other = Report.of(RECORDS[:3], {"a": SLOS["a"]}, 10.0, name="static")
    side_by_side = shown(comparison_table([report(), other]))
    for word in ("balloon", "static", "TTFT p99", "in SLO, worst model", "in SLO, b", "33.3 %"):
        assert word in side_by_side


def test_numbers_for_people() -> None:
    assert percent(0.99999) == "99.9 %"
    assert percent(1.0) == "100.0 %"
    assert [seconds(s) for s in (2e-5, 0.0123, 1.234, 12345.6)] == [
        "20 us", "12.3 ms", "1.23 s", "12346 s",
    ]  # fmt: skip
    assert [seconds(s) for s in (0.9994, 0.9996)] == ["999 ms", "1 s"]


def test_plot_writes_a_png(tmp_path: Path) -> None:
    path = tmp_path / "p.png"
    plot([report("balloon"), Report.of(RECORDS, SLOS, 10.0, name="static")], path)
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError):
        plot([], path)


def test_a_mean_by_rate_counts_models_with_few_requests_little() -> None:
    """Of `a` three of four were answered, of `b` both; in 10 s."""
    found = Report.of(RECORDS, SLOS, 10.0)
    assert found.rate_weighted_requests_per_second == pytest.approx((4 * 3 + 2 * 2) / 6 / 10)
    assert "requests/s, by rate" in shown(comparison_table([found]), 80)
