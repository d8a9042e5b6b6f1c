"""The demo compares presets on equal terms: one file, one workload, one measured machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from ballast.bench import demo, run
from ballast.bench.demo_questions import QUESTIONS, ModelAnswer
from ballast.bench.record import RequestRecord
from ballast.bench.replay import BenchmarkTarget, WorkloadReplay
from ballast.bench.report import Report
from ballast.bench.run_options import slos_of
from ballast.bench.server_process import Serving
from ballast.bench.verdict import verdict
from ballast.cli_common import load
from ballast.core.model import ModelSpec
from ballast.core.settings import FleetSettings
from ballast.sim.machine_profile import MachineProfile
from ballast.workload.workload import Workload, WorkloadRequest
from tests.bench.test_demo_terms import SPECS, machine, write_fleet


def test_every_preset_gets_the_same_file_and_bursts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything but the servers, the measurement and the picture is as the command has it."""
    served: list[tuple[bytes, tuple[str, ...]]] = []
    replayed: list[Workload] = []
    drawn: list[Report] = []
    profile = machine(1.0)

    def calibrated(
        fleet: FleetSettings, rounds: int, progress: object
    ) -> tuple[MachineProfile, list[ModelSpec]]:
        return profile, SPECS

    @contextlib.contextmanager
    def serving(file: Path, *options: str) -> Iterator[Serving]:
        served.append((file.read_bytes(), options))
        yield Serving("http://127.0.0.1:9", 0)

    async def replay(
        workload: Workload, target: BenchmarkTarget, *_: object, **__: object
    ) -> WorkloadReplay:
        replayed.append(workload)
        missed = MISSED[served[-1][1][1]]
        return WorkloadReplay(
            tuple(record(r, r.id % missed > 0) for r in workload.requests), 30.0, ()
        )

    def simulated(
        fleet: FleetSettings, _: list[ModelSpec], __: MachineProfile, workload: Workload
    ) -> Report:
        records = [record(r, True) for r in workload.requests]
        return Report.of(records, slos_of(fleet), 30.0, name=fleet.preset)

    monkeypatch.setattr(demo, "calibrated", calibrated)
    monkeypatch.setattr(demo, "serving", serving)
    monkeypatch.setattr(run, "replay", replay)
    monkeypatch.setattr(demo, "simulated", simulated)
    asked: list[list[str]] = []

    def ask(url: str, models: list[str]) -> list[ModelAnswer]:
        asked.append(models)
        waits = {m: None if m == models[-1] else 0.25 * len(asked) for m in models}
        return [ModelAnswer(m, QUESTIONS[0], f"{m} says", first) for m, first in waits.items()]

    monkeypatch.setattr(demo, "ask", ask)
    monkeypatch.setattr(demo, "plot", lambda reports, png: drawn.extend(reports))
    write_fleet(tmp_path)
    shown = StringIO()
    console = Console(file=shown, width=80)
    demo.run_demo(tmp_path, 25.0, None, 0, tmp_path / "out" / "demo.png", console, load)

    assert len({content for content, _ in served}) == 1
    assert [options[:2] for _, options in served] == [("--preset", p) for p in demo.PRESETS]
    assert len({options[2:] for _, options in served}) == 1
    assert len(set(map(id, replayed))) == 1
    assert len(replayed) == len(demo.PRESETS)
    assert [r.name for r in drawn] == list(demo.PRESETS)
    assert asked == [[s.name for s in SPECS]] * len(demo.PRESETS)
    text = shown.getvalue()
    assert f"{SPECS[0].name}: {SPECS[0].name} says" in text
    assert f"{SPECS[-1].name} says" not in text
    (row,) = (line for line in text.splitlines() if line.startswith(f"│ {SPECS[0].name}"))
    waits = [cell.strip() for cell in row.strip("│ ").split("│")]
    assert waits[1:] == ["250 ms", "500 ms", "750 ms", "1 s"]
    assert text.count("refused") >= len(demo.PRESETS)
    *_, agreed, last = text.splitlines()
    assert last == verdict(drawn)
    assert last.startswith("ballast serves ")
    assert "(lru+deadline, less)" in agreed


MISSED = {"static+deadline": 4, "lru+deadline": 2, "recompute+deadline": 5, "ballast": 50}
"""One in so many requests is refused."""


def record(request: WorkloadRequest, kept: bool) -> RequestRecord:
    at = request.at
    return RequestRecord(
        id=request.id,
        model=request.model,
        at=at,
        sent=at,
        first_token=at + 0.01 if kept else None,
        end=at + 0.02,
        prompt_tokens=request.prompt_tokens,
        output_tokens=1 if kept else 0,
        error=None if kept else "no place",
    )
