"""Format reports as terminal tables: one run by model, several runs side by side, and plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from ballast.bench.cluster_run import ClusterRun
from ballast.bench.planning import PlanResult
from ballast.bench.report import LatencyStats, Report, RequestStats
from ballast.core.model import ModelSpec, weight_bytes
from ballast.core.units import format_bytes
from ballast.sim.cluster import Kind
from ballast.sim.profile import DeviceProfile, device_files, device_profile
from ballast.sim.profile_tables import HeldRuns

_LATENCIES: tuple[tuple[str, Callable[[RequestStats], LatencyStats | None]], ...] = (
    ("TTFT", lambda s: s.ttft),
    ("TPOT", lambda s: s.tpot),
    ("end to end", lambda s: s.e2e),
)
HELD_ON = "H100-80G"
"""The device whose published runs stand for devices of which none are known."""
_PARTS = ("p50", "p99")
"""Percentiles that each model is shown with."""


def report_table(report: Report) -> Table:
    """A row per model and one for all, in 80 cells; `comparison_table` has more of all together."""
    table = Table(
        title=report.name,
        caption=_caption(report),
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("model", overflow="fold")
    latencies = (f"{name} {part}" for name, _ in _LATENCIES[:2] for part in _PARTS)
    for column in ("ok", "failed", "in SLO", *latencies, "tokens"):
        table.add_column(column.replace(" p", "\np"), justify="right", no_wrap=True)
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
    row("requests/s, by rate", lambda r: f"{r.rate_weighted_requests_per_second:.2f}")
    row("preemptions", lambda r: str(r.total.preemptions))
    if any(record.repeated_tokens for r in reports for record in r.records):
        row("prompt tokens computed", lambda r: f"{_computed(r.total):,}")
        row("computed before", lambda r: f"{r.total.recomputed_tokens:,}")
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
            lambda r, model=model: _attained(r.models[model]) if model in r.models else "",  # type: ignore[misc]
        )
    return table


def _computed(stats: RequestStats) -> int:
    return stats.prompt_tokens - stats.cached_tokens


def runs_table(runs: Sequence[ClusterRun]) -> Table:
    """Compare runs: the rows of `comparison_table`, and counts of the devices' actions."""
    table = comparison_table([run.report for run in runs])
    table.add_section()
    for what in ("activations", "evictions"):
        table.add_row(what, *(str(run.total(what)) for run in runs))
    for moved in ("placed", "withdrawn"):
        table.add_row(f"models {moved}", *(str(getattr(run, moved)) for run in runs))
    for use in ("weights", "kv"):
        peaks = (max((s.uses[use] for s in run.report.memory), default=0) for run in runs)
        table.add_row(f"{use} in memory, most", *(format_bytes(n) for n in peaks))
    for model in sorted({m for run in runs for m in run.rotations}):
        cells = (_loads(run.rotations.get(model)) for run in runs)
        table.add_row(f"layers loaded, {model}", *cells)
    failures = [f"{r.report.name}: {n} x {why}" for r in runs for why, n in _reasons(r.report)]
    table.caption = "\n".join(failures) or None
    return table


def kinds_text(kinds: Sequence[Kind]) -> str:
    """A line per kind of device: which engine serves there, and which software that is."""
    return "\n".join(
        f"{kind.profile.device}, engine {kind.profile.engine}: {kind.profile.serving.served_by}"
        for kind in kinds
    )


def sizes_text(specs: Sequence[ModelSpec], run: ClusterRun) -> str:
    """Compare the bytes of the models' weights with the memory of the devices."""
    weights, memory = weight_bytes(specs), run.total("memory_bytes")
    parts = f"weights of {len(specs)} models {format_bytes(weights)}, "
    parts += f"memory of the devices in use ({len(run.devices)}) {format_bytes(memory)}"
    full = [d for d in run.devices.values() if d["weights_bytes"] > d["memory_bytes"]]
    if full:
        missing = sum(d["weights_bytes"] - d["memory_bytes"] for d in full)
        parts += f"; on {len(full)} of them {format_bytes(missing)} are missing to hold all at once"
    return parts


def plans_table(plans: Sequence[PlanResult], target: float, each: bool) -> Table:
    """A row per preset: the fewest devices, how sure that is, what these and one fewer attain."""
    of = "of every model's requests" if each else "of all requests"
    table = Table(title=f"fewest devices for {percent(target)} {of} in SLO")
    columns = (
        "preset",
        "devices",
        "by draw",
        "in SLO",
        "with one fewer",
        "worst model",
        "TTFT p99",
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "preset" else "right")
    notes = []
    for plan in plans:
        number, sure = plan.shown, plan.sure
        row = plan.rows[number]
        table.add_row(
            plan.preset,
            "none" if sure is None else str(number),
            "-" if sure is None else f"{sure.least}-{sure.most}",
            percent(plan.least),
            "-" if plan.with_fewer is None else percent(plan.with_fewer),
            percent(row["worst_attainment"]),
            "-" if row["ttft_p99"] is None else seconds(row["ttft_p99"]),
        )
        notes += [f"{plan.preset}: {note}" for note in _sure_of(plan)]
    table.caption = "\n".join(notes) or None
    return table


