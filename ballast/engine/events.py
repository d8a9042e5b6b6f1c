"""Handle events: apply each event of the inbox to the device's state and return outputs.

Called by the loop, event by event, live and in virtual time. One function for each kind of event;
operators' commands are handled by `commands`. Starts no jobs and asks no policy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ballast.core.event import (
    ArrivalEvent,
    CancelEvent,
    CancelledOutput,
    DrainEvent,
    Event,
    FailedOutput,
    FinishedOutput,
    FirstJobReadyEvent,
    GrammarReadyEvent,
    JobDoneEvent,
    JobFailedEvent,
    Output,
    PauseEvent,
    ResumeEvent,
    RotationSettledEvent,
    StopEvent,
    TimerEvent,
    TransferDoneEvent,
)
from ballast.core.kv_tiers import KvFetchedEvent, KvFoundEvent
from ballast.core.lease import (
    PagesLentEvent,
    PagesRecalledEvent,
    PagesReturnedEvent,
    PeerGoneEvent,
    PeerMetEvent,
)
from ballast.core.migration import (
    DepartEvent,
    DropKvEvent,
    ExportKvEvent,
    ImportKvEvent,
    KvReadEvent,
    KvTailEvent,
)
from ballast.core.request import Request, RequestState, WaitsFor
from ballast.engine import jobs, layer_remap, pausing, places, staging
from ballast.engine.admission import finish_reason, fitted, refusal
from ballast.engine.lending import Heard
from ballast.engine.state import DeviceState


def handle(state: DeviceState, event: Event) -> list[Output]:
    """Apply an event to the state; return outputs for clients."""
    return _HANDLERS[type(event)](state, event)


def _arrival(state: DeviceState, event: ArrivalEvent) -> list[Output]:
    outputs = _arrives(state, event)
    if outputs:
        state.migration.drop(DropKvEvent(event.submission.id))
    return outputs


def _arrives(state: DeviceState, event: ArrivalEvent) -> list[Output]:
    s = event.submission
    m, adapter = state.named.get(s.model, (None, None))
    if state.draining or state.stopped is not None:
        return [FailedOutput(s.id, "unavailable", "the server is draining")]
    if m is None:
        return [FailedOutput(s.id, "model_not_found", f"no model {s.model!r} on this device")]
    if s.id in state.requests:
        return [FailedOutput(s.id, "invalid_request", f"a request {s.id!r} is already open")]
    room = state.room(m)
    longest = staging.longest(m, room, state.settings.step_tokens)
    s = fitted(s, m, room, longest)
    refused = refusal(s, m, adapter, room, longest)
    if refused is not None:
        return [FailedOutput(s.id, *refused)]
    # The worker that died may have generated all of it.
    reason = finish_reason(m, s, s.resumed[-1], len(s.resumed)) if s.resumed else None
    if s.resumed and reason is not None:
        return [FinishedOutput(s.id, reason, len(s.prompt), len(s.resumed), 0, 0)]
    state._sequence += 1
    request = Request.of(s, state._sequence, m.spec, adapter)
    request.streams = m.kv.layout.pages(m.spec.blocks_of(request.most_tokens)) > room
    state.requests[s.id] = request
    state.migration.adopt(m, request)
    m.waiting.add(request)
    state.tiers.look_up(m, request)
    if s.sampling.grammar and state.grammars is not None:
        pausing.pause(state, request, WaitsFor.GRAMMAR)
        state.grammars.prepare(request)
    seconds = m.queue_seconds(adapter)
    if seconds is not None and not s.resumed:
        state.queue_deadlines.begin(request, seconds)
    m.last_used = s.arrival if s.resumed is None else max(m.last_used, s.arrival)
    if s.resumed is None:
        m.traffic = m.traffic.arrived(s.arrival)
    m.longest.add(state.now, request.prompt_tokens)
    return []


def _cancel(state: DeviceState, event: CancelEvent) -> list[Output]:
    request = state.requests.get(event.request_id)
    if request is None:
        return []
    if request.in_flight:
        request.cancelled = True
        return []
    return [state.end(request, RequestState.CANCELLED, CancelledOutput(request.id))]


def _pause(state: DeviceState, event: PauseEvent) -> list[Output]:
    request = state.requests.get(event.request_id)
    if request is not None:
        pausing.pause(state, request, WaitsFor.READER)
    return []


def _resume(state: DeviceState, event: ResumeEvent) -> list[Output]:
    request = state.requests.get(event.request_id)
    if request is not None:
        pausing.resume(state, request, WaitsFor.READER)
    return []


def _grammar_ready(state: DeviceState, event: GrammarReadyEvent) -> list[Output]:
    request = state.requests.get(event.request_id)
    if request is None or WaitsFor.GRAMMAR not in request.waits_for:
        return []
    if event.code is not None:
        return [state.fail(request, event.code, event.reason)]
    pausing.resume(state, request, WaitsFor.GRAMMAR)
    return []


def _transfer_done(state: DeviceState, event: TransferDoneEvent) -> list[Output]:
    models = state.models.values()
    m = next((m for m in models if m.life.transfer_id == event.transfer_id), None)
    if m is None:
        return places.promoted(state, event)
    failed = event.error is not None
    state.activation_rate.end(event.transfer_id, event.n_bytes, state.now, failed=failed)
    if m.life.stopping:
        return layer_remap.load_stopped(state, m, event.error)
    if not failed:
        if m.weights.transfer_landed():
            m.life.land(state.now)
        else:
            transfer = state.next_transfer()
            m.life.refill(transfer)
            m.weights.fill(transfer)
            state.activation_rate.begin(transfer, state.now)
        return []
    if m.job is None:
        return state.fail_load(m, str(event.error))
    m.life.break_off(str(event.error))
    m.weights.transfer_failed()
    return []


def _opened(state: DeviceState, event: FirstJobReadyEvent) -> list[Output]:
    """Allow a model's first job to begin; does nothing if its load has ended meanwhile."""
    for m in state.models.values():
        if m.life.transfer_id == event.transfer_id and not m.life.stopping:
            m.life.open()
    return []


