"""`ballast demo`: the whole system once, as a newcomer sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
from rich.console import Console

from ballast.bench.choose import workload_of
from ballast.bench.run import compare_virtual, replay_http
from ballast.bench.serving import serving
from ballast.bench.show import comparison_table, report_table
from ballast.core.settings import FleetSettings
from ballast.core.units import format_bytes
from ballast.fleet.make import DEFAULT_STEPS, make_fleet

COMPARED = ("static", "swap", "balloon")
"""Presets, in virtual time."""
QUESTION = "What is a ship's ballast?"


def run_demo(
    directory: Path,
    seconds: float,
    rate: float,
    steps: int | None,
    console: Console,
    load: Callable[[Path], FleetSettings],
) -> None:
    """Make the fleet if need be, serve it, chat, replay bursts over HTTP, and simulate the same."""
    file = directory / "fleet.yaml"
    if not file.exists():
        console.rule("making eight small models (once)")
        made = make_fleet(
            directory,
            steps=DEFAULT_STEPS if steps is None else steps,
            progress=lambda name, step, of, loss: (
                console.print(f"  {name}: step {step} of {of}, loss {loss:.2f}")
                if step % 20 == 0 or step == of
                else None
            ),
        )
        console.print(
            f"fixed shares would need {format_bytes(made.fixed_bytes)}, "
            f"the budget is {format_bytes(made.budget_bytes)}"
        )
    fleet = load(file)
    names = [m.name for m in fleet.models]
    workload = workload_of("bursty", names, rate=rate, seconds=seconds, most_tokens=256)
    console.rule(f"serving {len(names)} models from {format_bytes(fleet.device.budget_bytes)}")
    with serving(file) as running:
        url = running.url
        console.print(f"{url} is up")
        console.print(f"[bold]{names[0]}[/bold]: {QUESTION}\n  {chat(url, names[0])!r}")
        console.print(f"{len(workload.requests)} requests: {workload.describe()}")
        live = replay_http(url, fleet, workload, name=f"{fleet.preset}, live")
    console.print(report_table(live))
    console.rule("the same workload in virtual time, on a profile of this machine measured now")
    virtual = [
        replace(report, name=f"{report.name}, virtual")
        for report in compare_virtual(fleet, workload, COMPARED)
    ]
    console.print(comparison_table([live, *virtual]))
    console.print(f"next: ballast serve {file}, and README.md for a first chat")


def chat(url: str, model: str, most: int = 60) -> str:
    """One answer, greedy."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": most,
        "temperature": 0,
    }
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120, trust_env=False)
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["message"]["content"])
