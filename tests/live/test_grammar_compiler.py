"""Grammars are compiled beside the lanes: once each, while models run, on nobody's time."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher

from ballast.bench.inprocess import InProcess
from ballast.core.command import Add, Remove
from ballast.core.errors import InvalidRequest
from ballast.core.event import CancelledOutput, Event, FailedOutput, GrammarReadyEvent
from ballast.core.request import Request, Sampling, Submission
from ballast.core.settings import ModelSettings
from ballast.live.grammar_compiler import GrammarCompiler
from ballast.models.grammar import CompiledGrammar, Grammars, compile_grammar
from ballast.sim.replay import replay
from ballast.sim.story_reader import read_device_stories
from tests.engine.test_requests import GRAMMAR, asked, fleet, path  # noqa: F401
from tests.live.test_command_executor import ordered
from tests.policy import worlds

DEADLINE = 240.0
"""Seconds after which a wait counts as failed; no test waits so long to pass."""
SPEC = worlds.spec("m")


class Gate:
    """A compiler that waits until a test lets it go on, and counts what it is asked for."""

    def __init__(self, server: InProcess | None = None) -> None:
        self.asked: Counter[str] = Counter()
        self.threads: set[str] = set()
        self.begun = threading.Event()
        self.open = threading.Event()
        if server is not None:
            server.device._grammar_compiler._compile = self

    def __call__(self, tokenizer: Any, text: str) -> CompiledGrammar:
        self.asked[text] += 1
        self.threads.add(threading.current_thread().name)
        self.begun.set()
        assert self.open.wait(DEADLINE)
        return compile_grammar(tokenizer, text)


def choices(n: int, grammar: str = GRAMMAR) -> list[Submission]:
    """Of one request."""
    one = asked("choice", n=30, temperature=1.0, seed=3, grammar=grammar)
    return [
        replace(one, id=f"choice {i}", sampling=replace(one.sampling, choice=i)) for i in range(n)
    ]


def test_models_run_while_a_grammar_is_compiled_once_for_all(
    path: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    settings = replace(fleet(path), story_path=str(tmp_path / "story"))
    with InProcess(settings) as server:
        gate = Gate(server)
        for choice in choices(32):
            server.submit(choice)
        assert gate.begun.wait(DEADLINE)
        # Nothing lets the compiler go on before this has been answered.
        server.submit(asked("plain"))
        server.submit(asked("gone", grammar=GRAMMAR))
        server.cancel("gone")
        wait_for(server, "plain", "gone")
        assert server.answers["plain"].finished.output_tokens == 40
        assert isinstance(server.answers["gone"].end, CancelledOutput)
        assert all(server.answers[f"choice {i}"].tokens == [] for i in range(32))
        assert server.device.snapshot().models[0].paused == 32
        gate.open.set()
        server.wait()
        again = server.generate([replace(c, id=f"{c.id} again") for c in choices(4)])
        server.drain()
        server.device._grammar_compiler.book.validate()
        state = server.device.state
        assert not any(m.paused for m in state.models.values())
        state.pool.validate()
    assert gate.asked == {GRAMMAR: 1}
    assert gate.threads == {"grammars"}
    for i in range(4):
        assert again[f"choice {i} again"].tokens == server.answers[f"choice {i}"].tokens != []
    (life,) = read_device_stories(tmp_path / "story")
    found = replay(life)
    assert (found.difference, found.stray) == (None, None)
    assert sum(entry.get("event") == "GrammarReady" for entry in life.entries) >= 36
    assert "sizes" not in (tmp_path / "story").read_text(), "no grammar is in it"


def wait_for(server: InProcess, *ids: str) -> None:
    """Until these have ended."""
    with server._ended:
        assert server._ended.wait_for(
            lambda: all(server.answers[id].end is not None for id in ids), DEADLINE
        )


def test_models_with_one_tokenizer_share_grammars(path: Path) -> None:  # noqa: F811
    settings = fleet(path)
    twin = replace(settings.models[0], name="b")
    with InProcess(replace(settings, models=(*settings.models, twin))) as server:
        gate = Gate(server)
        gate.open.set()
        one, other = (replace(asked(name, grammar=GRAMMAR), model=name) for name in "ab")
        answers = server.generate([one, other])
        assert len(server.device._grammar_compiler._tokenizers) == 1
    assert gate.asked == {GRAMMAR: 1}
    assert answers["a"].tokens == answers["b"].tokens


def test_models_that_come_and_go_have_grammars(path: Path) -> None:  # noqa: F811
    with InProcess(fleet(path)) as server:
        for _ in range(2):
            added = ModelSettings(name="b", path=str(path), dtype="float32")
            assert ordered(server, Add(added)).code is None
            asking = replace(asked("one", grammar=GRAMMAR), model="b")
            assert server.generate([asking])["one"].finished
            assert ordered(server, Remove("b", patience=DEADLINE)).code is None
        assert [*server.device._grammar_compiler._models] == ["a"]


# -- the thread, without a device ------------------------------------------------------------------


class Beside:
    """A compiler, and what it has posted."""

    def __init__(self, gate: Any) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.lost: queue.SimpleQueue[Exception] = queue.SimpleQueue()
        self.exempt: list[int] = []
        self.compiling = GrammarCompiler(
            self.events.put, self.lost.put, self.beside, self.exempt.append, gate
        )
        self.grammars = Grammars(Path("/nonexistent"), 10, ())
        self.grammars.tokenizer.load = lambda: "tokenizer"  # type: ignore[method-assign]
        self.compiling.serve("m", self.grammars)

    @contextmanager
    def beside(self) -> Iterator[None]:
        yield

    def prepare(self, id: str, grammar: str, tenant: str = "") -> Request:
        s = Submission(
            id=id,
            model="m",
            prompt=(1,),
            max_tokens=1,
            sampling=Sampling(grammar=grammar),
            tenant=tenant,
        )
        request = Request.of(s, 1, SPEC)
        self.compiling.prepare(request)
        return request

    def next(self) -> Event:
        return self.events.get(timeout=DEADLINE)

    def close(self) -> None:
        self.compiling.close()
        self.compiling.book.validate()


class Prototype:
    def deep_copy(self) -> Any:
        raise AssertionError("nobody asks here")


def test_what_is_wrong_with_a_grammar_fails_its_requests_alone() -> None:
    class Panic(BaseException):
        pass

    def compile(tokenizer: Any, text: str) -> CompiledGrammar:
        if text == "wrong":
            raise InvalidRequest("the grammar cannot be followed: wrong")
        if text == "fault":
            raise Panic
        return CompiledGrammar(Prototype())

    it = Beside(compile)
    for id in ("wrong", "fault", "sound"):
        it.prepare(id, id)
    assert it.next() == GrammarReadyEvent(
        "wrong", "invalid_request", "the grammar cannot be followed: wrong"
    )
    fault = it.next()
    assert isinstance(fault, GrammarReadyEvent)
    assert (fault.request_id, fault.code) == ("fault", "invalid_request")
    assert "Panic" in fault.reason
    assert it.next() == GrammarReadyEvent("sound")
    it.prepare("again", "sound")
    assert it.next() == GrammarReadyEvent("again")
    assert it.exempt[-1] > 0
    it.close()


def test_a_grammar_that_nobody_waits_for_is_not_compiled() -> None:
    seen: list[str] = []
    begun, go_on = threading.Event(), threading.Event()

    def compile(tokenizer: Any, text: str) -> CompiledGrammar:
        seen.append(text)
        begun.set()
        assert go_on.wait(DEADLINE)
        return CompiledGrammar(Prototype())

    it = Beside(compile)
    it.prepare("first", "first")
    assert begun.wait(DEADLINE)
    gone = it.prepare("gone", "gone")
    kept = [it.prepare(f"kept {i}", "kept") for i in range(3)]
    it.compiling.release(gone)
    it.compiling.release(kept[0])
    go_on.set()
    assert [it.next() for _ in range(3)] == [
        GrammarReadyEvent("first"),
        GrammarReadyEvent("kept 1"),
        GrammarReadyEvent("kept 2"),
    ]
    assert seen == ["first", "kept"]
    it.close()


def test_too_many_that_wait_are_refused_by_key() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def compile(tokenizer: Any, text: str) -> CompiledGrammar:
        begun.set()
        assert go_on.wait(DEADLINE)
        return CompiledGrammar(Prototype())

    it = Beside(compile)
    it.prepare("first", "first", "x")
    assert begun.wait(DEADLINE)
    requests = [it.prepare(f"x{i}", f"x{i}", "x") for i in range(65)]
    refused = it.next()
    assert refused == GrammarReadyEvent(
        "x64", "queue_full", "grammars to be compiled: 64 of the same API key wait already"
    )
    it.prepare("y", "y", "y")
    it.compiling.release(requests[64])
    go_on.set()
    first = [it.next() for _ in range(3)]
    assert GrammarReadyEvent("y") in first, "the other key does not wait for all of the first"
    it.close()


def test_a_compiler_that_is_lost_ends_the_loop() -> None:
    it = Beside(lambda tokenizer, text: CompiledGrammar(Prototype()))

    def fail(n_bytes: int) -> None:
        raise MemoryError

    it.compiling._exempt = fail
    it.prepare("r", "r")
    assert it.next() == GrammarReadyEvent("r")
    assert "has ended" in str(it.lost.get(timeout=DEADLINE))
    it.close()


def test_a_refusal_reaches_the_client(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr("ballast.live.grammar_cache.MOST_WAITING_EACH", 1)
    with InProcess(fleet(path)) as server:
        gate = Gate(server)
        server.submit(asked("1", grammar=GRAMMAR))
        assert gate.begun.wait(DEADLINE)
        numbers = LLMatcher.grammar_from_regex("[1-3]+;")
        server.submit(asked("2", grammar=numbers))
        server.submit(asked("3", grammar=LLMatcher.grammar_from_regex("[4-6]+;")))
        wait_for(server, "3")
        end = server.answers["3"].end
        assert isinstance(end, FailedOutput)
        assert (end.code, "1 of the same API key wait" in end.reason) == ("queue_full", True)
        gate.open.set()
        server.wait()
        assert server.answers["1"].finished
        assert server.answers["2"].finished