def _sure_of(plan: PlanResult) -> Iterator[str]:
    """Notes on the certainty of a plan's numbers."""
    sure, n = plan.sure, len(plan.draws)
    if sure is None:
        tried = max(plan.draws[-1].tried)
        used = plan.rows[plan.shown]["devices_used"]
        yield (
            f"no number up to {tried} suffices{f' for draw {n}' if n > 1 else ''}; the row is of "
            f"{plan.shown}, of which {used} had work; {percent(plan.alone)} of requests would be "
            "in time on an idle device of their own"
        )
    elif n > 1:
        grows = "" if plan.settled else "; the interval was still widening: ask for more --seeds"
        yield (
            f"{sure.most} devices sufficed for all of {n} draws of the workload, {sure.least} for "
            f"one; for a further draw they do with {percent(sure.at_least)} at least (95 % "
            f"confidence){grows}"
        )
    for i, draw in enumerate(plan.draws):
        if not draw.steady:
            bad = ", ".join(f"{n}: at most {percent(share)}" for n, share in draw.tried.items())
            which = f", draw {i + 1}" if n > 1 else ""
            yield f"more devices are not always better{which}: {bad}"
    if sure is not None and n == 1:
        yield "one draw of the workload: another may need more, or fewer"


def forecast_text(profile: DeviceProfile) -> str:
    """How far simulations were from what was measured, as far as anybody measured it: of capacity
    on the device, and of published runs of the engine there, or where there are some."""
    lines = []
    if profile.capacity_errors:
        parts = ", ".join(f"{p} {error:+.0%}" for p, error in profile.capacity_errors.items())
        lines.append(f"Simulated capacity, against the live one on {profile.device}: {parts}.")
    engine, device = profile.engine, profile.device
    rows, where = profile.held, device
    if not any(row.engine == engine for row in rows) and device in device_files():
        rows, where = device_profile(HELD_ON).held, HELD_ON
    sizes = [_held_text(row) for row in rows if row.engine == engine]
    if sizes:
        found = f"Simulated over measured in published runs of {engine} on {where}"
        elsewhere = "" if where == device else f" (none is known on {device})"
        lines.append(f"{found}{elsewhere}, median and worst: {'; '.join(sizes)}.")
    if profile.serving.not_held:
        lines.append(f"Not held, or off: {profile.serving.not_held}.")
    return "\n".join(lines) or (
        f"No run of {engine} on {device} is known that simulations could be held against."
    )


def _held_text(row: HeldRuns) -> str:
    """``on 1 device TTFT +2 % (+3), TPOT -6 % (-7), 4 runs``"""
    on = f"on {row.tp} device{'s' if row.tp > 1 else ''}"
    ttft, tpot = (
        f"{100 * median:+.0f} % ({100 * worst:+.0f})"
        for median, worst in ((row.ttft, row.ttft_worst), (row.tpot, row.tpot_worst))
    )
    return f"{on} TTFT {ttft}, TPOT {tpot}, {row.runs} runs"


def _loads(loads: Mapping[str, float] | None) -> str:
    if loads is None:
        return "-"
    took, waited = seconds(loads["copy_seconds"]), seconds(loads["stall_seconds"])
    return f"{format_bytes(loads['n_bytes'])} in {took}, {waited} waited"


def _reasons(report: Report) -> list[tuple[str, int]]:
    return list(report.errors.items())[:3]


def percent(share: float) -> str:
    """``0.9876 -> '98.8 %'``; never rounds up to 100."""
    shown = f"{share * 100:.1f}"
    return "99.9 %" if shown == "100.0" and share < 1 else f"{shown} %"


def seconds(value: float) -> str:
    """Seconds with a unit that keeps three digits."""
    if value < 1e-3:
        return f"{value * 1e6:.0f} us"
    if value < 0.9995:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3g} s" if value < 1000 else f"{value:.0f} s"


def _cells(served: RequestStats) -> list[str]:
    latencies = [_part(of(served), part) for _, of in _LATENCIES[:2] for part in _PARTS]
    return [
        str(served.answered),
        str(served.failed),
        _attained(served),
        *latencies,
        str(served.output_tokens),
    ]


def _attained(served: RequestStats) -> str:
    return percent(served.attainment) if served.requests else "-"


def _part(spread: LatencyStats | None, part: str) -> str:
    return "-" if spread is None else seconds(getattr(spread, part))


def _caption(report: Report) -> str:
    parts = [
        f"{report.wall_seconds:.1f} s",
        f"{report.requests_per_second:.2f} requests/s",
        f"{report.output_tokens_per_second:.1f} output tokens/s",
    ]
    if report.latest_send > 0.1:
        parts.append(f"sender up to {seconds(report.latest_send)} late")
    lines = [", ".join(parts), *(f"{n} x {reason}" for reason, n in _reasons(report))]
    return "\n".join(lines)
