"""Devices, requests and messages around `control.migrations`, in steps that a test orders.

A device answers as the engine does: an export gives the KV so far, a departure what has followed
it. Messages between the controller and one device keep their order; those of different devices do
not. A worker that dies takes its messages with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ballast.control.migration_events import (
    ActivationRefusedEvent,
    AnsweredEvent,
    BatchEnded,
    ContinueRequest,
    DeviceLostEvent,
    Event,
    LookEvent,
    MarkDeparting,
    OpenAtSource,
    OrderActivation,
    SendStep,
)
from ballast.control.migrations import Migrations
from ballast.core.migration import (
    DepartedAnswer,
    DepartEvent,
    DropKvEvent,
    ExportKvEvent,
    ImportKvEvent,
    KvExportedAnswer,
    KvImportedAnswer,
    KvTailEvent,
    MigrationAnswer,
    Piece,
)
from ballast.core.request import Submission
from ballast.transport.worker_messages.request_messages import WithdrawMsg

BLOCK = 2
"""Tokens of a block."""
ToDevice = (
    ExportKvEvent
    | DepartEvent
    | ImportKvEvent
    | KvTailEvent
    | DropKvEvent
    | OrderActivation
    | WithdrawMsg
    | ContinueRequest
)


@dataclass
class Request:
    """A request as the controller knows it."""

    submission: Submission
    device: str
    output: list[int] = field(default_factory=list)
    departing: bool = False
    ended: bool = False


@dataclass
class Worker:
    """A device's worker: requests that it runs, by their number of tokens, and imported KV."""

    weights: set[str]
    refuses: bool = False
    mute: bool = False
    """Whether it never answers."""
    runs: dict[str, int] = field(default_factory=dict)
    exported: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Tokens exported, and the attempt."""
    imported: dict[str, int] = field(default_factory=dict)
    adopted: dict[str, int] = field(default_factory=dict)
    """Tokens of KV that a request found here when it came."""
    departing: dict[str, int] = field(default_factory=dict)
    """By request, the attempt."""


class World:
    """Implements `Devices` over workers, and carries out instructions."""

    def __init__(self, workers: dict[str, Worker], decode: Sequence[str] = ()) -> None:
        self.workers = workers
        self.down: set[str] = set()
        self.far: set[tuple[str, str]] = set()
        """Source and target between which a copy would take too long."""
        self.decode = decode
        self.requests: dict[str, Request] = {}
        self.to_device: dict[str, deque[ToDevice]] = {name: deque() for name in workers}
        self.to_controller: dict[str, deque[MigrationAnswer | ActivationRefusedEvent]] = {
            name: deque() for name in workers
        }
        self.ended: list[BatchEnded] = []
        self.now = 0.0
        self.machine = Migrations(self)

    def add(self, request_id: str, device: str, prompt: int = 5) -> None:
        """Let a request run on a device, with one token of output."""
        submission = Submission(id=request_id, model="m", prompt=(1,) * prompt, max_tokens=100)
        self.requests[request_id] = Request(submission, device, [7])
        self.workers[device].runs[request_id] = prompt + 1

    # -- `Devices` --------------------------------------------------------------------------------

    def is_up(self, device: str) -> bool:
        return device not in self.down

    def offer(self, source: str, target: str, pieces: Sequence[Piece]) -> str | None:
        return None if (source, target) in self.far else source

    def has_weights(self, device: str, model: str) -> bool:
        return device not in self.down and model in self.workers[device].weights

    def others(self, device: str, model: str) -> Sequence[str]:
        return [name for name in self.workers if name != device and name not in self.down]

    def leaves(self, device: str, model: str) -> bool:
        return False

    def running(self, device: str, model: str) -> Sequence[str]:
        return [i for i, r in self.requests.items() if r.device == device and not r.ended]

    def open_at(self, device: str, request_id: str) -> OpenAtSource | None:
        found = self.requests[request_id]
        if found.ended or found.device != device:
            return None
        return OpenAtSource(found.submission, tuple(found.output))

    def base_of(self, device: str, name: str) -> str | None:
        return "m"

    def choose(self, submission: Submission, devices: Sequence[str]) -> str:
        return devices[0]

    def choose_for_decode(self, submission: Submission, devices: Sequence[str]) -> str | None:
        return next((name for name in devices if name in self.decode), None)

    # -- steps ------------------------------------------------------------------------------------

    def tell(self, event: Event) -> None:
        """Hand an event to the machine, and carry out its instructions."""
        for told in self.machine.handle(self.now, event):
            match told:
                case SendStep(device, step):
                    self._send(device, step)
                case OrderActivation(device, _, _):
                    self._send(device, told)
                case MarkDeparting(source, request_id):
                    assert self.requests[request_id].device == source
                    self.requests[request_id].departing = True
                case ContinueRequest(request_id, source, target, _, departed):
                    if not departed:
                        self._send(source, WithdrawMsg((request_id,)))
                    request = self.requests[request_id]
                    assert request.device == source, f"{request_id} was not at {source}"
                    assert not request.ended, f"{request_id} goes on after its end"
                    request.device, request.departing = target, False
                    self._send(target, told)
                case BatchEnded():
                    self.ended.append(told)

    def _send(self, device: str, message: ToDevice) -> None:
        if device not in self.down:
            self.to_device[device].append(message)

    def deliver(self, device: str) -> None:
        """Let a device handle the next message to it."""
        worker = self.workers[device]
        message = self.to_device[device].popleft()
        match message:
            case ExportKvEvent(i, attempt):
                tokens = worker.runs.get(i, 0) // BLOCK * BLOCK
                worker.exported[i] = tokens, attempt
                self._answer(device, KvExportedAnswer(i, tokens, "f", ((0, 8),), attempt))
            case ImportKvEvent(prefix, attempt=attempt):
                fits = "m" in worker.weights
                if fits:
                    worker.imported[prefix.id] = len(prefix.prompt)
                tokens = len(prefix.prompt) * fits
                self._answer(device, KvImportedAnswer(prefix.id, tokens, attempt))
            case DepartEvent(i, attempt):
                worker.departing[i] = attempt
                if i not in worker.runs:
                    self._depart(device, i)
            case KvTailEvent(i, tokens):
                assert i in worker.imported, f"a tail of {i} without what is before it"
                worker.imported[i] += tokens
            case DropKvEvent(i):
                worker.imported.pop(i, None)
            case OrderActivation():
                if worker.refuses:
                    self._answer(device, ActivationRefusedEvent(device, "m"))
                else:
                    worker.weights.add("m")
            case WithdrawMsg((i,)):
                worker.runs.pop(i, None)
                worker.departing.pop(i, None)
            case ContinueRequest(i, _, _, with_kv, _):
                request = self.requests[i]
                tokens = len(request.submission.prompt) + len(request.output)
                worker.runs[i] = tokens
                worker.adopted[i] = worker.imported.pop(i, 0)
                if with_kv:
                    assert worker.adopted[i] == tokens // BLOCK * BLOCK, f"{i} lacks KV"

    def _answer(self, device: str, answer: MigrationAnswer | ActivationRefusedEvent) -> None:
        if not self.workers[device].mute:
            self.to_controller[device].append(answer)

    def compute(self, device: str) -> None:
        """Let a device compute one token of each request, and let those depart that can."""
        worker = self.workers[device]
        for i in list(worker.runs):
            if i in worker.departing and worker.runs[i] % BLOCK == 0:
                self._depart(device, i)
                continue
            worker.runs[i] += 1
            if self.requests[i].device == device:  # else it is about to be withdrawn
                self.requests[i].output.append(7)

    def finish(self, device: str) -> None:
        """Let the requests of a device end."""
        worker = self.workers[device]
        for i in list(worker.runs):
            del worker.runs[i]
            if self.requests[i].device == device:
                self.requests[i].ended = True
            if i in worker.departing:
                self._depart(device, i)

    def _depart(self, device: str, i: str) -> None:
        worker = self.workers[device]
        attempt = worker.departing.pop(i)
        computed = worker.runs.pop(i, None)
        tokens, exported = worker.exported.get(i, (0, -1))
        intact = computed is not None and exported == attempt
        tail = computed - tokens if computed is not None and intact else 0
        self._answer(device, DepartedAnswer(i, intact, tail, attempt=attempt))

    def hear(self, device: str) -> None:
        """Hand the next message of a device to the machine."""
        answer = self.to_controller[device].popleft()
        match answer:
            case ActivationRefusedEvent():
                self.tell(answer)
            case _:
                self.tell(AnsweredEvent(device, answer))

    def pass_time(self) -> None:
        """Let time pass up to the next deadline."""
        if self.machine.due < float("inf"):
            self.now = max(self.now, self.machine.due)
        self.tell(LookEvent())

    def kill(self, device: str) -> None:
        """Let a worker die. The next one starts at once and gets the requests again."""
        weights, refuses = self.workers[device].weights, self.workers[device].refuses
        self.workers[device] = Worker(set(weights), refuses)
        self.to_device[device].clear()
        self.to_controller[device].clear()
        self.down.add(device)
        for request in self.requests.values():
            if request.device == device:
                request.departing = False
        self.tell(DeviceLostEvent(device))
        self.down.discard(device)
        for i, request in self.requests.items():
            if request.device == device and not request.ended:
                self._send(device, ContinueRequest(i, device, device, False, True))

    def settle(self) -> None:
        """Deliver everything, and let time pass until no migration is open."""
        while True:
            for name in self.workers:
                while self.to_device[name]:
                    self.deliver(name)
                while self.to_controller[name]:
                    self.hear(name)
                self.compute(name)
            departing = any(worker.departing for worker in self.workers.values())
            messages = (*self.to_device.values(), *self.to_controller.values())
            if not any(messages) and not departing:
                if not self.machine.busy:
                    return
                self.pass_time()

    def validate(self) -> None:
        """Assert that every open request runs on the one device that the controller thinks, and
        that no KV is kept for a request that does not come."""
        for i, request in self.requests.items():
            at = [name for name, worker in self.workers.items() if i in worker.runs]
            assert at == ([] if request.ended else [request.device]), f"{i}: {at}"
            assert not request.departing or request.ended
        for name, worker in self.workers.items():
            assert not worker.imported, f"{name} keeps KV of {list(worker.imported)}"
            assert not worker.departing, f"{name}: {worker.departing}"
