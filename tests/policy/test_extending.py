"""The code of docs/extending.md runs, and does what is said of it there."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from ballast.core.actions import DropCache
from ballast.core.view import Shortage
from ballast.policy.market.claim_and_offer import Claim
from ballast.policy.market.cover import cover
from tests.policy.worlds import device, kind, model, request

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
SHORT = (Shortage("a", "r1", 4, limited=False),)


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """What the page's code defines; each block stands alone."""
    defined: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        module = types.ModuleType("extending")
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, module.__name__, module)  # dataclasses look it up
            exec(block, vars(module))
        defined |= vars(module)
    return defined


def test_the_policy_of_the_page_preempts_before_it_evicts(page: dict[str, Any]) -> None:
    policy = page["Settled"]()
    a = model("a", kv=5, running=(request(1),))
    b = model("b", kv=5, running=(request(2, pages=5),))
    idle = model("idle", pages=30)
    decision = policy(device(a, b, idle, free=0, shortages=SHORT), None)
    assert [kind(x) for x in decision.actions] == ["Preempt"]
    decision = policy(device(a, idle, free=0, shortages=SHORT), None)
    assert [kind(x) for x in decision.actions] == ["Evict"]
    assert decision.promises[0].model == "a"


def test_the_source_of_the_page_begins_with_the_model_that_has_fewest_requests(
    page: dict[str, Any],
) -> None:
    claim = Claim("a", request(1).order, 4, may_preempt=True)
    a = model("a", kv=5, running=(request(1),))
    quiet = model("quiet", kv=3, cached=3)
    busy = model("busy", kv=9, cached=9, running=(request(2),))
    found = cover(device(a, busy, quiet, free=0), [claim], [page["quiet_caches"]])
    assert found.actions == [
        DropCache("quiet", 3, "a needs pages"),
        DropCache("busy", 1, "a needs pages"),
    ]


def test_files_that_the_page_names_exist() -> None:
    for name in re.findall(r"`((?:policy|engine|core|sim|dashboard)/\w+\.py)`", PAGE):
        assert (ROOT / "ballast" / name).exists(), name
    for name in re.findall(r"`(tests/[\w/]+\.py)`", PAGE):
        assert (ROOT / name).exists(), name