def _timer(state: DeviceState, event: TimerEvent) -> list[Output]:
    state.lending.check(state.now)
    state.news.n += 1  # a moment has come that somebody waited for
    reason = "it was not admitted in the time that its model gives requests to wait"
    overdue = state.queue_deadlines.over(state.now)
    return [state.fail(request, "queue_timeout", reason) for request in overdue]


def _of_peers(state: DeviceState, event: Heard) -> list[Output]:
    state.lending.handle(event)
    return []


def _export_kv(state: DeviceState, event: ExportKvEvent) -> list[Output]:
    request = state.requests.get(event.request_id)
    if request is None:
        state.migration.nothing(event.request_id, event.attempt)
    else:
        state.migration.export(state.models[request.model], request, event.attempt)
    return []


def _depart(state: DeviceState, event: DepartEvent) -> list[Output]:
    state.migration.depart(event.request_id, event.attempt)
    request = state.requests.get(event.request_id)
    if request is None:
        state.migration.ended(event.request_id)
        return []
    return [] if request.in_flight else jobs.depart(state, state.models[request.model], request)


def _import_kv(state: DeviceState, event: ImportKvEvent) -> list[Output]:
    m, adapter = state.named.get(event.wanted.model, (None, None))
    state.migration.begin(m, event, adapter)
    return []


def _kv_read(state: DeviceState, event: KvReadEvent) -> list[Output]:
    state.migration.read(event)
    return []


def _kv_tail(state: DeviceState, event: KvTailEvent) -> list[Output]:
    state.migration.extend(event)
    return []


def _drop_kv(state: DeviceState, event: DropKvEvent) -> list[Output]:
    state.migration.drop(event)
    return []


def _kv_found(state: DeviceState, event: KvFoundEvent) -> list[Output]:
    request = state.requests.get(event.request_id)
    if request is not None:
        state.tiers.found(state.models[request.model], request, event)
    return []


def _kv_fetched(state: DeviceState, event: KvFetchedEvent) -> list[Output]:
    request = state.requests.get(event.request_id)
    if request is not None:
        state.tiers.fetched(state.models[request.model], request, event)
    return []


def _drain(state: DeviceState, event: DrainEvent) -> list[Output]:
    state.draining = True
    return []


def _stop(state: DeviceState, event: StopEvent) -> list[Output]:
    state.stopped = event.reason
    return []


_HANDLERS: dict[type, Callable[[DeviceState, Any], list[Output]]] = {
    ArrivalEvent: _arrival,
    CancelEvent: _cancel,
    PauseEvent: _pause,
    ResumeEvent: _resume,
    GrammarReadyEvent: _grammar_ready,
    JobDoneEvent: jobs.done,
    JobFailedEvent: jobs.failed,
    TransferDoneEvent: _transfer_done,
    FirstJobReadyEvent: _opened,
    RotationSettledEvent: layer_remap.settled,
    TimerEvent: _timer,
    ExportKvEvent: _export_kv,
    DepartEvent: _depart,
    ImportKvEvent: _import_kv,
    KvReadEvent: _kv_read,
    KvTailEvent: _kv_tail,
    DropKvEvent: _drop_kv,
    KvFoundEvent: _kv_found,
    KvFetchedEvent: _kv_fetched,
    DrainEvent: _drain,
    StopEvent: _stop,
    **dict.fromkeys(
        (PeerMetEvent, PeerGoneEvent, PagesLentEvent, PagesRecalledEvent, PagesReturnedEvent),
        _of_peers,
    ),
}
