"""The order of compute by deadline, on views made by hand and on random ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ballast.core.compute import (
    ComputeDecision,
    ComputeView,
    DecodeView,
    PromptView,
    Runnable,
    WorkView,
)
from ballast.core.cost import StepCosts
from ballast.core.job import JobLoad, chunk_pairs
from ballast.core.request import Precedence
from ballast.policy.compute.deadline import (
    LEAST_CHUNK,
    MOST_CREDIT,
    MOST_LATE,
    Deadline,
    DeadlineMemo,
    least_chunk,
)
from tests.effort import tries

NOW = 100.0
STEP_TOKENS = 512
COSTS = StepCosts(0.02, 1e-3, 1e-3, 0.0, 0.0)
"""A step of one sequence takes 21 ms; a token of a prompt 1 ms."""
STEP = COSTS.base + COSTS.per_sequence
ROUNDING = 1e-9


def decode(
    slack: float = 10.0,
    *,
    outputs: int = 100,
    pace: float = 0.5,
    generated: int = 1,
    last: float = NOW,
) -> DecodeView:
    """A request that decodes in time: its next token is due `slack` seconds from now."""
    first = NOW + slack - generated * pace
    return DecodeView(
        order=Precedence(0, first, 0),
        due=first,
        first=first,
        last=last,
        generated=generated,
        outputs=outputs,
        pace=pace,
        context=0,
    )


def late_decode(*, outputs: int = 10, last: float = NOW) -> DecodeView:
    """A request whose first token came too late."""
    return decode(outputs=outputs, last=last)._replace(due=NOW - 99.0)


def prompt(
    sequence: int,
    tokens: int,
    due: float,
    *,
    arrival: float = NOW - 1.0,
    outputs: int = 1,
    pace: float = 0.5,
) -> PromptView:
    """A request that has had no job yet; its first token is due `due` seconds from now."""
    return PromptView(
        order=Precedence(0, arrival, sequence),
        tokens=tokens,
        start=0,
        due=NOW + due,
        last=arrival,
        outputs=outputs,
        pace=pace,
    )


def work(
    model: str,
    *,
    decodes: Sequence[DecodeView] = (),
    prompts: Sequence[PromptView] = (),
    costs: StepCosts = COSTS,
) -> WorkView:
    return WorkView(model, costs, tuple(decodes), tuple(prompts))


def view(*works: WorkView, now: float = NOW, step_tokens: int = STEP_TOKENS) -> ComputeView:
    """A device whose models could all run now."""
    by_name = {w.model: w for w in works}
    runnable = tuple(
        Runnable(w.model, now, w.prompts[0].order if w.prompts else None) for w in works
    )
    return ComputeView(now, step_tokens, runnable, by_name.__getitem__)


def job_seconds(v: ComputeView, decision: ComputeDecision) -> float:
    """Of the job that the engine forms of a decision (`engine.plan`)."""
    w = v.work_of(decision.model)
    most = v.step_tokens if decision.prompt_tokens is None else decision.prompt_tokens
    left = min(v.step_tokens - len(w.decodes), most)
    tokens = chunks = pairs = 0
    for p in w.prompts:
        n = min(p.tokens, left)
        if n <= 0:
            break
        tokens, chunks, left = tokens + n, chunks + 1, left - n
        pairs += chunk_pairs(n, p.start)
    context = sum(d.context for d in w.decodes)
    return w.costs.of(JobLoad(tokens, chunks, pairs, len(w.decodes), context))


def by_slack(**options: float) -> Deadline:
    """The order without its bound on gaps: as slack alone has it."""
    return Deadline(longest_gap=1e9, **options)


# -- gaps of streams ------------------------------------------------------------------------------


def test_a_stream_that_has_paused_long_enough_steps_whatever_slack_it_has() -> None:
    a = work("a", decodes=[decode(9.0)] * 3)
    b = work("b", decodes=[decode(9.0, last=NOW - 0.25)], prompts=[prompt(9, 400, due=9.0)])
    assert by_slack()(view(a, b), DeadlineMemo("a", NOW)).model == "b", "for its prompt"
    decision = Deadline(longest_gap=0.25)(view(a, b), DeadlineMemo("a", NOW))
    assert (decision.model, decision.prompt_tokens) == ("b", 0)


def test_others_decode_and_compute_prompts_until_a_stream_has_paused_long_enough() -> None:
    a = work("a", decodes=[decode(9.0, last=NOW)])
    b = work("b", decodes=[decode(9.0, last=NOW - 0.1)])
    decision = Deadline(longest_gap=0.5)(view(a, b), DeadlineMemo("a", NOW))
    assert decision.model == "a"
    assert decision.until == pytest.approx(
        NOW + 0.5 - 0.1 - 2 * STEP
    )  # its step, after one of another
    long = work("a", decodes=[decode(9.0, last=NOW)], prompts=[prompt(9, 512, due=60.0)])
    decision = Deadline(longest_gap=0.5)(view(long, b), DeadlineMemo("b", NOW))
    assert decision.model == "a"
    assert job_seconds(view(long, b), decision) <= 0.5 - 0.1 - 2 * STEP + ROUNDING


@pytest.mark.parametrize(("late", "kept"), [(0.03, 0.03), (9.0, MOST_LATE * 0.5)])
def test_a_stream_pauses_less_where_jobs_take_longer_than_expected(
    late: float, kept: float
) -> None:
    a = replace(work("a", decodes=[decode(9.0, last=NOW)]), late=late)
    b = work("b", decodes=[decode(9.0, last=NOW - 0.1)])
    decision = Deadline(longest_gap=0.5)(view(a, b), DeadlineMemo("a", NOW))
    assert decision.until == pytest.approx(NOW + 0.5 - kept - 0.1 - 2 * STEP)


def test_steps_that_take_long_leave_half_of_the_lane() -> None:
    works = [work(f"m{i}", decodes=[decode(90.0, last=NOW - 0.5)]) for i in range(20)]
    decision = Deadline(longest_gap=0.01)(view(*works), DeadlineMemo("m3", NOW))
    assert decision.model == "m3"
    assert decision.until == pytest.approx(NOW + 2 * 20 * STEP - 0.5 - 2 * STEP)


@pytest.mark.parametrize("due", [NOW - 1.0, NOW + 0.01], ids=["late", "urgent"])
def test_prompts_that_are_late_or_urgent_hold_no_stream_up(due: float) -> None:
    a = work("a", prompts=[prompt(9, 512, due=due)])
    b = work("b", decodes=[decode(9.0, last=NOW - 0.1)])
    held = view(a, b)
    decision = Deadline(longest_gap=0.2)(held, DeadlineMemo("a", NOW, credit=1.0))
    assert decision.model == "a"
    assert job_seconds(held, decision) <= 0.2 - 0.1 - STEP + ROUNDING
    assert job_seconds(held, by_slack()(held, DeadlineMemo("a", NOW, credit=1.0))) > 0.2


# -- batches ----------------------------------------------------------------------------------


def test_a_batch_runs_on_until_the_others_have_no_slack() -> None:
    a = work("a", decodes=[decode(9.0)] * 3)
    b = work("b", decodes=[decode(2.0, outputs=1)])
    decision = by_slack(margin=2.0)(view(a, b), DeadlineMemo("a", NOW))
    assert (decision.model, decision.prompt_tokens) == ("a", 0)
    step = COSTS.base + 3 * COSTS.per_sequence
    # b's step must end at 2.0; a's last begins before `until`, and takes a step; then the margin.
    reserve = 2.0 * step
    assert decision.until == pytest.approx(NOW + 2.0 - STEP - reserve - step)


def test_the_model_that_ran_last_goes_on_though_anothers_token_is_due_earlier() -> None:
    a, b = work("a", decodes=[decode(9.0)]), work("b", decodes=[decode(5.0)])
    for ran in "ab":
        assert by_slack()(view(a, b), DeadlineMemo(ran, NOW)).model == ran
        assert by_slack()(view(b, a), DeadlineMemo(ran, NOW)).model == ran


def test_a_model_whose_slack_is_gone_takes_the_turn() -> None:
    a, b = work("a", decodes=[decode(9.0)]), work("b", decodes=[decode(1.5 * STEP)])
    decision = by_slack()(view(a, b), DeadlineMemo("a", NOW))
    assert decision.model == "b"


def test_without_slack_the_earliest_deadline_comes_first() -> None:
    # Each could be in time alone: all of them together are too many.
    works = [
        work(n, decodes=[decode(s)]) for n, s in zip("abc", (0.031, 0.030, 0.032), strict=True)
    ]
    for ran in ("a", "b", "c", ""):
        assert by_slack()(view(*works), DeadlineMemo(ran, NOW)).model == "b"
        assert by_slack()(view(*works[::-1]), DeadlineMemo(ran, NOW)).model == "b"


def test_slack_is_a_mean_over_the_answer() -> None:
    """A request that has had its tokens faster than it must can wait as much longer."""
    fast = decode(4.5, outputs=1, generated=11)  # 11 tokens in 1 s
    assert fast.first == NOW - 1.0
    decision = by_slack(margin=0.0)(
        view(work("a", decodes=[decode(9.0)]), work("b", decodes=[fast])),
        DeadlineMemo("a", NOW),
    )
    assert decision.model == "a"
    assert decision.until == pytest.approx(NOW + 4.5 - 2 * STEP)


def test_no_request_waits_longer_than_longest_wait_between_two_tokens() -> None:
    patient = decode(1000.0, pace=500.0, outputs=1, last=NOW - 4.0)
    works = work("a", decodes=[decode(900.0, pace=100.0)]), work("b", decodes=[patient])
    for wait in (10.0, 20.0):
        decision = by_slack(longest_wait=wait, margin=0.0)(view(*works), DeadlineMemo("a", NOW))
        assert decision.model == "a"
        # Within b's slack a itself must step every `wait` seconds.
        assert decision.until == pytest.approx(NOW + wait - 4.0 - 2 * STEP)


# -- prompts ----------------------------------------------------------------------------------


def test_a_first_token_that_would_be_late_comes_first() -> None:
    a = work("a", decodes=[decode(9.0)])
    b = work("b", prompts=[prompt(1, 200, due=0.23)])  # which takes 0.22
    decision = by_slack()(view(a, b), DeadlineMemo("a", NOW))
    assert decision.model == "b"
    assert decision.prompt_tokens is not None
    assert decision.prompt_tokens >= 200


def test_prompts_begin_while_there_is_slack_so_that_batches_are_large() -> None:
    a = work("a", decodes=[decode(9.0)])
    b = work("b", prompts=[prompt(1, 200, due=5.0)])
    decision = by_slack(margin=0.0)(view(a, b), DeadlineMemo("a", NOW))
    assert (decision.model, decision.prompt_tokens) == ("b", 200)


def test_a_prompt_joins_the_step_of_its_model_that_must_be_now() -> None:
    """Without the headroom that is left for the unforeseen: the pass over the weights is one."""
    a = work("a", decodes=[decode(0.1)])
    b = work("b", decodes=[decode(0.07)], prompts=[prompt(1, 10, due=0.3)])
    v = view(a, b)
    decision = by_slack(margin=9.0)(v, DeadlineMemo("a", NOW))
    assert decision.model == "b"
    assert decision.prompt_tokens


def test_a_prompt_joins_the_batch_of_its_model() -> None:
    a = work("a", decodes=[decode(9.0)])
    b = work("b", decodes=[decode(9.0)], prompts=[prompt(1, 200, due=9.0)])
    decision = by_slack()(view(a, b), DeadlineMemo("a", NOW))
    assert decision.model == "b"
    assert decision.prompt_tokens is not None
    assert decision.prompt_tokens >= 200


@pytest.mark.parametrize(
    "beside",
    [
        pytest.param((), id="none"),
        pytest.param([decode(1.0, outputs=1)], id="one that ends with its next step"),
        pytest.param([decode(1.0, pace=0.5)], id="one that has more time per token"),
    ],
)
def test_a_prompt_does_not_begin_where_its_answer_would_be_too_much(
    beside: Sequence[DecodeView],
) -> None:
    """A step takes 21 ms, and each of two models would need one every 25 ms."""
    b = work("b", decodes=[decode(1.0, outputs=1000, pace=0.025)])
    new = prompt(1, 30, due=3.0, outputs=1000, pace=0.025)
    decision = by_slack()(view(b, work("a", decodes=beside, prompts=[new])), DeadlineMemo("b", NOW))
    assert decision.prompt_tokens == 0


def test_a_prompt_counts_those_before_it_in_its_model() -> None:
    """Jobs take prompts in their order, so one that is due earlier waits for one that is not."""
    a = work("a", decodes=[decode(9.0)])
    # The second can be in time only if the first is computed before it, at once.
    b = work("b", prompts=[prompt(1, 100, due=5.0), prompt(2, 20, due=0.2)])
    c = work("c", prompts=[prompt(3, 100, due=0.25)])
    assert by_slack(margin=9.0)(view(a, b, c), DeadlineMemo("a", NOW)).model == "b"
    # It is late in any case; the first has time.
    b = work("b", prompts=[prompt(1, 400, due=5.0), prompt(2, 20, due=0.1)])
    assert by_slack(margin=9.0)(view(a, b, c), DeadlineMemo("a", NOW)).model == "c"


def test_a_prompt_that_cannot_be_in_time_comes_after_those_that_can() -> None:
    hopeless = work("a", prompts=[prompt(1, 200, due=0.1, arrival=NOW - 9.0)])
    feasible = work("b", prompts=[prompt(2, 200, due=0.5)])
    for works in ((hopeless, feasible), (feasible, hopeless)):
        for ran in "ab":
            assert by_slack()(view(*works), DeadlineMemo(ran, NOW)).model == "b"
    alone = work("b", decodes=[late_decode(last=NOW)])
    assert by_slack()(view(hopeless, alone), DeadlineMemo("b", NOW)).model == "a", (
        "the longest wait first"
    )


def test_a_stream_behind_its_pace_keeps_no_prompt_from_beginning() -> None:
    """It lacked memory for a second; 100 tokens are left to make up for that."""
    stalled = decode(-1.0, pace=0.5, generated=4, last=NOW - 0.1)
    a = work("a", decodes=[stalled])
    b = work("b", prompts=[prompt(1, 100, due=0.5)])
    assert by_slack()(view(a, b), DeadlineMemo("a", NOW)).model == "b"
    hopeless = work("a", decodes=[stalled._replace(outputs=2)])
    assert by_slack()(view(hopeless, b), DeadlineMemo("a", NOW)).model == "b"
    assert by_slack()(view(a, work("b", prompts=[prompt(1, 100, due=0.05)])), None).model == "a"


@pytest.mark.parametrize("outputs", [4, 6, 10])
def test_a_stream_behind_its_pace_catches_up_by_its_last_token(outputs: int) -> None:
    """Its next tokens come faster than its pace, or its answer as a whole would be late: another
    model's jobs leave it the time that it has left, in equal parts."""
    late_by, pace = 1.0, 0.5
    stalled = decode(-late_by, pace=pace, generated=4, outputs=outputs, last=NOW - 0.1)
    left = pace * (outputs - 1) - late_by
    assert left < pace * outputs
    each = left / outputs
    a = work("a", decodes=[stalled])
    b = work("b", prompts=[prompt(1, 2000, due=50.0)])
    v = view(a, b, step_tokens=2000)
    decision = by_slack(margin=0.0)(v, DeadlineMemo("b", NOW))
    assert decision.model == "b", "there is time for both"
    assert job_seconds(v, decision) <= each - STEP + ROUNDING
    assert job_seconds(v, decision) > each - STEP - 2 * COSTS.per_token, "and it is all used"
    # A stream on its pace leaves a whole pace.
    punctual = work("a", decodes=[stalled._replace(first=NOW - 3.5 * pace, due=NOW)])
    v = view(punctual, b, step_tokens=2000)
    decision = by_slack(margin=0.0)(v, DeadlineMemo("b", NOW))
    assert job_seconds(v, decision) == pytest.approx(0.5 * pace - STEP, abs=2 * COSTS.per_token)


