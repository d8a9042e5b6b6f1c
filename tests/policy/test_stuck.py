"""What is done when no decision helps: recall what is lent, else fail the request in the way."""

from __future__ import annotations

from ballast.core.actions import Recall, Refuse
from ballast.core.view import Shortage
from ballast.policy.presets import PRESETS, resolve
from tests.policy.worlds import device, model, request


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
    """Else the newest that holds pages, and never the oldest."""
    short = (Shortage("a", "r1", 1, limited=False),)
    huge = model("h", waiting=(request(0, tokens=100_000),))
    a = model("a", kv=5, running=(request(1, pages=2), request(2, pages=3)))
    policy = resolve("balloon").memory
    (refusal,) = policy.when_stuck(device(huge, a, free=0, shortages=short))
    assert isinstance(refusal, Refuse)
    assert (refusal.model, refusal.request_id) == ("h", "r0")
    (refusal,) = policy.when_stuck(device(a, free=0, shortages=short))
    assert isinstance(refusal, Refuse)
    assert refusal.request_id == "r2"
