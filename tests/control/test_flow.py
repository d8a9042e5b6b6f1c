"""Flow control between server and worker: whatever readers, workers and crashes do, a request is
paused on both sides or on neither, what is not read is bounded, and nothing is lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ballast.cluster.output_stream import OutputStream, size
from ballast.control.open_request import OpenRequest
from ballast.control.open_requests import OpenRequests
from ballast.control.suspicion import Suspicions
from ballast.core.event import FailedOutput, FinishedOutput, Output, TokenOutput
from ballast.core.request import Submission
from ballast.transport.worker_messages.codec import ToWorker
from ballast.transport.worker_messages.request_messages import (
    FlowControlMsg,
    SubmitMsg,
    WithdrawMsg,
)
from benchmarks.fault_world import VirtualTimers
from tests.effort import tries

picks = st.integers(0, 1000)
TOP = tuple((k, -1.0) for k in range(20))
LENGTH = 150
"""Tokens of each output: three times what an stream holds, with their alternatives."""


@dataclass
class Worker:
    """Does what messages say, at once."""

    open: dict[str, int] = field(default_factory=dict)
    """By id, the tokens so far."""
    paused: set[str] = field(default_factory=set)

    def handle(self, message: ToWorker) -> None:
        match message:
            case SubmitMsg():
                for s in message.unwrap():
                    assert s.id not in self.open, "it has it already"
                    self.open[s.id] = len(s.resumed or ())
            case WithdrawMsg():
                for id in message.request_ids:
                    del self.open[id]
                    self.paused.discard(id)
            case FlowControlMsg():
                assert self.paused.isdisjoint(message.paused)
                assert self.paused.issuperset(message.resumed)
                self.paused = (self.paused | {*message.paused}) - {*message.resumed}
            case _:
                raise AssertionError(message)


class FlowControl(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.suspicions = Suspicions()
        self.timers = VirtualTimers()
        self.requests = OpenRequests(self.suspicions, self.timers, lambda model: None)
        self.worker: Worker | None = None
        self.streams: dict[str, OutputStream] = {}
        """By id, of those whose clients have not left."""
        self.read: dict[str, list[Output]] = {}
        self.suspects: set[str] = set()
        """Those that were ever suspected of killing workers, and so are or were not paused."""
        self.n = 0

    # -- what happens -----------------------------------------------------------------------------

    @rule(n=st.integers(1, 3))
    def submit(self, n: int) -> None:
        ids = [f"r{self.n + i}" for i in range(n)]
        self.n += n
        stream = OutputStream(ids, self.requests.withdraw, self.requests.set_paused)
        for id in ids:
            self.streams[id], self.read[id] = stream, []
        submissions = [Submission(id=id, model="m", prompt=(1,), max_tokens=LENGTH) for id in ids]
        self.requests.add([OpenRequest(s, stream) for s in submissions])

    @precondition(lambda self: self.worker is None)
    @rule()
    def start(self) -> None:
        self.worker = Worker()
        self.requests.worker_ready(self.worker.handle)

    @precondition(lambda self: self.worker is not None and self.running)
    @rule(pick=picks, steps=st.integers(1, 120))
    def generate(self, pick: int, steps: int) -> None:
        self.advance(self.running[pick % len(self.running)], steps)

    def advance(self, id: str, steps: int) -> None:
        """As a worker does that learns of a pause before its next step."""
        assert self.worker is not None
        for _ in range(steps):
            if id not in self.running:
                return
            at = self.worker.open[id]
            self.worker.open[id] += 1
            outputs: list[Output] = [TokenOutput(id, at % 97, at, -1.0, TOP)]
            if at + 1 == LENGTH:
                outputs.append(FinishedOutput(id, "length", 1, LENGTH, 0, 0))
                del self.worker.open[id]
            for output in outputs:
                self.requests.deliver(output)
            self.requests.dispatch()

    @precondition(lambda self: self.streams)
    @rule(pick=picks, times=st.integers(1, 6))
    def take(self, pick: int, times: int) -> None:
        id = [*self.streams][pick % len(self.streams)]
        for _ in range(times):
            self.drain(self.streams[id])

    @precondition(lambda self: self.streams)
    @rule(pick=picks)
    def leave(self, pick: int) -> None:
        gone = self.streams[[*self.streams][pick % len(self.streams)]]
        self.streams = {id: stream for id, stream in self.streams.items() if stream is not gone}
        gone.close()

    @precondition(lambda self: self.worker is not None)
    @rule(pick=picks, known=st.booleans())
    def die(self, pick: int, known: bool) -> None:
        """The worker, with one request in flight, if any runs and that is known."""
        flying = [self.running[pick % len(self.running)]] if known and self.running else []
        self.worker = None
        self.requests.worker_died(flying)
        self.suspects |= {id for id in self.streams if self.suspicions.suspect(id)}

    # -- what must hold ---------------------------------------------------------------------------

    def turn(self) -> None:
        """Let the loop turn until all slices of many requests have been sent."""
        while self.timers.step():
            pass

    @invariant()
    def both_sides_agree(self) -> None:
        self.turn()
        present = self.requests._open
        if self.worker is not None:
            assert {*self.worker.open} == {id for id, r in present.items() if r.sent}
            assert self.worker.paused == {id for id, r in present.items() if r.sent and r.paused}
        for id, request in present.items():
            suspect = self.suspicions.suspect(id)
            assert request.paused == (request.stream.paused and not suspect)

    @invariant()
    def what_nobody_reads_is_bounded(self) -> None:
        for id, stream in self.streams.items():
            together = {i for i, o in self.streams.items() if o is stream}
            if self.suspects.isdisjoint(together):
                assert stream.unread <= stream.most + len(together) * (2 + len(TOP)), id

    def teardown(self) -> None:
        if self.worker is None:
            self.start()
        assert self.worker is not None
        while self.worker.open or any(o.unread for o in self.streams.values()):
            self.turn()
            for stream in [*self.streams.values()]:
                self.drain(stream)
            for id in self.running:
                self.advance(id, LENGTH)
        assert len(self.requests) == 0
        for id in self.streams:
            *tokens, end = self.read[id]
            if isinstance(end, FailedOutput):
                assert end.code == "poison"
                continue
            assert isinstance(end, FinishedOutput)
            assert [t.index for t in tokens if isinstance(t, TokenOutput)] == [*range(LENGTH)]

    # -- by what means ----------------------------------------------------------------------------

    @property
    def running(self) -> list[str]:
        """Requests that the worker computes."""
        assert self.worker is not None
        return [id for id in self.worker.open if id not in self.worker.paused]

    def drain(self, stream: OutputStream) -> None:
        """Take once what is there."""
        if stream.unread:
            reading = stream.take()
            try:
                while reading.send(None) is None:
                    pass  # it lets the loop's other work pass
            except StopIteration as done:
                for output in done.value:
                    assert size(output) > 0
                    self.read[output.request_id].append(output)
            else:
                raise AssertionError("it waits, though something is there")


TestFlowControl = FlowControl.TestCase
TestFlowControl.settings = settings(
    max_examples=tries(20, all=60), stateful_step_count=30, deadline=None
)