def test_a_stream_behind_its_pace_ends_in_time_beside_a_long_prompt() -> None:
    """Jobs follow one another until its last token."""
    now, context = NOW, 3000
    stream = decode(-1.0, pace=0.5, generated=4, outputs=5, last=NOW - 0.1)
    assert stream.first is not None
    end = stream.first + stream.pace * (stream.generated + stream.outputs - 1)
    memo: object = None
    while stream.outputs:
        b = work("b", prompts=[prompt(1, context, due=NOW - now + 50.0)])
        v = view(work("a", decodes=[stream]), b, now=now, step_tokens=2000)
        decision = by_slack(margin=0.0)(v, memo)
        memo = decision.memo
        now += job_seconds(v, decision)
        if decision.model == "a":
            stream = stream._replace(
                outputs=stream.outputs - 1, generated=stream.generated + 1, last=now
            )
        else:
            assert decision.prompt_tokens is not None
            context -= decision.prompt_tokens
    assert now <= end + ROUNDING
    assert context < 3000 - 500, "and most of the time went to the prompt"


def test_of_prompts_that_are_too_many_some_are_kept_whole() -> None:
    """Each takes 0.22 s, and all are due in 0.5 s: two can be kept, and the others wait for them
    rather than all four being late together."""
    works = [work(n, prompts=[prompt(i, 200, due=0.5)]) for i, n in enumerate("abcd")]
    first = by_slack()(view(*works), DeadlineMemo("", NOW))
    assert first.model == "a"
    half = [work("a", prompts=[prompt(0, 100, due=0.3)]), *works[1:]]
    assert by_slack()(view(*half), DeadlineMemo("d", NOW)).model == "a"


