"""What a link carries one way and both ways, from the figures that are given."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ballast.core.link import Direction, LinkRates
from ballast.core.settings import LinkSettings

figures = st.floats(1.0, 1e12)


@given(figures, st.none() | figures)
def test_neither_direction_is_quicker_beside_the_other(alone: float, mixed: float | None) -> None:
    rates = LinkRates.even(alone, mixed)
    for direction in Direction:
        assert 0 < rates.of(direction, mixed=True) <= rates.of(direction, mixed=False) == alone
    assert rates.mixed <= sum(rates.of(d, mixed=False) for d in Direction)
    assert rates.mixed == min(2 * alone, alone if mixed is None else mixed)


def test_a_pace_of_one_figure_is_of_all_bytes_together() -> None:
    assert LinkSettings().pace is None
    assert LinkSettings(bytes_per_second=8.0).pace == LinkRates(8.0, 8.0, 4.0, 4.0)
    both = LinkSettings(bytes_per_second=8.0, mixed_bytes_per_second=12.0)
    assert both.pace == LinkRates(8.0, 8.0, 6.0, 6.0)


def test_directions_have_figures_of_their_own() -> None:
    rates = LinkRates(4.0, 3.0, 2.0, 1.0)
    assert [rates.of(Direction.TO_DEVICE, m) for m in (False, True)] == [4.0, 2.0]
    assert [rates.of(Direction.TO_DEVICE.other, m) for m in (False, True)] == [3.0, 1.0]
    assert not LinkRates(4.0, 3.0, 2.0, 0.0).positive
