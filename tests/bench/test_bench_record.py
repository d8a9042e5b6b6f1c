"""Records, from what an engine says or a client sees."""

from __future__ import annotations

import pytest

from ballast.bench.record import (
    RequestRecord,
    RequestRecorder,
    prompts_of,
    submission_for,
)
from ballast.core.event import CancelledOutput, FailedOutput, FinishedOutput, TokenOutput
from ballast.workload.workload import WorkloadRequest


def request(n: int = 0, at: float = 1.0) -> WorkloadRequest:
    return WorkloadRequest(id=n, at=at, model="a", prompt_tokens=4, output_tokens=3)


def recorded(*tokens: float, start: float = 101.5) -> RequestRecorder:
    book = RequestRecorder(origin=100.0)
    book.sent(request(), "x", start)
    for n, when in enumerate(tokens):
        book.record(when, TokenOutput("x", 9, n))
    return book


def only(book: RequestRecorder) -> RequestRecord:
    (record,) = book.records()
    return record


def test_latencies_count_from_the_wanted_moment() -> None:
    book = recorded(102.0, 102.5, 104.0)
    book.record(104.0, FinishedOutput("x", "length", 4, 3, 2, 1))
    r = only(book)
    assert (r.at, r.sent, r.first_token, r.end) == (1.0, 1.5, 2.0, 4.0)
    assert (r.ttft, r.tpot, r.e2e) == (1.0, 1.0, 3.0)
    assert (r.prompt_tokens, r.output_tokens, r.cached_tokens, r.preemptions) == (4, 3, 2, 1)
    assert r.answered
    assert book.answered("x")


def test_tokens_of_several_requests_at_once_are_those_told_one_by_one() -> None:
    one, many = recorded(102.0), recorded(102.0)
    for book in (one, many):
        book.sent(request(1), "y", 101.0)
        book.sent(request(2), "z", 101.0)
        book.failed("z", 102.0, "gone")
    for when in (103.0, 103.25):
        for name in ("x", "y", "z"):
            one.record(when, TokenOutput(name, 9, 1))
    many.tokens(["x", "y", "z"], [103.0, 103.25])
    assert many.records() == one.records()
    times = [r.token_times for r in many.records()]
    assert [list(t) for t in times] == [[2.0, 3.0, 3.25], [3.0, 3.25], []]
    many.tokens(["x"], [104.0])
    assert len(times[0]) == 3, "a record does not change"


def test_tpot_divides_by_tokens_not_by_chunks() -> None:
    book = recorded(102.0, 104.0)
    book.finished("x", 104.0, 4, 5)
    assert only(book).tpot == 0.5


def test_a_single_token_has_no_tpot() -> None:
    book = recorded(102.0)
    book.finished("x", 102.0, 4, 1)
    r = only(book)
    assert (r.ttft, r.tpot, r.e2e) == (1.0, None, 1.0)


def test_an_answer_without_seen_tokens_came_at_its_end() -> None:
    book = recorded()
    book.finished("x", 103.0, 4, 2)
    r = only(book)
    assert (r.ttft, r.tpot) == (2.0, None)


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (FailedOutput("x", "insufficient_memory", "too long"), "insufficient_memory: too long"),
        (CancelledOutput("x"), "cancelled"),
    ],
)
def test_failures_keep_their_reason_and_tokens(
    output: FailedOutput | CancelledOutput, reason: str
) -> None:
    book = recorded(102.0)
    book.record(103.0, output)
    r = only(book)
    assert (r.error, r.output_tokens, r.end, r.e2e) == (reason, 1, 3.0, None)
    assert not book.answered("x")


def test_the_first_end_counts() -> None:
    book = recorded(102.0)
    book.failed("x", 103.0, "timed out")
    book.record(104.0, TokenOutput("x", 9, 1))
    book.record(105.0, FinishedOutput("x", "stop", 4, 2, 0, 0))
    book.failed("x", 106.0, "late")
    r = only(book)
    assert (r.error, r.end, tuple(r.token_times)) == ("timed out", 3.0, (2.0,))


def test_the_unanswered_are_failures() -> None:
    r = only(recorded(102.0))
    assert r.error == "not answered by the end of the run"
    assert r.end is None
    assert not r.answered


def test_records_come_in_the_workloads_order() -> None:
    book = RequestRecorder()
    for n, at in ((3, 1.0), (1, 2.0), (0, 1.0)):
        book.sent(request(n, at), f"w{n}", at)
    assert [r.id for r in book.records()] == [0, 3, 1]


def test_submission_asks_for_exactly_the_workloads_tokens() -> None:
    prompts = prompts_of({"a": 500}, seed=1, lowest=3)
    submission = submission_for(request(7), prompts(request(7)))
    assert (submission.id, submission.model, submission.max_tokens) == ("w7", "a", 3)
    assert submission.ignore_eos
    assert submission.arrival == 1.0
    assert len(submission.prompt) == 4
    assert min(submission.prompt) >= 3
