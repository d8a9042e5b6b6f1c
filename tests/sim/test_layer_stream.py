"""Rotating layers in virtual time do what a simulation of single loads and layers does."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast.core.clock import VirtualClock
from ballast.core.event import RotationSettledEvent, TransferDoneEvent
from ballast.core.link import Direction, LinkRates
from ballast.core.model import ModelSpec
from ballast.core.rotation import WHOLE, Rotation, stall
from ballast.memory.copies import Copy
from ballast.sim.event_heap import EventHeap
from ballast.sim.layer_passes import Alone, Pass
from ballast.sim.layer_stream import SimStream, SimStreams
from ballast.sim.link import SimLink

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


class Device:
    """A clock, a heap, a link and streams; jobs run one after another."""

    def __init__(self, rates: LinkRates) -> None:
        self.clock = VirtualClock()
        self.heap = EventHeap(self.clock)
        self.link = SimLink(self.heap, self.clock, rates)
        self.streams = SimStreams(self.heap, self.clock, self.link)
        self.layers: dict[str, int] = {}

    def make(self, name: str, n: int, n_bytes: int) -> SimStream:
        self.layers[name] = n
        made = self.streams.make(spec(name, n))
        made.add_weights([Copy(0, 0, n_bytes)] * n)
        return made

    def begin(self, name: str, seconds: float) -> Alone:
        """Let a job of a model begin now."""
        stream, now = self.streams.of(name), self.clock.now()
        pace = Alone(self.heap.agenda, now, seconds)
        Pass(self.layers[name], [] if stream is None else [stream], pace).begin(now)
        return pace

    def run(self, name: str, seconds: float) -> float:
        """Let a job of a model begin, and time pass to its end; the seconds that it waits."""
        pace = self.begin(name, seconds)
        while pace.end is None:
            self.heap.agenda.run(self.heap.agenda.next)
        self.wait(pace.end - self.clock.now())
        return pace.stall

    def wait(self, seconds: float) -> None:
        until = self.clock.now() + seconds
        assert self.heap.take(until) == []
        self.clock.advance_to(until)


def by_flows(course: Course) -> Seen:
    device = Device(LinkRates.even(RATE))
    made = [device.make(str(i), n, course.n_bytes) for i, n in enumerate(course.layers)]
    now = [WHOLE] * len(made)
    seen: Seen = []
    for step in course.steps:
        device.wait(step.pause)
        stream = made[step.model]
        if step.rotation is None:
            stall = device.run(str(step.model), step.seconds)
            seen.append((device.clock.now(), stall))
            continue
        stream.settle()
        assert device.heap.take(None) == [RotationSettledEvent(str(step.model))]
        n, held = course.layers[step.model], list(stream.held)
        seen.append((device.clock.now(), *held))
        kept, missing = turned(n, now[step.model], held, step.rotation)
        stream.remap(step.rotation, kept, missing)
        now[step.model] = step.rotation
    while device.heap.agenda.next < float("inf"):
        device.heap.agenda.run(device.heap.agenda.next)
    seen += [(stream.loads.n, stream.loads.stall_seconds) for stream in made]
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
    """Every load and every layer is an event; models share the link, each loads in order."""

    def __init__(self, course: Course) -> None:
        self.course = course
        self.now = 0.0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.models = [Bytes() for _ in course.layers]
        self.wanted: list[list[tuple[int, int]]] = [[] for _ in course.layers]
        """By model, (layer, slot or -1) in the order of asking; the first is on its way."""
        self.left = [0.0] * len(course.layers)
        """By model, bytes of the load on its way, as of `shared`."""
        self.shared = 0.0
        """When the link was last shared out."""
        self.version = 0
        """Of how it was; ends that were expected of an older one do not come."""
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
        self.pass_time()
        self.wanted[model].append((layer, slot))
        if len(self.wanted[model]) == 1:
            self.begin(model)
        self.share()

    def begin(self, model: int) -> None:
        (_, slot), m = self.wanted[model][0], self.models[model]
        self.left[model] = self.course.n_bytes
        m.loads += 1
        if slot >= 0:
            m.absent.add(m.held[slot])
            m.held[slot] = -1

    @property
    def busy(self) -> list[int]:
        return [i for i, wanted in enumerate(self.wanted) if wanted]

    def pass_time(self) -> None:
        for i in self.busy:
            self.left[i] -= (self.now - self.shared) * RATE / len(self.busy)
        self.shared = self.now

    def share(self) -> None:
        self.version += 1
        if not self.busy:
            return
        first, version = min(self.busy, key=lambda i: self.left[i]), self.version

        def landed() -> None:
            if self.version != version:
                return
            self.pass_time()
            for model in [i for i in self.busy if self.left[i] < 1e-9]:
                m, (layer, slot) = self.models[model], self.wanted[model].pop(0)
                m.absent.discard(layer)
                if slot >= 0:
                    m.held[slot] = layer
                if self.wanted[model]:
                    self.begin(model)
            self.share()

        self.after(max(0.0, self.left[first]) * len(self.busy) / RATE, landed)

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
        while self.wanted[step.model]:
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
def test_flows_do_what_a_simulation_of_each_load_does(course: Course) -> None:
    found, expected = by_flows(course), World(course).run()
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
    device = Device(LinkRates.even(4.0))
    device.make("m", n, transfer).remap(rotation, [-1] * rotation.slots, ())
    stalls = []
    for _ in range(72):
        stalls.append(device.run("m", float(n)))
        device.wait(outside / 4)
    expected = stall(n, rotation, transfer / 4, 1.0, outside / 4)
    assert sum(stalls[-12:]) / 12 == pytest.approx(expected, abs=1e-6)


def test_loads_and_other_traffic_slow_each_other() -> None:
    rates = LinkRates(100.0, 100.0, 60.0, 60.0)

    def waits(*others: tuple[str, Direction]) -> float:
        device = Device(rates)
        for i, (stream, direction) in enumerate(others):
            device.link.start(i, [Copy(0, 0, 10**6)], stream, direction)
        device.make("m", 2, 50).remap(Rotation((0, 1), 1), [0], ())
        return device.run("m", 2.0)

    assert waits() == 0.5
    assert waits(("a", Direction.TO_DEVICE)) == 1.0
    assert waits(("a", Direction.TO_DEVICE), ("b", Direction.TO_DEVICE)) == 1.5
    assert waits(("a", Direction.TO_HOST)) == pytest.approx(50 / 60)


def test_a_transfer_is_as_slow_as_loads_leave_it() -> None:
    """300 bytes beside a load of 50 at 1 to 2 s, and one at 2.5 to 3.5 s: half the rate then."""
    device = Device(LinkRates.even(100.0))
    device.make("m", 2, 50).remap(Rotation((0, 1), 1), [0], ())
    device.link.start(0, [Copy(0, 0, 300)])
    pace = device.begin("m", 2.0)
    (done,) = device.heap.take(None)
    assert isinstance(done, TransferDoneEvent)
    assert (device.clock.now(), done.seconds) == (4.0, 4.0)
    assert (pace.end, pace.stall) == (3.0, 1.0)


def test_a_model_whose_layers_stay_is_not_slowed_by_one_whose_layers_come_and_go() -> None:
    device = Device(LinkRates.even(100.0))
    device.make("a", 4, 500).remap(Rotation((0, 1, 2), 1), [0], ())
    device.make("b", 4, 500)
    assert device.run("a", 1.0) > 9
    assert device.run("b", 1.0) == 0


def test_a_newcomer_that_is_refused_does_not_stand_for_the_model_that_is_there() -> None:
    device = Device(LinkRates.even(100.0))
    device.make("a", 2, 50).remap(Rotation((0, 1), 1), [0], ())
    device.make("a", 2, 50)
    assert device.run("a", 2.0) == 0.5


def test_loads_of_jobs_at_the_same_time_use_what_the_others_leave_of_the_link() -> None:
    """The second job's load at 1..2 s has the link alone; from 2 s on the first one's has half."""
    device = Device(LinkRates.even(100.0))
    for name in "ab":
        device.make(name, 4, 100).remap(Rotation((0, 2), 1), [0], ())
    first = device.begin("a", 8.0)  # loads from 2 s on, needed at 4 s
    second = device.begin("b", 4.0)  # loads from 1 s on, needed at 2 s; then from 3 s on
    device.wait(8.0)
    assert (first.end, first.stall) == (8.0, 0.0)
    assert (second.end, second.stall) == (4.0, 0.0)
