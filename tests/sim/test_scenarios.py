"""Random scenarios keep every promise of `watching`, under every preset; and defects break them.

One strategy over whole scenarios, not a state machine of rules: what happens depends on times that
are chosen beforehand and on nothing that the device answers, so a scenario is data; the same
generator serves hypothesis and seeds, and a failing example shrinks to a `Scenario` that is pasted
below as it is printed. To run it longer, with other seeds:

    pytest tests/sim/test_scenarios.py --hypothesis-profile=long --hypothesis-seed=0
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sim.scenarios import Ask, Drawn, Model, Order, Scenario, scenario
from tests.sim.watching import Run


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    return scenario(Drawn(draw))


LONG = settings.default.max_examples > 100
"""By the profile: other examples each time, and many of them."""


@settings(max_examples=settings.default.max_examples // 4, derandomize=not LONG)
@given(scenarios())
def test_promises_are_kept(scenario: Scenario) -> None:
    Run(scenario)()


BUSY = Ask(after=0.0, model=1, prompt=250, output=20, n=6, gap=0.3)
MENDED = {
    "cached prefixes make way for a model that was evicted": Scenario(
        preset="kvswap",
        models=(Model(ttl=0.2), Model(), Model()),
        more_weights=100,
        kv_pages=40,
        acts=(BUSY, replace(BUSY, model=2), Ask(after=4.0, model=0, prompt=20, output=4)),
    ),
    "a pinned model's cached prefixes make way for the next turn": Scenario(
        preset="swap",
        models=(Model(), Model(pinned=True)),
        kv_pages=30,
        acts=(BUSY, Ask(after=3.0, model=0, prompt=20, output=4)),
    ),
    "free pages beyond a model's limit are no use to it": Scenario(
        preset="recompute",
        models=(Model(weight_pages=2), Model(weight_pages=2)),
        more_weights=100,
        kv_pages=20,
        acts=(
            Order(after=0.0, what="evict", model=0),
            Ask(after=0.1, model=1, prompt=96, output=40, n=6, gap=0.02),
        ),
    ),
}
"""What they found, each with what is right."""


@pytest.mark.parametrize("what", MENDED)
def test_what_was_mended_stays_so(what: str) -> None:
    Run(MENDED[what])()
