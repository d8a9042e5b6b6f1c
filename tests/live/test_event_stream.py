"""The stream of a GPU over a driver that does work as late as it may."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Iterator

import pytest

from ballast.core.errors import DeviceError
from ballast.core.rotation import WHOLE, Rotation, stall
from ballast.live.event_stream import EventStream
from ballast.memory.copies import Copy
from ballast.memory.cuda.pinning import PinnedMemory
from tests.memory.fake_cuda import FakeDriver

PAGE = 64 << 10
N = 9
TRANSFER = 2.0
"""Seconds of a layer's copy, as the device counts."""


class World:
    """Layers of a page each, in slots or places of their own; a lane that reads them."""

    def __init__(self) -> None:
        self.driver = driver = FakeDriver(bandwidth=PAGE / TRANSFER)
        self.compute = 0.0
        """Seconds of each layer."""
        self.context = driver.retain_context(0)
        driver.set_current(self.context)
        self.lane = driver.new_stream()
        self.host = (ctypes.c_char * (N * PAGE))()
        for layer in range(N):
            ctypes.memset(ctypes.addressof(self.host) + layer * PAGE, layer + 1, PAGE)
        self.base = driver.reserve(N * PAGE, PAGE)
        self.handles = [driver.create(0, PAGE) for _ in range(N)]
        self.mapped: dict[int, int] = {}
        self.read: list[tuple[int, int]] = []
        """(layer, what was there)"""
        self.settled = threading.Event()
        copies = [
            Copy(self.base + i * PAGE, ctypes.addressof(self.host) + i * PAGE, PAGE)
            for i in range(N)
        ]
        known = (driver, self.context, lambda: self.lane, self.settled.set)
        self.pins = PinnedMemory(driver, 0)
        self.stream = EventStream(*known, self.pins)
        self.stream.add_weights(copies)
        self.place({i: i for i in range(N)})
        self.stream.remap(WHOLE, (), range(N))

    def place(self, handle_of: dict[int, int]) -> None:
        for layer in list(self.mapped):
            if self.mapped[layer] != handle_of[layer]:
                self.driver.unmap(self.base + layer * PAGE, PAGE)
                del self.mapped[layer]
        for layer, handle in handle_of.items():
            if layer not in self.mapped:
                at = self.base + layer * PAGE
                self.driver.map(at, PAGE, self.handles[handle])
                self.driver.set_access(at, PAGE, 0)
                self.mapped[layer] = handle

    def turn(self, wanted: Rotation) -> None:
        """As the engine does: settle, change pages, turn."""
        self.settled.clear()
        self.stream.settle()
        assert self.settled.wait(240)
        before = dict(self.mapped)
        whole = {i for i in range(N) if ctypes.string_at(self.base + i * PAGE, 1)[0] == i + 1}
        slots = {layer: i % wanted.slots for i, layer in enumerate(wanted.layers)}
        pages = {i: before[i] for i in whole if i not in slots}
        pages = {i: h for i, h in pages.items() if list(pages.values()).count(h) == 1}
        spare = [h for h in range(N) if h not in pages.values()]
        slot_pages = [spare.pop() for _ in range(wanted.slots)]
        missing = [i for i in range(N) if i not in slots and i not in pages]
        pages |= {i: spare.pop() for i in missing}
        self.place(pages | {i: slot_pages[s] for i, s in slots.items()})
        self.stream.remap(wanted, [-1] * wanted.slots, missing)

    def run_pass(self, upto: int = N) -> None:
        """Launches all of it before anything runs; the job then waits for its stream."""
        stops = self.stream.begin_pass()
        for layer in range(upto):
            if layer in stops:
                self.stream.wait(layer)
            at = self.base + layer * PAGE

            def read(layer: int = layer, at: int = at) -> None:
                self.read.append((layer, ctypes.string_at(at, 1)[0]))

            self.driver.put(self.lane, read, [(at, PAGE)], seconds=self.compute)
            if layer in stops:
                self.stream.used(layer)
        self.driver.finish(self.lane)

    def check(self, passes: int) -> None:
        assert [layer for layer, _ in self.read] == [*range(N)] * passes
        assert all(found == layer + 1 for layer, found in self.read)
        self.read.clear()

    def close(self) -> None:
        self.stream.close()
        self.pins.close()
        driver = self.driver
        for layer in self.mapped:
            driver.unmap(self.base + layer * PAGE, PAGE)
        driver.free(self.base, N * PAGE)
        for handle in self.handles:
            driver.release(handle)
        driver.destroy_stream(self.lane)
        driver.release_context(0)
        assert driver.is_clean()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


