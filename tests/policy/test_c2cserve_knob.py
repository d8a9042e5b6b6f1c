"""The feedback on the share of output-stationary columns (C2CServe, 7.3)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ballast.policy.c2cserve_knob import Knob, KnobRule, PassMeasurement

RULE = KnobRule()
LINK = PassMeasurement(seconds=1.0, budget=2.0, link=1.0, device=0.2)
MEMORY = PassMeasurement(seconds=1.0, budget=2.0, link=0.2, device=1.0)


def after(knob: Knob, seen: PassMeasurement, n: int) -> Knob:
    for _ in range(n):
        knob = knob.after(seen, RULE)
    return knob


def test_it_starts_by_sparing_the_link_and_moves_to_the_side_that_is_used_less() -> None:
    assert Knob().os_share == 0.0
    assert after(Knob(), LINK, 20).os_share == 0.0
    raised = after(Knob(), MEMORY, 20)
    assert raised.os_share > 0.3
    assert after(raised, LINK, 30).os_share < raised.os_share


def test_it_stays_within_the_dead_band() -> None:
    even = PassMeasurement(seconds=1.0, budget=2.0, link=0.9, device=0.9 + 0.9 * RULE.dead_band)
    assert after(Knob(os_share=0.4), even, 50).os_share == 0.4


def test_late_passes_move_it_faster() -> None:
    late = PassMeasurement(seconds=1.0, budget=0.5, link=0.2, device=1.0)
    assert after(Knob(), late, 3).os_share == 4 * after(Knob(), MEMORY, 3).os_share


def test_one_odd_pass_does_not_turn_it_around() -> None:
    raised = after(Knob(), MEMORY, 10)
    odd = PassMeasurement(seconds=1.0, budget=2.0, link=0.5, device=0.2)
    assert raised.after(odd, RULE).os_share > raised.os_share, "it is smoothed"


@given(
    st.lists(
        st.builds(
            PassMeasurement,
            seconds=st.floats(1e-4, 10),
            budget=st.floats(1e-3, 10),
            link=st.floats(0, 1),
            device=st.floats(0, 1),
        ),
        max_size=60,
    )
)
def test_it_is_bounded_and_so_is_each_step(seen: list[PassMeasurement]) -> None:
    knob = Knob()
    for each in seen:
        following = knob.after(each, RULE)
        assert 0.0 <= following.os_share <= 1.0
        assert abs(following.os_share - knob.os_share) <= RULE.late_step + 1e-12
        knob = following
