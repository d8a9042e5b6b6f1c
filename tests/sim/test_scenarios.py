"""Random scenarios keep every promise of `watching`, under every preset; and defects break them.

One strategy over whole scenarios, not a state machine of rules: what happens depends on times that
are chosen beforehand and on nothing that the device answers, so a scenario is data; the same
generator serves hypothesis and seeds, and a failing example shrinks to a `Scenario` that is pasted
below as it is printed. To run it longer, with other seeds:

    pytest tests/sim/test_scenarios.py --hypothesis-profile=long --hypothesis-seed=0
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ballast.policy.market.cover
from ballast.engine.promises import Promises
from ballast.policy.market.claim_and_offer import Claim, Offer
from ballast.policy.market.cover import AcceptedOffer
from ballast.policy.market.page_budget import PageBudget
from tests.effort import LONG
from tests.sim.scenarios import (
    FIRST_ORDERS,
    TURNS,
    Ask,
    Choices,
    Drawn,
    Model,
    Order,
    Scenario,
    Seeded,
    scenario,
    stream,
)
from tests.sim.watching import Broken, Run


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    make = draw(st.sampled_from([scenario, scenario, scenario, stream]))
    return make(Drawn(draw))


@settings(max_examples=max(settings.default.max_examples // 4, 8), derandomize=not LONG)
@given(scenarios())
def test_promises_are_kept(scenario: Scenario) -> None:
    Run(scenario)()


BUSY = Ask(after=0.0, model=1, prompt=250, output=20, n=6, gap=0.3)
WIDE = Model(weight_pages=5, kv_heads=4)
"""Only one such model has a place."""
PLACELESS = Scenario(
    preset="recompute",
    models=(replace(WIDE, share=3.0, ttl=0.3), WIDE),
    more_weights=0,
    kv_pages=12,
    acts=(
        Ask(after=1.0, model=1, prompt=16, output=4),
        Ask(after=1.0, model=0, prompt=16, output=4),
    ),
)
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
    "an older request has younger ones of another model undone beside a pinned one": Scenario(
        preset="swap",
        page_kib=16,
        models=(
            Model(layers=6, weight_pages=3, kv_heads=4),
            Model(layers=2, weight_pages=1, kv_heads=2, pinned=True),
        ),
        kv_pages=40,
        acts=(
            Ask(after=0.05, model=1, prompt=300, output=400, n=2),
            Ask(after=0.05, model=0, prompt=13, output=40),
        ),
    ),
    "a model that an operator brought makes way for the one whose turn it is": Scenario(
        preset="swap",
        models=(Model(), Model()),
        more_weights=100,
        kv_pages=10,
        acts=(
            Order(after=0.1, what="activate", model=1),
            Ask(after=0.5, model=0, prompt=200, output=500),
        ),
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
    "who is overdue is not overtaken by those who take cached prefixes": Scenario(
        preset="recompute",
        models=(Model(), Model(kv_heads=2), Model(kv_heads=2)),
        more_weights=100,
        kv_pages=20,
        acts=(
            Ask(after=0.0, model=0, prompt=100, output=100),
            Ask(after=0.3, model=1, prompt=290, output=4),
            Ask(after=0.05, model=2, prompt=60, output=60, n=8, gap=0.1),
            Ask(after=0.05, model=0, prompt=30, output=60, n=8, gap=0.1),
        ),
    ),
    "a model comes back for a request that has room once its own layers lend": Scenario(
        preset="mirage",
        options=(("cap", 0.0),),
        models=(Model(kv_heads=2), Model(layers=6, weight_pages=6)),
        more_weights=100,
        kv_pages=20,
        acts=(
            Order(after=0.5, what="evict", model=1),
            Ask(after=0.1, model=0, prompt=300, output=4, n=2, gap=0.5),
            Ask(after=2.0, model=1, prompt=260, output=4),
        ),
    ),
    "a model is held no longer than others lack their shares": Scenario(
        preset="recompute",
        models=(Model(), Model()),
        more_weights=100,
        kv_pages=40,
        acts=(
            Ask(after=0.0, model=0, prompt=280, output=60),
            Ask(after=0.0, model=0, prompt=280, output=300, n=3),
            Ask(after=0.5, model=1, prompt=30, output=400),
            Ask(after=0.0, model=0, prompt=20, output=4),
        ),
    ),
    "blocks at hand for an overdue request are not moved together for others": Scenario(
        preset="recompute",
        models=(Model(), Model(kv_heads=2), Model()),
        more_weights=100,
        kv_pages=30,
        acts=(
            Ask(after=0.0, model=0, prompt=100, output=300),
            Ask(after=0.3, model=1, prompt=290, output=4),
            Ask(after=0.05, model=2, prompt=60, output=60, n=8, gap=0.1),
            Ask(after=0.05, model=0, prompt=30, output=60, n=8, gap=0.1),
        ),
    ),
    "a large request is not passed for ever by small ones of a model within its share": Scenario(
        preset="recompute",
        models=(Model(), Model(kv_heads=2)),
        more_weights=100,
        kv_pages=21,
        acts=(
            Ask(after=0.0, model=0, prompt=40, output=40, n=300, gap=0.05),
            Ask(after=0.5, model=1, prompt=290, output=4),
        ),
    ),
    "a model without a place does not come for a request that is refused": PLACELESS,
    "nor where KV is swapped": replace(PLACELESS, preset="kvswap"),
    "a younger request makes way before one fails": Scenario(
        preset="balloon",
        link=1e6,
        models=(
            Model(layers=3, weight_pages=5, kv_heads=4),
            Model(weight_pages=5, kv_heads=2, ttft=0.05),
        ),
        more_weights=0,
        kv_pages=21,
        acts=(
            Ask(after=0.1, model=0, prompt=15, output=4),
            Ask(after=0.05, model=1, prompt=15, output=40),
        ),
    ),
    "a model that loses its place while it loads is evicted when it has come": Scenario(
        preset="static",
        link=1e6,
        models=(Model(weight_pages=5), Model(weight_pages=5)),
        joining=(Model(weight_pages=5, share=3.0),),
        more_weights=100,
        kv_pages=10,
        acts=(
            Order(after=0.01, what="join"),
            Ask(after=5.0, model=2, prompt=16, output=4),
        ),
    ),
    "a pinned model, which stays anyway, keeps its place": Scenario(
        preset="static",
        models=(Model(weight_pages=5), Model(weight_pages=5, pinned=True)),
        joining=(Model(weight_pages=5, share=3.0),),
        more_weights=100,
        kv_pages=10,
        acts=(
            Order(after=1.0, what="join"),
            Ask(after=5.0, model=2, prompt=16, output=4),
            Ask(after=5.0, model=1, prompt=16, output=4),
        ),
    ),
    "an idle model that an operator brought makes way for the next turn's weights": Scenario(
        preset="swap",
        models=(
            Model(weight_pages=6),
            Model(weight_pages=6),
            Model(layers=6, weight_pages=5),
        ),
        more_weights=0,
        kv_pages=14,
        acts=(
            Ask(after=0.1, model=1, prompt=16, output=4),
            Order(after=0.5, what="activate", model=0),
            Ask(after=1.0, model=2, prompt=16, output=4),
        ),
    ),
    "a cache beyond a share that has shrunk makes way for others within theirs": Scenario(
        preset="static",
        models=(Model(weight_pages=2), Model(weight_pages=2)),
        more_weights=100,
        kv_pages=20,
        acts=(
            Ask(after=0.1, model=0, prompt=260, output=5),
            Order(after=0.1, what="change", model=1, amount=18),
            Ask(after=5.0, model=1, prompt=560, output=10),
        ),
    ),
    "pages freed for a request beside the model of the turn are kept for it": Scenario(
        preset="swap+adbs",
        lanes=2,
        models=(Model(pinned=True), Model(pinned=True, kv_heads=2, max_running=2), Model(layers=3)),
        more_weights=30,
        kv_pages=8,
        acts=(
            Ask(after=0.515, model=0, prompt=300, output=3),
            Ask(after=1.28, model=1, prompt=82, output=159),
            Ask(after=0.755, model=2, prompt=1, output=159),
            Ask(after=0.0, model=1, prompt=15, output=37, n=5),
        ),
    ),
    "blocks at hand beside pages are not moved together for others": Scenario(
        preset="recompute",
        lanes=3,
        page_kib=64,
        models=(
            Model(),
            Model(layers=6),
            Model(layers=6, kv_heads=4, ttft=0.05),
            Model(layers=3, kv_heads=4),
        ),
        more_weights=100,
        acts=(
            Ask(after=0.0, model=3, prompt=15, output=400, n=2),
            Ask(after=0.3, model=1, prompt=288, output=400, n=2),
            Ask(after=0.0, model=1, prompt=286, output=4, priority=5),
            Ask(after=0.3, model=2, prompt=128, output=4, n=4, stem=64),
        ),
    ),
}
"""What they found, each with what is right."""


@pytest.mark.parametrize("what", MENDED)
def test_what_was_mended_stays_so(what: str) -> None:
    assert Run(MENDED[what])()["out_of_memory"] == 0


@pytest.mark.parametrize("preset", ["recompute", "mirage", "kvswap"])
def test_a_request_that_its_limit_stops_for_ever_fails_beside_turns(preset: str) -> None:
    """A model joins while it runs, and leaves it less than it has: else turns pass for ever."""
    small = Model(weight_pages=2)
    beyond = Scenario(
        preset=preset,
        options=(*TURNS, ("preemptive", 1.0)),
        models=(small, replace(small, pinned=True)),
        joining=(small,),
        more_weights=100,
        kv_pages=24,
        acts=(
            Ask(after=0.05, model=0, prompt=300, output=460),
            Order(after=0.5, what="join"),
            Ask(after=0.5, model=1, prompt=300, output=4),
            Ask(after=0.5, model=2, prompt=300, output=4),
        ),
    )
    assert Run(beyond)()["out_of_memory"] == 1


# -- defects that were mended, put back -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Defect:
    """A defect, and a budget of random scenarios that is enough to find it."""

    put_back: Callable[[pytest.MonkeyPatch], None]
    make: Callable[[Choices], Scenario]
    seeds: range
    recorded: str
    """By the rule that is broken."""


def _promise_nothing(patch: pytest.MonkeyPatch) -> None:
    """What is freed for a claim is there for whoever comes first."""

    def make(self: Promises, promises: object, models: object) -> None:
        self.withdraw()

    patch.setattr(Promises, "make", make)


def _flush(patch: pytest.MonkeyPatch) -> None:
    """A whole cache goes for one page."""
    patch.setattr(Offer, "part", lambda self, pages, taken: self.pages - taken)


def _take_all(patch: pytest.MonkeyPatch) -> None:
    """A claim that cannot be covered takes everything from those after it."""
    cover_one = ballast.policy.market.cover.cover_one

    def cover(
        claim: Claim,
        find: Callable[[], Iterable[Offer]],
        budget: PageBudget,
        lacked: int,
        *,
        by_price: bool,
    ) -> list[AcceptedOffer] | None:
        chosen = cover_one(claim, find, budget, lacked, by_price=by_price)
        if chosen is None:
            budget.coming = budget.free = budget.borrowed = 0
        return chosen

    patch.setattr(ballast.policy.market.cover, "cover_one", cover)


def _hold_nothing(patch: pytest.MonkeyPatch) -> None:
    """A claim that undoes nobody keeps nothing, however long it is overdue."""
    patch.setattr(PageBudget, "hold", lambda self, needs: 0)
    patch.setattr(PageBudget, "reserve", lambda self, offers, pages: None)


def _balloon(c: Choices) -> Scenario:
    return scenario(c, ("balloon",), FIRST_ORDERS)


DEFECTS = {
    "livelock": Defect(_promise_nothing, _balloon, range(16, 46), "has waited"),
    "flush": Defect(_flush, _balloon, range(20), "lie free after"),
    "starvation by a claim that cannot be covered": Defect(
        _take_all, _balloon, range(18, 48), "has waited"
    ),
    "starvation of a claim that undoes nobody": Defect(
        _hold_nothing, stream, range(67, 87), "is overdue"
    ),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_defects_that_were_mended_are_found_when_they_are_put_back(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    defect = DEFECTS[name]
    with monkeypatch.context() as patch:
        defect.put_back(patch)
        for seed in defect.seeds:
            found = defect.make(Seeded(random.Random(seed)))
            try:
                Run(found)()
            except Broken as broken:
                if defect.recorded in str(broken):
                    break
        else:
            raise AssertionError("not found")
    Run(found)()


TWO_VICTIMS = Scenario(
    preset="balloon",
    lanes=2,
    page_kib=64,
    models=(
        Model(weight_pages=2, kv_heads=2),
        Model(weight_pages=2, kv_heads=2),
        Model(weight_pages=3, kv_heads=2),
    ),
    kv_pages=18,
    acts=(
        Ask(after=0.0, model=0, prompt=200, output=800),
        Ask(after=0.0, model=1, prompt=200, output=800),
        Ask(after=0.3, model=2, prompt=100, output=10, priority=5),
    ),
)


def test_two_victims_that_undo_each_other_break_the_bound_on_being_undone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert Run(TWO_VICTIMS)()["preempted"] > 0
    _promise_nothing(monkeypatch)
    with pytest.raises(Broken, match=r"times in a row|pages lie free"):
        Run(TWO_VICTIMS)()
