"""`ballast demo`: presets compared live, on equal terms, as a newcomer sees the system first."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path

import httpx
from rich.console import Console

from ballast.bench.choose import slos_of
from ballast.bench.demo_result import Compared, agreement, result_table, verdict
from ballast.bench.demo_terms import Terms, choose_terms, simulated
from ballast.bench.http import HttpTarget
from ballast.bench.others import DISTURBED, Others
from ballast.bench.plot import plot
from ballast.bench.record import Prompts, prompts_of, vocabularies_of
from ballast.bench.replay import replay
from ballast.bench.report import Report
from ballast.bench.serving import serving
from ballast.bench.stages import Stages
from ballast.core.settings import FleetSettings
from ballast.engine.inbox import MonotonicClock
from ballast.fleet.make import DEFAULT_STEPS, make_fleet, training_steps
from ballast.sim.calibrate import calibrated

PRESETS = ("static", "swap", "mirage", "balloon")
QUESTION = "What is a ship's ballast?"
PATIENCE = 30.0
"""Seconds after which a request is given up, and has failed."""


def run_demo(
    directory: Path,
    seconds: float,
    steps: int | None,
    seed: int,
    png: Path,
    console: Console,
    load: Callable[[Path], FleetSettings],
) -> None:
    """Make the fleet if need be, measure the machine, and replay the same bursts under each preset:
    in virtual time, then live over HTTP. Draws a picture and says who won by how much.

    Raises ConfigError where the fleet in `directory` is not one that `choose_terms` takes.
    """
    file = directory / "fleet.yaml"
    with Stages(console) as stages:
        if not file.exists():
            _make(directory, DEFAULT_STEPS if steps is None else steps, stages)
        fleet = load(file)
        with stages.stage("measuring this machine"), Others() as others:
            profile, specs = calibrated(fleet, rounds=1)
        with stages.stage("in virtual time", len(PRESETS)) as advance:
            terms = choose_terms(fleet, specs, profile, seconds, seed)
            compared = directory / "demo.yaml"
            terms.write(file, compared, secrets.token_hex())
            virtual = {}
            for preset in PRESETS:
                chosen = terms.of(load(compared), preset)
                virtual[preset] = simulated(chosen, specs, profile, terms.workload)
                advance(preset)
        console.print(f"the same for every preset: {terms.describe()}", soft_wrap=True)
        if others.cores > DISTURBED:
            console.print(
                f"other processes took {others.cores:.1f} cores while this machine was measured: "
                "what follows is of a busy machine",
                soft_wrap=True,
            )
        prompts = prompts_of(vocabularies_of(specs))
        live: dict[str, Report] = {}
        answers: list[str] = []
        for preset in PRESETS:
            ask = answers.append if preset == PRESETS[-1] else None
            live[preset] = _live(compared, preset, load, terms, prompts, stages, ask)
    results = [Compared(live[p], virtual[p]) for p in PRESETS]
    reports = [r.live for r in results]
    png.parent.mkdir(parents=True, exist_ok=True)
    plot(reports, png)
    console.print(
        f"[bold]{fleet.models[0].name}[/bold]: {QUESTION}\n  {answers[0]!r}", soft_wrap=True
    )
    console.print(result_table(results))
    console.print(_took(stages.seconds), soft_wrap=True)
    console.print(f"drawn: {png}; next: ballast serve {file}", soft_wrap=True)
    console.print(agreement(results), soft_wrap=True)
    console.print(f"[bold]{verdict(reports)}[/bold]", soft_wrap=True)


def _make(directory: Path, steps: int, stages: Stages) -> None:
    with stages.stage("making eight small models (once)", training_steps(steps)) as advance:
        make_fleet(
            directory,
            steps=steps,
            progress=lambda name, step, of, loss: advance(f"{name}, loss {loss:.2f}"),
        )


def _live(
    file: Path,
    preset: str,
    load: Callable[[Path], FleetSettings],
    terms: Terms,
    prompts: Prompts,
    stages: Stages,
    show: Callable[[str], None] | None,
) -> Report:
    """What clients of a server on these terms saw; then an answer of its first model for `show`."""
    fleet = terms.of(load(file), preset)
    workload = terms.workload
    with stages.stage(f"{preset}, live", len(workload.requests)) as advance:
        options = ("--preset", preset, "--no-changes", "--log-level", "error")
        with serving(file, *options) as running:

            def count(what: str, done: int, total: int | None = None, note: str = "") -> None:
                advance(f"{done} of {total} requests")

            async def run() -> Report:
                key = fleet.server.admin_key
                async with HttpTarget(running.url, MonotonicClock(), key) as target:
                    done = await replay(workload, target, prompts, timeout=PATIENCE, progress=count)
                return Report.of(
                    done.records,
                    slos_of(fleet),
                    done.wall_seconds,
                    done.memory,
                    done.decisions,
                    name=preset,
                    workload=workload.describe(),
                )

            report = asyncio.run(run())
            if show is not None:
                show(chat(running.url, fleet.models[0].name))
            return report


def _took(parts: Mapping[str, float]) -> str:
    each = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in parts.items())
    return f"took {sum(parts.values()):.0f} s: {each}"


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
