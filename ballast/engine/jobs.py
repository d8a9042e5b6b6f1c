"""End jobs: append sampled tokens, record KV, finish requests, and do what waited for the job.

Called by `events` when a job has ended or failed. Preemptions, pauses, evictions and remaps that
were ordered during the job are carried out here.
"""

from __future__ import annotations

from ballast.core.event import (
    CancelledOutput,
    FailedOutput,
    FinishedOutput,
    JobDoneEvent,
    JobFailedEvent,
    Output,
    PromptScoresOutput,
    TokenOutput,
)
from ballast.core.job import Job, SampledToken
from ballast.core.request import Request, RequestState
from ballast.engine import layer_remap, pausing, staging
from ballast.engine.admission import finish_reason
from ballast.engine.model import ModelState
from ballast.engine.state import DeviceState


def done(state: DeviceState, event: JobDoneEvent) -> list[Output]:
    """Handle a job that has ended successfully; return outputs for clients."""
    m = _close(state, event.job, done=True)
    now = m.last_run = state.now
    m.lane_seconds += event.seconds * state.lanes.share(event.job)
    if any(work.tokens for work in event.job.work):
        load = event.job.load
        # One that ran beside the copies it waited for says little of those to come. What passes
        # read in host memory they read each time.
        stall = 0.0 if m.weights.plan.in_place else event.stall
        seconds = None if m.life.early else event.seconds - stall
        m.took(seconds, load)
        if seconds is not None:
            m.cost(now - m.life.job_began - stall, load)
        m.weights.job_passed()
    for work in event.job.work:
        request = state.requests[work.request_id]
        m.running.compute(request, work.end)
        request.isolated = False
    outputs: list[Output] = []
    set_aside: list[str] = []
    for result in event.results:
        request = state.requests[result.request_id]
        name = request.submission.model
        if m.quarantine.judge(name, result):
            set_aside.append(name)
        if request.cancelled:
            continue
        if isinstance(result, SampledToken):
            outputs += _token(state, m, request, result, now)
        elif isinstance(result, FailedOutput):
            outputs.append(state.end(request, RequestState.FAILED, result))
        else:
            outputs.append(result)
            if isinstance(result, PromptScoresOutput):
                request.unscored = result.start + len(result.logprobs)
    for work in event.job.work:
        open_request = state.requests.get(work.request_id)
        if open_request is None:
            continue
        if open_request.read_only and work.end == len(open_request.tokens):
            if not open_request.cancelled:
                reason = "stop" if open_request.submission.embed else "length"
                outputs.append(_finished(state, m, open_request, reason))
        else:
            state.remember(m, open_request)
    outputs += _settle(state, m, event.job)
    for name in set_aside:
        outputs += state.fail_all(m, "model_failed", m.quarantine.reasons[name], name)
    return outputs


def failed(state: DeviceState, event: JobFailedEvent) -> list[Output]:
    """Fail the request of a job that had one; each of several has its next job to itself.

    Returns the outputs for clients. KV from before the job is intact: a job writes only at the
    positions of its own work, which are computed again. So a request that fails alone is at fault,
    and the others continue with the same tokens. If requests fail only together, each round of
    single jobs still advances each of them by a step. Recurrent states, written in place, are lost:
    such requests go on from their cached prefixes.
    """
    m = _close(state, event.job, done=False)
    outputs: list[Output] = []
    requests = [state.requests[work.request_id] for work in event.job.work]
    if m.life.load_failed is not None:
        pass  # no request is at fault: all of the model fail with its load (`_settle`)
    elif not any(work.tokens for work in event.job.work):
        pass  # it moved KV, all of which is where it was
    elif len(requests) > 1:
        for request in requests:
            request.isolated = True
            if m.spec.states:
                state.preempt(m, request, keeps_kv=True)
    elif not requests[0].cancelled:
        outputs.append(state.fail(requests[0], "internal_error", event.reason))
    return outputs + _settle(state, m, event.job)


def depart(state: DeviceState, m: ModelState, request: Request) -> list[Output]:
    """End a request that continues on another device, if it may end now. It must not be in a
    job."""
    if not state.migration.leaves(m, request):
        return []
    return [state.end(request, RequestState.CANCELLED, CancelledOutput(request.id))]


def _token(
    state: DeviceState, m: ModelState, request: Request, new: SampledToken, now: float
) -> list[Output]:
    """Append a sampled token to a request, and finish the request if it was the last one."""
    queued, activating, cached = None, 0.0, 0
    fetched: tuple[tuple[str, int], ...] = ()
    if request.first_token_at is None:
        assert request.admitted_at is not None
        arrived, admitted = request.submission.arrival, request.admitted_at
        queued = admitted - arrived
        landed = m.life.resident_since
        there = admitted if landed < m.activation_at else min(admitted, landed)
        activating = max(0.0, there - max(arrived, m.activation_at))
        cached, fetched = request.cached_tokens, request.fetched
    m.running.extend(request, new.token, now)
    n = request.generated
    output = TokenOutput(
        request.id, new.token, n - 1, new.logprob, new.top, queued, cached, fetched, activating
    )
    reason = "stop" if new.ends else finish_reason(m, request.submission, new.token, n)
    return [output] if reason is None else [output, _finished(state, m, request, reason)]


def _finished(state: DeviceState, m: ModelState, request: Request, reason: str) -> Output:
    m.prompt_tokens += request.prompt_tokens
    m.cached_tokens += request.cached_tokens
    m.output_tokens += request.generated - len(request.submission.resumed or ())
    m.traffic = m.traffic.ended(request.prompt_tokens, request.generated, request.cached_tokens)
    m.longest.add(state.now, request.prompt_tokens + request.generated)
    state.remember(m, request)
    output = FinishedOutput(
        request.id,
        reason,
        request.prompt_tokens,
        request.generated,
        request.cached_tokens,
        request.preemptions,
        request.fetched,
    )
    return state.end(request, RequestState.FINISHED, output)


def _close(state: DeviceState, job: Job, *, done: bool) -> ModelState:
    m = state.models[job.model]
    staging.end(m, [*(r.blocks for r in m.running), *state.migration.tables(m)], done=done)
    m.life.end_job()
    state.lanes.end(job)
    m.last_used = state.now
    state.jobs += 1
    m.running.end(state.requests[work.request_id] for work in job.work)
    return m


def _settle(state: DeviceState, m: ModelState, job: Job) -> list[Output]:
    """Carry out what waited for the job: cancellations, departures, preemptions, pauses,
    and the next step of the model's life (remap, eviction, failure)."""
    outputs: list[Output] = []
    departing = state.migration.departing
    for work in job.work:
        request = state.requests.get(work.request_id)
        if request is not None and request.cancelled:
            outputs.append(state.end(request, RequestState.CANCELLED, CancelledOutput(request.id)))
        elif request is not None and departing:
            outputs += depart(state, m, request)
    for request in m.running.take_leaving():
        if request.state is RequestState.RUNNING:
            state.preempt(m, request)
    for work in job.work:
        request = state.requests.get(work.request_id)
        if request is not None:
            pausing.settle(state, m, request)
    return outputs + layer_remap.proceed(state, m)
