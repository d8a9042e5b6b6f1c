"""Quotas of KV memory: how they are divided, and how limits follow them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ballast.core.actions import Decision, DropCache, Limit
from ballast.core.traffic import PRIOR_OUTPUT, Arrivals, Lengths, TrafficStats
from ballast.core.view import DeviceView, ModelView, Shortage
from ballast.policy.memory.quota_steps import Use, next_quotas
from ballast.policy.memory.quotas import (
    QuotaMemo,
    Quotas,
    Wish,
    divide,
    pages_of,
    transfers,
    wanted,
    weight,
)
from tests.policy.worlds import device, model, request

POLICY = Quotas(steps=0)
"""Quotas are set at once to what steps would lead to."""
STEPS = Quotas()
NOW = 10.0


def busy(m: ModelView, rate: float, tokens: int = 100) -> ModelView:
    """Asked `rate` times a second for a minute, each time for `tokens` and as many more."""
    arrivals = Arrivals(rate * 60.0, NOW, NOW - 1e9)
    lengths = Lengths(9, float(tokens))
    return replace(m, traffic=TrafficStats(arrivals, lengths, lengths))


def limits(decision: Decision) -> dict[str, int | None]:
    return {a.model: a.pages for a in decision.actions if isinstance(a, Limit)}


def start(view: DeviceView) -> tuple[DeviceView, QuotaMemo]:
    """The device once the first decision is done, and what is remembered of it."""
    decision = POLICY(view, None)
    first = limits(decision)
    models = tuple(replace(m, limit=first[m.name]) for m in view.models)
    assert isinstance(decision.memo, QuotaMemo)
    return replace(view, models=models), decision.memo


def hungry(name: str, n: int, **others: int) -> ModelView:
    """A model with so many requests that wait, of 512 tokens in the end."""
    return model(name, waiting=tuple(request(i, tokens=256, max_tokens=256) for i in range(n)),
                 first=4, **others)  # fmt: skip


def test_quotas_begin_as_fixed_shares() -> None:
    view, memo = start(device(model("a"), model("b", share=3.0), free=76))
    assert {m.name: m.limit for m in view.models} == {"a": 19, "b": 57}
    assert memo.first == {"a": 19, "b": 57}


def test_what_one_model_does_not_use_goes_to_another_that_could() -> None:
    a, b = busy(hungry("a", 30), 4.0), busy(model("b"), 0.5)
    view, memo = start(device(a, b, free=76))
    early = replace(view, now=NOW + 4.9)
    assert limits(POLICY(early, memo)) == {}, "not yet"
    later = replace(view, now=NOW + 5.0)
    found = POLICY(later, memo)
    assert limits(found) == {"a": 68, "b": 8}, "the other keeps what one full context takes"
    assert isinstance(found.memo, QuotaMemo)
    assert found.memo.since == later.now
    assert pages_of(b, [b.spec.max_model_len]) == 8


def test_nothing_moves_while_nobody_could_use_more() -> None:
    a, b = busy(model("a"), 4.0), busy(model("b"), 0.5)
    view, memo = start(device(a, b, free=76))
    found = POLICY(replace(view, now=NOW + 60), memo)
    assert limits(found) == {}
    assert found.memo == memo


def test_contended_memory_is_divided_by_rate_size_and_share() -> None:
    a, b = busy(hungry("a", 30), 3.0), busy(hungry("b", 30), 1.0)
    view = device(a, b, free=76)
    assert weight(view, a) == 3 * weight(view, b)
    larger = replace(b, spec=replace(b.spec, n_layers=6, share=2.0))
    assert weight(view, larger) == 6 * weight(view, b)
    view, memo = start(view)
    assert limits(POLICY(replace(view, now=NOW + 5), memo)) == {"a": 57, "b": 19}


def test_a_quota_is_enough_for_every_request_that_was_accepted() -> None:
    """Of the model that is to give: one request here needs more than a full context's pages."""
    long = request(9, tokens=400, generated=1, max_tokens=401)
    a, b = busy(hungry("a", 30), 30.0), busy(model("b", running=(long,)), 0.1)
    view, memo = start(device(a, b, free=76))
    found = limits(POLICY(replace(view, now=NOW + 5), memo))
    assert found["b"] == pages_of(b, [800])
    assert found == {"a": 76 - found["b"], "b": found["b"]}


