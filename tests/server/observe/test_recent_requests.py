"""Requests that are open and that ended last: what is said of them, and that no text is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ballast.core.clock import VirtualClock
from ballast.core.settings import KeySettings
from ballast.server.http.request_context import MOST_SHOWN, Caller, RequestContext, RequestTexts
from ballast.server.observe.latency import Timing
from ballast.server.observe.recent_requests import KEPT, RecentRequests
from ballast.server.openai.records import Usage


@dataclass
class Answer:
    model: str = "atlas"
    usage: Usage = field(default_factory=lambda: Usage.of(30, 0, 0))
    timings: Sequence[Timing] = ()
    finish_reasons: Sequence[str | None] = (None,)

    def log_fields(self, arrived: float) -> dict[str, Any]:
        return {}


def asked(clock: VirtualClock, name: str = "r", answer: Answer | None = None) -> RequestContext:
    key = KeySettings(name="team", key="k" * 16)
    context = RequestContext(
        "POST", "/v1/completions", began=clock.now(), request_id=name, caller=Caller(key)
    )
    context.answer, context.model = answer, "" if answer is None else "a"
    return context


def end(requests: RecentRequests, context: RequestContext, clock: VirtualClock) -> None:
    context.ended = clock.now()
    requests.over(context)


def test_a_request_waits_generates_and_ends() -> None:
    clock = VirtualClock(10.0)
    requests, timing = RecentRequests(clock), Timing(10.0)
    answer = Answer(timings=(timing,))
    context = asked(clock, answer=answer)
    requests.arrived(context)
    clock.advance_to(11.0)
    (one,) = requests.listed(9).open
    assert (one.state, one.age, one.key, one.model, one.status) == (
        *("waiting", 1.0, "team", "atlas"),
        None,
    )
    assert (one.ttft, one.tpot, one.queued, one.seconds) == (None, None, None, None)
    timing.first, timing.last, timing.queued, timing.activating = 12.0, 14.0, 0.5, 0.25
    answer.usage, context.status = Usage.of(30, 5, 20, fetched={"host": 12}), 200
    clock.advance_to(14.0)
    (one,) = requests.listed(9).open
    assert (one.state, one.ttft, one.tpot, one.queued) == ("generating", 2.0, 0.5, 0.5)
    assert one.activating == 0.25
    assert one.cached_tokens_by_tier == {"device": 8, "host": 12}
    answer.finish_reasons = ("stop",)
    end(requests, context, clock)
    clock.advance_to(20.0)
    listed = requests.listed(9)
    (one,) = listed.ended
    assert listed.open == []
    assert (one.state, one.seconds, one.age, one.finish) == ("ended", 4.0, 10.0, ["stop"])
    assert b"cached_tokens_by_tier" in msgspec.json.encode(listed)


def test_a_request_is_listed_while_its_model_is_loaded() -> None:
    clock = VirtualClock()
    requests, context = RecentRequests(clock), asked(clock)
    context.model = "late"
    requests.arrived(context)
    (one,) = requests.listed(0).open
    assert (one.model, one.state, one.choices, one.finish) == ("late", "waiting", 0, [])
    end(requests, context, clock)
    assert [one.status for one in requests.listed(1).ended] == [499]


def test_what_asks_no_model_is_not_listed_and_the_ended_ones_are_bounded() -> None:
    clock = VirtualClock()
    requests = RecentRequests(clock)
    probe = asked(clock)
    requests.arrived(probe)
    assert requests.listed(9).open == []
    end(requests, probe, clock)
    for i in range(KEPT + 5):
        context = asked(clock, f"r{i}", Answer())
        requests.arrived(context)
        end(requests, context, clock)
    assert [one.request_id for one in requests.listed(2).ended] == ["r204", "r203"]
    assert requests.listed(0).ended == []
    assert len(requests.listed(KEPT * 2).ended) == KEPT


def test_lengths_of_what_was_answered_are_kept_to_be_simulated() -> None:
    clock = VirtualClock(1.0)
    requests = RecentRequests(clock)
    for model, output in (("a", 7), ("b", 0), ("c", 9)):
        context = asked(clock, answer=Answer(model, Usage.of(30, output, 0)))
        clock.advance_to(clock.now() + 1.0)
        end(requests, context, clock)
    assert requests.trace() == [(1.0, "a", 30, 7), (3.0, "c", 30, 9)]


def test_texts_are_listed_for_the_operator_alone() -> None:
    clock = VirtualClock()
    requests, context = RecentRequests(clock), asked(clock, answer=Answer())
    context.texts = RequestTexts("the prompt")
    context.texts.add("x" * 5000 + "the end")
    requests.arrived(context)
    assert b'prompt":"the' not in msgspec.json.encode(requests.listed(9))
    end(requests, context, clock)
    assert b"the end" not in msgspec.json.encode(requests.listed(9))
    (one,) = requests.listed(9, texts=True).ended
    assert isinstance(one.texts, RequestTexts)
    assert (one.texts.prompt, len(one.texts.output)) == ("the prompt", MOST_SHOWN)
