"""Laws of a link in virtual time: bytes are conserved, shares are fair, being alone is best."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast.core.clock import VirtualClock
from ballast.core.event import TransferDoneEvent
from ballast.core.link import Direction, LinkRates
from ballast.memory.copies import Copy
from ballast.memory.transfer import ACTIVATIONS, STOPPED
from ballast.sim.event_heap import EventHeap
from ballast.sim.link import SimLink

IN, OUT = Direction.TO_DEVICE, Direction.TO_HOST
RATES = LinkRates(100.0, 80.0, 60.0, 50.0)
ONE = LinkRates.even(100.0)


@dataclass(frozen=True)
class Asked:
    at: float
    n_bytes: int
    stream: str = "s"
    direction: Direction = IN


def ends(asked: list[Asked], rates: LinkRates = RATES) -> list[tuple[float, TransferDoneEvent]]:
    """When each of `asked`, by its place in the list, ends; in the order in which they do."""
    clock = VirtualClock()
    heap = EventHeap(clock)
    link = SimLink(heap, clock, rates)
    result: list[tuple[float, TransferDoneEvent]] = []

    def drain(until: float | None) -> None:
        last = inf if until is None else until
        while (due := min(heap.agenda.next, inf if heap.next is None else heap.next)) <= last:
            if due == inf:
                break
            result.extend(
                (clock.now(), e) for e in heap.take(due) if isinstance(e, TransferDoneEvent)
            )
        clock.advance_to(until or 0.0)

    for i, a in sorted(enumerate(asked), key=lambda pair: pair[1].at):
        drain(a.at)
        link.start(i, [Copy(0, 0, a.n_bytes)], a.stream, a.direction)
    drain(None)
    assert heap.next is None
    return result


def by_id(result: list[tuple[float, TransferDoneEvent]]) -> dict[int, float]:
    return {done.transfer_id: at for at, done in result}


transfers = st.lists(
    st.builds(
        Asked,
        at=st.floats(0, 20),
        n_bytes=st.integers(0, 1000),
        stream=st.sampled_from("abc"),
        direction=st.sampled_from(Direction),
    ),
    min_size=1,
    max_size=12,
)


@given(transfers)
def test_every_transfer_ends_once_and_none_is_quicker_than_alone(asked: list[Asked]) -> None:
    result = ends(asked)
    assert sorted(done.transfer_id for _, done in result) == list(range(len(asked)))
    assert [at for at, _ in result] == sorted(at for at, _ in result)
    for at, done in result:
        a = asked[done.transfer_id]
        assert done.n_bytes == a.n_bytes
        alone = a.n_bytes / RATES.of(a.direction, mixed=False)
        assert done.seconds >= alone * (1 - 1e-9)
        assert at >= a.at + alone * (1 - 1e-9)


@given(transfers)
def test_a_stream_is_served_in_order(asked: list[Asked]) -> None:
    when = by_id(ends(asked))
    order = sorted(range(len(asked)), key=lambda i: asked[i].at)
    for direction in Direction:
        for stream in "abc":
            same = [
                i for i in order if (asked[i].stream, asked[i].direction) == (stream, direction)
            ]
            assert [when[i] for i in same] == sorted(when[i] for i in same)


@given(transfers)
def test_bytes_are_conserved(asked: list[Asked]) -> None:
    """One direction alone is busy for as long as its bytes take, whoever shares it."""
    one_way = [Asked(a.at, a.n_bytes, a.stream) for a in asked]
    free = 0.0
    for a in sorted(one_way, key=lambda a: a.at):
        free = max(free, a.at) + a.n_bytes / RATES.to_device
    assert max(at for at, _ in ends(one_way)) == pytest.approx(free)


@given(transfers)
def test_both_directions_together_are_bounded(asked: list[Asked]) -> None:
    """Never more than what is mixed; never later than if they had gone one after the other."""
    result = ends([Asked(0.0, a.n_bytes, a.stream, a.direction) for a in asked])
    last = max(at for at, _ in result)
    moved = {d: sum(a.n_bytes for a in asked if a.direction is d) for d in Direction}
    alone = {d: moved[d] / RATES.of(d, mixed=False) for d in Direction}
    assert last >= sum(moved.values()) / RATES.mixed * (1 - 1e-9)
    assert max(alone.values()) * (1 - 1e-9) <= last <= sum(alone.values()) * (1 + 1e-9)


@given(st.integers(1, 20), st.integers(1, 10**12))
def test_equal_transfers_begun_together_end_together(n: int, n_bytes: int) -> None:
    result = ends([Asked(0.0, n_bytes, f"s{i}") for i in range(n)], ONE)
    assert len({at for at, _ in result}) == 1
    assert result[0][0] == pytest.approx(n * n_bytes / 100)
    assert [done.transfer_id for _, done in result] == list(range(n))


def test_one_stream_is_first_in_first_out_at_full_bandwidth() -> None:
    result = ends([Asked(0.0, 100), Asked(0.5, 50), Asked(9.0, 30)], ONE)
    assert [(at, done.seconds) for at, done in result] == [(1.0, 1.0), (1.5, 0.5), (9.3, 9.3 - 9.0)]


def test_a_short_transfer_overtakes_a_long_one_of_another_stream() -> None:
    """At half the rate from 1 s on, 100 bytes take 2 s; the rest is as if they had waited."""
    when = by_id(ends([Asked(0.0, 1000, "long"), Asked(1.0, 100, "short")], ONE))
    assert when == pytest.approx({0: 11.0, 1: 3.0})


def test_the_other_direction_slows_down_what_is_in_flight_while_it_lasts() -> None:
    """To the device 100 alone and 60 beside; to the host 50 beside: 1 s, then 2 s, then alone."""
    when = by_id(ends([Asked(0.0, 320, direction=IN), Asked(1.0, 100, direction=OUT)]))
    assert when == pytest.approx({0: 1.0 + 2.0 + 1.0, 1: 3.0})


def test_streams_share_their_own_direction_only() -> None:
    asked = [Asked(0.0, 60, "a"), Asked(0.0, 60, "b"), Asked(0.0, 100, "a", OUT)]
    assert by_id(ends(asked)) == pytest.approx({0: 2.0, 1: 2.0, 2: 2.0})


def test_a_transfer_that_is_stopped_leaves_the_link_to_others() -> None:
    clock = VirtualClock()
    heap = EventHeap(clock)
    link = SimLink(heap, clock, ONE)
    for transfer, stream in ((1, ACTIVATIONS), (2, ACTIVATIONS), (3, ACTIVATIONS), (1, "kv")):
        link.start(transfer, [Copy(0, 0, 1000)], stream)
    found: list[tuple[float, TransferDoneEvent]] = []

    def run(until: float) -> None:
        while (due := min(heap.agenda.next, inf if heap.next is None else heap.next)) <= until:
            if due == inf:
                break
            events = [e for e in heap.take(due) if isinstance(e, TransferDoneEvent)]
            found.extend((clock.now(), e) for e in events)
        if until < inf:
            clock.advance_to(until)

    run(4.0)  # each stream has carried 200 bytes
    for transfer in (1, 2, 2, 9):
        link.stop(transfer)
    run(inf)
    ends = [(at, e.transfer_id, e.error) for at, e in found]
    # The other stream shares with the third transfer; alone, that has the last 200 bytes.
    assert ends == [(4.0, 1, STOPPED), (4.0, 2, STOPPED), (20.0, 1, None), (22.0, 3, None)]
    assert link.moving == 0
    assert heap.next is None


def test_many_at_once_leave_nothing_behind_in_the_heap() -> None:
    """Those that join move the next end, which the heap then forgets."""
    clock = VirtualClock()
    heap = EventHeap(clock)
    link = SimLink(heap, clock, ONE)
    for i in range(200):
        link.start(i, [Copy(0, 0, 1000 - i)], f"s{i}")
    assert len(heap.agenda._heap) <= 2
    assert heap.next is None
    link.close()
    assert sum(len(heap.take(None)) for _ in range(200)) == 200
    assert heap.next is None
