"""What is true on one device. Facts change through `handle(event)`, which returns what to say."""

from __future__ import annotations

from collections.abc import Callable

from ballast.core.actions import Short
from ballast.core.clock import Clock
from ballast.core.event import (
    Arrival,
    Cancel,
    Cancelled,
    Drain,
    Event,
    Failed,
    Finished,
    JobDone,
    JobFailed,
    Output,
    PromptScores,
    Settled,
    Stop,
    Timer,
    TokenOut,
    TransferDone,
)
from ballast.core.job import Job, Sampled, SequenceWork
from ballast.core.lease import AskedBack, Lent, PeerGone, PeerMet, Returned
from ballast.core.model import weight_pages
from ballast.core.request import Request, State
from ballast.core.rotation import Rotation
from ballast.core.settings import DeviceSettings
from ballast.core.view import Residency
from ballast.engine import swapping
from ballast.engine.admission import finish_reason, fitted, refusal
from ballast.engine.lanes import Lanes
from ballast.engine.lending import Heard, Lending
from ballast.engine.model import ModelState
from ballast.engine.patience import Patience
from ballast.kv.swapper import MakeSwapper
from ballast.memory.arena import Arena
from ballast.memory.pool import Pool
from ballast.memory.transfer import Link
from ballast.weights.rotor import MakeRotor
from ballast.weights.shared import SharedSegment


