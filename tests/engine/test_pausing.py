"""Paused requests: whatever comes when, each is in one place, and goes on as it would have."""

from __future__ import annotations

import tempfile
from math import inf
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ballast.core.entries import StoryEntry
from ballast.core.event import (
    CancelEvent,
    Event,
    FailedOutput,
    FinishedOutput,
    GrammarReadyEvent,
    Output,
    PauseEvent,
    PromptScoresOutput,
    ResumeEvent,
)
from ballast.core.link import LinkRates
from ballast.core.request import Request, RequestState, Sampling, Submission, WaitsFor
from ballast.engine.story_file import StoryFile
from ballast.policy.presets import resolve
from ballast.sim.device import SimDevice
from ballast.sim.machine_profile import MachineProfile
from ballast.sim.replay import replay
from ballast.sim.story_reader import read_device_stories
from tests.effort import tries
from tests.sim.test_simulate import COSTS, KEEP_PLACES, OutputLog, fleet, spec, watch

PRESETS = ("balloon", "swap", "static", "mirage", "recompute")
picks = st.integers(0, 1000)


class Store:
    """A `GrammarStore` whose grammars are ready when a test posts that."""

    def __init__(self) -> None:
        self.held: set[str] = set()

    def prepare(self, request: Request) -> None:
        assert request.id not in self.held
        self.held.add(request.id)

    def release(self, request: Request) -> None:
        self.held.remove(request.id)


class Pausing(RuleBasedStateMachine):
    """A device in virtual time, against the few rules that `ballast.engine.pausing` promises."""

    @initialize(
        preset=st.sampled_from(PRESETS),
        pages=st.sampled_from([60, 90, 400]),
        cached=st.booleans(),
        lanes=st.sampled_from([1, 2]),
    )
    def begin(self, preset: str, pages: int, cached: bool, lanes: int, **changes: int) -> None:
        specs = [spec("a", max_running=4, **changes), spec("b", max_running=3)]
        self.keeps_places = preset in KEEP_PLACES
        self.store = Store()
        self.received = OutputLog()
        self.n = 0
        self.sleeping: dict[str, int] = {}
        """Paused requests that nobody has resumed since, and how many tokens they had."""
        self.entries: list[StoryEntry] = []
        lanes = 1 if preset in ("swap", "mirage") else lanes
        made = fleet(preset, specs, pages, prefix_cache=cached, lanes=lanes)
        self.device = SimDevice(
            made.device,
            specs,
            resolve(preset, {}),
            MachineProfile(
                costs={s.name: COSTS for s in specs}, link=LinkRates.even(1e8), overhead=0.0
            ),
            self.listen,
            self.entries.extend,
        )
        self.state = self.device.state
        self.state.grammars = self.store

    # -- what happens -----------------------------------------------------------------------------

    @rule(
        model=st.sampled_from(["a", "b"]),
        prompt=st.integers(1, 120),
        tokens=st.integers(1, 40),
        grammar=st.booleans(),
        scored=st.booleans(),
    )
    def arrive(self, model: str, prompt: int, tokens: int, grammar: bool, scored: bool) -> None:
        self.n += 1
        submission = Submission(
            id=f"r{self.n}",
            model=model,
            prompt=tuple((3 * i) % 511 + 1 for i in range(prompt)),
            max_tokens=tokens,
            sampling=Sampling(grammar="g" if grammar else ""),
            arrival=self.device.clock.now(),
            ignore_eos=True,
            prompt_logprobs=0 if scored else None,
        )
        self.device.submit(submission)
        self.go_on(1e-9)

    @precondition(lambda self: self.state.requests)
    @rule(pick=picks)
    def pause(self, pick: int) -> None:
        self.happens(PauseEvent(self.picked(pick).id))

    @precondition(lambda self: self.state.requests)
    @rule(pick=picks)
    def resume(self, pick: int) -> None:
        self.wake(self.picked(pick), ResumeEvent)

    @precondition(lambda self: self.store.held)
    @rule(pick=picks, fails=st.integers(0, 5))
    def compiled(self, pick: int, fails: int) -> None:
        held = sorted(self.store.held)
        request = self.state.requests[held[pick % len(held)]]
        if fails == 0 and WaitsFor.GRAMMAR in request.waits_for:
            self.sleeping.pop(request.id, None)
            self.happens(GrammarReadyEvent(request.id, "invalid_request", "nonsense"))
        else:
            self.wake(request, GrammarReadyEvent)

    @precondition(lambda self: self.state.requests)
    @rule(pick=picks)
    def cancel(self, pick: int) -> None:
        request = self.picked(pick)
        self.sleeping.pop(request.id, None)
        self.happens(CancelEvent(request.id))

    @rule(seconds=st.sampled_from([0.001, 0.01, 0.1, 1.0]))
    def go_on(self, seconds: float) -> None:
        self.device.advance(self.device.clock.now() + seconds)

    # -- what must hold ---------------------------------------------------------------------------

    @invariant()
    def each_request_is_in_one_place(self) -> None:
        if not hasattr(self, "device"):
            return
        watch(0.0, self.state)
        found: list[str] = []
        for m in self.state.models.values():
            for state, there in (
                (RequestState.RUNNING, list(m.running)),
                (RequestState.WAITING, list(m.waiting)),
                (RequestState.PAUSED, list(m.paused.values())),
            ):
                assert all(r.state is state for r in there)
                found += [r.id for r in there]
            assert sorted(m.running, key=lambda r: r.order) == list(m.running)
        assert sorted(found) == sorted(self.state.requests)
        with_grammar = {r.id for r in self.state.requests.values() if r.submission.sampling.grammar}
        assert self.store.held == with_grammar

    @invariant()
    def who_waits_for_anything_is_paused_or_about_to_be(self) -> None:
        if not hasattr(self, "device"):
            return
        for r in self.state.requests.values():
            if r.state is RequestState.PAUSED:
                assert r.waits_for
                assert (r.blocks, r.computed, r.in_flight) == ([], 0, False)
                assert self.sleeping.setdefault(r.id, len(r.tokens)) == len(r.tokens)
            else:
                assert r.in_flight or not r.waits_for
                assert r.id not in self.sleeping, "nobody has resumed it"

    def teardown(self) -> None:
        if not hasattr(self, "device"):
            return
        expected = dict(self.state.requests)
        for request in expected.values():
            self.wake(request, ResumeEvent)
            if WaitsFor.GRAMMAR in request.waits_for:
                self.wake(request, GrammarReadyEvent)
        self.device.finish(self.device.clock.now())
        watch(0.0, self.state)
        assert not self.store.held
        assert not any(m.paused for m in self.state.models.values())
        for id, request in expected.items():
            if request.cancelled:
                continue
            end = self.received.ended[id]
            if self.keeps_places and isinstance(end, FailedOutput):
                assert end.code == "insufficient_memory"
                assert "has no place" in end.reason
                continue
            assert isinstance(end, FinishedOutput), end
            assert end.output_tokens == request.submission.max_tokens
            assert request.output == self.undisturbed(request)
        with tempfile.TemporaryDirectory() as directory:
            file = StoryFile(f"{directory}/story", "cpu:0")
            file.write(self.entries)
            file.close()
            (life,) = read_device_stories(Path(directory) / "story")
        found = replay(life)
        assert (found.difference, found.stray) == (None, None)
        assert life.over

    def undisturbed(self, request: Request) -> list[int]:
        """The output of a request, which depends on it and on positions alone."""
        token = self.device._runner.token
        m, end = self.state.models[request.model], len(request.tokens)
        return [token(m.spec, request.id, at) for at in range(request.prompt_tokens, end)]

    # -- by what means ----------------------------------------------------------------------------

    def listen(self, now: float, output: Output) -> None:
        if not isinstance(output, PromptScoresOutput):
            self.received(now, output)

    def picked(self, pick: int) -> Request:
        requests = [*self.state.requests.values()]
        return requests[pick % len(requests)]

    def wake(self, request: Request, event: type[ResumeEvent] | type[GrammarReadyEvent]) -> None:
        """Takes place before anything else does."""
        gone = WaitsFor.READER if event is ResumeEvent else WaitsFor.GRAMMAR
        if not request.waits_for & ~gone:
            self.sleeping.pop(request.id, None)
        self.happens(event(request.id))

    def happens(self, event: Event) -> None:
        self.device._heap.schedule(self.device.clock.now(), event)
        self.go_on(1e-9)