@pytest.mark.parametrize("slack", [0.1, 0.2, 0.3])
def test_chunks_are_bounded_by_the_slack_of_other_models(slack: float) -> None:
    a = work("a", decodes=[decode(slack, outputs=1)])
    b = work("b", decodes=[decode(9.0)], prompts=[prompt(1, 500, due=9.0)])
    v = view(a, b)
    decision = by_slack(margin=0.0)(v, DeadlineMemo("a", NOW))
    assert decision.model == "b"
    assert job_seconds(v, decision) == pytest.approx(slack - STEP, abs=1.1 * COSTS.per_token)
    assert job_seconds(v, decision) <= slack - STEP


@pytest.mark.parametrize("slack", [0.1, 0.2, 0.3])
def test_chunks_are_bounded_by_the_slack_of_their_own_batch(slack: float) -> None:
    a = work("a", decodes=[decode(9.0)])
    b = work("b", decodes=[decode(slack)], prompts=[prompt(1, 500, due=9.0)])
    v = view(a, b)
    decision = by_slack(margin=0.0)(v, DeadlineMemo("a", NOW))
    assert decision.model == "b"
    assert job_seconds(v, decision) == pytest.approx(slack, abs=1.1 * COSTS.per_token)
    assert job_seconds(v, decision) <= slack


