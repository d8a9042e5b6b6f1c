"""Check whether this machine, and optionally a fleet, is fit for Ballast (`ballast doctor`).

Collects the findings of the `doctor_*` modules and prints them as a table.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from ballast.bench import doctor_gpus, doctor_huge, doctor_machine, doctor_memory
from ballast.bench.doctor_finding import Finding, Verdict
from ballast.cluster.machine_check import host_budget, machine_faults
from ballast.core.clock import Clock
from ballast.core.settings import DeviceSettings, FleetSettings
from ballast.core.units import KiB, MiB

DEFAULT = DeviceSettings(budget_bytes=512 * MiB, page_bytes=256 * KiB)
_COLOURS = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "bold red"}


def examine(fleet: FleetSettings | None, clock: Clock) -> Iterator[Finding]:
    """Yield findings, as they are made. Without a fleet, a budget of 512 MiB is assumed.

    Times its measurements by `clock`. Loads every model of the fleet, one after the other; the
    machinery for models is imported only then.
    """
    devices = [device for device, _ in fleet.devices.values()] if fleet else [DEFAULT]
    yield from doctor_machine.software()
    yield from doctor_machine.processor()
    yield from doctor_machine.limits()
    yield doctor_machine.caches()
    yield from doctor_gpus.gpus()
    budget = DEFAULT.budget_bytes if fleet is None else host_budget(fleet)
    for fault in machine_faults(fleet) if fleet else ():
        yield Finding("devices", Verdict.FAIL, str(fault), "change the fleet file, or the machine")
    yield doctor_memory.room(budget, "the budget" if len(devices) == 1 else "all budgets")
    for size, page in dict.fromkeys((d.budget_bytes, d.page_bytes) for d in devices):
        yield doctor_memory.mappings(size, page)
    for page in dict.fromkeys(d.page_bytes for d in devices):
        yield from doctor_memory.pages(page, clock)
        yield doctor_huge.check(page, clock)
    if fleet is not None:
        from ballast.bench import doctor_fleet

        yield from doctor_fleet.fleet(fleet)
    yield from doctor_machine.kernels()


def table(findings: list[Finding]) -> Table:
    """Format findings as a terminal table; a cure stands below its finding."""
    result = Table(title="ballast doctor", title_justify="left")
    for column in ("check", "", "found"):
        result.add_column(column, overflow="fold")
    for finding in findings:
        colour = _COLOURS[finding.verdict]
        result.add_row(
            finding.check, f"[{colour}]{finding.verdict.value}[/]", _escaped(finding.found)
        )
        if finding.cure:
            result.add_row("", "", f"[{colour}]->[/] {_escaped(finding.cure)}")
    return result


def _escaped(text: str) -> str:
    return text.replace("[", r"\[")
