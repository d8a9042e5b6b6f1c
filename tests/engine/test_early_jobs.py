"""The first job of a model begins while its later layers arrive: no token changes, and what fails
on the way fails alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ballast.bench.inprocess import InProcess
from ballast.core.clock import Clock
from ballast.core.errors import DeviceError
from ballast.core.event import CancelledOutput, Event, FailedOutput, FirstJobReadyEvent
from ballast.core.request import Submission
from ballast.core.settings import FleetSettings
from ballast.core.units import KiB
from ballast.core.view import Residency
from ballast.engine.layer_stream import MakeStream
from ballast.engine.life_rules import EarlyStart
from ballast.live.cpu_machine import CpuMachine
from ballast.memory.copies import Copy, CopyBytes, copy_checked
from ballast.memory.transfer import HostLink
from ballast.sim.replay import replay
from ballast.sim.story_reader import read_device_stories
from tests.engine.checkpoints import make_base_and_tuned, make_llama
from tests.engine.holding import DEADLINE
from tests.engine.test_adapters import World
from tests.engine.test_rotating import with_path
from tests.live.test_live_device import NAMES, asked, fleet, need

CHUNK = 16 * KiB
"""Of the link: less than a layer, so that layers land one by one."""


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {n: make_llama(root / n, i, num_hidden_layers=4 + i) for i, n in enumerate(NAMES)}


class Stepwise:
    """A machine whose link goes on, once a model is open, when a job of it has come to a layer that
    is not there: then it copies the rest, or fails if told so."""

    def __init__(self, patch: pytest.MonkeyPatch, fails: bool = False) -> None:
        self.opened: list[int] = []
        """Transfers."""
        self.waited: list[tuple[str, int]] = []
        """Model and layer."""
        self.in_between: Callable[[], None] = lambda: None
        """Called while the job waits, in the link's thread."""
        self.fails = fails
        self._waits: dict[str, threading.Event] = {}
        """By model, whether a job has come to a layer that it was to wait for."""
        self._of: Callable[[int], str] = lambda transfer_id: ""
        patch.setattr("ballast.engine.reside.bytes_ahead", lambda state, m: 1 << 40)
        patch.setattr("ballast.memory.transfer.copy_checked", self._copy)
        self.broken = False
        """Copies fail."""

    def _copy(self, copy: Copy, copy_bytes: CopyBytes) -> None:
        if self.broken:
            raise DeviceError("link", "the host is gone")
        copy_checked(copy, copy_bytes)

    def __call__(
        self, settings: FleetSettings, clock: Clock, post: Callable[[Event], None]
    ) -> CpuMachine:
        def forward(event: Event) -> None:
            waits = None
            if isinstance(event, FirstJobReadyEvent):
                self.opened.append(event.transfer_id)
                waits = self._waits[self._of(event.transfer_id)]
                waits.clear()  # earlier jobs of the model have ended
            post(event)
            if waits is not None:
                assert waits.wait(DEADLINE), "no job has come to wait"
                self.broken = self.fails
                self.in_between()

        class Machine(CpuMachine):
            copies_beside_jobs = True

            def make_stream(self, clock: Clock, post: Callable[[Event], None]) -> MakeStream | None:
                return super().make_stream(clock, forward)

        machine = Machine(settings, clock, forward)
        machine.link.close()
        machine.link = HostLink(clock, forward, threads=1, chunk_bytes=CHUNK)
        return machine

    def watch(self, server: InProcess) -> None:
        """Have the server's jobs tell when they wait."""
        models = server.device.state.models
        self._of = lambda id: next(n for n, m in models.items() if m.life.transfer_id == id)
        for name, m in models.items():
            self._waits[name] = threading.Event()
            stream: Any = m.weights.stream
            stream.wait = self._waiting(name, stream.wait)

    def _waiting(self, name: str, wait: Callable[[int], None]) -> Callable[[int], None]:
        def noting(layer: int) -> None:
            self.waited.append((name, layer))
            self._waits[name].set()
            wait(layer)

        return noting