def test_all_prompts_of_a_job_are_bounded_by_the_slack_of_others() -> None:
    """A job takes the prompts of its model in their order: what follows a short one counts too."""
    a = work("a", decodes=[decode(0.15, outputs=1)])
    short, long = prompt(1, 20, due=9.0), prompt(2, 480, due=9.0)
    late = prompt(0, 400, due=-1.0)
    for prompts in ((short, long), (late, short), (late, short, long)):
        v = view(a, work("b", decodes=[decode(9.0)], prompts=prompts))
        decision = by_slack(margin=0.0)(v, DeadlineMemo("a", NOW))
        assert decision.model == "b"
        assert job_seconds(v, decision) <= 0.15 - STEP


def test_a_job_takes_all_prompts_of_its_model_that_have_time() -> None:
    """They share its pass over the weights; but the first does not wait for the rest of its job
    where it would be late."""
    a = work("a", decodes=[decode(9.0)])
    waiting = [prompt(i, 30, due=9.0) for i in range(4)]
    b = work("b", prompts=waiting)
    decision = by_slack()(view(a, b), DeadlineMemo("a", NOW))
    assert (decision.model, decision.prompt_tokens) == ("b", 120)
    b = work("b", prompts=[prompt(0, 30, due=0.1), *waiting[1:]])
    v = view(a, b)
    decision = by_slack()(v, DeadlineMemo("a", NOW))
    assert decision.model == "b"
    assert 0.1 - 1.1 * COSTS.per_token <= job_seconds(v, decision) <= 0.1


