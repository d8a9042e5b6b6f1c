"""Every order of events of small streams: what a pass reads is there, nothing is lost or stuck."""

from __future__ import annotations

import copy as copying
import random
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast.core.errors import BrokenPromise
from ballast.core.link import Direction
from ballast.core.rotation import WHOLE, Rotation
from ballast.residency.arrival import ArrivalPlan
from ballast.residency.buffer import HOME, NOBODY, Buffer, LayerCopy
from ballast.residency.stream import LayerStream

Place = tuple[int, int]
"""(slot, layer): the layer only where it has a place of its own."""


@dataclass
class World:
    """Bytes of a stream's layers, a pass that reads them, and copies that land when they do."""

    n_layers: int
    plans: tuple[tuple[bool, Rotation], ...]
    """By buffer: whether it is written, and its rotation."""
    failures: int
    """Copies that may still fail."""
    stream: LayerStream = field(default_factory=LayerStream)
    bytes: list[dict[Place, int]] = field(default_factory=list)
    """By buffer and place, the layer whose present content is there."""
    unstored: list[set[int]] = field(default_factory=list)
    """By buffer, layers whose content a pass has changed since it was stored."""
    lost: list[set[int]] = field(default_factory=list)
    """By buffer, layers whose content was not stored in a pass that failed."""
    submitted: list[LayerCopy] = field(default_factory=list)
    at: int | None = None
    """The layer that the pass comes to; None: no pass runs."""
    reading: bool = False

    def start(self, held: bool) -> World:
        for written, rotation in self.plans:
            buffer = self.stream.add("b", written=written)
            whole = {(HOME, layer): layer for layer in range(self.n_layers)}
            self.bytes.append({p: i for p, i in whole.items() if i not in rotation.layers})
            self.unstored.append(set())
            self.lost.append(set())
            first = [rotation.of_slot(slot)[0] for slot in range(rotation.slots)]
            if held and not written:
                self.bytes[-1] |= {(slot, 0): layer for slot, layer in enumerate(first)}
            self.submit(self.stream.change(buffer, rotation, first if held else ()))
        return self

    # -- copies -----------------------------------------------------------------------------------

    def place(self, copy: LayerCopy) -> Place:
        return (copy.slot, copy.layer if copy.slot == HOME else 0)

    def which(self, copy: LayerCopy) -> int:
        return self.stream.buffers.index(copy.buffer)

    def submit(self, copies: list[LayerCopy]) -> None:
        for copy in copies:
            i = self.which(copy)
            there = self.bytes[i].get(self.place(copy), NOBODY)
            others = [c for c in self.submitted if c.buffer is copy.buffer and c.slot == copy.slot]
            assert not others, "two copies at a time use a slot"
            if copy.direction is Direction.TO_HOST:
                assert there == copy.layer, "what is stored is there"
            else:
                assert not (self.reading and there == self.at), "what is read is overwritten"
                assert there not in self.unstored[i], "what is not stored is overwritten"
                self.bytes[i].pop(self.place(copy), None)
            self.submitted.append(copy)

    def land(self, n: int) -> None:
        copy = self.submitted.pop(n)
        i = self.which(copy)
        if copy.direction is Direction.TO_HOST:
            self.unstored[i].discard(copy.layer)
        else:
            assert copy.layer not in self.unstored[i] | self.lost[i], "the host has what is loaded"
            self.bytes[i][self.place(copy)] = copy.layer
        self.submit(self.stream.landed(copy))

    def fail(self, n: int) -> None:
        self.failures -= 1
        self.submit(self.stream.failed(self.submitted.pop(n), "the host is gone"))

    # -- the pass ---------------------------------------------------------------------------------

    def begin(self) -> None:
        for unstored, lost in zip(self.unstored, self.lost, strict=True):
            unstored.clear()  # of a pass that failed: its requests end, and their KV
            lost.clear()
        self.at = 0
        self.submit(self.stream.begin_pass())

    def read(self) -> None:
        assert self.at is not None
        for i, buffer in enumerate(self.stream.buffers):
            slot = buffer.slot_of.get(self.at, HOME)
            place = (slot, self.at if slot == HOME else 0)
            assert self.bytes[i].get(place) == self.at, "it is not there"
            if buffer.written and slot != HOME:
                self.unstored[i].add(self.at)
        self.reading = True

    def used(self) -> None:
        assert self.at is not None
        self.reading = False
        if self.at in self.stream.stops:
            self.submit(self.stream.used(self.at))
        self.at += 1

    def end(self) -> None:
        """As a driver does that has waited until no copy of the pass is in flight."""
        if self.at == self.n_layers and self.stream.failure is None:
            assert not any(self.unstored), "a pass that ends well has stored everything"
        for unstored, lost in zip(self.unstored, self.lost, strict=True):
            lost |= unstored
        self.at = None

    def choices(self) -> Iterator[tuple[str, int]]:
        for n in range(len(self.submitted)):
            yield "land", n
            if self.failures:
                yield "fail", n
        if self.at is None:
            if not self.stream.open:
                yield "begin", 0
        elif self.reading:
            yield "used", 0
        else:
            if self.at < self.n_layers and not self.stream.lacks(self.at):
                yield "read", 0
            if not self.stream.open:
                yield "end", 0  # well, or broken off

    def apply(self, choice: tuple[str, int]) -> None:
        name, n = choice
        getattr(self, name)(*((n,) if name in ("land", "fail") else ()))

    def check(self) -> None:
        stream = self.stream
        assert stream.settled == (not stream._flying)
        for i, buffer in enumerate(stream.buffers):
            for slot, layer in enumerate(buffer.held_now):
                if layer != NOBODY and not (buffer.written and self.at is None):
                    assert self.bytes[i].get((slot, 0)) == layer, "held is true"
            for layer in range(self.n_layers):
                slot = buffer.slot_of.get(layer, HOME)
                streams = buffer.written and slot != HOME
                if layer not in buffer.absent and not (streams and self.at is None):
                    used = streams and self.at is not None and layer < self.at
                    there = self.bytes[i].get((slot, layer if slot == HOME else 0))
                    assert there == layer or used, "what is not lacking is there"
        stuck = bool(stream._flying) and not self.submitted
        assert not stuck, "what is in flight is submitted, or waits for what is"
        if self.at is not None and self.at < self.n_layers and stream.lacks(self.at):
            assert stream.fault(self.at) or self.submitted, "a pass waits for ever"

    def key(self) -> Hashable:
        """What its future depends on."""
        ids = {c.id: n for n, c in enumerate(self.stream._flying.values())}

        def of(c: LayerCopy) -> Hashable:
            after = tuple(ids.get(id, -1) for id in c.after)
            return self.which(c), c.layer, c.slot, c.direction, after, ids.get(c.id, -1)

        buffers = tuple(
            (
                tuple(b.held),
                frozenset(b.absent),
                frozenset((layer, of(c)) for layer, c in b.loading.items()),
                frozenset((slot, of(c)) for slot, c in b.passing.items()),
                frozenset(b.broken),
                frozenset(self.bytes[i].items()),
                frozenset(self.unstored[i]),
                frozenset(self.lost[i]),
            )
            for i, b in enumerate(self.stream.buffers)
        )
        flying = tuple(map(of, self.stream._flying.values()))
        submitted = frozenset(c.id in ids and ids[c.id] for c in self.submitted)
        failed = self.stream.failure is not None
        return buffers, flying, submitted, self.at, self.reading, self.failures, failed


