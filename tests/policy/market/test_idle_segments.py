"""Idle models' weights in parts: the cheapest first, no more than is lacking, all if need be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ballast.core.view import ModelView, Residency, SharedView
from ballast.policy.market.claim_and_offer import Claim
from ballast.policy.market.idle_segments import idle_segments
from ballast.policy.plans import eviction, last_plans
from ballast.policy.presets import resolve
from tests.policy import worlds

LAYERS = (2,) * 8
"""Pages of the layers, from the last to the first."""


def idle(name: str, used: float = 0.0, *, gone: int = 0) -> ModelView:
    """A model of eight layers, embeddings and a head, without the last `gone` layers."""
    residency = Residency.ABSENT if gone else Residency.RESIDENT
    m = worlds.model(name, pages=20, residency=residency, last_used=used)
    return worlds.in_parts(m, 2, 2, *LAYERS, gone=gone)


def asking(pages: int) -> ModelView:
    m = worlds.model("new", pages=pages, residency=Residency.ABSENT)
    return replace(m, waiting=(worlds.request(1),))


def evictions(
    *models: ModelView, free: int, wanted: int, **options: float
) -> dict[str, int | None]:
    view = worlds.device(*models, asking(wanted), free=free)
    decision = resolve("balloon", options).memory(view, None)
    assert worlds.activated(decision.actions) == ["new"]
    assert len({a.model for a in decision.actions}) == len(decision.actions)  # type: ignore[union-attr]
    here = {m.name: m.plan.missing_pages for m in models}
    return {
        name: None if pages is None else pages - here[name]
        for name, pages in worlds.evicted(decision.actions).items()
    }


@pytest.mark.parametrize("by_price", [0, 1])
def test_only_as_many_segments_go_as_are_lacking(by_price: float) -> None:
    assert evictions(idle("a"), free=5, wanted=10, by_price=by_price) == {"a": 6}
    assert evictions(idle("a"), free=5, wanted=10, by_price=by_price, segments=0) == {"a": None}
    assert evictions(idle("a"), free=0, wanted=20, by_price=by_price) == {"a": None}


@pytest.mark.parametrize("by_price", [0, 1])
def test_models_that_are_alike_share_the_loss(by_price: float) -> None:
    assert evictions(idle("a"), idle("b"), free=2, wanted=10, by_price=by_price) == {"a": 4, "b": 4}


def test_a_model_idle_for_longer_gives_more() -> None:
    found = evictions(idle("a", used=9.0), idle("b", used=1.0), free=0, wanted=12)
    assert found["b"] is not None
    assert found["b"] > (found.get("a") or 0)


def test_a_model_that_misses_some_already_is_the_dearer() -> None:
    assert evictions(idle("a", gone=4), idle("b"), free=0, wanted=8) == {"b": 8}
    assert evictions(idle("a", gone=4), free=0, wanted=8) == {"a": 8}
    assert evictions(idle("a", gone=4), free=0, wanted=12) == {"a": None}


def test_what_is_missing_alone_is_claimed() -> None:
    """Six of 20 pages; four free ones, and two of the other's."""
    back = replace(idle("back", gone=3), waiting=(worlds.request(1),))
    view = worlds.device(idle("a"), back, free=4)
    assert back.missing_pages == 6
    actions = resolve("balloon").memory(view, None).actions
    assert worlds.evicted(actions) == {"a": 2}
    assert worlds.activated(actions) == ["back"]


def test_shared_segments_go_with_the_last_of_the_others() -> None:
    shared = (SharedView("shared:s", 6, ("a",)),)
    a = worlds.model("a", pages=20, shared=shared)
    a = worlds.in_parts(a, *(2,) * 7)
    assert evictions(a, free=0, wanted=14) == {"a": 14}
    assert evictions(a, free=0, wanted=18) == {"a": None}


def test_offers_rise_in_price_and_pinned_models_make_none() -> None:
    pinned = replace(idle("p"), spec=worlds.spec("p", pages=20, pinned=True))
    view = worlds.device(idle("a"), idle("b", used=5.0), pinned, asking(10), free=0)
    claim = Claim("new", worlds.request(1).order, 10, may_preempt=False)
    offers = list(idle_segments(view, claim))
    unit = [offer.price() / offer.pages for offer in offers]
    assert unit == sorted(unit)
    assert {offer.owner for offer in offers} == {"a", "b"}


def test_the_last_eviction_of_a_model_is_what_counts() -> None:
    a, b = idle("a"), idle("b")
    first, other, whole = eviction(a, "", 2), eviction(b, "", 4), eviction(a, "")
    assert last_plans([first, other, whole]) == [other, whole]
