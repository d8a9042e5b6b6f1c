"""Links of several processes that are one: together they keep its rate, and share it fairly."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import queue
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest

from ballast.core.errors import DeviceError
from ballast.core.event import TransferDoneEvent
from ballast.core.link import LinkRates
from ballast.core.units import MiB
from ballast.live.inbox import MonotonicClock
from ballast.memory.copies import Copy
from ballast.memory.shared_pace import LAPSE, HostLinkMemory, SharedPace
from ballast.memory.transfer import HostLink


@pytest.fixture
def path() -> Iterator[str]:
    memory = HostLinkMemory()
    yield memory.path
    memory.close()


def carried(paces: list[SharedPace], seconds: float, at: float = 1000.0) -> list[int]:
    """Batches that each carries in so many virtual seconds from `at` on, always having more."""
    due = [pace.charge(0.01, at) for pace in paces]
    counts = [0] * len(paces)
    while min(due) < at + seconds:
        i = min(range(len(due)), key=due.__getitem__)
        counts[i] += 1
        due[i] = paces[i].charge(0.01, due[i])
    return counts


def test_together_they_have_the_link_and_each_an_equal_part(path: str) -> None:
    paces = [SharedPace(path) for _ in range(3)]
    assert carried(paces[:1], 3.0)[0] == pytest.approx(300, abs=2)
    paces[0].rest()
    counts = carried(paces, 9.0, 2000.0)
    assert sum(counts) == pytest.approx(900, abs=5)
    assert counts == pytest.approx([300] * 3, abs=5)
    for pace in paces:
        pace.close()


@pytest.mark.parametrize(
    ("reserved", "parts"),
    [
        ((0.6, 0.0, 0.0), (0.6, 0.2, 0.2)),
        ((0.5, 0.25, 0.0), (0.5, 0.25, 0.25)),
        ((0.6, 0.4, 0.0), (0.594, 0.396, 0.01)),
        ((1.0, 0.5, 0.0), (4 / 9, 2 / 9, 3 / 9)),
        ((0.2, 0.1, 0.1), (0.5, 0.25, 0.25)),
    ],
)
def test_reservations_are_kept_and_nothing_is_left_over(
    path: str, reserved: tuple[float, ...], parts: tuple[float, ...]
) -> None:
    paces = [SharedPace(path) for _ in reserved]
    for pace, part in zip(paces, reserved, strict=True):
        pace.reserve(part)
    counts = carried(paces, 10.0)
    assert counts == pytest.approx([1000 * part for part in parts], abs=8)
    assert carried_alone_after_rest(paces) == pytest.approx(100, abs=2)
    for pace in paces:
        pace.close()


def carried_alone_after_rest(paces: list[SharedPace]) -> int:
    """Batches that the last one carries in a second when the others have nothing to carry."""
    for pace in paces:
        pace.rest()
    began = due = paces[-1].charge(0.01, 2000.0)
    n = 0
    while due < began + 1.0:
        due = paces[-1].charge(0.01, due)
        n += 1
    return n


def test_clocks_that_began_at_other_times_share_as_well(path: str) -> None:
    """Two processes, the second of which began 100 s later, both with more to carry all along."""
    first, second = SharedPace(path, origin=50.0), SharedPace(path, origin=150.0)
    now, counts = {first: 1000.0, second: 900.0}, {first: 0, second: 0}
    due = {pace: pace.charge(0.01, at) for pace, at in now.items()}
    while min(due[first], due[second] + 100.0) < 1003.0:
        pace = first if due[first] <= due[second] + 100.0 else second
        counts[pace] += 1
        due[pace] = pace.charge(0.01, due[pace])
    assert list(counts.values()) == pytest.approx([150, 150], abs=3)
    first.close()
    second.close()


def test_who_stops_in_the_midst_counts_until_its_lapse(path: str) -> None:
    a, b = SharedPace(path), SharedPace(path)
    b.reserve(0.9)
    b.charge(0.01, 10.0)
    assert a.charge(0.01, 10.0) == pytest.approx(10.1)
    assert a.charge(0.01, 10.1) == pytest.approx(10.2)
    later = 10.02 + LAPSE
    assert a.charge(0.01, later) == pytest.approx(later + 0.01, abs=0.03)
    a.close()
    b.close()


def _carry(path: str, pipe: Connection, reserved: float) -> None:
    """Carry a batch, and live on."""
    pace = SharedPace(path)
    pace.reserve(reserved)
    pipe.send(pace.charge(0.01, 10.0))
    signal.pause()


def test_a_process_that_is_killed_leaves_its_entry_and_its_part_to_others(path: str) -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_carry, args=(path, theirs, 0.9), daemon=True)
    child.start()
    assert ours.recv() == pytest.approx(10.01, abs=0.005)
    mine = SharedPace(path)
    assert mine._at == 1
    assert mine.charge(0.01, 10.0) > 10.05  # a tenth of the link
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    heir = SharedPace(path)
    assert heir._at == 0
    due = mine.charge(0.0, 10.0)
    assert mine.charge(0.01, due) == pytest.approx(due + 0.01, abs=0.005)
    heir.close()
    mine.close()


def test_memory_that_is_none_is_refused(tmp_path: object) -> None:
    with pytest.raises(DeviceError, match="cannot be shared"):
        SharedPace("/proc/self/fd/9999")


def test_links_that_are_one_are_no_faster_together_than_alone(path: str) -> None:
    size, rate, n = 4 * MiB, 100 * MiB, 6
    source, target = bytearray(b"x" * size), bytearray(size)
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(buffer)) for buffer in (target, source)]
    ended: queue.Queue[TransferDoneEvent] = queue.Queue()
    links = [
        HostLink(
            MonotonicClock(),
            ended.put,
            LinkRates.even(rate),
            chunk_bytes=MiB,
            shared=SharedPace(path),
        )
        for _ in range(2)
    ]
    began = time.monotonic()
    for i in range(n):
        links[i % 2].start(i, [Copy(addresses[0], addresses[1], size)])
    events = [ended.get(timeout=240) for _ in range(n)]
    assert time.monotonic() - began > 0.95 * n * size / rate
    assert {e.error for e in events} == {None}
    assert target == source
    for link in links:
        link.close()
