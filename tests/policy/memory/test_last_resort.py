"""What is done when no decision helps: recall what is lent, else fail the request in the way."""

from __future__ import annotations

from ballast.core.actions import Preempt, Recall, Refuse
from ballast.core.view import Shortage
from ballast.policy.presets import PRESETS, resolve
from tests.policy.worlds import device, kind, model, request


def test_what_is_lent_is_recalled_before_a_request_fails() -> None:
    a = model("a", kv=5, running=(request(1, pages=5),), waiting=(request(2),))
    lent = (("cpu:1", 20), ("cpu:2", 3))
    for name in PRESETS:
        actions = resolve(name).memory.when_stuck(device(a, free=0, lent=lent))
        assert [(type(x), x.to, x.pages) for x in actions if isinstance(x, Recall)] == [
            (Recall, "cpu:1", None),
            (Recall, "cpu:2", None),
        ]
        assert len(actions) == 2


def test_the_request_that_could_never_be_served_fails_before_newer_ones() -> None:
    """Else none fails, as the newest that holds pages makes way, and never the oldest."""
    short = (Shortage("a", "r1", 1, limited=False),)
    huge = model("h", waiting=(request(0, tokens=100_000),))
    a = model("a", kv=5, running=(request(1, pages=2), request(2, pages=3)))
    policy = resolve("balloon").memory
    (refusal,) = policy.when_stuck(device(huge, a, free=0, shortages=short))
    assert isinstance(refusal, Refuse)
    assert (refusal.model, refusal.request_id) == ("h", "r0")
    (preemption,) = policy.when_stuck(device(a, free=0, shortages=short))
    assert isinstance(preemption, Preempt)
    assert preemption.request_id == "r2"
    (refusal,) = resolve("static").memory.when_stuck(device(a, free=0, shortages=short))
    assert isinstance(refusal, Refuse)
    assert refusal.request_id == "r2"


def test_models_that_fill_the_device_make_way_for_the_oldest_request() -> None:
    """Weights alone leave no page for KV, and each model has requests, so that none is idle."""
    waiting = {"a": request(2), "b": request(3), "c": request(1)}
    models = [model(name, waiting=(r,), first=2) for name, r in waiting.items()]
    short = tuple(Shortage(name, r.id, 2, limited=False, blocks=8) for name, r in waiting.items())
    view = device(*models, free=0, shortages=short)
    (first, *_) = resolve("balloon").memory.when_stuck(view)
    assert kind(first) == "Evict"
    assert first.model == "b", "whose request is the youngest"
    for preset in PRESETS:
        assert resolve(preset).memory.when_stuck(view)
