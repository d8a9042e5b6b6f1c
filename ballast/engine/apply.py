"""Carry out policies' actions on a device's state, one function for each action.

Called with the actions of the memory policy, of operators' commands and of recalled leases. Each
action is carried out wholly or refused with a reason; nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ballast.core.actions import (
    Action,
    Compact,
    DropCache,
    GiveBack,
    Hold,
    Limit,
    Preempt,
    Recall,
    Refuse,
    Reorder,
    Reside,
    Stage,
)
from ballast.core.event import Output
from ballast.core.request import RequestState
from ballast.core.story import Story
from ballast.engine import staging
from ballast.engine.reside import Refusal, change_tag, reside
from ballast.engine.state import DeviceState


def carry_out(
    state: DeviceState, story: Story, action: Action, outputs: list[Output], by: str | None = None
) -> Refusal:
    """Apply an action and record it. `by`: its origin, if not the memory policy."""
    m = state.models.get(action.model) if isinstance(action, Reside) else None
    tag = change_tag(m.plan, action.plan) if m and isinstance(action, Reside) else None
    refused = apply(state, action, outputs)
    story.record_decision(state.now, action, refused, by=by, tag=tag)
    return refused


def apply(state: DeviceState, action: Action, outputs: list[Output]) -> Refusal:
    """Carry `action` out, wholly or not at all. Returns the reason if it was refused.

    Outputs for clients that follow from it are appended to `outputs`.
    """
    if isinstance(action, Recall):
        out = state.lending.recall(action.to, action.pages, state.now, action.seconds)
        return None if out else f"nothing is lent to {action.to}"
    if isinstance(action, GiveBack):
        returned = state.lending.give_back(action.to, action.pages)
        return None if returned else f"no unused page of {action.to} is here"
    if action.model not in state.models:
        return f"no model {action.model!r} on this device"
    if isinstance(action, Refuse):
        return _refuse(state, action, outputs)
    return _HANDLERS[type(action)](state, action)


def _reside(state: DeviceState, a: Reside) -> Refusal:
    return reside(state, state.models[a.model], a.plan)


def _preempt(state: DeviceState, a: Preempt) -> Refusal:
    m = state.models[a.model]
    request = state.requests.get(a.request_id)
    if request is None or request.state is not RequestState.RUNNING:
        return f"{a.request_id} is not running"
    if request.in_flight:
        m.running.leave(request)
    else:
        state.preempt(m, request)
    return None


def _drop_cache(state: DeviceState, a: DropCache) -> Refusal:
    m = state.models[a.model]
    spared = state.requests.get(a.spare)
    freed = m.kv.prefixes.drop(a.pages, spare=m.kv.prefixes.find(*spared.prefix) if spared else ())
    return None if freed else "nothing is cached that is not in use"


def _compact(state: DeviceState, a: Compact) -> Refusal:
    m = state.models[a.model]
    coming = state.migration.tables(m)
    fixed = {b for r in m.running if r.in_flight or r.fetching for b in r.blocks}
    fixed.update(block for table in (*coming, m.kv.book.moves.coming) for block in table)
    tables = [*(r.blocks for r in m.running), *coming]
    freed = m.kv.compact(tables, a.pages, fixed=fixed)
    return None if freed else "its blocks are already together"


def _limit(state: DeviceState, a: Limit) -> Refusal:
    m = state.models[a.model]
    # To policies, what is guaranteed to a model is no part of its cache (`views`).
    m.kv.bounds.limit = None if a.pages is None else a.pages + m.kv.bounds.floor
    return None


def _hold(state: DeviceState, a: Hold) -> Refusal:
    m = state.models[a.model]
    if not a.held:
        m.blocked = None  # jobs formed while it was held know nothing of its shortage
    m.held, m.frozen = a.held, a.frozen
    return None


def _reorder(state: DeviceState, a: Reorder) -> Refusal:
    m = state.models[a.model]
    requests = [state.requests.get(name) for name in a.requests]
    waiting = [r for r in requests if r is not None and r.state is RequestState.WAITING]
    if len(waiting) < len(requests):
        return "not all of these requests wait"
    for r in waiting:
        m.waiting.move(r, a.place)
    return None


def _stage(state: DeviceState, a: Stage) -> Refusal:
    m = state.models[a.model]
    refused = staging.refusal(m, a.staged)
    if refused is None:
        m.stage_to, m.stage_order = a.staged, a.order
    return refused


def _refuse(state: DeviceState, a: Refuse, outputs: list[Output]) -> Refusal:
    request = state.requests.get(a.request_id)
    if request is None or request.state is not RequestState.WAITING:
        return f"{a.request_id} is not waiting"
    outputs.append(state.fail(request, "insufficient_memory", str(a.why)))
    return None


_HANDLERS: dict[type, Callable[[DeviceState, Any], Refusal]] = {
    Preempt: _preempt,
    DropCache: _drop_cache,
    Compact: _compact,
    Limit: _limit,
    Hold: _hold,
    Reorder: _reorder,
    Reside: _reside,
    Stage: _stage,
}
