"""Pause requests and let them go on: the one way into `RequestState.PAUSED`, and the one out of it.

A paused request is neither queued nor in a batch and holds no blocks. Blocks that it had filled
stay cached, so that the memory policy keeps them or gives them up like any cached prefix. Its
tokens stay, and it goes on with those that it would have had. It keeps its place: when it is
resumed it is queued by its first order.
"""

from __future__ import annotations

from ballast.core.request import Request, RequestState, WaitsFor
from ballast.engine.model import ModelState
from ballast.engine.state import DeviceState


def pause(state: DeviceState, request: Request, what: WaitsFor) -> None:
    """Make a request wait for `what`, too: at once, or as soon as the job that it is in ends."""
    request.waits_for |= what
    if not request.in_flight:
        settle(state, state.models[request.model], request)


def resume(state: DeviceState, request: Request, what: WaitsFor) -> None:
    """Note that `what` is there; where a request waits for nothing else, it is queued again."""
    request.waits_for &= ~what
    if request.state is not RequestState.PAUSED or request.waits_for:
        return
    m = state.models[request.model]
    m.paused.remove(request)
    request.to(RequestState.WAITING)
    m.waiting.add(request)
    m.last_used = state.now


def settle(state: DeviceState, m: ModelState, request: Request) -> None:
    """Pause a request, in no job, that waits for anything and is not paused."""
    if not request.waits_for or request.state is RequestState.PAUSED:
        return
    state.withdraw(m, request)
    request.to(RequestState.PAUSED)
    m.paused.add(request)