def explore(world: World, most: int = 30_000) -> int:
    """Try all choices in all states; returns the number of states."""
    seen, todo = {world.key()}, [world]
    while todo:
        state = todo.pop()
        state.check()
        for choice in list(state.choices()):
            following = copying.deepcopy(state)
            following.apply(choice)
            key = following.key()
            if key not in seen:
                seen.add(key)
                todo.append(following)
        assert len(seen) < most

    return len(seen)


def run_well(world: World) -> None:
    """From any state, without further failures: end the pass, then run one that must succeed."""
    world.failures = 0
    if world.reading:
        world.used()
    for _ in range(2):
        while world.submitted and (world.at is None or world.stream.open):
            world.land(0)
        if world.at is not None:
            world.end()
        world.begin()
        for layer in range(world.n_layers):
            assert world.stream.fault(layer) is None
            while world.stream.lacks(layer):
                world.land(0)
            world.read()
            world.used()
    while world.submitted:
        world.land(0)
    world.end()
    assert world.stream.failure is None
    for buffer in world.stream.buffers:
        assert buffer.written or buffer.lacking == [], "the next pass's first layers are there"


READ_ONLY, WRITTEN = False, True
SMALL = [
    (2, ((READ_ONLY, Rotation((0, 1), 1)),)),
    (4, ((READ_ONLY, Rotation((0, 1, 3), 2)),)),
    (5, ((READ_ONLY, Rotation((0, 1, 2, 3, 4), 2)),)),
    (6, ((READ_ONLY, Rotation((0, 1, 2, 4, 5), 3)),)),
    (3, ((WRITTEN, Rotation((0, 1, 2), 1)),)),
    (4, ((WRITTEN, Rotation((0, 1, 3), 2)),)),
    (6, ((WRITTEN, Rotation((0, 1, 2, 3, 4, 5), 3)),)),
    (2, ((READ_ONLY, Rotation((0, 1), 1)), (WRITTEN, Rotation((0, 1), 1)))),
    (4, ((READ_ONLY, Rotation((0, 2), 1)), (WRITTEN, Rotation((1, 2, 3), 2)))),
    (5, ((READ_ONLY, Rotation((0, 1, 2, 4), 2)), (WRITTEN, Rotation((0, 2, 3), 1)))),
]


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize(("n_layers", "plans"), SMALL, ids=str)
def test_in_every_order_of_events_nothing_is_read_early_or_overwritten(
    n_layers: int, plans: tuple[tuple[bool, Rotation], ...], held: bool
) -> None:
    assert explore(World(n_layers, plans, failures=2).start(held)) > 20


