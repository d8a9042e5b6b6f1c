"""Track what a worker's server has ordered and is not done, to end it when that server is gone.

Used by `Worker` on its main thread. The next server gets a device without requests, with the models
that it serves by then.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import msgspec

from ballast.core.command import Add, DeviceCommand, Remove
from ballast.core.event import CancelEvent, Event
from ballast.core.migration import DropKvEvent, ImportKvEvent, MigrationStep
from ballast.core.settings import FleetSettings
from ballast.transport.worker_messages.admin_messages import CommandDoneMsg, CommandMsg
from ballast.transport.worker_messages.request_messages import (
    OutputsMsg,
    SubmitMsg,
    WrappedCancelled,
    WrappedFailed,
    WrappedFinished,
)

_LAST = (WrappedFinished, WrappedFailed, WrappedCancelled)


class ServerOrders:
    """The open requests, imports of KV and commands of the present server."""

    def __init__(self) -> None:
        self.fleet: FleetSettings | None = None
        """What the device serves now; None: it has not been configured."""
        self._requests = set[str]()
        self._imports = set[str]()
        """Requests that are to arrive, whose KV comes from other devices."""
        self._numbers = itertools.count(1)
        self._commands: dict[int, tuple[int | None, DeviceCommand]] = {}
        """By a number of this worker's, the server's; None: of a server that is gone."""

    @property
    def changing(self) -> bool:
        """Whether models are being loaded or removed."""
        return any(isinstance(command, Add | Remove) for _, command in self._commands.values())

    def submitted(self, message: SubmitMsg) -> None:
        """Note requests."""
        ids = {request.id for request in message.requests}
        self._requests |= ids
        self._imports -= ids

    def answered(self, message: OutputsMsg) -> None:
        """Note which requests have ended."""
        ended = (w.output.request_id for w in message.wrapped if isinstance(w, _LAST))
        self._requests.difference_update(ended)

    def migrates(self, step: MigrationStep) -> None:
        """Note a step of a migration."""
        if isinstance(step, ImportKvEvent):
            self._imports.add(step.wanted.id)
        elif isinstance(step, DropKvEvent):
            self._imports.discard(step.request_id)

    def commanded(self, message: CommandMsg) -> int:
        """Note a command; return the number with which it is `done`."""
        number = next(self._numbers)
        self._commands[number] = message.id, message.order
        return number

    def done(self, message: CommandDoneMsg) -> CommandDoneMsg | None:
        """Note the end of a command; return the answer to the present server; None: it was ordered
        by another one."""
        id, command = self._commands.pop(message.id)
        if message.outcome.code is None and self.fleet is not None:
            self.fleet = command.applied(self.fleet)
        return None if id is None else msgspec.structs.replace(message, id=id)

    def abandon(self, post: Callable[[Event], object]) -> None:
        """End all requests and imports: the server is gone. Commands go on, and nobody hears of
        them."""
        for id in self._requests:
            post(CancelEvent(id))
        for id in self._imports:
            post(DropKvEvent(id))
        self._requests.clear()
        self._imports.clear()
        self._commands = {n: (None, command) for n, (_, command) in self._commands.items()}