def test_a_chunk_is_not_smaller_than_what_the_pass_over_the_weights_is_worth() -> None:
    assert least_chunk(work("a"), STEP_TOKENS) == 20  # 20 ms of 1 ms each
    assert least_chunk(work("a", costs=StepCosts(0.0, 1e-3, 0, 0, 0)), STEP_TOKENS) == LEAST_CHUNK
    assert least_chunk(work("a", costs=StepCosts(0.1, 0.0, 0, 0, 0)), STEP_TOKENS) == STEP_TOKENS
    assert least_chunk(work("a", costs=StepCosts(9.0, 1e-3, 0, 0, 0)), STEP_TOKENS) == STEP_TOKENS
    assert least_chunk(work("a"), 8) == 8
    # A chunk of 20 tokens takes 40 ms beside a's step of 21 ms; with less slack there is none.
    b = work("b", decodes=[decode(9.0)], prompts=[prompt(1, 500, due=9.0)])
    for slack, model in ((0.0631, "b"), (0.061, "a")):
        v = view(work("a", decodes=[decode(slack, outputs=1)]), b)
        decision = by_slack(margin=0.0)(v, DeadlineMemo("a", NOW))
        assert decision.model == model
        if model == "b":
            assert decision.prompt_tokens in (20, 21)


# -- late requests ----------------------------------------------------------------------------

