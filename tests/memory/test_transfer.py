"""Copies arrive, in order, at the pace asked for; what cannot be copied is told."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest

from ballast.core.errors import DeviceError
from ballast.core.event import TransferDoneEvent
from ballast.core.link import Direction, LinkRates
from ballast.core.units import KiB, MiB
from ballast.memory.copies import Copy, CopyBytes, copy_checked, copy_now
from ballast.memory.transfer import PRIOR_BYTES_PER_SECOND, STOPPED, HostLink, copy_threads
from ballast.memory.vm_memfd import MemfdVm

PAGE = 64 * KiB


class Stepping:
    """A clock of its own: each look at it is `step` seconds later."""

    def __init__(self, step: float) -> None:
        self.step, self.looks = step, 0

    def now(self) -> float:
        self.looks += 1
        return self.step * self.looks


class DoneEvents:
    """Collects what a link tells."""

    def __init__(self) -> None:
        self.queue: queue.Queue[TransferDoneEvent] = queue.Queue()

    def __call__(self, done: TransferDoneEvent) -> None:
        self.queue.put(done)

    def next(self) -> TransferDoneEvent:
        return self.queue.get(timeout=240)


@pytest.fixture
def done_events() -> DoneEvents:
    return DoneEvents()


@pytest.fixture(params=[1, 3])
def link(request: pytest.FixtureRequest, done_events: DoneEvents) -> Iterator[HostLink]:
    made = HostLink(Stepping(1e-3), done_events, threads=request.param, chunk_bytes=10_000)
    yield made
    made.close()


def _pair(n: int) -> tuple[np.ndarray, np.ndarray]:
    source = np.random.default_rng(0).integers(0, 255, n, dtype=np.uint8)
    return source, np.zeros(n, dtype=np.uint8)


def test_all_copies_land_before_the_end_is_told(link: HostLink, done_events: DoneEvents) -> None:
    source, target = _pair(123_457)
    base, to = source.ctypes.data, target.ctypes.data
    cuts = [0, 1, 500, 30_000, 30_001, 123_457]
    link.start(9, [Copy(to + a, base + a, b - a) for a, b in pairwise(cuts)])
    done = done_events.next()
    assert (done.transfer_id, done.n_bytes, done.error) == (9, 123_457, None)
    assert done.seconds > 0
    assert (source == target).all()


def test_first_come_first_served(link: HostLink, done_events: DoneEvents) -> None:
    source, target = _pair(50_000)
    for i in range(20):
        link.start(i, [Copy(target.ctypes.data, source.ctypes.data, 50_000 - 1_000 * i)])
    assert [done_events.next().transfer_id for _ in range(20)] == list(range(20))


def test_nothing_to_copy(link: HostLink, done_events: DoneEvents) -> None:
    link.start(1, [])
    link.start(2, [Copy(8, 8, 0)])
    assert [(d.n_bytes, d.error) for d in (done_events.next(), done_events.next())] == [
        (0, None),
        (0, None),
    ]


def test_a_target_that_is_gone_is_an_error_not_a_signal(
    link: HostLink, done_events: DoneEvents, memfd: MemfdVm
) -> None:
    source, target = _pair(PAGE)
    r = memfd.reserve(2 * PAGE)
    memfd.map(r, 0, [0])
    copy = Copy(r.base, source.ctypes.data, PAGE)
    link.start(1, [copy, Copy(r.address(1), source.ctypes.data, PAGE)])
    link.start(2, [Copy(target.ctypes.data, source.ctypes.data, -5)])
    link.start(3, [Copy(0, source.ctypes.data, 5)])
    link.start(4, [copy])
    first, second, third, fourth = (done_events.next() for _ in range(4))
    assert first.error is not None
    assert "madvise" in first.error
    assert second.error is not None
    assert third.error is not None
    assert (fourth.n_bytes, fourth.error) == (PAGE, None)


def test_the_pace_is_kept_over_chunks_and_transfers(done_events: DoneEvents) -> None:
    """Against a clock that runs by being looked at: the link looks until the time is up."""
    clock = Stepping(1e-4)
    link = HostLink(clock, done_events, pace=LinkRates.even(1e6), chunk_bytes=1000)
    source, target = _pair(20_000)
    assert link.bytes_per_second == 1e6
    for i in range(3):
        link.start(i, [Copy(target.ctypes.data, source.ctypes.data, 20_000)])
    seconds = [done_events.next().seconds for _ in range(3)]
    link.close()
    # 20,000 bytes at 1e6 a second, and a few looks at 1e-4 s each around them.
    assert sum(seconds) == pytest.approx(0.06, rel=0.1)
    assert clock.now() >= 0.06


class Held:
    """A clock that lets nothing begin until told: what is started meanwhile is in flight at once.

    Then each look at it is `step` seconds later.
    """

    def __init__(self, step: float) -> None:
        self.step, self.looks, self.go = step, 0, threading.Event()

    def now(self) -> float:
        if threading.current_thread() is threading.main_thread():
            return 0.0
        self.go.wait(240)
        self.looks += 1
        return self.step * self.looks


def _shared(
    done_events: DoneEvents, pace: LinkRates, wanted: list[tuple[int, str, Direction]]
) -> tuple[list[TransferDoneEvent], float]:
    """All of `wanted` (bytes, stream, direction) at once; their ends, and how long it took."""
    clock = Held(5e-8)
    link = HostLink(clock, done_events, pace=pace, chunk_bytes=1000)
    source, target = _pair(max(n for n, _, _ in wanted))
    for i, (n, stream, direction) in enumerate(wanted):
        link.start(i, [Copy(target.ctypes.data, source.ctypes.data, n)], stream, direction)
    clock.go.set()
    ends = [done_events.next() for _ in wanted]
    link.close()
    return ends, clock.step * clock.looks


def test_streams_share_by_bytes(done_events: DoneEvents) -> None:
    """A short transfer ends after twice its bytes, whatever pieces the long one comes in."""
    ends, took = _shared(
        done_events,
        LinkRates.even(1e9),
        [(40_000, "long", Direction.TO_DEVICE), (4_300, "short", Direction.TO_DEVICE)],
    )
    assert [e.transfer_id for e in ends] == [1, 0]
    assert ends[0].seconds == pytest.approx(2 * 4_300e-9, abs=2.1e-6)
    assert took == pytest.approx(44_300e-9, rel=0.02)


def test_both_directions_keep_the_pace_together(done_events: DoneEvents) -> None:
    both = [(20_000, "s", direction) for direction in Direction]
    ends, took = _shared(done_events, LinkRates.even(1e9), both)
    assert took == pytest.approx(40e-6, rel=0.02)
    assert [e.seconds for e in ends] == pytest.approx([40e-6, 40e-6], rel=0.06)


def test_mixed_traffic_has_a_pace_of_its_own(done_events: DoneEvents) -> None:
    """To the host three quarters of it: that one ends first, then the other has its full rate."""
    both = [(30_000, "s", direction) for direction in Direction]
    ends, took = _shared(done_events, LinkRates(2e9, 2e9, 0.5e9, 1.5e9), both)
    assert [e.transfer_id for e in ends] == [1, 0]
    assert ends[0].seconds == pytest.approx(20e-6, rel=0.1)
    assert took == pytest.approx(20e-6 + 20_000 / 2e9, rel=0.05)


def test_a_failure_in_one_stream_leaves_the_others_alone(done_events: DoneEvents) -> None:
    clock = Held(1e-6)
    link = HostLink(clock, done_events, chunk_bytes=1000)
    source, target = _pair(5_000)
    link.start(1, [Copy(target.ctypes.data, source.ctypes.data, 5_000)], "good")
    link.start(2, [Copy(0, source.ctypes.data, 5_000)], "bad")
    link.start(3, [Copy(target.ctypes.data, source.ctypes.data, 2_000)], "bad")
    clock.go.set()
    ends = {e.transfer_id: e for e in (done_events.next() for _ in range(3))}
    link.close()
    assert ends[2].error is not None
    assert [(ends[i].n_bytes, ends[i].error) for i in (1, 3)] == [(5_000, None), (2_000, None)]
    assert (source == target).all()


def test_an_unpaced_link_measures_itself(done_events: DoneEvents) -> None:
    clock = Stepping(0.5)
    link = HostLink(clock, done_events, chunk_bytes=MiB)
    assert link.bytes_per_second == PRIOR_BYTES_PER_SECOND
    source, target = _pair(MiB)
    for _ in range(30):
        link.start(0, [Copy(target.ctypes.data, source.ctypes.data, MiB)])
    for _ in range(30):
        done_events.next()
    assert link.bytes_per_second < 0.1 * PRIOR_BYTES_PER_SECOND
    link.close()


def test_closing_tells_what_was_not_finished(done_events: DoneEvents) -> None:
    source, target = _pair(10_000)
    link = HostLink(Stepping(1e-9), done_events, pace=LinkRates.even(1.0), chunk_bytes=1000)
    link.start(1, [Copy(target.ctypes.data, source.ctypes.data, 10_000)])
    link.start(2, [Copy(target.ctypes.data, source.ctypes.data, 10_000)])
    link.close()
    link.close()
    done = [done_events.next(), done_events.next()]
    assert [d.transfer_id for d in done] == [1, 2]
    assert all(d.error and "closed" in d.error for d in done)
    assert all(d.n_bytes < 10_000 for d in done)
    with pytest.raises(DeviceError, match="closed"):
        link.start(3, [])


@pytest.mark.parametrize("paced", [False, True])
def test_a_transfer_that_is_stopped_ends_with_what_is_in_flight(
    done_events: DoneEvents, monkeypatch: pytest.MonkeyPatch, paced: bool
) -> None:
    """What follows it does not wait for the rest; one that has not begun ends at once."""
    begun, go = threading.Event(), threading.Event()

    def copy(copy: Copy, copy_bytes: CopyBytes) -> None:
        begun.set()
        assert go.wait(240)
        copy_checked(copy, copy_bytes)

    monkeypatch.setattr("ballast.memory.transfer.copy_checked", copy)
    source, target = _pair(90_000)
    pace = LinkRates.even(1e9) if paced else None
    link = HostLink(Stepping(1e-6), done_events, pace, threads=1, chunk_bytes=10_000)
    whole = [Copy(target.ctypes.data, source.ctypes.data, 90_000)]
    watches = [Followed(done_events) for _ in range(2)]
    link.start(1, whole, watch=watches[0])
    link.start(1, [Copy(target.ctypes.data, source.ctypes.data, 9)], "kv")
    link.start(2, whole, watch=watches[1])
    link.start(3, whole)
    assert begun.wait(240)
    link.stop(1)
    link.stop(2)
    link.stop(2)
    link.stop(77)
    second = done_events.next()
    assert (second.transfer_id, second.n_bytes, second.error) == (2, 0, STOPPED)
    go.set()
    ends = [done_events.next() for _ in range(3)]
    assert [(e.transfer_id, e.n_bytes, e.error) for e in ends] == [
        (1, 10_000, STOPPED),
        (1, 9, None),
        (3, 90_000, None),
    ]
    link.stop(3)
    link.close()
    assert (source == target).all()
    assert [watch.end for watch in watches] == [[(STOPPED, True)], [(STOPPED, True)]]
    assert done_events.queue.empty()


def test_stopping_at_any_moment_ends_each_transfer_once(done_events: DoneEvents) -> None:
    link = HostLink(Stepping(1e-6), done_events, threads=2, chunk_bytes=1_000)
    source, target = _pair(40_000)
    for i in range(60):
        link.start(i, [Copy(target.ctypes.data, source.ctypes.data, 40_000)])
        if i % 3:
            link.stop(i - i % 2)
    ends = [done_events.next() for _ in range(60)]
    link.close()
    assert sorted(e.transfer_id for e in ends) == list(range(60))
    assert all(e.error == (None if e.n_bytes == 40_000 else STOPPED) for e in ends)
    assert done_events.queue.empty()


def test_senseless_settings_and_copies(done_events: DoneEvents) -> None:
    for bad in ({"threads": 0}, {"chunk_bytes": 0}, {"pace": LinkRates.even(0.0)}):
        with pytest.raises(DeviceError):
            HostLink(Stepping(1.0), done_events, **bad)  # type: ignore[arg-type]
    with pytest.raises(DeviceError):
        copy_now(0, 1, 1)


def test_copy_now() -> None:
    source, target = _pair(1000)
    copy_now(target.ctypes.data, source.ctypes.data, 999)
    assert (source[:999] == target[:999]).all()
    assert target[999] == 0


def test_cpus_make_threads() -> None:
    assert [copy_threads(cpus) for cpus in (1, 2, 4, 6, 64)] == [1, 2, 2, 3, 4]
    paced = HostLink(Stepping(1.0), print, pace=LinkRates.even(1.0))
    paced.close()
    assert (paced.paced, paced.threads) == (True, 1)


def test_nothing_of_a_failed_batch_is_written_after_its_end(
    done_events: DoneEvents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread's copy fails at once, the other's is held up: the end waits for it."""
    failed, written = threading.Event(), threading.Event()

    def copy(copy: Copy, _: object) -> None:
        if copy.src == 1:
            failed.set()
            raise DeviceError("link", "the host is gone")
        assert failed.wait(240)
        written.set()

    monkeypatch.setattr("ballast.memory.transfer.copy_checked", copy)
    seen: list[bool] = []

    def on_done(done: TransferDoneEvent) -> None:
        seen.append(written.is_set())
        done_events(done)

    link = HostLink(Stepping(1e-3), on_done, threads=2, chunk_bytes=10)
    # Each thread takes one: whoever has the second waits for the first.
    link.start(1, [Copy(1, 1, 10), Copy(2, 2, 10)])
    assert "the host is gone" in str(done_events.next().error)
    link.close()
    assert seen == [True]


