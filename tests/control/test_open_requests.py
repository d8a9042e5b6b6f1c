"""Requests that leave a worker and come back to it, and those that wait behind them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ballast.control.open_request import OpenRequest
from ballast.control.open_requests import MOST_AT_ONCE, OpenRequests
from ballast.control.suspicion import Suspicions
from ballast.core.event import CancelledOutput, Output, TokenOutput
from ballast.core.migration import DropKvEvent
from ballast.core.request import Submission
from ballast.transport.worker_messages.codec import ToWorker
from ballast.transport.worker_messages.migration_messages import MigrationOrderMsg
from ballast.transport.worker_messages.request_messages import SubmitMsg, WithdrawMsg
from benchmarks.fault_world import Client, VirtualTimers


class Book:
    """Open requests of one device, and what its worker was sent."""

    def __init__(self) -> None:
        self.suspicions = Suspicions()
        self.timers = VirtualTimers()
        self.requests = OpenRequests(self.suspicions, self.timers, lambda name: None)
        self.sent: list[str] = []
        self.withdrawn: list[str] = []
        self.dropped: list[str] = []
        self.requests.worker_ready(self._send)

    def _send(self, message: ToWorker) -> None:
        if isinstance(message, SubmitMsg):
            self.sent += [s.id for s in message.unwrap()]
        elif isinstance(message, WithdrawMsg):
            self.withdrawn += message.request_ids
        elif isinstance(message, MigrationOrderMsg):
            assert isinstance(message.order, DropKvEvent)
            self.dropped.append(message.order.request_id)

    def add(self, id: str) -> Client:
        submission = Submission(id=id, model="m", prompt=(1,), max_tokens=9)
        requests = self.requests
        client = Client(submission, requests.withdraw, requests.set_paused, {id})
        requests.add([OpenRequest(submission, client)])
        return client

    def deliver(self, *outputs: Output) -> None:
        for output in outputs:
            self.requests.deliver(output)
        self.requests.dispatch()


def test_what_a_worker_sends_of_an_earlier_stay_is_not_for_the_next_one() -> None:
    book = Book()
    client = book.add("r")
    book.deliver(TokenOutput("r", 5, 0))
    gone = book.requests.take_back("r")
    assert book.withdrawn == ["r"]
    book.requests.add([gone])
    assert book.sent == ["r"], "the worker has it still"
    book.deliver(TokenOutput("r", 6, 1), TokenOutput("r", 7, 2))
    assert client.tokens == [5]
    book.deliver(CancelledOutput("r"))
    assert book.sent == ["r", "r"]
    assert not client.ends
    book.deliver(TokenOutput("r", 6, 1))
    assert client.tokens == [5, 6]


def test_a_worker_that_dies_sends_nothing_more_of_what_was_withdrawn() -> None:
    book = Book()
    book.add("r")
    gone = book.requests.take_back("r")
    book.requests.worker_died(())
    book.requests.add([gone])
    book.requests.worker_ready(book._send)
    assert book.sent == ["r", "r"]


def test_those_that_wait_are_sent_when_the_suspect_before_them_has_gone_elsewhere() -> None:
    book = Book()
    book.add("culprit")
    for _ in range(2):
        book.requests.worker_died(["culprit"])
        book.requests.worker_ready(book._send)
    book.add("waits")
    assert "waits" not in book.sent
    book.requests.remove(["culprit"])
    assert book.sent[-1] == "waits"


def test_many_requests_are_sent_in_turns_of_the_loop() -> None:
    book = Book()
    ids = [f"r{i}" for i in range(3 * MOST_AT_ONCE + 1)]
    requests = book.requests
    submissions = [Submission(id=i, model="m", prompt=(1,), max_tokens=9) for i in ids]
    client = Client(submissions[0], requests.withdraw, requests.set_paused, set(ids))
    requests.add([OpenRequest(s, client) for s in submissions])
    assert book.sent == ids[:MOST_AT_ONCE]
    book.requests.dispatch()
    assert book.sent == ids[:MOST_AT_ONCE], "not in the same turn"
    turns = 0
    while book.timers.step():
        turns += 1
    assert turns == 3
    assert book.sent == ids


@pytest.mark.parametrize("how", ["left", "moved"])
def test_kv_that_was_imported_for_a_request_that_does_not_come_is_dropped(how: str) -> None:
    book = Book()
    submission = Submission(id="r", model="m", prompt=(1,), max_tokens=9)
    client = Client(submission, book.requests.withdraw, book.requests.set_paused, {"r"}, True)
    request = OpenRequest(submission, client, paused=True, kv_waits=True)
    book.requests.add([request])
    assert book.sent == book.dropped == []
    if how == "left":
        book.requests.withdraw(["r"])
    else:
        book.requests.remove(["r"])
    assert book.dropped == ["r"]


def test_kv_that_was_imported_is_the_workers_once_it_has_the_request() -> None:
    book = Book()
    client = book.add("other")
    request = OpenRequest(replace(client.submission, id="r"), client, kv_waits=True)
    book.requests.add([request])
    book.requests.withdraw(["r"])
    assert book.withdrawn == ["r"]
    assert book.dropped == []