class DeviceState:
    """All facts of one device. Mechanisms (pool, KV caches, weights) hang below it."""

    def __init__(
        self,
        settings: DeviceSettings,
        models: list[ModelState],
        pool: Pool,
        arena: Arena,
        graphs: Arena,
        link: Link,
        clock: Clock,
        lending: Lending,
        make_rotor: MakeRotor | None = None,
        make_swapper: MakeSwapper | None = None,
    ) -> None:
        self.settings = settings
        self.models: dict[str, ModelState] = {}
        """Replaced, never changed: other threads look at it."""
        self.named: dict[str, tuple[ModelState, int | None]] = {}
        """What requests may ask for: models, and (base, index) of adapters."""
        self.shared: tuple[SharedSegment, ...] = ()
        """Segments that several models contain, or did."""
        for m in models:
            self.enrol(m)
        self.pool = pool
        self.lending = lending
        self.link = link
        self.make_rotor, self.make_swapper = make_rotor, make_swapper
        """For models that join."""
        self.clock = clock
        self.now = clock.now()
        """Of the loop's present turn, or its last, as is the next: what a turn does follows from
        them and its events, so that the story, which tells them all, replays to the same."""
        self.link_bytes_per_second = link.bytes_per_second
        self.arena, self.graphs = arena, graphs
        self.requests: dict[str, Request] = {}
        self.patience = Patience(self.requests)
        self.lanes = Lanes(settings)
        self.asking = True
        """Something happened that a policy should know of."""
        self.freed = 0
        """Grows whenever pages or blocks become free: a blocked admission is worth trying again."""
        self.draining = False
        self.stopped: str | None = None
        self.jobs = 0
        self._sequence = 0
        self._transfers = 0
        self._handlers: dict[type, Callable[..., list[Output]]] = {
            Arrival: self._arrival,
            Cancel: self._cancel,
            JobDone: self._job_done,
            JobFailed: self._job_failed,
            TransferDone: self._transfer_done,
            Settled: self._settled,
            Timer: self._timer,
            Drain: self._drain,
            Stop: self._stop,
            **dict.fromkeys((PeerMet, PeerGone, Lent, AskedBack, Returned), self._of_peers),
        }

    # -- models ---------------------------------------------------------------------------------

    def enrol(self, m: ModelState) -> None:
        """A model is of the device from now on."""
        self.models = {**self.models, m.spec.name: m}
        self.named[m.spec.name] = m, None
        for i, adapter in enumerate(m.spec.adapters):
            self.named[adapter.name] = m, i
        self._list_shared()

    def unname(self, m: ModelState) -> None:
        """Requests may no longer ask for a model, nor for its adapters."""
        self.named = {name: found for name, found in self.named.items() if found[0] is not m}

    def strike(self, m: ModelState) -> None:
        """A model without requests, job or transfer is gone, with its memory and addresses."""
        self.unname(m)
        m.kv.close()
        m.weights.close()
        self.models = {name: other for name, other in self.models.items() if other is not m}
        self._list_shared()
        self.freed += 1
        self.asking = True

    def _list_shared(self) -> None:
        """Which segments are shared may have changed, and with it what policies see of all."""
        models = self.models.values()
        self.shared = tuple(dict.fromkeys(s for m in models for s in m.weights.shared))
        for m in models:
            self.touch(m)

    # -- events ---------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Output]:
        """Take a fact in; returns what clients are to be told."""
        return self._handlers[type(event)](event)

    def _arrival(self, event: Arrival) -> list[Output]:
        s = event.submission
        m, adapter = self.named.get(s.model, (None, None))
        if self.draining or self.stopped is not None:
            return [Failed(s.id, "unavailable", "the server is draining")]
        if m is None:
            return [Failed(s.id, "model_not_found", f"no model {s.model!r} on this device")]
        if s.id in self.requests:
            return [Failed(s.id, "invalid_request", f"a request {s.id!r} is already open")]
        room = self._room(m)
        s = fitted(s, m, room)
        refused = refusal(s, m, adapter, room)
        if refused is not None:
            return [Failed(s.id, *refused)]
        # The worker that died may have generated all of it.
        reason = finish_reason(m, s, s.resumed[-1], len(s.resumed)) if s.resumed else None
        if s.resumed and reason is not None:
            return [Finished(s.id, reason, len(s.prompt), len(s.resumed), 0, 0)]
        self._sequence += 1
        request = Request.of(s, self._sequence, m.spec, adapter)
        self.requests[s.id] = request
        m.waiting.add(request)
        seconds = m.queue_seconds(adapter)
        if seconds is not None and not s.resumed:
            self.patience.begin(request, seconds)
        self.touch(m)
        m.last_used = s.arrival
        self.asking = True
        return []

    @property
    def set_aside(self) -> int:
        """Pages that are for neither weights nor KV."""
        return self.arena.pages + self.graphs.pages

    def _room(self, m: ModelState) -> int:
        """Pages of KV that one request of `m` could have with the device to itself."""
        there = [o.spec for o in self.models.values() if o.spec.pinned or o is m]
        room = self.pool.total - self.set_aside - weight_pages(there, self.settings.page_bytes)
        return room if m.kv.limit is None else min(room, m.kv.limit)

    def _cancel(self, event: Cancel) -> list[Output]:
        request = self.requests.get(event.request_id)
        if request is None:
            return []
        if request.in_flight:
            request.cancelled = True
            return []
        return [self._end(request, State.CANCELLED, Cancelled(request.id))]

    def _job_done(self, event: JobDone) -> list[Output]:
        m = self._close_job(event.job)
        now = m.last_run = self.now
        m.lane_seconds += event.seconds * self.lanes.share(event.job)
        prefill = any(len(work.tokens) > 1 for work in event.job.work)
        if not m.kv.fixed:
            m.took(event.seconds - event.stall, prefill=prefill)
        m.weights.passed()
        for work in event.job.work:
            request = self.requests[work.request_id]
            request.computed = work.end
        outputs: list[Output] = []
        for result in event.results:
            request = self.requests[result.request_id]
            if request.cancelled:
                continue
            if isinstance(result, Sampled):
                outputs += self._token(m, request, result, now)
            elif isinstance(result, Failed):
                outputs.append(self._end(request, State.FAILED, result))
            else:
                outputs.append(result)
                if isinstance(result, PromptScores):
                    request.unscored = result.start + len(result.logprobs)
        for work in event.job.work:
            open_request = self.requests.get(work.request_id)
            if open_request is None:
                continue
            if open_request.read_only and work.end == len(open_request.tokens):
                if not open_request.cancelled:
                    reason = "stop" if open_request.submission.embed else "length"
                    outputs.append(self._finished(m, open_request, reason))
            else:
                self._remember(m, open_request)
        outputs += self._settle(m, event.job)
        return outputs

    def _token(self, m: ModelState, request: Request, new: Sampled, now: float) -> list[Output]:
        """One more token of a request's output; its last, perhaps."""
        request.tokens.append(new.token)
        queued = None
        if request.first_token_at is None:
            request.first_token_at = now
            assert request.admitted_at is not None
            queued = request.admitted_at - request.submission.arrival
        request.last_token_at = now
        n = request.generated
        told = TokenOut(request.id, new.token, n - 1, new.logprob, new.top, queued)
        reason = "stop" if new.ends else finish_reason(m, request.submission, new.token, n)
        return [told] if reason is None else [told, self._finished(m, request, reason)]

    def _job_failed(self, event: JobFailed) -> list[Output]:
        m = self._close_job(event.job)
        outputs: list[Output] = []
        for work in event.job.work:
            request = self.requests[work.request_id]
            told = Failed(request.id, "internal_error", event.reason)
            outputs.append(self._end(request, State.FAILED, told))
        if m.kv.fixed:
            m.kv.fixed = False
            m.kv.clear()  # what was cached has not been copied either
            swapping.forget(m)
        return outputs + self._settle(m, event.job)

    def _close_job(self, job: Job) -> ModelState:
        m = self.models[job.model]
        m.job = None
        self.lanes.end(job)
        m.last_used = self.now
        self.jobs += 1
        for work in job.work:
            self.requests[work.request_id].in_flight = False
        self.touch(m)
        return m

    def _settle(self, m: ModelState, job: Job) -> list[Output]:
        """What had to wait for the job: cancellations, preemptions, an eviction."""
        outputs: list[Output] = []
        if m.kv.fixed:
            swapping.end(m)
            self.freed += 1
            self.asking = True
        for work in job.work:
            request = self.requests.get(work.request_id)
            if request is not None and request.cancelled:
                outputs.append(self._end(request, State.CANCELLED, Cancelled(request.id)))
        leaving, m.leaving = m.leaving, []
        for request in leaving:
            if request.state is State.RUNNING:
                self.preempt(m, request)
        if m.residency is Residency.EVICTING or m.turning is not None:
            self._make_way(m)
        return outputs

    def _transfer_done(self, event: TransferDone) -> list[Output]:
        m = next(m for m in self.models.values() if m.transfer_id == event.transfer_id)
        m.transfer_id = None
        self.asking = True
        self.touch(m)
        if event.error is None:
            if m.weights.landed():
                self.become(m, Residency.RESIDENT)
            else:
                m.transfer_id = self.next_transfer()
                m.weights.fill(m.transfer_id)
            return []
        m.weights.evict()
        self.become(m, Residency.FAILED)
        self.freed += 1
        reason = f"the weights of {m.spec.name!r} could not be brought in: {event.error}"
        return self.fail_all(m, "model_failed", reason)

    def _settled(self, event: Settled) -> list[Output]:
        m = self.models.get(event.model)
        if m is None or not m.settling:
            return []
        m.settling = False
        if m.residency is Residency.EVICTING:
            self.evict(m)
        elif m.turning is not None:
            self._turn(m, m.turning)
        self.touch(m)
        self.asking = True
        return []

    def _timer(self, event: Timer) -> list[Output]:
        self.lending.check(self.now)
        self.asking = True
        reason = "it was not admitted in the time that its model gives requests to wait"
        overdue = self.patience.over(self.now)
        return [self.fail(request, "queue_timeout", reason) for request in overdue]

    def _of_peers(self, event: Heard) -> list[Output]:
        if self.lending.handle(event):
            self.freed += 1
            self.asking = True
        return []

    def _drain(self, event: Drain) -> list[Output]:
        self.draining = True
        return []

    def _stop(self, event: Stop) -> list[Output]:
        self.stopped = event.reason
        return []

    # -- what happens to requests ---------------------------------------------------------------

    def _finished(self, m: ModelState, request: Request, reason: str) -> Output:
        m.prompt_tokens += request.prompt_tokens
        m.cached_tokens += request.cached_tokens
        m.output_tokens += request.generated - len(request.submission.resumed or ())
        self._remember(m, request)
        told = Finished(
            request.id,
            reason,
            request.prompt_tokens,
            request.generated,
            request.cached_tokens,
            request.preemptions,
        )
        return self._end(request, State.FINISHED, told)

    def _remember(self, m: ModelState, request: Request) -> None:
        """Offer the blocks that have filled to the prefix cache."""
        m.kv.remember(request.tokens, request.blocks, request.computed, request.salt)

    def _end(self, request: Request, state: State, told: Output) -> Output:
        """The request is over; its memory is free."""
        m = self.models[request.model]
        (m.running if request.state is State.RUNNING else m.waiting).remove(request)
        self.release(m, request)
        self._forget_shortage(m, request)
        request.to(state)
        del self.requests[request.id]
        m.last_used = self.now
        self.touch(m)
        self.asking = True
        return told

    def fail_all(self, m: ModelState, code: str, reason: str) -> list[Output]:
        """End every request of a model with an error."""
        return [
            self._end(r, State.FAILED, Failed(r.id, code, reason)) for r in [*m.running, *m.waiting]
        ]

    def fail(self, request: Request, code: str, reason: str) -> Output:
        """End one request, not in flight, with an error."""
        return self._end(request, State.FAILED, Failed(request.id, code, reason))

    @staticmethod
    def _forget_shortage(m: ModelState, request: Request) -> None:
        if m.shortages:
            m.shortages = [s for s in m.shortages if s.request_id != request.id]

    def release(self, m: ModelState, request: Request, *, surrender: bool = False) -> None:
        """Give a request's blocks back; `surrender`: cached prefixes go where that frees pages."""
        if request.blocks:
            m.kv.free(request.blocks, surrender=surrender)
            request.blocks = []
            self.freed += 1
        request.computed = 0

    def preempt(self, m: ModelState, request: Request) -> None:
        """Back to the queue without KV; it will be recomputed, token for token."""
        m.running.remove(request)
        self.release(m, request, surrender=True)
        self._forget_shortage(m, request)
        request.to(State.WAITING)
        request.preemptions += 1
        m.preemptions += 1
        m.waiting.add(request)
        self.touch(m)
        self.asking = True

    def evict(self, m: ModelState) -> None:
        """Weights and KV off the device; no job of the model may be in flight."""
        for request in list(m.running):
            self.preempt(m, request)
        m.shortages = []
        m.blocked = None
        m.kv.clear()
        swapping.forget(m)
        m.weights.evict()
        self.become(m, Residency.ABSENT)
        m.evictions += 1
        self.freed += 1
        self.asking = True

    def begin_swap(self, m: ModelState) -> list[SequenceWork]:
        """The work of a job that changes which layers' KV rotates, if that is due."""
        if m.swap_to is None:
            return []
        work = swapping.begin(m)
        if not work:  # that was all
            self.freed += 1
        self.touch(m)
        return work

    # -- layers that rotate -----------------------------------------------------------------------

    def remap(self, m: ModelState, wanted: Rotation) -> Short | None:
        """These layers of a resident model rotate as soon as nothing stands in the way. Pages that
        it takes more are promised to it now, or nothing changes."""
        owner = m.weights.owner
        self.pool.withdraw(owner)
        back = (m.weights.slots.rotation.lent - wanted.lent) * m.weights.slots.layer_pages
        short = self.pool.promise(owner, max(0, back))
        if short is not None:
            if m.turning is not None:  # what was promised for that is not taken by anybody
                self.pool.promise(owner, max(0, m.pages_to_take))
            return short
        m.turning = wanted
        if m.job is None and not m.settling:
            self._make_way(m)
        self.touch(m)
        return None

    def drive_out(self, m: ModelState) -> None:
        """Evict a model as soon as no job, and no load of a layer, stands in the way."""
        m.turning = None
        self.pool.withdraw(m.weights.owner)
        if m.job is not None or m.weights.stirred:
            self.become(m, Residency.EVICTING)
        if m.job is None:
            self._make_way(m)

    def _make_way(self, m: ModelState) -> None:
        """No job is in flight; once no load is either, the model turns, or goes."""
        if m.weights.rotor is None or not (m.weights.stirred or m.turning is not None):
            self.evict(m)
        elif not m.settling:
            m.settling = True
            m.weights.rotor.settle()

    def _turn(self, m: ModelState, wanted: Rotation) -> None:
        m.turning = None
        if m.weights.turn(wanted) is not None:
            # Its promise is worth less than it was: pages that others were to give back are not
            # there yet. The policy will see, and may ask again; layers stay as they are.
            m.weights.turn(m.weights.slots.rotation)
        self.pool.withdraw(m.weights.owner)
        self.freed += 1

    def become(self, m: ModelState, residency: Residency) -> None:
        """The model's residency, once its weights are so. Who shares segments with it sees that."""
        m.residency = residency
        self.touch(m)
        if m.weights.shared:
            for other in self.models.values():
                if other.weights.shared:
                    self.touch(other)

    def next_transfer(self) -> int:
        """A number for a transfer, never used before on this device."""
        self._transfers += 1
        return self._transfers

    # -- what the loop goes by --------------------------------------------------------------------

    @property
    def in_flight(self) -> bool:
        """Whether an event is bound to come without any client doing anything."""
        on_their_way = (m.transfer_id is not None or m.settling for m in self.models.values())
        return self.lanes.busy or any(on_their_way)

    @property
    def over(self) -> bool:
        """Whether the loop may end."""
        if self.stopped is not None:
            return not self.lanes.busy
        return self.draining and not self.requests and not self.in_flight

    def touch(self, m: ModelState) -> None:
        """The model has changed: its snapshot is stale."""
        m.view = None
