"""How events change what is true on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ballast.core.event import (
    Arrival,
    Cancel,
    Cancelled,
    Drain,
    Event,
    Failed,
    Finished,
    FirstJobReady,
    GrammarReady,
    JobDone,
    JobFailed,
    Output,
    Pause,
    Resume,
    Settled,
    Stop,
    Timer,
    TransferDone,
)
from ballast.core.lease import AskedBack, Lent, PeerGone, PeerMet, Returned
from ballast.core.migration import Depart, DropKv, ExportKv, ImportKv, KvRead, KvTail
from ballast.core.request import Request, State, WaitsFor
from ballast.engine import jobs, layer_remap, pausing
from ballast.engine.admission import finish_reason, fitted, refusal
from ballast.engine.lending import Heard
from ballast.engine.state import DeviceState


def handle(state: DeviceState, event: Event) -> list[Output]:
    """Take a fact in; returns what clients are to be told."""
    return _HANDLERS[type(event)](state, event)


def _arrival(state: DeviceState, event: Arrival) -> list[Output]:
    outputs = _arrives(state, event)
    if outputs:
        state.migration.drop(DropKv(event.submission.id))
    return outputs


def _arrives(state: DeviceState, event: Arrival) -> list[Output]:
    s = event.submission
    m, adapter = state.named.get(s.model, (None, None))
    if state.draining or state.stopped is not None:
        return [Failed(s.id, "unavailable", "the server is draining")]
    if m is None:
        return [Failed(s.id, "model_not_found", f"no model {s.model!r} on this device")]
    if s.id in state.requests:
        return [Failed(s.id, "invalid_request", f"a request {s.id!r} is already open")]
    room = state.room(m)
    s = fitted(s, m, room)
    refused = refusal(s, m, adapter, room)
    if refused is not None:
        return [Failed(s.id, *refused)]
    # The worker that died may have generated all of it.
    reason = finish_reason(m, s, s.resumed[-1], len(s.resumed)) if s.resumed else None
    if s.resumed and reason is not None:
        return [Finished(s.id, reason, len(s.prompt), len(s.resumed), 0, 0)]
    state._sequence += 1
    request = Request.of(s, state._sequence, m.spec, adapter)
    state.requests[s.id] = request
    state.migration.adopt(m, request)
    m.waiting.add(request)
    if s.sampling.grammar and state.grammars is not None:
        pausing.pause(state, request, WaitsFor.GRAMMAR)
        state.grammars.prepare(request)
    seconds = m.queue_seconds(adapter)
    if seconds is not None and not s.resumed:
        state.patience.begin(request, seconds)
    m.last_used = s.arrival if s.resumed is None else max(m.last_used, s.arrival)
    if s.resumed is None:
        m.traffic = m.traffic.arrived(s.arrival)
    return []


def _cancel(state: DeviceState, event: Cancel) -> list[Output]:
    request = state.requests.get(event.request_id)
    if request is None:
        return []
    if request.in_flight:
        request.cancelled = True
        return []
    return [state.end(request, State.CANCELLED, Cancelled(request.id))]


def _pause(state: DeviceState, event: Pause) -> list[Output]:
    request = state.requests.get(event.request_id)
    if request is not None:
        pausing.pause(state, request, WaitsFor.READER)
    return []


def _resume(state: DeviceState, event: Resume) -> list[Output]:
    request = state.requests.get(event.request_id)
    if request is not None:
        pausing.resume(state, request, WaitsFor.READER)
    return []


def _grammar_ready(state: DeviceState, event: GrammarReady) -> list[Output]:
    request = state.requests.get(event.request_id)
    if request is None or WaitsFor.GRAMMAR not in request.waits_for:
        return []
    if event.code is not None:
        return [state.fail(request, event.code, event.reason)]
    pausing.resume(state, request, WaitsFor.GRAMMAR)
    return []


def _transfer_done(state: DeviceState, event: TransferDone) -> list[Output]:
    m = next(m for m in state.models.values() if m.life.transfer_id == event.transfer_id)
    failed = event.error is not None
    state.activation_rate.end(event.transfer_id, event.n_bytes, state.now, failed=failed)
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


def _opened(state: DeviceState, event: FirstJobReady) -> list[Output]:
    """A model's first job may begin; nothing, where its load has ended meanwhile."""
    for m in state.models.values():
        if m.life.transfer_id == event.transfer_id:
            m.life.open()
    return []


def _timer(state: DeviceState, event: Timer) -> list[Output]:
    state.lending.check(state.now)
    state.news.n += 1  # a moment has come that somebody waited for
    reason = "it was not admitted in the time that its model gives requests to wait"
    overdue = state.patience.over(state.now)
    return [state.fail(request, "queue_timeout", reason) for request in overdue]


def _of_peers(state: DeviceState, event: Heard) -> list[Output]:
    state.lending.handle(event)
    return []


def _export_kv(state: DeviceState, event: ExportKv) -> list[Output]:
    request = state.requests.get(event.request_id)
    if request is None:
        state.migration.nothing(event.request_id)
    else:
        state.migration.export(state.models[request.model], request)
    return []


def _depart(state: DeviceState, event: Depart) -> list[Output]:
    state.migration.depart(event.request_id)
    request = state.requests.get(event.request_id)
    if request is None:
        state.migration.ended(event.request_id)
        return []
    return [] if request.in_flight else jobs.depart(state, state.models[request.model], request)


def _import_kv(state: DeviceState, event: ImportKv) -> list[Output]:
    m, adapter = state.named.get(event.wanted.model, (None, None))
    state.migration.begin(m, event, adapter)
    return []


def _kv_read(state: DeviceState, event: KvRead) -> list[Output]:
    state.migration.read(event)
    return []


def _kv_tail(state: DeviceState, event: KvTail) -> list[Output]:
    state.migration.extend(event)
    return []


def _drop_kv(state: DeviceState, event: DropKv) -> list[Output]:
    state.migration.drop(event)
    return []


def _drain(state: DeviceState, event: Drain) -> list[Output]:
    state.draining = True
    return []


def _stop(state: DeviceState, event: Stop) -> list[Output]:
    state.stopped = event.reason
    return []


_HANDLERS: dict[type, Callable[[DeviceState, Any], list[Output]]] = {
    Arrival: _arrival,
    Cancel: _cancel,
    Pause: _pause,
    Resume: _resume,
    GrammarReady: _grammar_ready,
    JobDone: jobs.done,
    JobFailed: jobs.failed,
    TransferDone: _transfer_done,
    FirstJobReady: _opened,
    Settled: layer_remap.settled,
    Timer: _timer,
    ExportKv: _export_kv,
    Depart: _depart,
    ImportKv: _import_kv,
    KvRead: _kv_read,
    KvTail: _kv_tail,
    DropKv: _drop_kv,
    Drain: _drain,
    Stop: _stop,
    **dict.fromkeys((PeerMet, PeerGone, Lent, AskedBack, Returned), _of_peers),
}
