"""Messages about a running request that moves to another device (`ballast.core.migration`)."""

from __future__ import annotations

from ballast.core import migration
from ballast.core.migration import (
    Depart,
    Departed,
    DropKv,
    ExportKv,
    ImportKv,
    KvExported,
    KvImported,
    KvTail,
)
from ballast.transport.decoding import MalformedMessage
from ballast.transport.worker_messages.message import WorkerMessage


class MigrationOrderMsg(WorkerMessage, frozen=True):
    """To source or target: one step of a migration, in the field of its type."""

    export: ExportKv | None = None
    depart: Depart | None = None
    fetch: ImportKv | None = None
    tail: KvTail | None = None
    drop: DropKv | None = None

    @classmethod
    def of(cls, order: migration.Order) -> MigrationOrderMsg:
        """Wrap a step."""
        match order:
            case ExportKv():
                return cls(export=order)
            case Depart():
                return cls(depart=order)
            case ImportKv():
                return cls(fetch=order)
            case KvTail():
                return cls(tail=order)
            case DropKv():
                return cls(drop=order)

    @property
    def order(self) -> migration.Order:
        """The step. Raises MalformedMessage unless there is exactly one."""
        fields = (self.export, self.depart, self.fetch, self.tail, self.drop)
        given = [order for order in fields if order is not None]
        if len(given) != 1:
            raise MalformedMessage(f"a migration with {len(given)} steps")
        return given[0]


class MigrationAnswerMsg(WorkerMessage, frozen=True):
    """To the server: a device's answer to a step of a migration, in the field of its type."""

    exported: KvExported | None = None
    imported: KvImported | None = None
    departed: Departed | None = None

    @classmethod
    def of(cls, answer: migration.Word) -> MigrationAnswerMsg:
        """Wrap an answer."""
        match answer:
            case KvExported():
                return cls(exported=answer)
            case KvImported():
                return cls(imported=answer)
            case Departed():
                return cls(departed=answer)

    @property
    def answer(self) -> migration.Word:
        """The answer. Raises MalformedMessage unless there is exactly one."""
        given = [a for a in (self.exported, self.imported, self.departed) if a is not None]
        if len(given) != 1:
            raise MalformedMessage(f"{len(given)} answers about a migration")
        return given[0]