ROTATIONS = [Rotation((0, 2, 4, 6), 2), Rotation((1, 5), 1), Rotation((0, 3, 6), 2), WHOLE]


@pytest.mark.parametrize("rotation", ROTATIONS, ids=str)
def test_every_layer_is_there_when_it_is_read(world: World, rotation: Rotation) -> None:
    world.run_pass()
    world.turn(rotation)
    for _ in range(3):
        world.run_pass()
    world.check(4)
    if rotation is WHOLE:
        assert not world.stream.begin_pass()
    else:
        shared = {a for a, b in rotation.next_of.items() if a != b}
        assert set(world.stream.begin_pass()) >= shared
        assert world.stream.loads.n > N + len(rotation.layers)


@pytest.mark.parametrize("seed", range(3))
def test_plans_change_between_passes(world: World, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(6):
        world.turn(rng.choice(ROTATIONS))
        for _ in range(rng.randrange(3)):
            world.run_pass()
            world.check(1)


def test_a_pass_that_breaks_off_leaves_the_next_what_it_needs(world: World) -> None:
    world.turn(ROTATIONS[0])
    world.run_pass(upto=4)
    world.read.clear()
    world.run_pass()
    world.check(1)


@pytest.mark.parametrize("copies", range(3))
def test_a_copy_that_cannot_be_launched_is_tried_again(world: World, copies: int) -> None:
    world.turn(Rotation((0, 2, 5), 1))
    world.run_pass()
    world.driver.fail("copy_to_device", after=copies)
    with pytest.raises(DeviceError):
        world.run_pass()
    world.driver.finish(world.lane)
    world.read.clear()
    world.run_pass()
    world.check(1)


def test_events_are_used_again(world: World) -> None:
    world.turn(ROTATIONS[0])

    def run(passes: int) -> None:
        for _ in range(passes):
            world.run_pass()
            world.stream.stalled()

    run(3)
    made = len(world.driver.events)
    run(5)
    assert len(world.driver.events) == made


@pytest.mark.parametrize("rotation", ROTATIONS, ids=str)
@pytest.mark.parametrize("compute", [0.25, 0.5, 1.0, 4.0])
def test_stalls_are_what_passes_take_beyond_their_work(
    world: World, rotation: Rotation, compute: float
) -> None:
    world.compute = compute
    world.turn(rotation)
    for _ in range(4):
        world.run_pass()
    world.stream.stalled()
    began, before = world.driver.now, world.stream.loads.stall_seconds
    passes = 12
    result = 0.0
    for _ in range(passes):
        world.run_pass()
        result += world.stream.stalled()
    took = world.driver.now - began
    assert result == pytest.approx(took - passes * N * compute)
    assert result / passes == pytest.approx(stall(N, rotation, TRANSFER, compute))
    assert world.stream.loads.stall_seconds - before == pytest.approx(result)
    assert world.stream.stalled() == 0.0
    world.stream.rest()
    loads = world.stream.loads
    assert loads.copy_seconds == pytest.approx(loads.n * TRANSFER)
    assert loads.n_bytes == loads.n * PAGE


def test_nobody_waits_for_the_time_of_a_copy(world: World) -> None:
    """Only what was reached is asked, and nothing is run by asking."""
    world.turn(ROTATIONS[0])
    n = world.stream.loads.n
    world.stream.begin_pass()
    assert world.stream.stalled() == 0.0
    assert world.stream.loads.n == n
    assert any(world.driver.streams.values())


def test_who_waits_is_told_also_when_the_driver_cannot(world: World) -> None:
    world.settled.clear()
    world.driver.fail("finish")
    world.stream.settle()
    assert world.settled.wait(240)