def test_limits_come_down_as_pages_are_given_up() -> None:
    a = hungry("a", 30, limit=38)
    b = model("b", kv=30, cached=10, limit=38)
    quotas = {"a": 68, "b": 8}
    first = transfers(device(a, b, free=46), quotas, 76)
    assert first == [
        DropCache("b", 10, "other models use more of their quotas"),
        Limit("b", 20, "its quota has shrunk"),
        Limit("a", 56, "its quota has grown"),
    ]
    b = replace(b, kv_pages=4, cached_pages=0, limit=20)
    then = transfers(device(replace(a, limit=56), b, free=46), quotas, 76)
    assert then == [
        Limit("b", 8, "its quota has shrunk"),
        Limit("a", 68, "its quota has grown"),
    ]


def test_it_is_asked_again_when_quotas_can_change() -> None:
    lacks = (Shortage("a", "r0", 4, limited=True),)
    view, memo = start(device(busy(hungry("a", 9), 4.0), busy(model("b"), 1.0), free=76))
    found = POLICY(replace(view, shortages=lacks), memo)
    assert found.wake_at == memo.since + POLICY.adapt
    assert POLICY(view, memo).wake_at is None


def test_what_requests_will_have_counts_and_no_more_of_them_than_may_run() -> None:
    one = request(1, tokens=100, generated=4, max_tokens=54)
    m = model("m", running=(one,), waiting=tuple(request(i, tokens=16) for i in range(2, 9)))
    assert wanted(replace(m, spec=replace(m.spec, max_running=1))) == pages_of(m, [150])
    two = replace(m, spec=replace(m.spec, max_running=2))
    assert wanted(two) == pages_of(m, [150, 16 + PRIOR_OUTPUT])


wishes = st.dictionaries(
    st.sampled_from("abcdef"),
    st.builds(
        lambda least, more, weight: Wish(least, least + more, weight),
        st.integers(0, 20),
        st.integers(0, 100),
        st.sampled_from([0.0, 0.5, 1.0, 7.0, 1e9]),
    ),
    min_size=1,
)


@given(st.integers(0, 300), wishes)
def test_a_division_is_max_min_fair(total: int, wishes: dict[str, Wish]) -> None:
    found = divide(total, wishes)
    least = sum(w.least for w in wishes.values())
    assert sum(found.values()) <= max(total, least)
    for name, w in wishes.items():
        assert found[name] >= w.least
    if least > total:
        return
    short = [n for n, w in wishes.items() if found[n] < w.most - 1 and w.weight > 0]
    if short:
        for name, w in wishes.items():
            assert found[name] <= w.most
        # Nobody who could have less has more, by weight, than one who could use more.
        level = min((found[n] + 1) / wishes[n].weight for n in short)
        for name, w in wishes.items():
            if w.weight > 0 and found[name] > w.least:
                assert found[name] / w.weight <= level * (1 + 1e-6), (name, found)
    elif any(w.weight > 0 for w in wishes.values()):
        spare = total - sum(found.values())
        unused = [n for n, w in wishes.items() if found[n] < w.most - 1]
        assert spare <= len(wishes) or unused, found


def test_room_for_those_that_are_here_comes_before_room_for_those_that_may_come() -> None:
    """An operator has given almost all of it to a model that is idle."""
    long = request(9, tokens=400, generated=1, max_tokens=401)
    a, b = model("a", share=16.0), model("b", running=(long,), kv=6)
    view, memo = start(device(a, b, free=20, total=40))
    assert view.model("b").limit == 0
    short = (Shortage("b", "r9", 4, limited=True),)
    found = POLICY(replace(view, now=NOW + 5, shortages=short), memo)
    assert limits(found)["b"] >= pages_of(b, [800])


