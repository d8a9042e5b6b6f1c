"""Units, requests, jobs, clock and story."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ballast.core.actions import DropCache
from ballast.core.clock import VirtualClock
from ballast.core.cost import StepCosts
from ballast.core.errors import BrokenPromise, ConfigError
from ballast.core.event import ArrivalEvent, CancelEvent, JobDoneEvent
from ballast.core.job import Job, JobLoad, SequenceWork
from ballast.core.model import AdapterSpec
from ballast.core.request import Request, RequestState, Sampling, Submission
from ballast.core.story import Story
from ballast.core.units import GiB, KiB, MiB, ceil_div, format_bytes, parse_bytes
from tests.policy.worlds import model


@pytest.mark.parametrize(
    ("text", "n"),
    [
        ("512MiB", 512 * MiB),
        ("1.5 GiB", 3 * GiB // 2),
        ("4GB/s", 4 * 10**9),
        ("256k", 256_000),
        ("7", 7),
        (7, 7),
        ("64kib", 64 * KiB),
    ],
)
def test_parse_bytes(text: str | int, n: int) -> None:
    assert parse_bytes(text) == n


@pytest.mark.parametrize("text", ["", "MiB", "-1MiB", "1 parsec", "1e3"])
def test_parse_bytes_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_bytes(text)


def test_format_and_division() -> None:
    assert [format_bytes(n) for n in (5, 1536, 3 * MiB, 2 * GiB)] == [
        "5B",
        "1.5KiB",
        "3MiB",
        "2GiB",
    ]
    assert [ceil_div(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


def request(prompt: int = 4, max_tokens: int = 3) -> Request:
    submission = Submission(id="r", model="m", prompt=(1,) * prompt, max_tokens=max_tokens)
    return Request.of(submission, 1, model("m").spec)


def test_a_request_lives_legally() -> None:
    r = request()
    assert not r.decoding
    r.to(RequestState.RUNNING)
    r.tokens.append(7)
    r.computed = 4
    assert r.decoding
    assert (r.generated, r.output, r.most_tokens) == (1, [7], 6)
    r.to(RequestState.WAITING)
    r.to(RequestState.RUNNING)
    r.to(RequestState.FINISHED)
    with pytest.raises(BrokenPromise, match="finished -> running"):
        r.to(RequestState.RUNNING)


def test_a_waiting_request_cannot_finish() -> None:
    with pytest.raises(BrokenPromise):
        request().to(RequestState.FINISHED)


def test_prefixes_are_apart_by_adapter_and_tenant() -> None:
    adapters = tuple(
        AdapterSpec(name=n, fingerprint=f, rank=4) for n, f in (("x", "0"), ("y", "1"))
    )
    spec = replace(model("m").spec, adapters=adapters)
    asked = Submission(id="r", model="?", prompt=(1,), max_tokens=1)
    made = [
        Request.of(replace(asked, salt=salt), 1, spec, adapter)
        for salt in ("", "0", "0:", "1")
        for adapter in (None, 0, 1)
    ]
    assert len({r.salt for r in made}) == len(made)
    assert {r.model for r in made} == {"m"}


def test_job_counts_what_costs() -> None:
    job = Job(
        1,
        0,
        "m",
        (
            SequenceWork("a", [1, 2, 3], 2, [0], None),
            SequenceWork("b", [1], 9, [1], Sampling()),
            SequenceWork("c", [1], 4, [2], Sampling()),
        ),
    )
    assert job.load == JobLoad(3, 1, 3 + 4 + 5, 2, 10 + 5)
    costs = StepCosts(1.0, 10.0, 100.0, 1000.0, 10000.0)
    assert costs.seconds(job) == 1 + 30 + 200 + 15000 + 120000
    assert costs.prefill_seconds(3, 2) == 1 + 30 + 120000


def test_virtual_time_never_goes_back() -> None:
    clock = VirtualClock()
    clock.advance_to(2.0)
    clock.advance_to(1.0)
    assert clock.now() == 2.0


def test_the_story_tells_counts_not_contents() -> None:
    story = Story(keep=2)
    story.record_event(
        0.5, ArrivalEvent(Submission(id="r", model="m", prompt=(5, 6), max_tokens=9))
    )
    assert story.entries[0] == {
        "at": 0.5,
        "event": "Arrival",
        "request": "r",
        "model": "m",
        "prompt_tokens": 2,
        "max_tokens": 9,
    }
    story.record_event(0.6, CancelEvent("r"))
    story.record_event(0.7, JobDoneEvent(Job(1, 0, "m", ()), (), 0.01))
    assert len(story.entries) == 2


def test_decisions_are_taken_once() -> None:
    story = Story(keep=2)
    for pages in (1, 2, 3):
        story.record_decision(0.5, DropCache("m", pages, "why"), "refused" if pages == 3 else None)
    story.record_event(0.6, CancelEvent("r"))
    result = {"at": 0.5, "action": "DropCache", "model": "m", "why": "why"}
    assert story.take_decisions() == (
        {**result, "pages": 2},
        {**result, "pages": 3, "refused": "refused"},
    )
    assert story.take_decisions() == ()


def test_config_error_says_key_value_and_remedy() -> None:
    error = ConfigError("models[0].dtype", "int3", "use float32 or bfloat16")
    assert str(error) == "models[0].dtype: 'int3': use float32 or bfloat16"