def check(server: InProcess) -> None:
    server.drain()
    server.device.state.validate()
    for m in server.device.state.models.values():
        assert m.life.early_start is EarlyStart.NONE
        assert m.weights.range.os_backed() == m.weights.range.backed + m.weights.range.aliased


@pytest.mark.parametrize(("model_impl", "linear"), [("generic", "plain"), ("fused", "packed")])
def test_a_cold_models_tokens_are_those_of_a_warm_one(
    paths: dict[str, Path], model_impl: str, linear: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = with_path(fleet(paths), model_impl, linear)
    requests = asked(3)
    again = [replace(r, id=f"{r.id}-warm") for r in requests]
    step = Stepwise(monkeypatch)
    with InProcess(settings, make_machine=step) as server:
        step.watch(server)
        cold, warm = server.generate(requests), server.generate(again)
        for m in server.device.state.models.values():
            assert m.weights.stream is not None
            assert m.weights.stream.loads.n == 0
            assert m.weights.stream.loads.stall_seconds == 0
        check(server)
    for r in requests:
        assert cold[r.id].tokens == warm[f"{r.id}-warm"].tokens
        assert cold[r.id].logprobs == pytest.approx(warm[f"{r.id}-warm"].logprobs, abs=1e-4)
    assert len(step.opened) == len(NAMES)
    assert {name for name, _ in step.waited} == set(NAMES)


def test_models_that_drive_each_other_out_change_no_token(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    requests = asked(4)
    with InProcess(fleet(paths)) as server:
        alone = server.generate(requests)
    step = Stepwise(monkeypatch)
    story = tmp_path / "story.jsonl"
    tight = replace(fleet(paths, need(paths)), story_path=str(story))
    with InProcess(tight, make_machine=step) as server:
        step.watch(server)
        answers = server.generate(requests)
        check(server)
        assert sum(m.evictions for m in server.device.state.models.values())
    assert {id: a.tokens for id, a in answers.items()} == {id: a.tokens for id, a in alone.items()}
    assert len(step.opened) > 1
    (life,) = read_device_stories(story)
    found = replay(life)
    assert (found.difference, found.stray) == (None, None)


def test_a_load_that_fails_under_a_job_fails_its_model_and_no_other(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    requests = asked(2, models=("a",))
    others = asked(2, models=("b",))
    with InProcess(fleet(paths)) as server:
        alone = server.generate(others)
    step = Stepwise(monkeypatch)
    story = tmp_path / "story.jsonl"
    with InProcess(replace(fleet(paths), story_path=str(story)), make_machine=step) as server:
        step.watch(server)
        there = server.generate(others)
        step.fails = True
        answers = server.generate(requests)
        late = server.generate([replace(requests[0], id="late")])["late"].end
        step.fails = step.broken = False
        after = server.generate([replace(r, id=f"{r.id}-after") for r in others])
        state = server.device.state
        assert state.models["a"].residency is Residency.FAILED
        assert state.pool.ledger.owned("weights:a") == 0
        assert state.models["a"].kv.pages == 0
        check(server)
    for r in requests:
        end = answers[r.id].end
        assert isinstance(end, FailedOutput)
        assert (end.code, "the host is gone" in end.reason) == ("model_failed", True)
        assert answers[r.id].tokens == []
    assert isinstance(late, FailedOutput)
    assert late.code == "model_failed"
    for r in others:
        assert there[r.id].tokens == after[f"{r.id}-after"].tokens == alone[r.id].tokens
    assert len(step.opened) == 2
    (life,) = read_device_stories(story)
    found = replay(life)
    assert (found.difference, found.stray) == (None, None)


def test_what_arrives_and_goes_while_the_first_job_waits(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request more, and a client that vanishes."""
    first, gone, second = asked(3, models=("a",))
    with InProcess(fleet(paths)) as server:
        alone = server.generate([first, gone, second])
    step = Stepwise(monkeypatch)
    with InProcess(fleet(paths), make_machine=step) as server:
        step.watch(server)

        def in_between() -> None:
            server.submit(second)
            server.cancel(gone.id)

        step.in_between = in_between
        answers = server.generate([first, gone])
        server.wait()
        assert answers[first.id].tokens == alone[first.id].tokens
        assert server.answers[second.id].tokens == alone[second.id].tokens
        assert isinstance(answers[gone.id].end, CancelledOutput)
        check(server)


def test_a_load_that_is_given_up_leaves_nothing_behind(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its pages are back before the others' load; when it is loaded again, jobs wait for its layers
    as before."""
    (first,), (other,) = asked(1, models=("a",)), asked(1, models=("b",))
    with InProcess(fleet(paths)) as server:
        alone = server.generate([first, other])
    begun, go = threading.Event(), threading.Event()

    def copy(copy: Copy, copy_bytes: CopyBytes) -> None:
        begun.set()
        assert go.wait(DEADLINE)
        copy_checked(copy, copy_bytes)

    step = Stepwise(monkeypatch)
    monkeypatch.setattr("ballast.memory.transfer.copy_checked", copy)
    story = tmp_path / "story.jsonl"
    with InProcess(replace(fleet(paths), story_path=str(story)), make_machine=step) as server:
        step.watch(server)
        m = server.device.state.models["a"]
        server.submit(replace(first, id="gone"))
        assert begun.wait(DEADLINE)
        server.cancel("gone")
        server.submit(other)
        until = time.monotonic() + DEADLINE
        while not m.life.stopping and time.monotonic() < until:
            time.sleep(0.01)
        go.set()
        server.wait()
        assert (m.residency, m.evictions) == (Residency.ABSENT, 1)
        assert server.device.state.pool.ledger.owned("weights:a") == 0
        answers = server.generate([first])
        check(server)
    assert isinstance(server.answers["gone"].end, CancelledOutput)
    assert answers[first.id].tokens == alone[first.id].tokens
    assert server.answers[other.id].tokens == alone[other.id].tokens
    assert {name for name, _ in step.waited} == {"a", "b"}
    (life,) = read_device_stories(story)
    found = replay(life)
    assert (found.difference, found.stray) == (None, None)


def test_costs_are_learned_from_jobs_that_found_their_layers(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = [replace(r, max_tokens=1) for r in asked(1, models=("a",))]
    step = Stepwise(monkeypatch)
    with InProcess(fleet({"a": paths["a"]}), make_machine=step) as server:
        step.watch(server)
        m = server.device.state.models["a"]
        before = m.costs
        server.generate(one)
        assert step.opened
        assert (m.costs, m.prefill_seconds) == (before, None)
        assert sum(m.step_counts) == 1
        server.generate([replace(one[0], id="again", prompt=(*one[0].prompt, 5))])
        assert m.costs != before
        assert m.prefill_seconds is not None
        check(server)


def test_adapters_are_there_before_the_first_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    requests = [
        Submission(id=f"{name}{i}", model=name, prompt=(3 + i, 5, 7), max_tokens=8, ignore_eos=True)
        for name in ("x", "base", "z")
        for i in range(2)
    ]
    with InProcess(world.fleet()) as server:
        alone = server.generate(requests)
    step = Stepwise(monkeypatch)
    with InProcess(world.fleet(), make_machine=step) as server:
        step.watch(server)
        answers = server.generate(requests)
        check(server)
    assert step.opened
    assert {id: a.tokens for id, a in answers.items()} == {id: a.tokens for id, a in alone.items()}


def test_a_model_that_counts_on_anothers_copy_waits_for_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, tuned = make_base_and_tuned(tmp_path)
    both = {"a": base, "b": tuned}
    requests = asked(2, models=("a", "b"))
    with InProcess(fleet(both)) as server:
        alone = server.generate(requests)
    step = Stepwise(monkeypatch)
    with InProcess(fleet(both), make_machine=step) as server:
        step.watch(server)
        answers = server.generate(requests)
        check(server)
    assert {name for name, _ in step.waited} == {"a"}
    assert {id: a.tokens for id, a in answers.items()} == {id: a.tokens for id, a in alone.items()}
