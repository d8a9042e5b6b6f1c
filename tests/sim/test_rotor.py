"""Loads of rotating layers by arithmetic are those of a simulation that makes each of them."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast.core.clock import VirtualClock
from ballast.core.event import Settled
from ballast.core.link import Direction, LinkRates
from ballast.core.model import ModelSpec
from ballast.core.rotation import WHOLE, Rotation, stall
from ballast.memory.copies import Copy
from ballast.sim.heap import EventHeap
from ballast.sim.link import SimLink
from ballast.sim.rotor import SimRotors

RATE = 1000.0


@dataclass(frozen=True)
class Step:
    """After `pause` seconds the model's rotation becomes another, or, if None, a job runs."""

    model: int
    pause: float
    seconds: float = 0.0
    rotation: Rotation | None = None


@dataclass(frozen=True)
class Course:
    layers: tuple[int, ...]
    """Of each model."""
    n_bytes: int
    """Of each layer."""
    steps: tuple[Step, ...]


@st.composite
def rotations(draw: st.DrawFn, n: int) -> Rotation:
    layers = draw(st.sets(st.integers(0, n - 1), min_size=2))
    return Rotation(tuple(sorted(layers)), draw(st.integers(1, min(3, len(layers) - 1))))


@st.composite
def courses(draw: st.DrawFn) -> Course:
    """Models take turns; rotations change between their jobs."""
    layers = tuple(draw(st.lists(st.integers(2, 12), min_size=1, max_size=3)))
    steps = [Step(i, 0.0, rotation=draw(rotations(n))) for i, n in enumerate(layers)]
    for _ in range(draw(st.integers(1, 12))):
        i = draw(st.integers(0, len(layers) - 1))
        pause = draw(st.sampled_from([0.0, 0.01, 0.3, 2.0]))
        seconds = draw(st.sampled_from([0.05, 0.4, 1.0, 7.0]))
        steps.append(Step(i, pause, seconds))
        if draw(st.integers(0, 3)) == 0:
            rotation = draw(st.one_of(st.just(WHOLE), rotations(layers[i])))
            steps.append(Step(i, draw(st.floats(0, 0.5)), rotation=rotation))
    return Course(layers, draw(st.sampled_from([20, 100, 350])), tuple(steps))


Seen = list[tuple[float, ...]]
"""(end, stall) of each job; when each rotation was settled, and which layers its slots held."""


def turned(n: int, old: Rotation, held: list[int], new: Rotation) -> tuple[list[int], list[int]]:
    """By slot, the layer whose bytes it has (as well it may choose); and the missing ones."""
    absent = set(old.layers) - set(held)
    kept = [
        next((layer for layer in new.of_slot(slot) if layer not in absent), -1)
        for slot in range(new.slots)
    ]
    return kept, sorted(absent - set(new.layers))


def by_arithmetic(course: Course) -> Seen:
    clock = VirtualClock()
    heap = EventHeap(clock)
    rotors = SimRotors(heap, clock, SimLink(heap, clock, LinkRates.even(1.0)), LinkRates.even(RATE))
    made = [
        rotors.make(spec(str(i), n), [Copy(0, 0, course.n_bytes)] * n)
        for i, n in enumerate(course.layers)
    ]
    now = [WHOLE] * len(made)
    seen: Seen = []
    for step in course.steps:
        clock.advance_to(clock.now() + step.pause)
        rotor = made[step.model]
        if step.rotation is None:
            stall = rotors.stall(str(step.model), step.seconds)
            assert stall == rotors.stall(str(step.model), step.seconds)
            clock.advance_to(clock.now() + (step.seconds + stall))
            seen.append((clock.now(), stall))
            continue
        rotor.settle()
        assert heap.take(None) == [Settled(str(step.model))]
        n, held = course.layers[step.model], list(rotor.held)
        seen.append((clock.now(), *held))
        kept, missing = turned(n, now[step.model], held, step.rotation)
        rotor.turn(step.rotation, kept, missing)
        now[step.model] = step.rotation
    seen += [(rotor.loads.n, rotor.loads.stall_seconds) for rotor in made]
    return seen


