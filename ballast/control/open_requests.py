"""Queue the open requests of one device, send them to its worker, and deliver their outputs.

Used by `DeviceRecord`, the server's state of a device; admission to the batch is the worker's. A
request is kept until it ends, so that the next worker can continue it after a crash. Requests that
were in flight at two crashes are sent alone (`suspicion`).
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial

from ballast.control.activation_admission import ActivationAdmission
from ballast.control.fairness import chosen, counted
from ballast.control.open_request import OpenRequest
from ballast.control.suspicion import Suspicions
from ballast.control.timers import Timer, Timers
from ballast.core.errors import BrokenPromise
from ballast.core.event import CancelledOutput, FailedOutput, FinishedOutput, Output, TokenOutput
from ballast.core.migration import DropKvEvent
from ballast.core.model import ModelSpec
from ballast.core.view import Residency
from ballast.transport.worker_messages.codec import ToWorker
from ballast.transport.worker_messages.migration_messages import MigrationOrderMsg
from ballast.transport.worker_messages.request_messages import (
    FlowControlMsg,
    SubmitMsg,
    WithdrawMsg,
)

log = logging.getLogger(__name__)

MOST_AT_ONCE = 64
"""Requests that are sent in one turn of the caller's loop: thousands take it, and the worker's loop
after it, a tenth of a second and more."""
POISON = "poison"
"""Code of `FailedOutput` for a request that killed workers, the last one while it ran alone."""


class OpenRequests:
    """The open requests of one device, in order of arrival; as a collection, their ids."""

    def __init__(
        self,
        suspicions: Suspicions,
        timers: Timers,
        queue_of: Callable[[str], tuple[ModelSpec, ModelSpec] | None],
        began: Callable[[str], object] = lambda request_id: None,
        residency_of: Callable[[str], str | None] = lambda model: Residency.RESIDENT.value,
    ) -> None:
        """`queue_of`: returns a model or adapter and its base by the former's name; None: unknown.
        `began`: called once per request when this device has generated a token of it and has a full
        block of its KV. `residency_of`: returns the state of a base's weights, as last reported;
        None: unknown."""
        self._suspicions, self._timers = suspicions, timers
        self._queue_of = queue_of
        self._began = began
        self._activations = ActivationAdmission(timers, self._base_of, residency_of, self.reported)
        self._open: dict[str, OpenRequest] = {}
        self._withdrawn: set[str] = set()
        """Ids of requests that the worker was told to end, and whose end it has not sent: until
        then its outputs for them are not for those of this id that may come back meanwhile."""
        self._silent: Counter[str] = Counter()
        """Number of requests without a token yet, by model."""
        self._alone: str | None = None
        """Id of the suspect that runs alone at the worker."""
        self._send: Callable[[ToWorker], None] | None = None
        """Sends a message to the worker; None while no worker serves."""
        self._next_slice: Timer | None = None
        """Sends the requests that exceeded MOST_AT_ONCE."""
        self._paused = False
        self._changed = False
        """Whether a request may have become sendable since the last `dispatch`."""

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[str]:
        return iter(self._open)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    @property
    def holding(self) -> bool:
        """Whether new requests wait here: no worker serves, or a suspect runs alone."""
        return self._send is None or self._alone is not None

    @property
    def sent(self) -> list[str]:
        """Ids of the requests that the worker has."""
        return [r.submission.id for r in self._open.values() if r.sent]

    def get(self, request_id: str) -> OpenRequest | None:
        return self._open.get(request_id)

    def count(self, base: ModelSpec) -> int:
        """Count the requests of a model and its adapters."""
        return len(self._of(base))

    def count_silent(self, base: ModelSpec) -> int:
        """Count the requests of a model and its adapters without a token yet."""
        return sum(self._silent[s.name] for s in base.served)

    def add(self, requests: Iterable[OpenRequest]) -> None:
        """Add requests, new or from another device, and send those that may be sent."""
        for request in requests:
            request.sent = request.begun = request.departing = request.resuming = False
            if request.arrived is None:
                request.arrived = self._timers.now()
            queue = self._queue_of(request.submission.model)
            request.vocab = None if queue is None else queue[1].vocab
            self._changed = True
            self._open[request.submission.id] = request
            self._silent[request.submission.model] += not request.output_tokens
            if self.holding and not request.accepted:
                self._hold(request)
        self.dispatch()

    def remove(self, request_ids: Iterable[str]) -> list[OpenRequest]:
        """Remove requests that no worker has, for another device to add."""
        gone = [self._open.pop(i) for i in request_ids]
        for request in gone:
            request.cancel_expiry()
            self._drop_kv(request)
            self._silent[request.submission.model] -= not request.output_tokens
        self._changed = True
        self.dispatch()  # others may have waited until one of them had run alone
        return gone

    def hand_over(self, base: ModelSpec) -> list[OpenRequest]:
        """Remove a model's requests, except suspects, for another device to add. The worker ends
        those that it has; further outputs of them are dropped."""
        ids = [r.submission.id for r in self._of(base)]
        ids = [i for i in ids if not self._suspicions.suspect(i)]
        sent = tuple(i for i in ids if self._open[i].sent)
        gone = self.remove(ids)
        self._end_at_worker(sent)
        return gone

    def take_back(self, request_id: str) -> OpenRequest:
        """Remove a request that the worker has, for another device to add."""
        (gone,) = self.remove([request_id])
        self._end_at_worker((request_id,))
        return gone

    def _drop_kv(self, request: OpenRequest) -> None:
        """Have the worker drop KV that it has imported for a request that it will not get."""
        if request.kv_waits and self._send is not None:
            self._send(MigrationOrderMsg.of(DropKvEvent(request.submission.id)))
        request.kv_waits = False

    def _end_at_worker(self, sent: tuple[str, ...]) -> None:
        """Have the worker end requests that are not open here any more."""
        if sent and self._send is not None:
            self._withdrawn.update(sent)
            self._send(WithdrawMsg(sent))

    def running(self, base: ModelSpec) -> list[str]:
        """Return the ids of a model's requests that the worker may be running, except suspects."""
        ids = [r.submission.id for r in self._of(base) if r.sent and not r.paused]
        return [i for i in ids if not self._suspicions.suspect(i)]

    def movable(self, in_flight: Iterable[str]) -> list[OpenRequest]:
        """Return the requests that may move to another device: not sent, not suspect, and not
        `in_flight` when the worker died."""
        kept = set(in_flight)
        return [
            r
            for i, r in self._open.items()
            if i not in kept and not r.sent and not self._suspicions.suspect(i)
        ]

    def withdraw(self, request_ids: Iterable[str]) -> None:
        """End requests whose client has left; further outputs of them are dropped."""
        ended = [self._close(i) for i in request_ids if i in self._open]
        self._end_at_worker(tuple(r.submission.id for r in ended if r.sent))
        self.dispatch()

    def set_paused(self, request_ids: Iterable[str], paused: bool) -> None:
        """Pause requests, or resume them. A suspect is not paused: all others wait for its end."""
        requests = [self._open[i] for i in request_ids if i in self._open]
        if paused:
            requests = [r for r in requests if not self._suspicions.suspect(r.submission.id)]
        requests = [r for r in requests if r.paused != paused]
        for request in requests:
            request.paused = paused
            # The worker would activate an absent model for it, as for a new request.
            may_wait = request.activations_per_minute is not None and not self._paused
            absent = may_wait and self._activations.is_absent(request.submission.model)
            request.resuming = request.sent and not paused and absent
            self._changed = True
        sent = tuple(r.submission.id for r in requests if r.sent and not r.resuming)
        if sent and self._send is not None:
            self._send(FlowControlMsg(paused=sent) if paused else FlowControlMsg(resumed=sent))
        self.dispatch()

    def fail_all(self, code: str, reason: str) -> None:
        """End all requests with an error, here and at the worker."""
        ended = list(self._open.values())
        self.withdraw(list(self._open))
        for request in ended:
            request.stream.put(FailedOutput(request.submission.id, code, reason))

    def fail_model(self, base: ModelSpec, code: str, reason: str, *, begun: bool = False) -> None:
        """End the requests of a model and its adapters that no worker has with an error; `begun`:
        only those whose clients have a part of the answer."""
        for request in self._of(base):
            has_part = bool(request.output_tokens or request.scored)
            if not request.sent and (has_part or not begun):
                self._fail(request, code, reason)

    def worker_ready(self, send: Callable[[ToWorker], None]) -> None:
        """Send requests to a worker from now on."""
        self._send = send
        self._changed = True
        self.dispatch()

    def worker_died(self, recorded: Iterable[str] | None) -> list[str]:
        """Keep the requests of a worker that has died for the next one.

        `recorded`: ids of the requests in its job; empty: unknown, all that were sent count; None:
        its host is gone, none is to blame. Returns these ids. A suspect that ran alone fails.
        """
        self._send = None
        self._withdrawn.clear()
        self._activations.worker_died()
        to_blame = [] if recorded is None else list(recorded) or self.sent
        in_flight = [i for i in to_blame if i in self._open]
        for request in self._open.values():
            request.sent = request.begun = request.departing = request.resuming = False
            request.kv_waits = False
        self._judge(in_flight)
        for id, request in self._open.items():  # the set of suspects may have changed
            request.paused = request.stream.paused and not self._suspicions.suspect(id)
        return in_flight

    def pause(self) -> None:
        """Send no more requests to the worker; those that it has go on."""
        self._paused = True

    def reported(self) -> None:
        """Handle a report of the worker: requests may be sent that waited until models were
        resident."""
        if self._activations.turned_away:
            self._changed = True
            self.dispatch()

    def dispatch(self) -> None:
        """Send the requests that may be sent: the latest suspect alone, else those within their
        keys' fair shares."""
        if self._send is None or self._paused or not self._changed or self._next_slice:
            return
        if self._alone is not None and self._alone in self._open:
            return
        self._changed = False
        resuming = [r for r in self._open.values() if r.resuming]
        idle = (r for r in self._open.values() if not r.sent and not r.paused)
        waiting = [r for r in idle if r.submission.id not in self._withdrawn]
        suspects = []
        if self._suspicions.has_any:
            suspects = [r for r in waiting if self._suspicions.suspect(r.submission.id)]
        self._alone = None
        if suspects:  # the likeliest culprit came last
            waiting, resuming = suspects[-1:], []
            self._alone = waiting[0].submission.id
            log.warning("%s runs alone: it was in flight at two crashes", self._alone)
        else:
            held = self._activations.held_models([*resuming, *waiting], self._active_models)
            resuming = [r for r in resuming if self._base_of(r.submission.model) not in held]
            waiting = self._fair(waiting, held)
        if resuming:
            for request in resuming:
                request.resuming = False
            self._send(FlowControlMsg(resumed=tuple(r.submission.id for r in resuming)))
        if len(waiting) > MOST_AT_ONCE:
            waiting, self._changed = waiting[:MOST_AT_ONCE], True
            self._next_slice = self._timers.call_later(0.0, self._send_next_slice)
        if waiting:
            now = self._timers.now()
            self._send(SubmitMsg.of(r.next_submission(now) for r in waiting))

    def _send_next_slice(self) -> None:
        self._next_slice = None
        self.dispatch()

    def deliver(self, output: Output) -> None:
        """Put a worker's output into its client's stream, unless the client has it already."""
        if output.request_id in self._withdrawn:
            if isinstance(output, FinishedOutput | FailedOutput | CancelledOutput):
                self._withdrawn.discard(output.request_id)
                self._changed = True
            return
        request = self._open.get(output.request_id)
        if request is None or (request.departing and isinstance(output, CancelledOutput)):
            return  # withdrawn meanwhile, or about to move to another device
        try:
            undelivered = request.undelivered_part(output, self._timers.now())
        except BrokenPromise as error:
            log.error("%s", error)
            self.withdraw([output.request_id])
            request.stream.put(FailedOutput(output.request_id, "internal_error", str(error)))
            return
        if undelivered is None:
            return
        if len(request.output_tokens) == 1 and isinstance(undelivered, TokenOutput):
            self._silent[request.submission.model] -= 1
        if isinstance(output, FinishedOutput | FailedOutput | CancelledOutput):
            self._close(output.request_id)
        request.stream.put(undelivered)
        if not request.begun and isinstance(undelivered, TokenOutput):
            queue = self._queue_of(request.submission.model)
            request.begun = queue is None or request.has_block(queue[1])
            if request.begun:
                self._began(output.request_id)

    def _active_models(self) -> set[str]:
        names = {r.submission.model for r in self._open.values() if r.is_active}
        return {self._base_of(name) for name in names}

    def _fair(self, waiting: Sequence[OpenRequest], held: Collection[str]) -> list[OpenRequest]:
        """Return the waiting requests to send now: all without a key, and those within their keys'
        fair shares whose models are not `held`. The others fail after their model's
        `queue_seconds`."""
        bases: dict[str, ModelSpec] = {}
        by_base: defaultdict[str, list[OpenRequest]] = defaultdict(list)
        found = []
        for request in waiting:
            bounded = request.key or request.activations_per_minute is not None
            queue = self._queue_of(request.submission.model) if bounded else None
            if queue is None:
                found.append(request)
                continue
            spec, base = queue
            bases[base.name] = base
            by_base[base.name].append(request)
            if spec.queue_seconds is not None and request.fresh and request.expiry is None:
                expire = partial(self._expire, request.submission.id)
                request.expiry = self._timers.call_later(spec.queue_seconds, expire)
        for name, requests in by_base.items():
            if name not in held:
                base = bases[name]
                at_worker = counted(self._of(base), base.max_running)
                found += chosen(requests, at_worker, base.max_running)
        return found

    def _of(self, base: ModelSpec) -> list[OpenRequest]:
        """Return the requests of a model and its adapters."""
        names = {s.name for s in base.served}
        return [r for r in self._open.values() if r.submission.model in names]

    def _base_of(self, model: str) -> str:
        """Return the name of the base of a model or adapter; empty if it is unknown."""
        queue = self._queue_of(model)
        return "" if queue is None else queue[1].name

    def _expire(self, request_id: str) -> None:
        """Fail a request that has waited here for its model's `queue_seconds`."""
        request = self._open.get(request_id)
        if request is not None and request.fresh:
            reason = "it was not admitted in the time that its model gives requests to wait"
            self._fail(request, "queue_timeout", reason)

    def _hold(self, request: OpenRequest) -> None:
        """Accept a request that cannot be sent now; fail it beyond its model's `max_waiting`."""
        model = request.submission.model
        queue = self._queue_of(model)
        most = None if queue is None else queue[0].max_waiting
        held = sum(r.fresh and r.submission.model == model for r in self._open.values())
        if most is not None and held > most:
            self._fail(request, "queue_full", f"{most} requests of {model!r} wait already")
        request.accepted = True

    def _judge(self, in_flight: Sequence[str]) -> None:
        alone, self._alone = self._alone, None
        self._suspicions.crashed(in_flight)
        if alone is None or alone not in in_flight:
            return
        log.error("%s kills workers; it fails", alone)
        self._suspicions.convict(alone)
        reason = "the worker died whenever this request ran, the last time with nothing beside it"
        self._fail(self._open[alone], POISON, reason)

    def _fail(self, request: OpenRequest, code: str, reason: str) -> None:
        """End a request with an error, without a message to the worker."""
        self._close(request.submission.id)
        request.stream.put(FailedOutput(request.submission.id, code, reason))

    def _close(self, request_id: str) -> OpenRequest:
        request = self._open.pop(request_id)
        self._changed = True
        request.cancel_expiry()
        self._drop_kv(request)
        if not request.output_tokens:
            self._silent[request.submission.model] -= 1
        request.stream.open.discard(request_id)
        self._suspicions.forget(request_id)
        return request
