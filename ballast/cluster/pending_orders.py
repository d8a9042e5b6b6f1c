"""Orders that a worker has not answered yet, and the fleet that they lead to."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection
from dataclasses import replace

from ballast.core.actions import Change
from ballast.core.command import Add, CommandOutcome, DeviceCommand, ModelCommand, Remove
from ballast.core.errors import Unavailable
from ballast.core.settings import AdapterSettings, FleetSettings, ModelSettings
from ballast.fleet.levels import change_to
from ballast.transport.worker_messages.admin_messages import CommandDoneMsg, CommandMsg


class PendingOrders:
    """By id, of the present worker."""

    def __init__(self, send: Callable[[CommandMsg], None]) -> None:
        self._send = send
        self._numbers = itertools.count(1)
        self._pending: dict[int, tuple[DeviceCommand, asyncio.Future[CommandOutcome]]] = {}

    def send(self, order: DeviceCommand) -> asyncio.Future[CommandOutcome]:
        """Its outcome, or Unavailable."""
        asked: asyncio.Future[CommandOutcome] = asyncio.get_running_loop().create_future()
        id = next(self._numbers)
        self._pending[id] = order, asked
        self._send(CommandMsg.of(id, order))
        return asked

    def done(self, message: CommandDoneMsg) -> DeviceCommand | None:
        """Tell whoever waits, if anybody does; the order that was meant."""
        order, asked = self._pending.pop(message.id, (None, None))
        if asked is not None and not asked.done():
            asked.set_result(message.outcome)
        return order

    def fail(self, reason: str) -> None:
        """None of them will be answered."""
        for order, asked in self._pending.values():
            if not asked.done():
                what = f"{type(order).__name__.lower()} was not done: {reason}"
                asked.set_exception(Unavailable(what))
                asked.exception()  # whoever asked may be gone: asyncio need not complain of that
        self._pending.clear()


def names_of(fleet: FleetSettings) -> set[str]:
    """Own names of its models and their adapters."""
    return {m.name for m in fleet.models} | {a.name for m in fleet.models for a in m.adapters}


def refusal(fleet: FleetSettings, served: Collection[str], order: ModelCommand) -> str | None:
    """Why a fleet cannot become what an order would make of it; the device judges the rest."""
    if isinstance(order, Remove) and set(served) == {order.model}:
        return f"{order.model!r} is the only model that is served; add another one first"
    if isinstance(order, Add):
        for model in fleet.models:
            if model.name != order.settings.name:
                both = order.settings.names & model.names
                if both:
                    return f"there is a model {min(both)!r} already"
    return None


def undoing(order: ModelCommand, fleet: FleetSettings) -> ModelCommand | None:
    """What makes a fleet that an order was carried out on `fleet` again; None where nothing can."""
    match order:
        case Add(settings):
            return Remove(settings.name, 0.0)
        case Change(model=name):
            named: dict[str, ModelSettings | AdapterSettings] = {}
            for model in fleet.models:
                named |= {model.name: model} | {a.name: a for a in model.adapters}
            return change_to(named[name]) if name in named else None
        case _:
            return None


def changed(fleet: FleetSettings, order: DeviceCommand) -> FleetSettings:
    """What a worker has to be started with after an order was carried out."""
    models = list(fleet.models)
    match order:
        case Add(settings):
            # One that could not be loaded may have the name.
            models = [m for m in models if m.name != settings.name] + [settings]
        case Remove(name):
            models = [m for m in models if m.name != name]
        case Change():
            models = [_changed(m, order) for m in models]
        case _:
            return fleet
    return replace(fleet, models=tuple(models))


def _changed(model: ModelSettings, c: Change) -> ModelSettings:
    if model.name == c.model:
        return replace(
            model,
            slo=c.slo,
            priority=c.priority,
            share=c.share,
            max_running=c.max_running,
            max_waiting=c.max_waiting,
            queue_seconds=c.queue_seconds,
            pinned=c.pinned,
            ttl=c.ttl,
        )
    adapters = tuple(
        replace(
            a,
            slo=c.slo,
            priority=c.priority,
            max_waiting=c.max_waiting,
            queue_seconds=c.queue_seconds,
        )
        if a.name == c.model
        else a
        for a in model.adapters
    )
    return replace(model, adapters=adapters)