TestPausing = Pausing.TestCase
TestPausing.settings = settings(
    max_examples=tries(8, all=20), stateful_step_count=30, deadline=None
)


def test_a_request_that_fails_while_it_waits_for_its_grammar_says_why() -> None:
    machine = Pausing()
    machine.begin("balloon", 400, True, 1)
    machine.arrive("a", 5, 5, True, False)
    machine.go_on(1.0)
    assert machine.state.requests["r1"].state is RequestState.PAUSED
    machine.happens(GrammarReadyEvent("r1", "queue_full", "64 grammars of this key wait already"))
    end = machine.received.ended["r1"]
    assert end == FailedOutput("r1", "queue_full", "64 grammars of this key wait already")
    machine.teardown()


def test_paused_requests_alone_wake_nobody_and_do_not_fail() -> None:
    """A loop that has nothing but paused requests is not stuck: it waits for their readers."""
    machine = Pausing()
    machine.begin("balloon", 60, True, 1)
    machine.arrive("a", 100, 40, False, False)
    machine.go_on(0.1)
    machine.happens(PauseEvent("r1"))
    machine.go_on(1.0)
    assert machine.state.requests["r1"].state is RequestState.PAUSED
    assert machine.device.due == inf, "neither an event nor the loop is due"
    machine.teardown()


def test_who_is_paused_before_it_is_admitted_counts_as_waiting_and_later_not() -> None:
    machine = Pausing()
    machine.begin("balloon", 400, True, 1, max_waiting=1)
    machine.arrive("a", 100, 40, True, False)
    machine.arrive("a", 100, 40, True, False)
    refused = machine.received.ended["r2"]
    assert isinstance(refused, FailedOutput)
    assert refused.code == "queue_full"
    machine.wake(machine.state.requests["r1"], GrammarReadyEvent)
    machine.go_on(0.05)
    machine.happens(PauseEvent("r1"))
    machine.go_on(0.05)
    assert machine.state.requests["r1"].state is RequestState.PAUSED
    machine.arrive("a", 100, 40, False, False)
    assert "r3" in machine.state.requests
    machine.teardown()


def test_leaps_do_not_pass_over_what_waits_for_the_end_of_a_job() -> None:
    machine = Pausing()
    machine.begin("static", 60, False, 1)
    machine.arrive("a", 1, 400, False, False)
    machine.arrive("a", 1, 400, False, False)
    machine.go_on(0.1)
    machine.cancel(0)
    machine.pause(0 if [*machine.state.requests] == ["r2"] else 1)
    machine.go_on(0.02)  # some jobs
    assert [*machine.state.requests] == ["r2"]
    assert machine.state.requests["r2"].state is RequestState.PAUSED
    machine.teardown()
