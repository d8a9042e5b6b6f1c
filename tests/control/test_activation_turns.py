"""No key that goes round all models evicts everybody, or has others wait for all its loads."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field, replace

from hypothesis import given
from hypothesis import strategies as st

from ballast.cluster.loop_timers import LoopTimers
from ballast.cluster.output_stream import OutputStream
from ballast.control.activation_turns import AT_ONCE, ActivationTurns, ModelWish
from ballast.control.open_request import OpenRequest
from ballast.control.open_requests import OpenRequests
from ballast.control.suspicion import Suspicions
from ballast.core.event import FailedOutput, FinishedOutput
from ballast.core.model import ModelSpec
from ballast.core.request import Submission
from ballast.transport.worker_messages.codec import ToWorker
from ballast.transport.worker_messages.request_messages import (
    FlowControlMsg,
    SubmitMsg,
    WithdrawMsg,
)
from tests.cluster.fake_device import spec


def wishes(key: str, *models: str, per_minute: int = 100) -> list[ModelWish]:
    return [ModelWish(key, model, per_minute) for model in models]


def test_keys_take_turns() -> None:
    turns = ActivationTurns()
    assert turns.choose(wishes("a", *"pqrs"), 0.0).models == {"p", "q"}
    both = [*wishes("a", "r", "s"), *wishes("b", "t", "u")]
    assert turns.choose(both, 0.0).models == {"t"}, "one more for a key that has none coming"
    turns.keep(["t"])
    assert turns.choose([*wishes("a", "r", "s"), *wishes("b", "u")], 0.0).models == {"r"}
    turns.keep(["r"])
    assert turns.choose([*wishes("a", "s"), *wishes("b", "u")], 0.0).models == {"u"}


def test_a_budget_is_refilled() -> None:
    turns = ActivationTurns()
    for now in range(6):
        assert turns.choose(wishes("a", f"m{now}", per_minute=6), 0.0).models
        turns.keep(())
    spent = turns.choose([*wishes("a", "x", per_minute=6), *wishes("b", "y")], 0.0)
    assert (spent.models, spent.seconds) == ({"y"}, 10.0)
    assert turns.choose(wishes("a", "x", per_minute=6), 10.0).models == {"x"}


def test_a_model_that_two_keys_want_is_charged_to_one() -> None:
    turns = ActivationTurns()
    assert turns.choose([*wishes("a", "m"), *wishes("b", "m")], 0.0).models == {"m"}
    assert turns.coming == {"m": "a"}
    assert turns.choose(wishes("b", "m", per_minute=1), 0.0).models == frozenset()


@given(
    asked=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 9)), max_size=40),
    ended=st.lists(st.integers(0, 9), max_size=20),
)
def test_each_key_has_one_coming_and_none_is_idle(
    asked: list[tuple[str, int]], ended: list[int]
) -> None:
    turns, left = ActivationTurns(), list(dict.fromkeys(asked))
    for end in (None, *ended):
        turns.keep([m for m in turns.coming if m != f"{end}"])
        found = turns.choose([ModelWish(key, f"{m}", 1000) for key, m in left], 0.0).models
        left = [(key, m) for key, m in left if f"{m}" not in found]
        have = Counter(turns.coming.values())
        wanting = {key for key, m in left if f"{m}" not in turns.coming}
        assert all(have[key] for key in wanting)
        assert len(turns.coming) >= AT_ONCE or not wanting
        assert all(n <= AT_ONCE for n in have.values())


MODELS = {name: replace(spec(name), max_running=4) for name in "pqrstu"}


@dataclass
class Worker:
    """Open requests of one device whose models come when a request for them is sent."""

    residency: dict[str, str] = field(default_factory=lambda: dict.fromkeys(MODELS, "absent"))
    sent: list[str] = field(default_factory=list)
    withdrawn: list[str] = field(default_factory=list)
    paused: list[str] = field(default_factory=list)
    resumed: list[str] = field(default_factory=list)
    streams: dict[str, OutputStream] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.requests = OpenRequests(
            Suspicions(),
            LoopTimers(),
            self._queue_of,
            residency_of=lambda name: self.residency[name],
        )
        self.requests.worker_ready(self._send)

    def _queue_of(self, name: str) -> tuple[ModelSpec, ModelSpec]:
        return MODELS[name], MODELS[name]

    def _send(self, message: ToWorker) -> None:
        if isinstance(message, SubmitMsg):
            self.sent += [s.id for s in message.requests]
        elif isinstance(message, WithdrawMsg):
            self.withdrawn += message.request_ids
        elif isinstance(message, FlowControlMsg):
            self.paused += message.paused
            self.resumed += message.resumed

    def ask(self, key: str, model: str, per_minute: int | None = 30, apart: bool = True) -> str:
        name = f"{key}-{model}-{len(self.streams)}"
        stream = self.streams[name] = OutputStream(
            [name], self.requests.withdraw, self.requests.set_paused
        )
        wanted = Submission(id=name, model=model, prompt=(1,), max_tokens=1, tenant=key)
        self.requests.add([OpenRequest(wanted, stream, key if apart else "", per_minute)])
        return name

    def lands(self, model: str) -> None:
        self.residency[model] = "resident"
        self.requests.reported()

    def end(self, name: str) -> None:
        self.requests.deliver(FinishedOutput(name, "stop", 1, 1, 0, 0))
        self.requests.dispatch()


def test_a_key_that_goes_round_all_models_waits_for_its_own_loads() -> None:
    async def scenario() -> None:
        worker = Worker()
        flood = [worker.ask("flood", model) for model in "pqrst"]
        assert worker.sent == flood[:2]
        other = worker.ask("other", "u")
        assert worker.sent == [*flood[:2], other], "it waits for two loads, not for five"
        more = worker.ask("flood", "p")
        assert worker.sent[-1] == more, "what is coming is for all"
        worker.lands("p")
        assert worker.sent[-1] == more, "two are coming yet"
        worker.lands("u")
        assert worker.sent[-1] == flood[2]
        worker.residency["p"] = "evicting"
        again = worker.ask("third", "p")
        assert worker.sent[-1] == again

    asyncio.run(scenario())


def test_requests_that_are_read_again_have_their_models_activated_in_turn() -> None:
    """A key that reads of many streams in turn goes round all models, too; and a stream that it
    does not read holds no model open for its other requests."""

    async def scenario() -> None:
        worker = Worker()
        streams = [worker.ask("flood", model, per_minute=5) for model in "pqrst"]
        for model in "pqrst":
            worker.lands(model)
        assert worker.sent == streams
        worker.requests.set_paused(streams, True)
        assert worker.paused == streams
        worker.residency |= dict.fromkeys("pqrs", "absent")
        more = worker.ask("flood", "p", per_minute=5)
        worker.requests.set_paused(streams, False)
        assert worker.resumed == streams[4:], "the one whose model is there; the budget is spent"
        assert more not in worker.sent
        worker.requests.set_paused(streams[1:2], True)
        worker.requests.set_paused(streams[1:2], False)
        assert worker.resumed == streams[4:]
        free = worker.ask("free", "q", per_minute=None, apart=False)
        assert worker.sent[-1] == free
        assert streams[1] in worker.resumed, "its model comes for another"
        other = worker.ask("other", "r")
        assert worker.sent[-1] == other
        assert streams[2] in worker.resumed
        worker.residency["p"] = "resident"
        worker.requests.reported()
        assert streams[0] in worker.resumed
        assert worker.sent[-1] == more
        worker.requests.pause()  # the worker is to end what it has
        worker.requests.set_paused(streams[:1], True)
        worker.residency["p"] = "absent"
        worker.requests.set_paused(streams[:1], False)
        assert worker.resumed.count(streams[0]) == 2

    asyncio.run(scenario())


def test_a_spent_budget_holds_requests_for_absent_models_alone() -> None:
    async def scenario() -> None:
        worker = Worker()
        for model in "pq":
            worker.lands(model)
        for model in "rs":
            name = worker.ask("flood", model, per_minute=2)
            worker.end(name)
        held = worker.ask("flood", "t", per_minute=2)
        resident = worker.ask("flood", "p", per_minute=2)
        other = worker.ask("other", "r", per_minute=2)
        assert worker.sent[-2:] == [resident, other]
        assert held not in worker.sent
        worker.lands("t")
        assert worker.sent[-1] == held

    asyncio.run(scenario())


def test_a_budget_lets_the_next_one_through_in_time() -> None:
    async def scenario() -> None:
        worker = Worker()
        for _ in range(6000):
            worker.end(worker.ask("flood", "p", per_minute=6000))
        held = worker.ask("flood", "q", per_minute=6000)
        async with asyncio.timeout(240):
            while held not in worker.sent:
                await asyncio.sleep(0.01)

    asyncio.run(scenario())


def test_without_a_bound_nobody_waits() -> None:
    async def scenario() -> None:
        worker = Worker()
        names = [worker.ask("one", model, per_minute=None, apart=False) for model in MODELS]
        assert worker.sent == names

    asyncio.run(scenario())


def test_one_key_with_a_bound_is_held_too() -> None:
    async def scenario() -> None:
        worker = Worker()
        names = [worker.ask("one", model, per_minute=1, apart=False) for model in "pq"]
        assert worker.sent == names[:1]

    asyncio.run(scenario())


def test_clients_that_leave_have_nothing_loaded() -> None:
    """What nobody waits for any more is not begun, and what was sent is withdrawn."""

    async def scenario() -> None:
        worker = Worker()
        names = [worker.ask("flood", model) for model in "pqrst"]
        worker.requests.withdraw(names[2:])
        worker.requests.withdraw(names[:2])
        assert worker.withdrawn == names[:2]
        worker.lands("u")
        assert worker.sent == names[:2]

    asyncio.run(scenario())


def test_waiting_for_a_turn_ends_with_the_models_queue_seconds() -> None:
    async def scenario() -> None:
        worker = Worker()
        MODELS["t"] = replace(MODELS["t"], queue_seconds=0.01)
        names = [worker.ask("flood", model) for model in "pqt"]
        [failed] = await worker.streams[names[-1]].take()
        assert isinstance(failed, FailedOutput)
        assert failed.code == "queue_timeout"

    asyncio.run(scenario())
