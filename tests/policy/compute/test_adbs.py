"""Adaptive batch scheduling and first come first served, on views made by hand."""

from __future__ import annotations

from dataclasses import replace

from ballast.core.compute import ComputeDecision, ComputeView, InFlight, Phase, Runnable, WorkView
from ballast.core.cost import Traffic
from ballast.core.job import JobLoad, chunk_pairs
from ballast.core.request import Precedence
from ballast.policy.compute.adbs import RENEWED, AdaptiveBatches, Rounds
from ballast.policy.compute.basic_orders import FirstComeFirstServed
from ballast.policy.compute.decode_shares import least_parts, on_share
from tests.policy.compute.test_deadline import COSTS, NOW, decode, prompt, view, work

DECODES = work("d", decodes=[decode()])
PROMPTS = work("p", prompts=[prompt(1, 400, 1.0)])
ALSO = work("q", prompts=[prompt(2, 400, 1.0)])
POLICY = AdaptiveBatches(decode_share=0.5)
OWN = AdaptiveBatches()
"""Each model's decode steps have the least part on which they serve its rate."""


def lanes(v: ComputeView, *in_flight: InFlight, n: int = 2, parts: int = 8) -> ComputeView:
    return replace(v, lanes=n, parts=parts, in_flight=in_flight)


def chosen(decision: ComputeDecision | None) -> tuple[str, Phase, int | None]:
    assert decision is not None
    return decision.model, decision.phase, decision.parts


def test_a_prefill_comes_first_and_leaves_decodes_their_share() -> None:
    v = lanes(view(DECODES, PROMPTS))
    assert chosen(POLICY(v, None)) == ("p", Phase.MIXED, 4)
    quarter = replace(POLICY, decode_share=0.25)
    assert chosen(quarter(v, None)) == ("p", Phase.MIXED, 6)
    assert chosen(replace(POLICY, separate=1)(v, None)) == ("p", Phase.PREFILL, 4)
    assert chosen(POLICY(lanes(view(PROMPTS)), None)) == ("p", Phase.MIXED, 8), "nobody decodes"


def test_decodes_fill_what_a_prefill_leaves() -> None:
    flying = InFlight("p", True, 4)
    assert chosen(POLICY(lanes(view(DECODES), flying), None)) == ("d", Phase.DECODE, 4)
    three = lanes(view(DECODES), flying, n=3)
    assert chosen(POLICY(three, None)) == ("d", Phase.DECODE, 2), "two of them"


def busy(model: str, rate: float, outputs: float = 100.0) -> WorkView:
    """It decodes, and is asked `rate` times a second for so many tokens after a short prompt."""
    one = work(model, decodes=[decode()], costs=COSTS)
    return replace(one, traffic=Traffic(rate, 16.0, outputs))


def test_decodes_have_the_least_part_that_serves_their_rate() -> None:
    rates = [0.01, 0.5, 2.0, 5.0, 20.0, 1e6]
    found = [least_parts(busy("d", rate), 10) for rate in rates]
    assert found == sorted(found)
    assert found[0] == 1
    assert found[-1] == 10, "none is enough"
    for rate, n in zip(rates[:-1], found, strict=False):
        assert n == 10 or _serves(busy("d", rate), n / 10)
        assert n == 1 or not _serves(busy("d", rate), (n - 1) / 10)


def _serves(w: WorkView, share: float) -> bool:
    """Equation 3 for a model alone, with the best batch within its pace."""
    part = on_share(w.costs, share)
    pace = w.decodes[0].pace
    for b in range(1, 257):
        step = part.of(JobLoad(0, 0, 0, b, b * round(16 + w.traffic.output_tokens / 2)))
        if b > 1 and step > pace:
            break
        prefill = w.costs.of(JobLoad(b * 16, b, b * chunk_pairs(16, 0), 0, 0))
        if b / (prefill + step * w.traffic.output_tokens) >= w.traffic.rate * (1 - 1e-6):
            return True
    return False