def spec(name: str, n: int) -> ModelSpec:
    return ModelSpec(
        name=name,
        n_layers=n,
        n_heads=1,
        kv_heads=1,
        head_dim=8,
        hidden=8,
        intermediate=8,
        vocab=8,
        dtype="float32",
        max_model_len=8,
        block_tokens=8,
        segment_bytes=(1,) * (n + 2),
        fingerprint=name,
    )


@dataclass
class Bytes:
    """Of one model: which layers are there, and which are wanted in which slot."""

    rotation: Rotation = WHOLE
    held: list[int] = field(default_factory=list)
    absent: set[int] = field(default_factory=set)
    loads: int = 0
    stalls: float = 0.0


class World:
    """Every load and every layer is an event; the link serves one load after another."""

    def __init__(self, course: Course) -> None:
        self.course = course
        self.now = 0.0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.models = [Bytes() for _ in course.layers]
        self.wanted: list[tuple[int, int, int]] = []
        """(model, layer, slot or -1), in the order of asking; the first may be on its way."""
        self.copying = False
        self.seen: Seen = []

    def run(self) -> Seen:
        script = self.script()

        def go_on() -> None:
            wait = next(script, None)
            if wait is not None:
                self.after(wait, go_on)

        go_on()
        while self.queue:
            self.now, _, act = heapq.heappop(self.queue)
            act()
        return [*self.seen, *((m.loads, m.stalls) for m in self.models)]

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (self.now + seconds, next(self.order), act))

    def ask(self, model: int, layer: int, slot: int) -> None:
        self.wanted.append((model, layer, slot))
        self.serve()

    def serve(self) -> None:
        if self.copying or not self.wanted:
            return
        self.copying = True
        model, layer, slot = self.wanted[0]
        m = self.models[model]
        m.loads += 1
        if slot >= 0:
            m.absent.add(m.held[slot])
            m.held[slot] = -1

        def landed() -> None:
            self.wanted.pop(0)
            self.copying = False
            m.absent.discard(layer)
            if slot >= 0:
                m.held[slot] = layer
            self.serve()

        self.after(self.course.n_bytes / RATE, landed)

    def script(self) -> Iterator[float]:
        """What happens one after another; each number is a wait."""
        for step in self.course.steps:
            yield step.pause
            job = self.turn(step) if step.rotation is not None else self.job(step)
            yield from job

    def job(self, step: Step) -> Iterator[float]:
        m, n = self.models[step.model], self.course.layers[step.model]
        stalled = 0.0
        for layer in range(n):
            since = self.now
            while layer in m.absent:
                yield self.queue[0][0] - self.now
            stalled += self.now - since
            yield step.seconds / n
            if layer in m.rotation.layers:
                slot = m.rotation.layers.index(layer) % m.rotation.slots
                shared = m.rotation.of_slot(slot)
                following = shared[(shared.index(layer) + 1) % len(shared)]
                if following != layer:
                    self.ask(step.model, following, slot)
        m.stalls += stalled
        self.seen.append((self.now, stalled))

    def turn(self, step: Step) -> Iterator[float]:
        assert step.rotation is not None
        m, n = self.models[step.model], self.course.layers[step.model]
        while any(model == step.model for model, _, _ in self.wanted):
            yield self.queue[0][0] - self.now
        self.seen.append((self.now, *m.held))
        m.held, missing = turned(n, m.rotation, m.held, step.rotation)
        m.rotation = step.rotation
        m.absent = {*missing, *(set(step.rotation.layers) - set(m.held))}
        firsts = {step.rotation.of_slot(slot)[0]: slot for slot in range(step.rotation.slots)}
        for layer in sorted({*firsts, *missing}):
            slot = firsts.get(layer, -1)
            if slot < 0 or m.held[slot] != layer:
                self.ask(step.model, layer, slot)


@given(courses())
def test_loads_by_arithmetic_are_those_of_a_simulation_of_each(course: Course) -> None:
    found, expected = by_arithmetic(course), World(course).run()
    for a, b in zip(found, expected, strict=True):
        assert a == pytest.approx(b, abs=1e-6)


