"""Run `ballast demo`: compare presets on the same bursts, in virtual time and live over HTTP.

Makes a small fleet if there is none, measures the machine, and prints a table, a verdict and a
picture. Called by the command line.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import httpx
from rich.console import Console

from ballast.bench.demo_result import Compared, agreement, result_table
from ballast.bench.demo_terms import DemoTerms, choose_terms, simulated
from ballast.bench.machine_load import DISTURBED, OtherLoad
from ballast.bench.plot import plot
from ballast.bench.progress import Progress, shown, training
from ballast.bench.record import Prompts, prompts_of, vocabularies_of
from ballast.bench.report import Report
from ballast.bench.run import report_http
from ballast.bench.run_options import slos_of
from ballast.bench.server_process import serving
from ballast.bench.verdict import verdict
from ballast.core.settings import FleetSettings
from ballast.fleet.make import DEFAULT_STEPS, make_fleet
from ballast.sim.calibrate import calibrated

PRESETS = ("static+deadline", "lru+deadline", "recompute+deadline", "balloon")
"""All in the order of compute that `balloon` has."""
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
    compared = directory / "demo.yaml"
    parts: dict[str, float] = {}
    with shown() as progress:
        if not file.exists():
            with _timed(parts, "making eight small models (once)"):
                make_fleet(
                    directory,
                    steps=DEFAULT_STEPS if steps is None else steps,
                    progress=training(progress),
                )
        fleet = load(file)
        with _timed(parts, "measuring this machine"), OtherLoad() as others:
            profile, specs = calibrated(fleet, rounds=1, progress=progress)
        with _timed(parts, "in virtual time"):
            terms = choose_terms(fleet, specs, profile, seconds, seed)
            terms.write(file, compared)
            virtual = {}
            for i, preset in enumerate(PRESETS):
                progress("in virtual time", i, len(PRESETS), preset)
                chosen = terms.of(load(compared), preset)
                virtual[preset] = simulated(chosen, specs, profile, terms.workload)
            progress("in virtual time", len(PRESETS), len(PRESETS))
        _show_terms(terms, others, console)
        prompts = prompts_of(vocabularies_of(specs))
        live: dict[str, Report] = {}
        answers: list[str] = []
        for preset in PRESETS:
            with _timed(parts, f"{preset}, live"):
                chosen = terms.of(load(compared), preset)
                show = answers.append if preset == PRESETS[-1] else None
                live[preset] = _live(compared, chosen, terms, prompts, progress, show)
    results = [Compared(live[p], virtual[p]) for p in PRESETS]
    png.parent.mkdir(parents=True, exist_ok=True)
    plot([r.live for r in results], png)
    console.print(
        f"[bold]{fleet.models[0].name}[/bold]: {QUESTION}\n  {answers[0]!r}", soft_wrap=True
    )
    _show_results(results, parts, f"drawn: {png}; next: ballast serve {file}", console)


def _show_terms(terms: DemoTerms, others: OtherLoad, console: Console) -> None:
    """Print the terms, and a warning where `others` disturbed the measurement behind them."""
    console.print(f"the same for every preset: {terms.describe()}", soft_wrap=True)
    if others.cores > DISTURBED:
        console.print(
            f"other processes took {others.cores:.1f} cores while this machine was measured: "
            "what follows is of a busy machine",
            soft_wrap=True,
        )


def _show_results(
    results: Sequence[Compared], parts: Mapping[str, float], next_step: str, console: Console
) -> None:
    """Print the comparison, how long its `parts` took, and who won."""
    console.print(result_table(results))
    console.print(_took(parts), soft_wrap=True)
    console.print(next_step, soft_wrap=True)
    console.print(agreement(results), soft_wrap=True)
    console.print(f"[bold]{verdict([r.live for r in results])}[/bold]", soft_wrap=True)


def _live(
    file: Path,
    fleet: FleetSettings,
    terms: DemoTerms,
    prompts: Prompts,
    progress: Progress,
    show: Callable[[str], None] | None,
) -> Report:
    """Serve the workload under the fleet's preset; returns the clients' report.

    Afterwards `show` gets an answer of the first model, if the preset placed that model.
    """
    preset = fleet.preset
    progress(f"{preset}, live: starting", 0)
    with serving(file, "--preset", preset, "--no-changes", "--log-level", "error") as running:
        report = report_http(
            running.url,
            terms.workload,
            prompts,
            slos_of(fleet),
            name=preset,
            timeout=PATIENCE,
            progress=progress,
        )
        if show is not None:
            show(chat(running.url, fleet.models[0].name))
        return report


@contextlib.contextmanager
def _timed(parts: dict[str, float], name: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    parts[name] = time.monotonic() - began


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
