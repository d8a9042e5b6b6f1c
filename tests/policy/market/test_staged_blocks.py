"""Which requests' blocks are staged, and which come home: by the passes that will read them."""

from __future__ import annotations

from dataclasses import replace

from ballast.core.actions import Stage
from ballast.core.view import ModelView, Shortage, StagingView
from ballast.policy.market.claims import shortage_claims
from ballast.policy.market.staged_blocks import bring_home, staged_blocks
from tests.policy.worlds import device, model, request


def running(left: dict[int, int], staged: int = 0) -> ModelView:
    """A model whose requests are to have so many tokens more, each with 8 full blocks."""
    requests = tuple(
        request(i, tokens=130, generated=2, max_tokens=2 + n, arrival=i)._replace(staged=staged)
        for i, n in left.items()
    )
    all_staged = staged * len(requests)
    view = StagingView(all_staged, 8 * len(requests) - all_staged, 1000, 1, 0, False)
    return replace(model("m", kv=16, running=requests), staging=view, decode_seconds=1.0)


def test_pages_go_to_requests_with_the_most_passes_left() -> None:
    m = running({1: 5, 2: 300, 3: 40}, staged=8)
    (action,) = bring_home(device(m, free=2), 2)
    assert isinstance(action, Stage)
    assert (action.staged, action.order) == (24 - 8, ("r2",)), "two pages hold eight blocks"
    (action,) = bring_home(device(m, free=4), 4)
    assert isinstance(action, Stage)
    assert (action.staged, action.order) == (24 - 16, ("r2", "r3"))


def test_nothing_comes_home_for_the_last_pass() -> None:
    assert bring_home(device(running({1: 1}, staged=8), free=10), 10) == []
    (action,) = bring_home(device(running({1: 1, 2: 2}, staged=8), free=10), 10)
    assert isinstance(action, Stage)
    assert (action.staged, action.order) == (8, ("r2",))


def test_requests_with_the_fewest_passes_left_leave_first() -> None:
    m = running({1: 5, 2: 300, 3: 40})
    view = device(m, free=0, shortages=(Shortage("m", "r2", 1, False, 1, 1),))
    claims, _ = shortage_claims(view, 0.0)
    (offer,) = staged_blocks(float("inf"))(view, claims[0])
    action = offer.act(3, claims[0])
    assert isinstance(action, Stage)
    assert action.order[:2] == ("r1", "r3"), action