SLOW = StepCosts(2 * MOST_CREDIT, 1e-3, 1e-3, 0.0, 0.0)
"""Of a model whose every job takes longer than what late requests can save up."""
LATE = {
    "decodes": work("late", decodes=[late_decode()]),
    "long prompts": work("late", prompts=[prompt(1, 5000, due=-1.0)]),
    "short prompts": work("late", prompts=[prompt(i, 20, due=-1.0) for i in range(8)]),
    "slow steps": work("late", decodes=[late_decode()], costs=SLOW),
}


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("share", [0.05, 0.2])
def test_late_requests_have_their_share_of_the_lane(late: str, share: float) -> None:
    """Beside a model that always has slack, and always has something to do."""
    policy, memo, now = by_slack(late_share=share), object(), NOW
    seconds = {"busy": 0.0, "late": 0.0}
    longest = 0.0
    busy = decode(outputs=100, pace=1.0, generated=0)
    while now < NOW + 300.0:
        there = busy._replace(first=now + 8.0, due=now + 8.0, last=now)
        v = view(work("busy", decodes=[there]), LATE[late], now=now)
        decision = policy(v, memo)
        memo = decision.memo
        job = job_seconds(v, decision)
        longest = max(longest, job)
        seconds[decision.model] += job
        now += job
        while now < decision.until:  # it decodes on
            now += job
            seconds[decision.model] += job
    # What is saved up, and one job of each that is under way.
    slack = MOST_CREDIT + 2 * longest
    assert seconds["late"] == pytest.approx(share * (now - NOW), abs=slack)


def test_late_requests_have_all_of_the_lane_if_there_are_no_others() -> None:
    a = work("a", decodes=[late_decode(last=NOW - 1.0)])
    b = work("b", prompts=[prompt(1, 500, due=-1.0, arrival=NOW - 2.0)])
    for credit in (0.0, 0.5):
        assert by_slack()(view(a, b), DeadlineMemo("a", NOW, credit)).model == "b"
    b = work("b", prompts=[prompt(1, 500, due=-1.0, arrival=NOW - 0.5)])
    assert by_slack()(view(a, b), DeadlineMemo("b", NOW)).model == "a", (
        "it has waited longer for a token"
    )


