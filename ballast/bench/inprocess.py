"""Run a live device in this process, its loop on a thread, for benchmarks and exactness checks.

Used by `benchmarks` only; without server, controller or worker process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from ballast.cluster.machine_choice import machine_of
from ballast.core.cost import StepCosts
from ballast.core.event import (
    ArrivalEvent,
    CancelEvent,
    DrainEvent,
    EmbeddingOutput,
    FinishedOutput,
    Output,
    PromptScoresOutput,
    StopEvent,
    TokenOutput,
)
from ballast.core.request import Submission
from ballast.core.settings import FleetSettings
from ballast.isolation.calls import Isolation
from ballast.live.device import LiveDevice
from ballast.live.kv_tiers import KvConnection
from ballast.live.machine import MakeMachine


@dataclass(slots=True)
class Answer:
    """Outputs of one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    tops: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    prompt: list[PromptScoresOutput] = field(default_factory=list)
    embedding: bytes | None = None
    times: list[float] = field(default_factory=list)
    """When each token left the loop."""
    end: Output | None = None

    @property
    def finished(self) -> FinishedOutput:
        """The successful end; raises AssertionError with the reason for any other."""
        assert isinstance(self.end, FinishedOutput), self.end
        return self.end


class InProcess:
    """Context manager: builds the device, runs its loop, drains on exit.

    `listen(now, output)` is called on the loop's thread for every output. `isolation` and
    `kv_store`: as of `LiveDevice`.
    """

    def __init__(
        self,
        fleet: FleetSettings,
        *,
        costs: Mapping[str, StepCosts] | None = None,
        make_machine: MakeMachine = machine_of,
        isolation: Isolation | None = None,
        kv_store: KvConnection | None = None,
    ) -> None:
        self.answers: dict[str, Answer] = {}
        self.listen: Callable[[float, Output], None] | None = None
        self._ended = threading.Condition()
        self._open = 0
        self.device = LiveDevice(
            fleet,
            self._hear,
            costs=costs,
            make_machine=make_machine,
            isolation=isolation,
            kv_store=kv_store,
        )
        self._crash: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="loop", daemon=True)

    def __enter__(self) -> InProcess:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.device.post(DrainEvent() if kind is None else StopEvent("the caller failed"))
        self._thread.join()
        self.device.close()
        if self._crash is not None:
            raise self._crash

    def drain(self) -> None:
        """Wait until all requests and the loop have ended: until the context is left, only the
        caller changes the device."""
        self.device.post(DrainEvent())
        self._thread.join()
        if self._crash is not None:
            raise self._crash

    @property
    def now(self) -> float:
        """Seconds on the device's clock."""
        return self.device.clock.now()

    def submit(self, *submissions: Submission) -> None:
        """Hand requests in, several of them at once; each one's answer grows in `answers`."""
        with self._ended:
            self.answers |= {s.id: Answer() for s in submissions}
            self._open += len(submissions)
        self.device.inbox.post(*(ArrivalEvent(s) for s in submissions))

    def cancel(self, request_id: str) -> None:
        """Cancel a request, as when its client disconnects."""
        self.device.post(CancelEvent(request_id))

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until every submitted request has ended; returns False after the timeout."""
        with self._ended:
            done = self._ended.wait_for(lambda: self._open == 0 or self._crash, timeout)
        if self._crash is not None:
            raise self._crash
        return bool(done)

    def generate(self, submissions: Sequence[Submission]) -> dict[str, Answer]:
        """Submit all requests to the same turn of the loop; returns when all have ended."""
        self.submit(*submissions)
        self.wait()
        return {s.id: self.answers[s.id] for s in submissions}

    def _run(self) -> None:
        try:
            self.device.run()
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
            with self._ended:
                self._crash = error
                self._ended.notify_all()

    def _hear(self, outputs: list[Output]) -> None:
        now = self.device.clock.now()
        ended = 0
        for output in outputs:
            answer = self.answers[output.request_id]
            if isinstance(output, TokenOutput):
                answer.tokens.append(output.token)
                answer.logprobs.append(output.logprob)
                answer.tops.append(output.top)
                answer.times.append(now)
            elif isinstance(output, PromptScoresOutput):
                answer.prompt.append(output)
            elif isinstance(output, EmbeddingOutput):
                answer.embedding = output.values
            else:
                answer.end = output
                ended += 1
            if self.listen is not None:
                self.listen(now, output)
        if ended:
            with self._ended:
                self._open -= ended
                self._ended.notify_all()