@given(
    st.integers(2, 12).flatmap(lambda n: st.tuples(st.just(n), rotations(n))),
    st.integers(1, 14),
    st.integers(0, 6),
)
def test_jobs_that_follow_each_other_come_to_wait_as_the_arithmetic_of_plans_says(
    plan: tuple[int, Rotation], transfer: int, outside: int
) -> None:
    """Times are quarters of a layer's work, so that what repeats does so soon."""
    n, rotation = plan
    clock = VirtualClock()
    heap = EventHeap(clock)
    rotors = SimRotors(heap, clock, SimLink(heap, clock, LinkRates.even(1.0)), LinkRates.even(4.0))
    rotors.make(spec("m", n), [Copy(0, 0, transfer)] * n).turn(rotation, [-1] * rotation.slots, ())
    stalls = []
    for _ in range(72):
        stalls.append(rotors.stall("m", float(n)))
        clock.advance_to(clock.now() + n + stalls[-1] + outside / 4)
    expected = stall(n, rotation, transfer / 4, 1.0, outside / 4)
    assert sum(stalls[-12:]) / 12 == pytest.approx(expected, abs=1e-6)


def test_loads_beside_other_traffic_are_as_slow_as_one_more_stream() -> None:
    rates = LinkRates(100.0, 100.0, 60.0, 60.0)

    def waits(*others: tuple[str, Direction]) -> float:
        clock = VirtualClock()
        heap = EventHeap(clock)
        link = SimLink(heap, clock, rates)
        rotors = SimRotors(heap, clock, link, rates)
        for i, (stream, direction) in enumerate(others):
            link.start(i, [Copy(0, 0, 10**6)], stream, direction)
        rotors.make(spec("m", 2), [Copy(0, 0, 50)] * 2).turn(Rotation((0, 1), 1), [0], ())
        return rotors.stall("m", 2.0)

    assert waits() == 0.5
    assert waits(("a", Direction.TO_DEVICE)) == 1.0
    assert waits(("a", Direction.TO_DEVICE), ("b", Direction.TO_DEVICE)) == 1.5
    assert waits(("a", Direction.TO_HOST)) == pytest.approx(50 / 60)


def test_a_model_whose_layers_stay_is_not_slowed_by_one_whose_layers_come_and_go() -> None:
    clock = VirtualClock()
    heap = EventHeap(clock)
    rates = LinkRates.even(100.0)
    rotors = SimRotors(heap, clock, SimLink(heap, clock, rates), rates)
    rotors.make(spec("a", 4), [Copy(0, 0, 500)] * 4).turn(Rotation((0, 1, 2), 1), [0], ())
    rotors.make(spec("b", 4), [Copy(0, 0, 500)] * 4)
    assert rotors.stall("a", 1.0) > 9
    assert rotors.stall("b", 1.0) == 0


def test_a_newcomer_that_is_refused_does_not_stand_for_the_model_that_is_there() -> None:
    clock = VirtualClock()
    heap = EventHeap(clock)
    rates = LinkRates.even(100.0)
    rotors = SimRotors(heap, clock, SimLink(heap, clock, rates), rates)
    rotors.make(spec("a", 2), [Copy(0, 0, 50)] * 2).turn(Rotation((0, 1), 1), [0], ())
    rotors.make(spec("a", 2), [Copy(0, 0, 50)] * 2)
    assert rotors.stall("a", 2.0) == 0.5


def test_loads_of_jobs_at_the_same_time_use_what_the_others_leave_of_the_link() -> None:
    """The second job's load finds a gap between the first one's."""
    clock = VirtualClock()
    heap = EventHeap(clock)
    rates = LinkRates.even(100.0)
    rotors = SimRotors(heap, clock, SimLink(heap, clock, rates), rates)
    for name in "ab":
        rotors.make(spec(name, 4), [Copy(0, 0, 100)] * 4).turn(Rotation((0, 2), 1), [0], ())
    assert rotors.stall("a", 8.0) == 0  # loads at 2..3 and 6..7
    assert rotors.stall("b", 4.0) == 0  # asked for at 1 and 3, needed at 2 and by the next one
    clock.advance_to(4.5)
    assert rotors.stall("b", 4.0) == 1  # asked for at 5.5, brought at 5.5..6 and 7..7.5
