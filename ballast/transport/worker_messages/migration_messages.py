"""Define the messages of migrating a running request to another device with its KV.

They wrap the steps and answers of `ballast.core.migration`. Sent by `Migrations` in the server to
source and target, and answered by their workers.
"""

from __future__ import annotations

from ballast.core import migration
from ballast.core.migration import (
    DepartedAnswer,
    DepartEvent,
    DropKvEvent,
    ExportKvEvent,
    ImportKvEvent,
    KvExportedAnswer,
    KvImportedAnswer,
    KvTailEvent,
)
from ballast.transport.decoding import MalformedMessage
from ballast.transport.worker_messages.message import WorkerMessage


class MigrationOrderMsg(WorkerMessage, frozen=True):
    """One step of a migration for its source or target, in the field of its type."""

    export: ExportKvEvent | None = None
    depart: DepartEvent | None = None
    fetch: ImportKvEvent | None = None
    tail: KvTailEvent | None = None
    drop: DropKvEvent | None = None

    @classmethod
    def of(cls, order: migration.MigrationStep) -> MigrationOrderMsg:
        """Wrap a step."""
        match order:
            case ExportKvEvent():
                return cls(export=order)
            case DepartEvent():
                return cls(depart=order)
            case ImportKvEvent():
                return cls(fetch=order)
            case KvTailEvent():
                return cls(tail=order)
            case DropKvEvent():
                return cls(drop=order)

    @property
    def order(self) -> migration.MigrationStep:
        """The step. Raises MalformedMessage unless there is exactly one."""
        fields = (self.export, self.depart, self.fetch, self.tail, self.drop)
        given = [order for order in fields if order is not None]
        if len(given) != 1:
            raise MalformedMessage(f"a migration with {len(given)} steps")
        return given[0]


class MigrationAnswerMsg(WorkerMessage, frozen=True):
    """Answer to a step of a migration, in the field of its type."""

    exported: KvExportedAnswer | None = None
    imported: KvImportedAnswer | None = None
    departed: DepartedAnswer | None = None

    @classmethod
    def of(cls, answer: migration.MigrationAnswer) -> MigrationAnswerMsg:
        """Wrap an answer."""
        match answer:
            case KvExportedAnswer():
                return cls(exported=answer)
            case KvImportedAnswer():
                return cls(imported=answer)
            case DepartedAnswer():
                return cls(departed=answer)

    @property
    def answer(self) -> migration.MigrationAnswer:
        """The answer. Raises MalformedMessage unless there is exactly one."""
        given = [a for a in (self.exported, self.imported, self.departed) if a is not None]
        if len(given) != 1:
            raise MalformedMessage(f"{len(given)} answers about a migration")
        return given[0]
