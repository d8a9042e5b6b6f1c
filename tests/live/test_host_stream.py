"""The live stream: no layer is read before its bytes are there, nor replaced while it is read."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ballast.core.errors import DeviceError
from ballast.core.event import TransferDoneEvent
from ballast.core.link import Direction
from ballast.core.rotation import WHOLE, Rotation
from ballast.live.host_stream import HostStream
from ballast.live.inbox import MonotonicClock
from ballast.memory.copies import Copy
from ballast.residency.arrival import ArrivalPlan


class SlowLink:
    """Copies land when a thread of its own gets to it; until then what is there is nobody's."""

    def __init__(self, n: int) -> None:
        self.there: list[int | None] = list(range(n))
        """By place, the layer whose bytes are there; places are layers' own, then slots."""
        self.place: Callable[[int], int] = lambda layer: layer
        self.reading: set[int] = set()
        """Places."""
        self.faults: list[str] = []
        self.fails: Callable[[], bool] = lambda: False
        """Whether the next copy does, leaving nothing."""
        self.refuses = False
        self._waiting: list[tuple[int, Callable[[TransferDoneEvent], None]]] = []
        self._wake = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def start(
        self,
        transfer_id: int,
        copies: Sequence[Copy],
        name: str,
        direction: Direction,
        on_done: Callable[[TransferDoneEvent], None],
    ) -> None:
        (copy,) = copies
        if self.refuses:
            raise DeviceError("link", "it is closed")
        with self._wake:
            if self.place(copy.src) in self.reading:
                self.faults.append(f"layer {copy.src} overwrites what is read")
            self.there[self.place(copy.src)] = None
            self._waiting.append((copy.src, on_done))
            self._wake.notify()

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        rng = random.Random(0)
        while True:
            with self._wake:
                while not self._waiting and not self._closed:
                    self._wake.wait()
                if not self._waiting:
                    return
                layer, on_done = self._waiting.pop(0)
            threading.Event().wait(rng.choice((0.0, 0.0, 0.0005)))
            error = "the host is gone" if self.fails() else None
            if error is None:
                self.there[self.place(layer)] = layer
            on_done(TransferDoneEvent(layer, 1, 0.0, error))


def made(n: int) -> tuple[SlowLink, Any, threading.Event]:
    link, settled = SlowLink(n), threading.Event()
    copies = [Copy(i + 1, i, 1) for i in range(n)]
    stream = HostStream("a", link, MonotonicClock(), settled.set)  # type: ignore[arg-type]
    stream.add_weights(copies)
    return link, stream, settled


def run_pass(link: SlowLink, stream: HostStream, n: int, upto: int | None = None) -> None:
    stops = stream.begin_pass()
    for layer in range(n if upto is None else upto):
        if layer in stops:
            stream.wait(layer)
        place = link.place(layer)
        link.reading.add(place)
        if link.there[place] != layer:
            link.faults.append(f"layer {layer} is read, {link.there[place]} is there")
        link.reading.discard(place)
        if layer in stops:
            stream.used(layer)


def turn(link: SlowLink, stream: HostStream, n: int, wanted: Rotation) -> None:
    """As `Slots.remap` would: new places, of which some hold what is said, unless it has failed."""
    slot_of = {layer: n + i % wanted.slots for i, layer in enumerate(wanted.layers)}
    there_before = [link.there[link.place(i)] == i for i in range(n)]
    whole = [i for i in range(n) if i not in stream.rotation.layers or i in stream.held]
    missing = [i for i in range(n) if i not in slot_of and i not in whole]
    held = []
    there: list[int | None] = [
        i if there_before[i] and i in whole and i not in slot_of else None for i in range(n)
    ]
    for slot in range(wanted.slots):
        layer = next((i for i in wanted.of_slot(slot) if i in whole), -1)
        held.append(layer)
        there.append(layer if layer >= 0 and there_before[layer] else None)
    link.there = there
    link.place = lambda layer: slot_of.get(layer, layer)
    stream.remap(wanted, held, missing)


@pytest.mark.parametrize("seed", range(4))
def test_every_layer_is_there_when_it_is_read(seed: int) -> None:
    rng = random.Random(seed)
    n = rng.randint(3, 9)
    link, stream, settled = made(n)
    try:
        for _ in range(40):
            for _ in range(rng.randint(0, 3)):
                broken_off = rng.random() < 0.2
                run_pass(link, stream, n, rng.randrange(n) if broken_off else None)
            settled.clear()
            stream.settle()
            assert settled.wait(240)
            assert all(link.there[link.place(i)] == i for i in stream.held if i >= 0)
            m = rng.randint(1, n)
            layers = tuple(sorted(rng.sample(range(n), m)))
            wanted = WHOLE if m == 1 else Rotation(layers, rng.randint(1, m - 1))
            turn(link, stream, n, wanted)
            run_pass(link, stream, n)
        assert not link.faults
        assert stream.loads.n > 50
        assert stream.loads.stall_seconds >= stream.stalled() > 0
    finally:
        link.close()


def test_only_layers_that_share_their_slot_are_brought_again() -> None:
    link, stream, settled = made(4)
    try:
        rotation = Rotation((0, 1, 3), 2)
        turn(link, stream, 4, rotation)
        for _ in range(5):
            run_pass(link, stream, 4)
        stream.settle()
        assert settled.wait(240)
        assert stream.loads.n == 5 * rotation.loads == 10
        assert not link.faults
    finally:
        link.close()