def test_a_share_of_nothing_is_nothing() -> None:
    a, b = work("a", decodes=[decode(9.0)]), work("b", decodes=[late_decode()])
    assert by_slack(late_share=0.0)(view(a, b), DeadlineMemo("a", NOW - 99.0)).model == "a"


def test_a_batch_with_one_request_in_time_is_not_late() -> None:
    both = work("b", decodes=[late_decode(last=NOW - 50.0), decode(1.5 * STEP)])
    assert (
        by_slack()(view(work("a", decodes=[decode(9.0)]), both), DeadlineMemo("a", NOW)).model
        == "b"
    )


# -- one model, and none ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "alone",
    [
        pytest.param(work("a", decodes=[decode(-5.0), late_decode()]), id="it only decodes"),
        pytest.param(work("a", prompts=[prompt(1, 999, due=9.0)]), id="it has no streams"),
        pytest.param(
            work("a", decodes=[decode(0.03)], prompts=[prompt(1, 999, due=0.0)]),
            id="a prompt is late",
        ),
        pytest.param(
            work("a", decodes=[late_decode()], prompts=[prompt(1, 99, due=9.0)]),
            id="its streams are late",
        ),
    ],
)
def test_a_model_that_is_alone_runs_as_much_as_it_can(alone: WorkView) -> None:
    """Where that makes nobody late who is not late in any case."""
    decision = Deadline()(view(alone), DeadlineMemo("b", NOW))
    assert (decision.model, decision.prompt_tokens) == ("a", None)
    assert decision.until == (-math.inf if alone.prompts else math.inf)


@pytest.mark.parametrize("slack", [0.1, 0.2, 0.3])
def test_prompts_of_a_model_that_is_alone_join_its_streams_within_their_slack(
    slack: float,
) -> None:
    """A stream with one token left has no later ones to make up for a long job."""
    alone = work("a", decodes=[decode(slack, outputs=1)], prompts=[prompt(1, 500, due=9.0)])
    v = view(alone)
    for policy in (by_slack(margin=0.0), Deadline(margin=0.0)):
        decision = policy(v, DeadlineMemo("a", NOW))
        assert decision.prompt_tokens
        assert job_seconds(v, decision) == pytest.approx(slack, abs=1.1 * COSTS.per_token)
        assert job_seconds(v, decision) <= slack


def test_streams_of_a_model_that_is_alone_step_where_no_prompt_fits_their_slack() -> None:
    decodes = [decode(1.5 * STEP, outputs=1)]
    alone = work("a", decodes=decodes, prompts=[prompt(1, 500, due=9.0)])
    decision = Deadline()(view(alone), DeadlineMemo("a", NOW))
    assert (decision.model, decision.prompt_tokens) == ("a", 0)
    assert decision.until < NOW + 9.0 - 0.5, "its prompt must be in time, too"


def test_models_that_have_nothing_but_kv_to_move_are_chosen_too() -> None:
    """Runnable is as well a model without requests whose KV is to be swapped layer by layer."""
    assert by_slack()(view(work("a"), work("b")), None).model in ("a", "b")


# -- any view ---------------------------------------------------------------------------------

moments = st.floats(-20.0, 20.0)
paces = st.sampled_from([1e-3, 0.05, 0.2, 1.0, 60.0])
costs = st.builds(
    StepCosts,
    base=st.sampled_from([0.0, 1e-3, 0.02, 0.5, 3.0]),
    per_token=st.sampled_from([0.0, 1e-5, 1e-3]),
    per_sequence=st.sampled_from([1e-6, 1e-3]),
    per_context=st.sampled_from([0.0, 1e-7]),
    per_pair=st.sampled_from([0.0, 1e-8]),
)
policies = st.builds(
    Deadline,
    late_share=st.sampled_from([0.01, 0.05, 0.5]),
    longest_wait=st.sampled_from([0.5, 10.0]),
    margin=st.sampled_from([0.0, 2.0]),
)