class Followed:
    """A watch that writes down what it is told, and what else was told by then."""

    def __init__(self, done_events: DoneEvents) -> None:
        self.landed_bytes: list[int] = []
        self.end: list[tuple[str | None, bool]] = []
        self.over = threading.Event()
        self._done_events = done_events

    def landed(self, n_bytes: int) -> None:
        self.landed_bytes.append(n_bytes)

    def ended(self, error: str | None) -> None:
        self.end.append((error, not self._done_events.queue.empty()))
        self.over.set()


def test_a_transfer_is_followed_batch_by_batch(done_events: DoneEvents) -> None:
    """But for the last, of which the end tells first."""
    source, target = _pair(35_000)
    link = HostLink(Stepping(1e-3), done_events, threads=1, chunk_bytes=10_000)
    watch = Followed(done_events)
    copies = [Copy(target.ctypes.data, source.ctypes.data, 35_000)]
    link.start(1, copies, watch=watch)
    assert watch.over.wait(240)
    broken = Followed(done_events)
    link.start(2, [*copies, Copy(0, source.ctypes.data, 5)], watch=broken)
    assert broken.over.wait(240)
    link.close()
    assert watch.landed_bytes == [10_000, 20_000, 30_000]
    assert watch.end == [(None, True)]
    assert broken.landed_bytes == [10_000, 20_000, 30_000]
    ((error, ended_before),) = broken.end
    assert error is not None
    assert ended_before