def test_a_prefill_leaves_each_model_that_decodes_its_own_part() -> None:
    rare, asked = busy("d", 0.01), busy("e", 5.0)
    few, many = least_parts(rare, 8), least_parts(asked, 8)
    assert few < many < 8
    assert chosen(OWN(lanes(view(rare, PROMPTS)), None)) == ("p", Phase.MIXED, 8 - few)
    assert chosen(OWN(lanes(view(asked, PROMPTS)), None)) == ("p", Phase.MIXED, 8 - many)
    both = lanes(view(rare, asked, PROMPTS), n=3)
    assert chosen(OWN(both, None)) == ("p", Phase.MIXED, max(1, 8 - few - many))
    flying = InFlight("p", True, 8 - many)
    assert chosen(OWN(lanes(view(rare), flying), None)) == ("d", Phase.DECODE, few)
    assert chosen(OWN(lanes(view(asked), flying), None)) == ("e", Phase.DECODE, many)
    one = view(asked, PROMPTS)
    assert chosen(OWN(one, None)) == ("p", Phase.MIXED, 1), "one lane"


def test_parts_of_decodes_are_kept_for_some_seconds() -> None:
    policy = replace(OWN, longest_gap=100.0)
    v = lanes(view(busy("d", 0.01), PROMPTS))
    first = policy(v, None)
    assert first is not None
    more = lanes(view(busy("d", 5.0), PROMPTS))
    early = policy(replace(more, now=NOW + RENEWED - 1), first.memo)
    late = policy(replace(more, now=NOW + RENEWED + 1), first.memo)
    assert early is not None
    assert late is not None
    assert early.parts == first.parts
    assert late.parts == 8 - least_parts(busy("d", 5.0), 8) < 7


def test_before_any_request_has_ended_present_ones_say_how_long_outputs_are() -> None:
    new = replace(busy("d", 0.5), traffic=Traffic(0.5))
    expected = new.decodes[0].generated + new.decodes[0].outputs
    assert least_parts(new, 8) == least_parts(replace(new, traffic=Traffic(0.5, 0.0, expected)), 8)


def test_one_prefill_is_in_flight() -> None:
    flying = InFlight("p", True, 4)
    assert POLICY(lanes(view(ALSO), flying), None) is None
    both = work("q", decodes=[decode()], prompts=[prompt(2, 400, 1.0)])
    assert chosen(POLICY(lanes(view(both), flying), None)) == ("q", Phase.DECODE, 4)


def test_a_prefill_that_does_not_fit_holds_decodes_back_while_a_job_runs() -> None:
    v = view(DECODES, PROMPTS)
    large = InFlight("e", False, 6)
    assert POLICY(lanes(v, large), None) is None
    assert chosen(POLICY(lanes(v, InFlight("e", False, 4)), None)) == ("p", Phase.MIXED, 4)
    assert POLICY(lanes(v), None) is not None, "nothing in flight: there is nothing to wait for"


def test_prefills_come_in_turns() -> None:
    memo: object = None
    order = []
    for _ in range(4):
        decision = POLICY(lanes(view(PROMPTS, ALSO)), memo)
        assert decision is not None
        memo = decision.memo
        order.append(decision.model)
    assert order == ["p", "q", "p", "q"]


def test_without_prompts_models_decode_in_turns_on_all_there_is() -> None:
    v = view(DECODES, work("e", decodes=[decode()]))
    early = replace(v.runnable[1], last_run=NOW - 1)
    for n in (1, 2):
        some = lanes(replace(v, runnable=(v.runnable[0], early)), n=n)
        assert chosen(POLICY(some, None)) == ("e", Phase.MIXED, None)


