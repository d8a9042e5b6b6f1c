"""Transforms, statistics and prompts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast.workload.prompts import prompt_for
from ballast.workload.stats import active_intervals, activity, gap_cv, idle_intervals, minute_cv
from ballast.workload.workload import Workload, WorkloadError, WorkloadRequest, repeated_tokens


def request(
    n: int, at: float, model: str = "a", prompt: int = 10, output: int = 5
) -> WorkloadRequest:
    return WorkloadRequest(id=n, at=at, model=model, prompt_tokens=prompt, output_tokens=output)


def workload(*models_and_times: tuple[str, float]) -> Workload:
    return Workload.of("w", [request(n, at, m) for n, (m, at) in enumerate(models_and_times)])


def test_of_sorts_by_time_then_id() -> None:
    w = Workload.of("w", [request(2, 1.0), request(1, 1.0), request(0, 3.0)])
    assert [r.id for r in w.requests] == [1, 2, 0]


@pytest.mark.parametrize(
    "bad",
    [
        request(0, -1.0),
        request(0, float("nan")),
        request(0, float("inf")),
        request(0, 0.0, prompt=0),
        request(0, 0.0, output=0),
        replace(request(0, 0.0), prefix_blocks=(1,)),
    ],
)
def test_invalid_requests_are_refused(bad: WorkloadRequest) -> None:
    with pytest.raises(WorkloadError, match="w: request 0"):
        Workload("w", (bad,))


def test_order_and_unique_ids_are_held() -> None:
    with pytest.raises(WorkloadError, match="out of order"):
        Workload("w", (request(0, 2.0), request(1, 1.0)))
    with pytest.raises(WorkloadError, match="not unique"):
        Workload("w", (request(0, 1.0), request(0, 2.0)))


def test_a_trace_of_one_service_is_spread_over_a_fleet() -> None:
    w = workload(*(("one", float(at)) for at in range(2000)))
    spread = w.spread_models(["a", "b", "c"], 1.0, seed=3)
    counts = Counter(r.model for r in spread.requests)
    assert [counts[m] / 2000 for m in "abc"] == pytest.approx([6 / 11, 3 / 11, 2 / 11], abs=0.03)
    assert [replace(r, model="one") for r in spread.requests] == list(w.requests)
    assert spread == w.spread_models(["a", "b", "c"], 1.0, seed=3)
    assert spread.requests != w.spread_models(["a", "b", "c"], 1.0, seed=4).requests
    even = Counter(r.model for r in w.spread_models(["a", "b"], 0.0).requests)
    assert even["a"] / 2000 == pytest.approx(0.5, abs=0.03)
    talks = Workload.of("w", (replace(r, session=f"s{r.id % 40}") for r in w.requests))
    of_session = {(r.session, r.model) for r in talks.spread_models(["a", "b", "c"], 1.0).requests}
    assert len(of_session) == 40
    for names, alpha in (([], 1.0), (["a", "a"], 1.0), (["a"], -1.0), (["a"], float("inf"))):
        with pytest.raises(WorkloadError):
            w.spread_models(names, alpha)


def test_scale_rate_divides_times() -> None:
    w = workload(("a", 1.0), ("a", 4.0)).scale_rate(2.0)
    assert [r.at for r in w.requests] == [0.5, 2.0]
    assert w.labels == ("rate x2",)
    with pytest.raises(WorkloadError, match="rate factor"):
        w.scale_rate(0.0)


def test_scale_lengths_rounds_and_clips() -> None:
    w = Workload.of("w", [request(0, 0, prompt=100, output=9), request(1, 1, prompt=1, output=1)])
    scaled = w.scale_lengths(0.25, 0.5, max_prompt=20, max_output=3)
    assert [(r.prompt_tokens, r.output_tokens) for r in scaled.requests] == [(20, 3), (1, 1)]
    assert scaled.labels == (
        "lengths: prompt x0.25, output x0.5",
        "1 of 2 prompts cut to at most 20 tokens: from 25 on average (longest 25) to 20",
        "1 of 2 outputs cut to at most 3 tokens: from 4 on average (longest 4) to 3",
    )
    assert w.scale_lengths(max_prompt=100, max_output=9).labels == (), "nothing was cut"
    with pytest.raises(WorkloadError, match="max_prompt"):
        w.scale_lengths(max_prompt=0)


def test_scale_lengths_keeps_shared_share() -> None:
    shared = tuple(range(4))
    first = replace(request(0, 0.0, prompt=500), prefix_blocks=(*shared, 10), block_tokens=100)
    second = replace(request(1, 1.0, prompt=450), prefix_blocks=(*shared, 11), block_tokens=100)
    w = Workload.of("w", [first, second]).scale_lengths(0.1)
    a, b = (prompt_for(r, 50_000) for r in w.requests)
    assert a[:40] == b[:40]
    assert (len(a), len(b)) == (50, 45)
    assert a[40:45] != b[40:45]
    cut = w.scale_lengths(max_prompt=15)
    assert all(r.prefix_blocks == (0, 1) for r in cut.requests)


def test_prompt_and_output_fit_a_context_together() -> None:
    w = Workload.of(
        "w",
        [
            request(0, 0.0, prompt=90, output=10),
            request(1, 1.0, prompt=91, output=10),
            request(2, 2.0, prompt=500, output=80),
            request(3, 3.0, prompt=3, output=51),
        ],
    ).within(100)
    found = [(r.prompt_tokens, r.output_tokens) for r in w.requests]
    assert found == [(90, 10), (90, 10), (50, 50), (3, 50)]
    assert w.labels == (
        "2 of 4 prompts cut to at most 100 tokens: from 296 on average (longest 500) to 70",
        "2 of 4 outputs cut to at most 50 tokens: from 66 on average (longest 80) to 50",
    )


@pytest.mark.parametrize("size", [16, 64, 512])
def test_a_session_that_is_cut_keeps_its_head_and_its_newest_part(size: int) -> None:
    """Cut at its end, all its later turns would be the same prompt."""
    most, turns = 32 * size, 60
    blocks = [tuple(range(4 * n + 3)) for n in range(turns)]
    requests = [
        replace(
            request(n, float(n), prompt=len(blocks[n]) * size - n % size),
            prefix_blocks=blocks[n],
            block_tokens=size,
        )
        for n in range(turns)
    ]
    cut = Workload.of("w", requests).scale_lengths(max_prompt=most).requests
    kept = [r.prefix_blocks or () for r in cut]
    assert all(r.prompt_tokens <= most for r in cut)
    assert list(cut[:7]) == requests[:7], "what fits is left as it is"
    assert all(r.prompt_tokens > most / 2 for r in cut[8:])
    assert len(set(kept)) == turns, "no two turns are the same"
    assert all(own[-1] == full[-1] for own, full in zip(kept, blocks, strict=True)), "the newest"
    assert all(own[:8] == tuple(range(8)) for own in kept[8:]), "the head"
    grown = sum(b[: len(a)] == a for a, b in pairwise(kept[8:]))
    assert 0.5 < grown / (turns - 9) < 1, "most turns begin with all of the turn before"
    lengths = [-(-r.prompt_tokens // size) for r in cut]
    assert lengths == [len(own) for own in kept]


def test_workloads_apart_have_models_and_sessions_of_their_own() -> None:
    a = Workload.of(
        "a", [replace(request(0, 1.0), session="s", prefix_blocks=(1,), block_tokens=2)]
    )
    b = replace(a, name="b")
    both = Workload.apart([a, b])
    assert both.models == ("a/a", "b/a")
    assert [r.session for r in both.requests] == ["a/s", "b/s"]
    assert both.requests[0].prefix_blocks != both.requests[1].prefix_blocks
    assert len(Workload.apart([a, a]).models) == 2
    assert Workload.apart([a]) is a


def test_map_models_by_popularity_folds_the_tail() -> None:
    counts = {"a": 5, "b": 4, "c": 3, "d": 2, "e": 1}
    w = workload(*((m, float(i)) for m, n in counts.items() for i in range(n)))
    mapped = w.map_models(["x", "y"])
    of = dict(zip((r.model for r in w.requests), (r.model for r in mapped.requests), strict=True))
    # x takes a (5), y b (4); c joins y (7), d joins x (7); at 7 to 7 e joins the earlier name.
    assert of == {"a": "x", "b": "y", "c": "y", "d": "x", "e": "x"}
    assert [r.at for r in mapped.requests] == [r.at for r in w.requests]


def test_map_models_by_tokens_and_ties_by_name() -> None:
    w = Workload.of("w", [request(0, 0, "small"), request(1, 1, "large", prompt=99)])
    assert w.map_models(["x", "y"], by="tokens").requests[1].model == "x"
    assert w.map_models(["x", "y"]).requests[1].model == "x"  # one request each: l before s
    assert {r.model for r in w.map_models(["x", "y", "z"]).requests} == {"x", "y"}


def test_map_models_refuses_nonsense() -> None:
    w = workload(("a", 0.0))
    for names in ([], ["x", "x"]):
        with pytest.raises(WorkloadError, match="distinct"):
            w.map_models(names)
    with pytest.raises(WorkloadError, match="popularity or tokens"):
        w.map_models(["x"], by="colour")


def test_window_is_half_open_and_moves_zero() -> None:
    w = workload(("a", 0.0), ("a", 1.0), ("a", 2.0)).window(1.0, 2.0)
    assert [(r.id, r.at) for r in w.requests] == [(1, 0.0)]
    with pytest.raises(WorkloadError):
        w.window(2.0, 2.0)


def test_merge_keeps_requests_and_blocks_apart() -> None:
    one = Workload.of(
        "one", [replace(request(3, 0.0), prefix_blocks=(0, 7), block_tokens=4)], "s", ("l",)
    )
    both = Workload.merge("both", [one, one])
    assert len({r.id for r in both.requests}) == 2
    first, second = both.requests
    assert first.prefix_blocks is not None
    assert second.prefix_blocks is not None
    assert not set(first.prefix_blocks) & set(second.prefix_blocks)
    assert both.labels == ("one: l", "one: l")


times = st.lists(st.floats(0, 1e4, allow_nan=False), min_size=1, max_size=30)


@given(times, st.floats(0.01, 100))
def test_scaled_rate_keeps_order_and_number(at: list[float], factor: float) -> None:
    w = Workload.of("w", [request(n, t) for n, t in enumerate(at)])
    assert len(w.scale_rate(factor).requests) == len(at)


# Statistics


def test_active_intervals_join_within_memory() -> None:
    assert active_intervals([0.0, 5.0, 20.0], 10.0) == [(0.0, 15.0), (20.0, 30.0)]
    assert active_intervals([0.0, 10.0], 10.0) == [(0.0, 20.0)]


def test_activity_counts_moments_between_first_and_last() -> None:
    # a: active [0, 10) and [100, ..); b: [50, 60) and at 100, the end. Changes inside: 10, 50, 60.
    seen = activity({"a": [0.0, 100.0], "b": [50.0]}, 10.0)
    assert seen.switches_per_hour == pytest.approx(3 * 36)
    assert seen.share == pytest.approx((10 + 10) / 100 / 2)


def test_activity_of_one_moment() -> None:
    assert activity({"a": [3.0]}, 10.0).share == 1.0


def test_gap_cv_of_even_and_uneven_gaps() -> None:
    assert gap_cv([0.0, 1.0, 2.0, 3.0]) == pytest.approx(0.0)
    assert gap_cv([0.0, 1.0, 4.0]) == pytest.approx(0.5)
    assert gap_cv([0.0, 0.0, 0.0]) == 0.0


def test_minute_cv_uses_whole_minutes() -> None:
    assert minute_cv([0.0, 60.0, 150.0], 0.0, 150.0) == 0.0
    assert minute_cv([0.0, 1.0], 0.0, 120.0) == pytest.approx(1.0)
    assert minute_cv([0.0], 0.0, 90.0) == 0.0


def test_idle_intervals_are_longer_than_ten_seconds() -> None:
    assert idle_intervals([0.0, 10.0, 20.1]) == 1


def test_stats_of_a_small_workload() -> None:
    s = workload(("a", 2.0), ("b", 3.0), ("a", 4.0), ("a", 6.0)).stats()
    assert (s.requests, s.models, s.seconds, s.rate) == (4, 2, 4.0, 1.0)
    assert (s.top1, s.top5) == (0.75, 1.0)
    assert (s.prompt.mean, s.output.p50) == (10.0, 5.0)
    with pytest.raises(WorkloadError, match="no requests"):
        Workload("w", ()).stats()


# Prompts


def test_prompt_is_deterministic_and_in_range() -> None:
    r = request(7, 0.0, prompt=1000)
    tokens = prompt_for(r, 300, seed=1, lowest=5)
    assert tokens == prompt_for(r, 300, seed=1, lowest=5)
    assert len(tokens) == 1000
    assert min(tokens) >= 5
    assert max(tokens) < 300
    assert len(set(tokens)) > 250
    assert tokens != prompt_for(r, 300, seed=2, lowest=5)
    assert tokens != prompt_for(replace(r, id=8), 300, seed=1, lowest=5)


def test_prompt_tokens_are_the_same_in_every_version() -> None:
    shared = replace(request(1, 0.0, prompt=6), prefix_blocks=(3,), block_tokens=4)
    assert prompt_for(shared, 1000, seed=0) == (802, 980, 557, 981, 880, 905)


def test_prompts_share_exactly_the_named_blocks() -> None:
    a = replace(request(0, 0.0, prompt=25), prefix_blocks=(1, 2), block_tokens=10)
    b = replace(request(1, 0.0, "b", prompt=40), prefix_blocks=(1, 2, 3), block_tokens=10)
    c = replace(request(2, 0.0, prompt=15), prefix_blocks=(1, 2), block_tokens=10)
    x, y, z = (prompt_for(r, 100_000) for r in (a, b, c))
    assert x[:20] == y[:20]
    assert z == x[:15]
    assert x[20] != y[20]
    assert x[:10] != x[10:20]


def test_prompt_needs_a_vocabulary() -> None:
    with pytest.raises(ValueError, match="no token ids"):
        prompt_for(request(0, 0.0), 10, lowest=10)


def test_what_a_prompt_repeats_is_counted_by_its_leading_blocks() -> None:
    def turn(model: str, tokens: int, *blocks: int) -> WorkloadRequest:
        plain = request(0, 0.0, model, tokens)
        return replace(plain, prefix_blocks=blocks, block_tokens=10)

    turns = [
        turn("a", 25, 1, 2, 3),
        turn("a", 45, 1, 2, 3, 4, 5),
        turn("b", 45, 1, 2, 3, 4, 5),
        turn("a", 30, 9, 2, 3),
        turn("a", 18, 1, 2),
        request(5, 5.0),
    ]
    assert list(repeated_tokens(turns)) == [0, 30, 0, 0, 18, 0]