def test_where_new_quotas_change_nothing_it_does_not_ask_to_be_asked_again() -> None:
    """Else nobody would see that requests are stuck."""
    long = request(9, tokens=800, generated=1, max_tokens=401)
    a = model("a", running=(long, request(10, tokens=800, max_tokens=401)), kv=8)
    view, memo = start(device(a, free=8, total=22))
    short = (Shortage("a", "r9", 4, limited=True),)
    found = POLICY(replace(view, now=NOW + 5, shortages=short), memo)
    assert limits(found) == {}
    assert found.wake_at is None


# -- steps from low to high use (MuxServe, section 3.3) -------------------------------------------


def test_a_model_of_low_use_gives_a_step_to_one_that_uses_all_of_its_quota() -> None:
    a = replace(busy(hungry("a", 30), 4.0), kv_pages=36)
    b = replace(busy(model("b"), 0.5), kv_pages=10)
    view, memo = start(device(a, b, free=30))
    assert memo.division.pages == {"a": 38, "b": 38}
    assert limits(STEPS(replace(view, now=NOW + 4.9), memo)) == {}, "not yet"
    quotas = [memo.division.pages]
    found: Decision | None = None
    for i in range(1, 12):
        found = STEPS(replace(view, now=NOW + 5.0 * i), memo)
        assert isinstance(found.memo, QuotaMemo)
        memo = found.memo
        quotas.append(memo.division.pages)
    assert quotas[1] == {"a": 42, "b": 34}, "a tenth of its quota, rounded up"
    assert all(later["a"] >= earlier["a"] for earlier, later in pairwise(quotas))
    assert all(sum(q.values()) == 76 for q in quotas)
    assert quotas[-1]["b"] >= max(10, pages_of(b, [b.spec.max_model_len])), "what it uses is left"


def test_a_model_that_lacks_pages_within_its_quota_counts_as_high() -> None:
    """Its next request finds no room, though much of the quota is free."""
    a, b = busy(hungry("a", 30), 4.0), busy(model("b"), 0.5)
    view, memo = start(device(a, b, free=76))
    later = replace(view, now=NOW + 5.0)
    assert limits(STEPS(later, memo)) == {}, "nobody uses his quota"
    short = (Shortage("a", "r0", 4, limited=True),)
    found = STEPS(replace(later, shortages=short), memo)
    assert limits(found) == {"a": 42, "b": 34}
    assert found.wake_at == later.now + STEPS.adapt


def test_a_present_request_gets_at_once_what_it_needs() -> None:
    """However little of the quota is used, and however large a step would be."""
    long = request(9, tokens=400, generated=1, max_tokens=401)
    a, b = model("a", share=16.0), model("b", running=(long,), kv=6)
    view, memo = start(device(a, b, free=20, total=40))
    short = (Shortage("b", "r9", 4, limited=True),)
    found = limits(STEPS(replace(view, now=NOW + 5, shortages=short), memo))
    assert found["b"] >= pages_of(b, [800])


uses = st.dictionaries(
    st.sampled_from("abcdef"),
    st.builds(
        lambda least, more, quota, used, lacks: Use(
            quota, min(used, quota), least, least + more, lacks
        ),
        st.integers(0, 20),
        st.integers(0, 100),
        st.integers(0, 60),
        st.integers(0, 60),
        st.booleans(),
    ),
    min_size=1,
)


@given(uses)
def test_a_step_moves_pages_from_low_to_high_use_alone(found: dict[str, Use]) -> None:
    after = next_quotas(found)
    assert sum(after.values()) == sum(u.quota for u in found.values())
    for name, u in found.items():
        if after[name] < u.quota:
            assert not u.high
            assert after[name] >= max(u.least, u.used)
        if after[name] > u.quota:
            assert u.high or u.quota < u.least
            assert after[name] <= max(u.least, u.most)
            assert after[name] - u.quota <= max(1, u.least - u.quota, 0.1 * u.quota + 1)
    given = [u for u in found.values() if u.to_give and not u.wanted]
    short = [n for n, u in found.items() if u.wanted and after[n] < u.quota + u.wanted]
    if short and given:
        left = sum(after[n] - u.quota + u.to_give for n, u in found.items() if u.to_give)
        assert left == 0 or all(found[n].to_give for n in short), "what could be given was"