def test_a_layer_that_cannot_be_brought_fails_a_job_and_is_tried_again_by_the_next() -> None:
    link, stream, _ = made(4)
    try:
        turn(link, stream, 4, Rotation((0, 2), 1))
        run_pass(link, stream, 2)
        link.fails = lambda: True
        for _ in range(2):
            with pytest.raises(DeviceError, match="the host is gone"):
                run_pass(link, stream, 4)
        link.fails = lambda: False
        run_pass(link, stream, 4)
        assert not link.faults
    finally:
        link.close()


def test_a_link_that_takes_nothing_fails_jobs_only() -> None:
    link, stream, settled = made(4)
    try:
        turn(link, stream, 4, Rotation((0, 2), 1))
        run_pass(link, stream, 4)
        stream.settle()
        assert settled.wait(240)
        link.refuses = True
        turn(link, stream, 4, WHOLE)
        with pytest.raises(DeviceError, match="it is closed"):
            run_pass(link, stream, 4)
        link.refuses = False
        run_pass(link, stream, 4)
        assert not link.faults
    finally:
        link.close()


@pytest.mark.parametrize("seed", range(4))
def test_what_could_not_be_brought_is_never_read(seed: int) -> None:
    rng, dice = random.Random(seed), random.Random(seed)
    n = rng.randint(3, 7)
    link, stream, settled = made(n)
    failed = passed = 0
    try:
        for _ in range(60):
            link.fails = lambda: dice.random() < 0.2
            m = rng.randint(1, n)
            layers = tuple(sorted(rng.sample(range(n), m)))
            turn(link, stream, n, WHOLE if m == 1 else Rotation(layers, rng.randint(1, m - 1)))
            for _ in range(rng.randint(0, 3)):
                try:
                    run_pass(link, stream, n)
                    passed += 1
                except DeviceError:
                    failed += 1
            settled.clear()
            stream.settle()
            assert settled.wait(240)
        link.fails = lambda: False
        run_pass(link, stream, n)
        assert not link.faults
        assert failed
        assert passed
    finally:
        link.close()


class HeldLink:
    """Takes a transfer, and lands as much of it as the test says."""

    def __init__(self) -> None:
        self.watches: list[Any] = []
        self.refuses = False

    def start(self, transfer_id: int, copies: Sequence[Copy], watch: Any) -> None:
        if self.refuses:
            raise DeviceError("link", "it is closed")
        self.watches.append(watch)


COMING = ArrivalPlan({0: 30, 1: 50, 2: 70}, 50)
"""Of weights whose embeddings take 10 bytes, and which a job may begin with after layer 1."""


def arriving() -> tuple[HeldLink, Any, list[int], threading.Event]:
    link, opened, settled = HeldLink(), list[int](), threading.Event()
    copies = [Copy(i + 1, i, 20) for i in range(3)]
    clock = MonotonicClock()
    stream = HostStream("a", link, clock, settled.set, opened.append)  # type: ignore[arg-type]
    stream.add_weights(copies)
    return link, stream, opened, settled


def test_passes_wait_for_what_a_load_has_not_brought_yet() -> None:
    link, stream, opened, _ = arriving()
    assert stream.start_load(7, [], COMING)
    (watch,) = link.watches
    watch.landed(49)
    assert (opened, stream.begin_pass()) == ([], [1, 2])
    watch.landed(50)
    watch.landed(60)
    assert (opened, stream.begin_pass()) == ([7], [2])
    stream.wait(1)
    passed = threading.Event()

    def run() -> None:
        stream.wait(2)
        stream.used(2)
        passed.set()

    job = threading.Thread(target=run)
    job.start()
    assert not passed.is_set()
    watch.ended(None)
    job.join(240)
    assert passed.is_set()
    assert stream.begin_pass() == ()
    assert stream.stalled() >= 0
    # What waits for a load of all weights is no cost of rotating.
    assert (stream.loads.n, stream.loads.stall_seconds) == (0, 0.0)


def test_what_a_failed_load_has_not_brought_fails_passes_and_is_not_tried_again() -> None:
    link, stream, _, _ = arriving()
    stream.start_load(7, [], COMING)
    (watch,) = link.watches
    watch.landed(30)
    watch.ended("the host is gone")
    for _ in range(2):
        assert stream.begin_pass() == [1, 2]
        stream.wait(0)
        with pytest.raises(DeviceError, match="the host is gone"):
            stream.wait(1)
    assert len(link.watches) == 1
    stream.start_load(8, [], COMING)
    link.watches[1].ended(None)
    assert stream.begin_pass() == ()


def test_what_is_told_late_of_an_earlier_load_says_nothing_of_this_one() -> None:
    link, stream, opened, _ = arriving()
    stream.start_load(7, [], COMING)
    stream.start_load(8, [], ArrivalPlan({2: 20}, 20))
    earlier, now = link.watches
    earlier.landed(60)
    earlier.ended(None)
    assert (opened, stream.begin_pass()) == ([], [2])
    stream.wait(0)
    now.ended(None)
    stream.wait(2)
    stream.forget()
    now.landed(20)
    assert opened == []


def test_a_load_that_cannot_be_started_keeps_nobody_waiting() -> None:
    link, stream, _, _ = arriving()
    link.refuses = True
    with pytest.raises(DeviceError, match="closed"):
        stream.start_load(7, [], COMING)
    assert stream.begin_pass() == ()
    stream.wait(2)


def test_a_stream_that_tells_nobody_leaves_the_load_to_others() -> None:
    link, stream, _ = made(3)
    link.close()
    assert not stream.start_load(7, [], COMING)
    assert stream.begin_pass() == ()