@given(st.data())
def test_from_any_state_the_next_pass_succeeds(data: st.DataObject) -> None:
    n_layers, plans = data.draw(st.sampled_from(SMALL))
    world = World(n_layers, plans, failures=3).start(held=data.draw(st.booleans()))
    for _ in range(data.draw(st.integers(0, 40))):
        choices = list(world.choices())
        if not choices:
            break
        world.apply(data.draw(st.sampled_from(choices)))
        world.check()
    run_well(world)


# -- copies that are submitted ahead of what they wait for ----------------------------------------

Op = tuple[str, int, int]
"""("copy", id, 0) or ("use", number of the pass, layer)."""


class Device:
    """Does what was launched in any order that its waits allow."""

    def __init__(self, plans: tuple[tuple[bool, Rotation], ...], rng: random.Random) -> None:
        self.stream, self.rng = LayerStream(ahead=True), rng
        self.waiting: dict[Op, set[Op]] = {}
        """What each operation that has not ended waits for."""
        self.copies: dict[Op, LayerCopy] = {}
        self.slots: dict[tuple[Buffer, int], tuple[int, bool]] = {}
        """The layer that is in each slot, and whether it is not stored."""
        self.passes = 0
        for written, rotation in plans:
            buffer = self.stream.add("b", written=written)
            self.launch(self.stream.change(buffer, rotation))

    def launch(self, copies: list[LayerCopy]) -> None:
        for copy in copies:
            assert not any(c.id >= copy.id for c in self.copies.values()), "in order of ids"
            waits: set[Op] = {("copy", id, 0) for id in copy.after}
            if copy.after_use is not None:
                waits.add(("use", self.passes, copy.after_use))
            self.copies["copy", copy.id, 0], self.waiting["copy", copy.id, 0] = copy, waits

    def run_pass(self, n_layers: int) -> None:
        """Launch all of it, then let the device do it; read-only copies may go on beyond it."""
        self.passes += 1
        self.launch(self.stream.begin_pass())
        for layer in range(n_layers):
            waits: set[Op] = {("copy", c.id, 0) for c in self.stream.awaited(layer)}
            assert waits or not self.stream.lacks(layer)
            self.waiting["use", self.passes, layer] = {*waits, ("use", self.passes, layer - 1)}
            if layer in self.stream.stops:
                self.launch(self.stream.used(layer))
        while any(op[0] == "use" or self.copies[op].buffer.written for op in self.waiting):
            ready = [op for op, waits in self.waiting.items() if waits.isdisjoint(self.waiting)]
            op = self.rng.choice(ready)
            del self.waiting[op]
            if op[0] == "use":
                self.use(op[2])
            else:
                self.make(self.copies.pop(op))

    def use(self, layer: int) -> None:
        for buffer in self.stream.buffers:
            if layer in buffer.slot_of:
                key = buffer, buffer.slot_of[layer]
                assert self.slots[key] == (layer, False)
                self.slots[key] = layer, buffer.written

    def make(self, copy: LayerCopy) -> None:
        key = copy.buffer, copy.slot
        there, unstored = self.slots.get(key, (NOBODY, False))
        assert unstored == (copy.direction is Direction.TO_HOST)
        assert there == copy.layer or not unstored
        self.slots[key] = copy.layer, False
        self.stream.landed(copy)


