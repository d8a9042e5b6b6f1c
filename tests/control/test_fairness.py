"""No key shuts another one out of a model, and no worker is left without work."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast.cluster.loop_timers import LoopTimers
from ballast.cluster.output_stream import OutputStream
from ballast.control.fairness import AHEAD, chosen
from ballast.control.open_request import OpenRequest
from ballast.control.open_requests import OpenRequests
from ballast.control.suspicion import Suspicions
from ballast.core.event import FailedOutput, FinishedOutput
from ballast.core.model import ModelSpec
from ballast.core.request import Submission
from ballast.transport.worker_messages.codec import ToWorker
from ballast.transport.worker_messages.request_messages import SubmitMsg
from tests.cluster.fake_device import spec

RUNNING = 4
WINDOW = RUNNING + AHEAD
MODEL = replace(spec("m"), max_running=RUNNING)


@dataclass
class Worker:
    """Open requests of one device, and what its worker was sent."""

    model: ModelSpec = MODEL
    sent: list[str] = field(default_factory=list)
    streams: dict[str, OutputStream] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.requests = OpenRequests(Suspicions(), LoopTimers(), self._queue_of)
        self.requests.worker_ready(self._send)

    def _queue_of(self, name: str) -> tuple[ModelSpec, ModelSpec] | None:
        return (self.model, self.model) if name == "m" else None

    def _send(self, message: ToWorker) -> None:
        if isinstance(message, SubmitMsg):
            self.sent += [s.id for s in message.requests]

    def ask(self, key: str, number: int, priority: int = 0, model: str = "m") -> str:
        name = f"{key}-{number}"
        stream = self.streams[name] = OutputStream(
            [name], self.requests.withdraw, self.requests.set_paused
        )
        wanted = Submission(id=name, model=model, prompt=(1,), max_tokens=1, priority=priority)
        self.requests.add([OpenRequest(wanted, stream, key)])
        return name

    def end(self, name: str) -> None:
        self.requests.deliver(FinishedOutput(name, "stop", 1, 1, 0, 0))
        self.requests.dispatch()


def test_a_newcomer_passes_those_that_wait() -> None:
    worker = Worker()
    flood = [worker.ask("flood", i) for i in range(130)]
    assert worker.sent == flood[:WINDOW]
    newcomer = worker.ask("other", 0)
    assert worker.sent[-1] == newcomer
    for name in flood[:WINDOW]:
        worker.end(name)
    assert len(worker.sent) == 2 * WINDOW, "the worker has always as many"


def test_keys_divide_the_worker() -> None:
    worker = Worker()
    for key in ("a", "b", "c"):
        for i in range(100):
            worker.ask(key, i)
    for _ in range(200):
        worker.end(next(name for name in worker.sent if name in worker.requests))
    at_worker = Counter(name[0] for name in worker.sent if name in worker.requests)
    assert set(at_worker.values()) == {WINDOW // 3}
    order = [int(name[2:]) for name in worker.sent if name[0] == "a"]
    assert order == sorted(order)


def test_what_is_important_comes_first_and_does_not_come_twice() -> None:
    worker = Worker()
    flood = [worker.ask("flood", i) for i in range(50)]
    urgent = worker.ask("flood", 99, priority=1)
    worker.end(flood[0])
    assert worker.sent[-1] == urgent
    assert max(Counter(worker.sent).values()) == 1


def test_requests_of_no_key_and_of_models_that_nobody_knows_are_sent_at_once() -> None:
    worker = Worker()
    names = [worker.ask("", i) for i in range(50)]
    names += [worker.ask("key", i, model="gone") for i in range(50)]
    assert worker.sent == names


def test_what_is_withdrawn_while_it_waits_leaves_its_place() -> None:
    worker = Worker()
    names = [worker.ask("flood", i) for i in range(WINDOW + 2)]
    worker.streams[names[WINDOW]].close()
    worker.end(names[0])
    assert worker.sent == [*names[:WINDOW], names[WINDOW + 1]]
    assert names[WINDOW] not in worker.requests


def test_what_is_paused_takes_no_place_and_what_is_resumed_is_sent() -> None:
    """Up to as many as can run: all of them could be resumed at once."""
    worker = Worker()
    names = [worker.ask("flood", i) for i in range(WINDOW + 3 * RUNNING)]
    waiting = names[WINDOW:]
    worker.requests.set_paused(waiting[:1], True)
    for name in names[:WINDOW]:
        worker.requests.set_paused([name], True)
    assert worker.sent == [*names[:WINDOW], *waiting[1 : RUNNING + 1]]
    worker.requests.set_paused(waiting[:1], False)
    worker.end(names[0])
    assert worker.sent[-1] == waiting[0], "it came before those that wait"
    assert worker.ask("other", 0) == worker.sent[-1]


def test_a_new_worker_gets_no_more_at_a_time() -> None:
    worker = Worker()
    names = [worker.ask("flood", i) for i in range(30)]
    worker.requests.worker_died(())
    worker.sent.clear()
    worker.requests.worker_ready(worker._send)
    assert worker.sent == names[:WINDOW]


def test_nobody_waits_here_for_longer_than_the_model_allows() -> None:
    async def scenario() -> None:
        worker = Worker(replace(MODEL, queue_seconds=0.01))
        names = [worker.ask("flood", i) for i in range(WINDOW + 1)]
        [failed] = await worker.streams[names[-1]].take()
        assert isinstance(failed, FailedOutput)
        assert failed.code == "queue_timeout"
        assert [name for name in names if name in worker.requests] == names[:-1]

    asyncio.run(scenario())


@dataclass(frozen=True)
class Asked:
    key: str
    submission: Submission


@given(
    waiting=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(-1, 1)), max_size=60),
    sent=st.dictionaries(st.sampled_from("abcde"), st.integers(0, 30)),
    running=st.integers(1, 20),
)
def test_none_is_idle_while_some_wait_and_each_has_its_share(
    waiting: list[tuple[str, int]], sent: dict[str, int], running: int
) -> None:
    requests = [
        Asked(key, Submission(id=f"{i}", model="m", prompt=(1,), max_tokens=1, priority=priority))
        for i, (key, priority) in enumerate(waiting)
    ]
    found = chosen(requests, Counter(sent), running)
    left = [r for r in requests if r not in found]
    have = Counter(sent) + Counter(r.key for r in found)
    assert len({r.submission.id for r in found}) == len(found)
    if not left:
        return
    assert have.total() >= running + AHEAD
    keys = {r.key for r in requests} | {key for key, n in sent.items() if n}
    assert all(have[r.key] >= (running + AHEAD) // len(keys) for r in left)
    for r in left:  # within a key, none that is less important or later was preferred
        mine = [(-o.submission.priority, int(o.submission.id)) for o in found if o.key == r.key]
        assert all(o < (-r.submission.priority, int(r.submission.id)) for o in mine)


@pytest.mark.parametrize("keys", [1, 3, 1000])
def test_a_share_is_one_at_least(keys: int) -> None:
    submission = Submission(id="x", model="m", prompt=(1,), max_tokens=1)
    requests = [Asked(f"{i}", submission) for i in range(keys)]
    assert chosen(requests, Counter(), 1) == requests
