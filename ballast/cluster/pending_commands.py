"""Track operators' commands that a worker has not answered, and apply commands to fleet settings.

`RemoteDevice` keeps one `PendingCommands`; `FleetCommands`, `DeviceSet` and the admin service use
the functions, which never change a fleet in place.
"""

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


class PendingCommands:
    """The commands that the present worker has not answered, by id."""

    def __init__(self, send: Callable[[CommandMsg], None]) -> None:
        self._send = send
        self._numbers = itertools.count(1)
        self._pending: dict[int, tuple[DeviceCommand, asyncio.Future[CommandOutcome]]] = {}

    def send(self, command: DeviceCommand) -> asyncio.Future[CommandOutcome]:
        """Send a command; return a future of its outcome, which raises Unavailable if the worker
        dies first."""
        outcome: asyncio.Future[CommandOutcome] = asyncio.get_running_loop().create_future()
        id = next(self._numbers)
        self._pending[id] = command, outcome
        self._send(CommandMsg.of(id, command))
        return outcome

    def done(self, message: CommandDoneMsg) -> DeviceCommand | None:
        """Resolve a command by its answer; returns the command, or None for one that is unknown."""
        command, outcome = self._pending.pop(message.id, (None, None))
        if outcome is not None and not outcome.done():
            outcome.set_result(message.outcome)
        return command

    def fail(self, reason: str) -> None:
        """Fail all commands with Unavailable: none of them will be answered."""
        for command, outcome in self._pending.values():
            if not outcome.done():
                what = f"{type(command).__name__.lower()} was not done: {reason}"
                outcome.set_exception(Unavailable(what))
                outcome.exception()  # its caller may be gone: no warning
        self._pending.clear()


def names_of(fleet: FleetSettings) -> set[str]:
    """Return the own names of a fleet's models and their adapters."""
    return {m.name for m in fleet.models} | {a.name for m in fleet.models for a in m.adapters}


def refusal(fleet: FleetSettings, served: Collection[str], command: ModelCommand) -> str | None:
    """Return why a command cannot be carried out, judged by the fleet's settings alone; None: the
    device decides."""
    if isinstance(command, Remove) and set(served) == {command.model}:
        return f"{command.model!r} is the only model that is served; add another one first"
    if isinstance(command, Add):
        for model in fleet.models:
            if model.name != command.settings.name:
                both = command.settings.names & model.names
                if both:
                    return f"there is a model {min(both)!r} already"
    return None


def undoing(command: ModelCommand, fleet: FleetSettings) -> ModelCommand | None:
    """Return the command that restores `fleet` after `command`; None if there is none."""
    match command:
        case Add(settings):
            return Remove(settings.name, 0.0)
        case Change(model=name):
            named: dict[str, ModelSettings | AdapterSettings] = {}
            for model in fleet.models:
                named |= {model.name: model} | {a.name: a for a in model.adapters}
            return change_to(named[name]) if name in named else None
        case _:
            return None


def changed(fleet: FleetSettings, command: DeviceCommand) -> FleetSettings:
    """Return the settings with which the next worker is started after a command."""
    models = list(fleet.models)
    match command:
        case Add(settings):
            # A model that could not be loaded may have the same name.
            models = [m for m in models if m.name != settings.name] + [settings]
        case Remove(name):
            models = [m for m in models if m.name != name]
        case Change():
            models = [_changed(m, command) for m in models]
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