@given(
    st.sampled_from(SMALL),
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.integers(0, 1 << 20),
)
def test_copies_submitted_ahead_wait_for_what_they_must(
    small: tuple[int, tuple[tuple[bool, Rotation], ...]], lengths: list[int], seed: int
) -> None:
    n_layers, plans = small
    device = Device(plans, random.Random(seed))
    for upto in lengths:
        device.run_pass(min(upto, n_layers))  # fewer: it breaks off


# -- in words -------------------------------------------------------------------------------------


def run_in_order(stream: LayerStream, n_layers: int) -> list[str]:
    """Run a pass whose copies land when they are needed; returns what happens in order."""
    seen: list[str] = []
    flying: list[LayerCopy] = []

    def submit(copies: list[LayerCopy]) -> None:
        for copy in copies:
            way = "load" if copy.direction is Direction.TO_DEVICE else "store"
            seen.append(f"{way} {copy.layer} in {copy.slot}")
            flying.append(copy)

    submit(stream.begin_pass())
    for layer in range(n_layers):
        while stream.lacks(layer):
            submit(stream.landed(flying.pop(0)))
        if layer in stream.stops:
            seen.append(f"use {layer}")
            submit(stream.used(layer))
    while flying:
        submit(stream.landed(flying.pop(0)))
    return seen


def test_weights_go_round_as_in_mirage() -> None:
    stream = LayerStream()
    weights = stream.add("weights", written=False)
    first = stream.change(weights, Rotation((0, 1, 3, 4), 2), [0, NOBODY])
    assert [c.layer for c in first] == [1]
    stream.landed(first[0])
    for _ in range(3):
        assert run_in_order(stream, 5) == [
            *("use 0", "load 3 in 0", "use 1", "load 4 in 1"),
            *("use 3", "load 0 in 0", "use 4", "load 1 in 1"),
        ]
    assert weights.held_now == (0, 1)


def test_one_slot_of_kv_is_loaded_after_attention_and_store_of_the_layer_before() -> None:
    """SwiftCache's rule."""
    stream = LayerStream()
    kv = stream.add("kv", written=True)
    assert stream.change(kv, Rotation((0, 1, 2), 1)) == []
    for _ in range(2):
        assert run_in_order(stream, 3) == [
            *("load 0 in 0", "use 0", "store 0 in 0"),
            *("load 1 in 0", "use 1", "store 1 in 0"),
            *("load 2 in 0", "use 2", "store 2 in 0"),
        ]


