"""Latencies of the last minute."""

from __future__ import annotations

from ballast.core.clock import VirtualClock
from ballast.server.observe.latency import KEPT, Quantiles, Recent, Timing, quantiles


def test_quantiles_are_ones_that_were_seen() -> None:
    assert quantiles([]) is None
    assert quantiles([3.0]) == Quantiles(1, 3.0, 3.0)
    assert quantiles([4.0, 1.0, 3.0, 2.0]) == Quantiles(4, 2.0, 4.0)
    assert quantiles(float(i) for i in range(100, 0, -1)) == Quantiles(100, 50.0, 99.0)


def test_what_is_older_than_a_minute_is_forgotten() -> None:
    clock = VirtualClock()
    recent = Recent(clock)
    recent.add(9.0)
    clock.advance_to(30.0)
    recent.add(1.0)
    assert recent.quantiles() == Quantiles(2, 1.0, 9.0)
    clock.advance_to(61.0)
    assert recent.quantiles() == Quantiles(1, 1.0, 1.0)
    clock.advance_to(91.0)
    assert recent.quantiles() is None


def test_memory_is_bounded_however_many_come() -> None:
    recent = Recent(VirtualClock())
    for i in range(2 * KEPT):
        recent.add(float(i))
    found = recent.quantiles()
    assert found is not None
    assert found.count == KEPT
    assert found.p50 == 1.5 * KEPT - 1


def test_times_of_a_request() -> None:
    timing = Timing(10.0)
    assert timing.ttft is None
    assert timing.tpot(5) is None
    timing.first, timing.last = 11.0, 13.0
    assert timing.ttft == 1.0
    assert timing.tpot(5) == 0.5
    assert timing.tpot(1) is None
