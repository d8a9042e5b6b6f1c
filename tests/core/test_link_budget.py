"""Reservations on a host link, as in C2CServe, 6.2."""

from __future__ import annotations

import pytest

from ballast.core.link_budget import LinkBudget, link_demand


def test_what_a_model_needs_of_the_link() -> None:
    # An 8B model takes at least 35.7 ms a token on a superchip's link, a 70B 313 ms.
    assert link_demand(16.06e9, 0.0357) == pytest.approx(450e9, rel=1e-3)
    assert link_demand(141e9, 0.313) == pytest.approx(450e9, rel=2e-3)
    with pytest.raises(ValueError, match="tpot"):
        link_demand(1.0, 0.0)


def test_models_are_active_together_while_the_sum_is_within_the_link() -> None:
    budget = LinkBudget(100.0).with_("a", 60.0)
    assert budget.fits("b", 40.0)
    assert not budget.fits("b", 40.1)
    assert budget.fits("a", 100.0), "in place of the reservation that it has"
    over = budget.with_("b", 50.0)
    assert (over.valid, over.free) == (False, -10.0)
    assert over.without("a").without("c").reserved == {"b": 50.0}
    assert budget.reserved == {"a": 60.0}, "budgets do not change"
