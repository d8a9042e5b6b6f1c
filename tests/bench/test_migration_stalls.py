"""A stall of a stream that `migration` moves is counted in its steps."""

from __future__ import annotations

import pytest

from benchmarks.migration import Stream


def test_a_stall_is_the_longest_gap_beyond_a_step() -> None:
    stream = Stream(times=[0.0, 0.1, 0.2, 0.3, 0.6, 0.7])
    assert stream.step(ordered=0.25) == pytest.approx(0.1)
    assert stream.stall(ordered=0.25) == pytest.approx(2.0)
    assert stream.stall(ordered=0.65) == pytest.approx(0.0, abs=1e-9)