def test_a_layer_that_shares_its_slot_with_none_stays_if_it_is_read_only() -> None:
    stream = LayerStream()
    weights = stream.add("weights", written=False)
    for copy in stream.change(weights, Rotation((0, 2, 5), 2)):
        stream.landed(copy)
    assert list(stream.stops) == [0, 5]
    assert run_in_order(stream, 6) == ["use 0", "load 5 in 0", "use 5", "load 0 in 0"]


def test_nothing_streams_at_first() -> None:
    stream = LayerStream()
    stream.add("weights", written=False)
    stream.add("kv", written=True)
    assert (stream.waits, list(stream.stops), stream.begin_pass()) == (False, [], [])
    assert stream.settled


def test_layers_that_are_home_without_bytes_are_loaded_beside_passes() -> None:
    stream = LayerStream()
    weights = stream.add("weights", written=False)
    for copy in stream.change(weights, Rotation((0, 1, 2), 1)):
        stream.landed(copy)
    one, two = stream.change(weights, WHOLE, (), (1, 2))
    assert [(c.layer, c.slot) for c in (one, two)] == [(1, HOME), (2, HOME)]
    assert stream.failed(one, "the host is gone") == []
    assert (stream.lacks(1), stream.fault(1)) == (True, "the host is gone")
    assert stream.fault(2) is None
    (again,) = stream.begin_pass()
    assert (again.layer, stream.fault(1)) == (1, None)
    stream.landed(two)
    stream.landed(again)
    assert not stream.waits


def test_a_layer_whose_load_failed_stays_lacking_when_others_are_evicted() -> None:
    stream = LayerStream()
    weights = stream.add("weights", written=False)
    (load,) = stream.change(weights, WHOLE, (), (1,))
    stream.failed(load, "the host is gone")
    stream.forget(weights)
    assert (list(stream.stops), stream.fault(1)) == ([1], "the host is gone")
    (again,) = stream.begin_pass()
    assert (again.layer, again.slot) == (1, HOME)
    stream.landed(again)
    assert not stream.waits


def test_layers_of_an_arrival_are_there_as_its_bytes_land() -> None:
    stream = LayerStream()
    weights = stream.add("weights", written=False)
    arrival = stream.expect(weights, ArrivalPlan({0: 30, 1: 50, 2: 70}, 50))
    assert list(stream.stops) == [0, 1, 2]
    assert not stream.arrived(weights, arrival, 49)
    assert stream.arrived(weights, arrival, 50), "the first job may begin"
    assert not stream.arrived(weights, arrival, 60), "it is told once"
    assert list(stream.stops) == [2]
    assert not weights.awaits_copy(2)
    stream.arrival_ended(weights, arrival, "the host is gone")
    assert (stream.begin_pass(), stream.fault(2)) == ([], "the host is gone")
    following = stream.expect(weights, ArrivalPlan({2: 20}, 20))
    assert not stream.arrived(weights, arrival, 70), "it has been replaced"
    assert stream.lacks(2)
    stream.arrival_ended(weights, following, None)
    assert not stream.waits


def test_a_driver_that_breaks_the_order_is_told() -> None:
    stream = LayerStream()
    weights = stream.add("weights", written=False)
    kv = stream.add("kv", written=True)
    loads = stream.change(weights, Rotation((0, 1), 1))
    with pytest.raises(BrokenPromise, match="weights: layer 0 was not there"):
        stream.used(0)
    with pytest.raises(BrokenPromise, match="weights: copies fly"):
        stream.change(weights, WHOLE)
    for copy in loads:
        stream.landed(copy)
    stream.change(kv, Rotation((0, 1), 1))
    stream.begin_pass()
    with pytest.raises(BrokenPromise, match="kv: an earlier pass is not finished"):
        stream.begin_pass()