@st.composite
def decodes(draw: st.DrawFn) -> DecodeView:
    ago = draw(st.floats(0.0, 20.0))
    first = draw(st.none() | st.just(NOW - ago))
    generated = 0 if first is None else draw(st.integers(1, 500))
    last = NOW - ago * draw(st.floats(0.0, 1.0))
    return DecodeView(
        order=Precedence(0, NOW - ago, 0),
        due=NOW + draw(moments),
        first=first,
        last=last,
        generated=generated,
        outputs=draw(st.integers(1, 300)),
        pace=draw(paces),
        context=draw(st.integers(1, 4000)),
    )


@st.composite
def prompts(draw: st.DrawFn, sequence: int) -> PromptView:
    arrival = NOW - draw(st.floats(0.0, 20.0))
    return PromptView(
        order=Precedence(0, arrival, sequence),
        tokens=draw(st.integers(1, 3000)),
        start=draw(st.integers(0, 500)),
        due=NOW + draw(moments),
        last=arrival,
        outputs=draw(st.integers(1, 300)),
        pace=draw(paces),
    )


@st.composite
def views(draw: st.DrawFn) -> ComputeView:
    works = []
    for i in range(draw(st.integers(1, 4))):
        n = draw(st.integers(0, 3))
        waiting = [draw(prompts(10 * i + k)) for k in range(draw(st.integers(not n, 3)))]
        running = [draw(decodes()) for _ in range(n)]
        works.append(work(f"m{i}", decodes=running, prompts=waiting, costs=draw(costs)))
    return view(*works, step_tokens=draw(st.sampled_from([8, 64, 512])))


turns = st.none() | st.builds(
    DeadlineMemo,
    model=st.sampled_from(["m0", "m1", "gone"]),
    at=st.floats(NOW - 5.0, NOW),
    credit=st.floats(0.0, MOST_CREDIT),
)


@settings(max_examples=tries(40, all=150))
@given(policies, views(), turns)
def test_any_view_is_answered_with_a_job(policy: Deadline, v: ComputeView, memo: object) -> None:
    decision = policy(v, memo)
    assert decision == policy(v, memo), "not deterministic"
    w = v.work_of(decision.model)
    assert w.model in [r.model for r in v.runnable]
    n = decision.prompt_tokens
    if n is None:
        assert len(v.runnable) == 1
    else:
        assert 0 <= n <= v.step_tokens
        if n == 0:
            assert w.decodes, "an empty job: the lane would be idle"
        else:
            assert w.prompts
            assert n >= least_chunk(w, v.step_tokens)
    if decision.until > v.now:
        assert w.decodes
        assert n == 0 or not w.prompts, "prompts would not be seen until then"
    if len(v.runnable) > 1:
        assert decision.until < math.inf, "the others would wait for ever"


@settings(max_examples=tries(30, all=100))
@given(
    st.lists(st.floats(0.2, 3.0), min_size=2, max_size=4),
    st.lists(st.lists(st.integers(1, 600), max_size=3), min_size=4, max_size=4),
    st.sampled_from(["m0", "m1", "m3"]),
)
def test_no_job_makes_late_who_could_be_in_time(
    slacks: list[float], tokens: list[list[int]], last: str
) -> None:
    """Steps are due after these slacks, and prompts much later: the job that is chosen leaves time
    for all the steps."""
    works = [
        work(
            f"m{i}",
            decodes=[decode(slack, outputs=1, last=NOW + slack - 0.5)],
            prompts=[prompt(10 * i + k, n, due=60.0, arrival=NOW) for k, n in enumerate(tokens[i])],
        )
        for i, slack in enumerate(slacks)
    ]
    v = view(*works)
    decision = by_slack(margin=0.0, longest_wait=1000.0)(v, DeadlineMemo(last, NOW))
    now = job_seconds(v, decision)
    steps = sorted((slack, f"m{i}") for i, slack in enumerate(slacks))
    for slack, model in steps:
        if model == decision.model:  # which has stepped with that job
            assert job_seconds(v, decision) <= slack + ROUNDING
        else:
            now += STEP
            assert now <= slack + ROUNDING