def test_streams_that_waited_long_decode_before_the_next_prefill() -> None:
    late = work("d", decodes=[decode(last=NOW - 0.3)])
    v = view(late, PROMPTS)
    first = POLICY(v, None)
    assert chosen(first) == ("d", Phase.DECODE, None)
    assert first is not None
    then = POLICY(v, first.memo)
    assert chosen(then) == ("p", Phase.MIXED, 1), "prompts do not starve either"
    assert then is not None
    assert chosen(POLICY(v, then.memo)) == ("d", Phase.DECODE, None)
    assert chosen(replace(POLICY, longest_gap=1.0)(v, None)) == ("p", Phase.MIXED, 1)


def test_streams_that_waited_long_decode_in_their_models_own_prefill() -> None:
    late = work("d", decodes=[decode(last=NOW - 0.3)], prompts=[prompt(1, 400, 1.0)])
    v = lanes(view(late))
    assert chosen(POLICY(v, None)) == ("d", Phase.MIXED, 8)
    assert chosen(replace(POLICY, separate=1)(v, None)) == ("d", Phase.DECODE, 4)


def test_kv_that_moves_comes_before_all() -> None:
    v = view(DECODES, PROMPTS)
    moving = Runnable("d", NOW, None, moves_kv=True)
    v = replace(v, runnable=(moving, v.runnable[1]))
    assert chosen(POLICY(v, Rounds()))[0] == "d"
    assert chosen(FirstComeFirstServed()(v, None))[0] == "d"


def test_whose_request_came_first_is_served_first() -> None:
    old = work("d", decodes=[decode()._replace(order=Precedence(0, NOW - 9, 1))])
    young = work("p", prompts=[prompt(2, 400, 1.0, arrival=NOW - 1)])
    policy = FirstComeFirstServed()
    decision = policy(view(young, old), None)
    assert decision.model == "d"
    assert decision.until == float("inf"), "until something happens"
    first = work("p", prompts=[prompt(2, 400, 1.0, arrival=NOW - 10)])
    assert policy(view(first, old), None).model == "p"
    assert policy(view(first, old), None).until < NOW, "its next job may be another's"
    important = work("p", prompts=[prompt(2, 400, 1.0)._replace(order=Precedence(-1, NOW, 3))])
    assert policy(view(important, old), None).model == "p"
    assert replace(policy, separate=1)(view(first, old), None).phase is Phase.PREFILL


def test_a_turn_ends_when_its_time_is_up() -> None:
    old = work("d", decodes=[decode()._replace(order=Precedence(0, NOW - 9, 1))])
    young = work("p", decodes=[decode()._replace(order=Precedence(0, NOW - 1, 2))])
    policy = FirstComeFirstServed(longest_turn=2.0)
    v = view(young, old)
    first = policy(v, None)
    assert (first.model, first.until) == ("d", NOW + 2)
    within = policy(replace(v, now=NOW + 1.9), first.memo)
    assert (within.model, within.until) == ("d", NOW + 2)
    then = policy(replace(v, now=NOW + 2), first.memo)
    assert (then.model, then.until) == ("p", NOW + 4)
    assert policy(replace(v, now=NOW + 4), then.memo).model == "d"
    alone = policy(replace(view(old), now=NOW + 2), first.memo)
    assert (alone.model, alone.until) == ("d", NOW + 4), "nobody else can go on"
    older = view(work("p", decodes=[decode()._replace(order=Precedence(0, NOW - 20, 2))]), old)
    assert policy(older, first.memo).model == "d", "its turn is not over"
    assert policy(replace(view(young), now=NOW + 1), first.memo).model == "p", "it has nothing left"


def test_a_turn_on_another_lane_is_not_taken_over() -> None:
    young = work("p", decodes=[decode()._replace(order=Precedence(0, NOW - 1, 2))])
    old = work("d", decodes=[decode()._replace(order=Precedence(0, NOW - 9, 1))])
    policy = FirstComeFirstServed(longest_turn=2.0)
    first = policy(view(young, old), None)
    beside = replace(view(young), lanes=2, parts=2, in_flight=(InFlight("d", False, 1),))
    assert policy(beside, first.memo).memo == first.memo
