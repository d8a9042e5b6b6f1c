"""A request that its model's own cached prefixes have room for costs none of them beforehand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ballast.core.actions import DropCache
from ballast.policy.presets import resolve
from tests.policy.worlds import device, model, request

POOLED = (
    "recompute",
    "superinfer",
    "balloon",
    "prism",
    "swiftcache",
    "ballast",
    "mirage",
    "kvswap",
)
FIRST = (request(1, tokens=128),)
OTHER = model("other", kv=6, cached=6, last_used=5.0)


@pytest.mark.parametrize("preset", POOLED)
def test_nothing_goes_before_it_is_tried_to_admit_it(preset: str) -> None:
    policy = resolve(preset).memory
    alone = model("m", kv=12, cached=8, waiting=FIRST, first=8)
    view = device(alone, OTHER, free=0)
    decision = policy(view, None)
    assert [a for a in decision.actions if isinstance(a, DropCache)] == []
    assert not any(p.kv for p in decision.promises)


@pytest.mark.parametrize("preset", [p for p in POOLED if p != "ballast"])
def test_others_caches_make_up_for_what_its_own_lack(preset: str) -> None:
    policy = resolve(preset).memory
    short = model("m", kv=8, cached=5, waiting=FIRST, first=8)
    borrowing = replace(short, cached_borrowed=3)
    for m, wanted in ((short, [("other", 3)]), (borrowing, [])):
        actions = policy(device(m, OTHER, free=0), None).actions
        dropped = [a for a in actions if isinstance(a, DropCache)]
        assert [(a.model, a.pages) for a in dropped] == wanted
