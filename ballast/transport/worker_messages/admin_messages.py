"""Define the messages of operators' commands to a device, and their outcomes.

Sent by `RemoteDevice` in the server, answered by `Worker`.
"""

from __future__ import annotations

from ballast.core.actions import (
    ActivateCommand,
    Change,
    EvictCommand,
    Lend,
    Recall,
    ReleaseMemory,
    ScrubKv,
)
from ballast.core.command import Add, CommandOutcome, DeviceCommand, Remove
from ballast.core.fleet_state import OPERATOR, Command
from ballast.transport.decoding import MalformedMessage
from ballast.transport.worker_messages.message import WorkerMessage


class CommandMsg(WorkerMessage, frozen=True):
    """An operator's command, in the field of its type; answered by `CommandDoneMsg` with its id.

    Exactly one command is set; its field identifies the type, as plain dataclasses carry no tag.
    """

    id: int
    add: Add | None = None
    remove: Remove | None = None
    change: Change | None = None
    activate: ActivateCommand | None = None
    evict: EvictCommand | None = None
    lend: Lend | None = None
    recall: Recall | None = None
    scrub: ScrubKv | None = None
    release: ReleaseMemory | None = None
    by: str = OPERATOR
    """Who ordered it."""

    @classmethod
    def of(cls, id: int, order: Command, by: str = OPERATOR) -> CommandMsg:
        """Wrap a command."""
        return cls(id, **{_FIELDS[type(order)]: order}, by=by)  # type: ignore[arg-type]

    @property
    def order(self) -> DeviceCommand:
        """The command. Raises MalformedMessage unless there is exactly one."""
        orders = (self.add, self.remove, self.change, self.activate, self.evict)
        fields = (*orders, self.lend, self.recall, self.scrub, self.release)
        given = [order for order in fields if order is not None]
        if len(given) != 1:
            raise MalformedMessage(f"a command with {len(given)} orders")
        return given[0]


_FIELDS: dict[type[Command], str] = {
    Add: "add",
    Remove: "remove",
    Change: "change",
    ActivateCommand: "activate",
    EvictCommand: "evict",
    Lend: "lend",
    Recall: "recall",
    ScrubKv: "scrub",
    ReleaseMemory: "release",
}


class CommandDoneMsg(WorkerMessage, frozen=True):
    """Outcome of a command, by its id."""

    id: int
    outcome: CommandOutcome
