"""What makes way for KV that comes home from borrowed pages."""

from __future__ import annotations

from ballast.core.actions import DropCache
from ballast.policy.memory.defaults import KV_COMES_HOME
from ballast.policy.presets import PRESETS, resolve
from tests.policy.worlds import device, model

OLD = model("old", kv=4, cached=4, last_used=1.0)
YOUNG = model("young", kv=9, cached=9, last_used=5.0)
HOME = model("home", kv=6, cached=3, last_used=9.0)
VIEW = device(YOUNG, HOME, OLD, free=0)


def test_caches_go_that_were_not_used_for_longest() -> None:
    for name in PRESETS:
        actions = resolve(name).memory.bring_home(VIEW, "home", 0, 6)
        assert list(actions) == [
            DropCache("old", 4, KV_COMES_HOME),
            DropCache("young", 2, KV_COMES_HOME),
        ]


def test_a_model_at_its_limit_gives_up_its_own_first() -> None:
    policy = resolve("balloon").memory
    assert list(policy.bring_home(VIEW, "home", 2, -5)) == [DropCache("home", 2, KV_COMES_HOME)]
    assert list(policy.bring_home(VIEW, "home", 2, 3)) == [
        DropCache("home", 2, KV_COMES_HOME),
        DropCache("old", 1, KV_COMES_HOME),
    ]


def test_nothing_goes_where_all_is_too_little() -> None:
    policy = resolve("balloon").memory
    assert list(policy.bring_home(VIEW, "home", 4, 4)) == [], "its own are too few"
    assert list(policy.bring_home(VIEW, "home", 0, 17)) == []
    assert list(policy.bring_home(VIEW, "home", -3, 0)) == [], "there is room"
