"""When a spare is started, given up and replaced."""

from __future__ import annotations

import random

import pytest

from ballast.control.spares import (
    LONGEST_RETRY_SECONDS,
    RETRY_SECONDS,
    STEADY_SECONDS,
    EndSpare,
    PrepareSpare,
    SpareActiveEvent,
    SpareDueEvent,
    SpareEndedEvent,
    SpareEvent,
    SparePreparedEvent,
    Spares,
    SpareWantedEvent,
)

IDLE, BUSY = 120.0, 600.0


@pytest.fixture
def spares() -> Spares:
    spares = Spares(IDLE, BUSY)
    assert spares.handle(0.0, SpareWantedEvent()) == [PrepareSpare(1)]
    return spares


def test_one_is_prepared_and_taken(spares: Spares) -> None:
    assert spares.take() is None
    assert spares.handle(1.0, SpareWantedEvent()) == []
    assert spares.handle(5.0, SparePreparedEvent(1)) == []
    assert spares.due == float("inf")
    assert spares.take() == 1
    assert spares.take() is None
    assert spares.handle(6.0, SpareWantedEvent()) == [PrepareSpare(2)]


def test_one_that_does_nothing_is_replaced(spares: Spares) -> None:
    assert spares.handle(100.0, SpareActiveEvent(1, 0.02)) == []
    assert spares.due == 100.0 + IDLE
    assert spares.handle(spares.due - 0.1, SpareDueEvent()) == []
    [end, start] = spares.handle(spares.due, SpareDueEvent())
    assert isinstance(end, EndSpare)
    assert end.number == 1
    assert "did nothing for 120 s" in end.why
    assert start == PrepareSpare(2)


def test_one_that_computes_slowly_goes_on_and_one_that_never_ends_does_not(spares: Spares) -> None:
    for second in range(0, 50_000, 100):  # a hundredth of a core, on a busy machine
        assert spares.handle(second, SpareActiveEvent(1, second / 100)) == []
    [end, start] = spares.handle(60_100.0, SpareActiveEvent(1, 601.0))
    assert isinstance(end, EndSpare)
    assert "more than 600 s of processor time" in end.why
    assert start == PrepareSpare(2)


def test_those_that_fail_again_are_started_later_and_later(spares: Spares) -> None:
    now, waits = 0.0, []
    for number in range(1, 13):
        found = spares.handle(now, SpareEndedEvent(number, "exit code 1"))
        if not found:
            waits.append(spares.due - now)
            now = spares.due
            found = spares.handle(now, SpareDueEvent())
        assert found == [PrepareSpare(number + 1)]
    assert waits[:3] == [RETRY_SECONDS, 2 * RETRY_SECONDS, 4 * RETRY_SECONDS]
    assert waits[-1] == LONGEST_RETRY_SECONDS


def test_a_worker_that_is_replaced_has_a_failed_spare_tried_again(spares: Spares) -> None:
    spares.handle(0.0, SpareEndedEvent(1, "exit code 1"))
    assert spares.handle(1.0, SpareEndedEvent(2, "exit code 1")) == []
    assert spares.handle(2.0, SpareWantedEvent()) == [PrepareSpare(3)]


def test_one_that_dies_while_it_waits_is_replaced(spares: Spares) -> None:
    spares.handle(0.0, SpareEndedEvent(1, "exit code 1"))
    spares.handle(1.0, SparePreparedEvent(2))
    late = 1.0 + STEADY_SECONDS
    assert spares.handle(late, SpareEndedEvent(2, "killed")) == [PrepareSpare(3)]
    spares.handle(late, SparePreparedEvent(3))
    assert spares.handle(late + 1.0, SpareEndedEvent(3, "killed")) == []
    assert spares.due == late + 1.0 + RETRY_SECONDS


def test_what_an_earlier_one_sends_changes_nothing(spares: Spares) -> None:
    spares.handle(IDLE, SpareDueEvent())
    late = SparePreparedEvent(1), SpareEndedEvent(1, "killed"), SpareActiveEvent(1, 2 * BUSY)
    events: tuple[SpareEvent, ...] = late
    for event in events:
        assert spares.handle(IDLE, event) == []
        assert spares.ready is None


@pytest.mark.parametrize("seed", range(20))
def test_there_is_always_one_or_a_time_at_which_it_is_started(seed: int) -> None:
    """Whatever happens, once a spare is wanted one is prepared, waits, or is started in time."""
    rng, spares = random.Random(seed), Spares(IDLE, BUSY)
    now, number, wanted = 0.0, 0, False
    for _ in range(300):
        now += rng.choice([0.0, 1.0, 200.0, 4000.0])
        match rng.randrange(6):
            case 0:
                found, wanted = spares.handle(now, SpareWantedEvent()), True
            case 1:
                found = spares.handle(now, SparePreparedEvent(number))
            case 2:
                found = spares.handle(now, SpareEndedEvent(number, "killed"))
            case 3:
                found = spares.handle(now, SpareActiveEvent(number, rng.uniform(0, 1.1 * BUSY)))
            case 4:
                found, before = [], spares.ready
                assert spares.take() == before
                wanted = wanted and before is None
            case _:
                found = spares.handle(now, SpareDueEvent())
        started = [i.number for i in found if isinstance(i, PrepareSpare)]
        assert len(started) <= 1
        number = max([number, *started])
        assert not wanted or spares.ready is not None or spares.due < float("inf")
