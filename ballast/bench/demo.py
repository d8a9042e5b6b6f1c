"""Run `ballast demo`: compare presets on the same bursts, in virtual time and live over HTTP.

Makes a small fleet if there is none, measures the machine, and prints a table, a verdict and a
picture. Called by the command line.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from ballast.bench import kept_measurement
from ballast.bench.demo_questions import ModelAnswer, ask, said, waits_table
from ballast.bench.demo_result import PresetResult, agreement, result_table
from ballast.bench.demo_terms import DemoTerms, choose_terms, simulated
from ballast.bench.machine_load import OtherLoad, disturbance
from ballast.bench.plot import plot
from ballast.bench.progress import Progress, shown, training
from ballast.bench.record import Prompts, prompts_of, vocabularies_of
from ballast.bench.report import Report
from ballast.bench.run import report_http
from ballast.bench.run_options import slos_of
from ballast.bench.server_process import serving
from ballast.bench.smollm2_fleet import make_fleet_to_try
from ballast.bench.verdict import verdict
from ballast.core.model import ModelSpec
from ballast.core.settings import FleetSettings
from ballast.fleet.make import DEFAULT_STEPS
from ballast.sim.calibrate import calibrated
from ballast.sim.machine_profile import MachineProfile

PRESETS = ("static+deadline", "lru+deadline", "recompute+deadline", "ballast")
"""All in the order of compute that `ballast` has."""
LEAST = 20
"""Least number of requests; where fewer would come, requests are made shorter."""
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
            with _timed(parts, "making the models (once)"):
                make_fleet_to_try(
                    directory, steps=steps, toy_steps=DEFAULT_STEPS, progress=training(progress)
                )
        fleet = load(file)
        with _timed(parts, "measuring this machine"):
            profile, specs, notes = _measured(fleet, directory / kept_measurement.FILE, progress)
        with _timed(parts, "in virtual time"):
            terms = choose_terms(fleet, specs, profile, seconds, seed, least=LEAST)
            terms.write(file, compared)
            virtual = {}
            for i, preset in enumerate(PRESETS):
                progress("in virtual time", i, len(PRESETS), preset)
                chosen = terms.of(load(compared), preset)
                virtual[preset] = simulated(chosen, specs, profile, terms.workload)
            progress("in virtual time", len(PRESETS), len(PRESETS))
        for line in (f"the same for every preset: {terms.describe()}", *notes):
            console.print(line, soft_wrap=True)
        prompts = prompts_of(vocabularies_of(specs))
        live: dict[str, Report] = {}
        answers: dict[str, list[ModelAnswer]] = {}
        for preset in PRESETS:
            with _timed(parts, f"{preset}, live"):
                chosen = terms.of(load(compared), preset)
                live[preset], answers[preset] = _live(compared, chosen, terms, prompts, progress)
    results = [PresetResult(live[p], virtual[p]) for p in PRESETS]
    png.parent.mkdir(parents=True, exist_ok=True)
    plot([r.live for r in results], png)
    for line in said(answers[PRESETS[-1]]):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(waits_table(answers))
    _show_results(results, parts, f"drawn: {png}; next: ballast serve {file}", console)


def _measured(
    fleet: FleetSettings, file: Path, progress: Progress
) -> tuple[MachineProfile, Sequence[ModelSpec], list[str]]:
    """Return what this machine can do, by an earlier demo's measurement in `file` where it holds,
    the models' sizes, and what is to be said of the measurement."""
    key = kept_measurement.key_of(fleet)
    kept = kept_measurement.find(file, key)
    if kept is not None:
        note = f"this machine was measured on {kept.when}; to measure it again remove {file}"
        return kept.profile, kept.specs, [note]
    with OtherLoad() as others:
        profile, specs = calibrated(fleet, rounds=1, progress=progress)
    notes = []
    if factors := profile.spread.quantiles:
        low, high = (factors[i * len(factors) // 4] for i in (1, 3))
        notes.append(f"half of this machine's jobs took {low:.2f} to {high:.2f} of the fitted time")
    if (warning := disturbance(others)) is None:
        kept_measurement.keep(file, key, profile, specs)
    else:
        notes.append(f"what follows is of a busy machine: {warning}")
    return profile, specs, notes


def _show_results(
    results: Sequence[PresetResult], parts: Mapping[str, float], next_step: str, console: Console
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
) -> tuple[Report, list[ModelAnswer]]:
    """Serve the workload under the fleet's preset; returns the clients' report, and what all models
    then answered to the same questions."""
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
        return report, ask(running.url, [m.name for m in fleet.models])


@contextlib.contextmanager
def _timed(parts: dict[str, float], name: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    parts[name] = time.monotonic() - began


def _took(parts: Mapping[str, float]) -> str:
    each = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in parts.items())
    return f"took {sum(parts.values()):.0f} s: {each}"
