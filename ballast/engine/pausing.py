"""Pause and resume requests: the only way into `RequestState.PAUSED`, and back to the queue.

A paused request that is cancelled or fails ends where it is (`DeviceState.end`).

Used by the handling of events and of ended jobs. A request is paused while its client does not read
or its grammar is compiled. It is then neither queued nor in a batch and holds no blocks; blocks
that it had filled stay in the prefix cache. Its tokens stay, and pausing does not change those that
follow. When resumed it is queued again in its old order.
"""

from __future__ import annotations

from ballast.core.request import Request, RequestState, WaitsFor
from ballast.engine.model import ModelState
from ballast.engine.state import DeviceState


def pause(state: DeviceState, request: Request, what: WaitsFor) -> None:
    """Pause a request until `what`: at once, or as soon as the job that it is in ends."""
    request.waits_for |= what
    if not request.in_flight:
        settle(state, state.models[request.model], request)


def resume(state: DeviceState, request: Request, what: WaitsFor) -> None:
    """End a request's wait for `what`; if it waits for nothing else, it is queued again."""
    request.waits_for &= ~what
    if request.state is not RequestState.PAUSED or request.waits_for:
        return
    m = state.models[request.model]
    m.paused.remove(request)
    request.to(RequestState.WAITING)
    m.waiting.add(request)
    state.tiers.look_up(m, request)
    m.last_used = state.now


def settle(state: DeviceState, m: ModelState, request: Request) -> None:
    """Move a request into `PAUSED` if it has a reason to wait. It must not be in flight."""
    if not request.waits_for or request.state is RequestState.PAUSED:
        return
    state.withdraw(m, request)
    request.to(RequestState.PAUSED)
    m.paused.add(request)
