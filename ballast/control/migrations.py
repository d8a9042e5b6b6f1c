"""Migrate running requests with their KV between devices; a pure state machine.

Run by the server (`control.request_migrations`) and by the simulator (`sim.migration`).

::

    source                        controller                        target
      | <---- ExportKvEvent -------- |                                 |
      | ----- KvExportedAnswer ----> | ------- ImportKvEvent --------> |
      |  (goes on decoding)          | <------ KvImportedAnswer ------ |
      | <---- DepartEvent ---------- |                                 |
      | ----- DepartedAnswer ------> | ------- KvTailEvent ----------> |  goes on decoding

A request departs when a block of its KV has just filled, so that no token is recomputed. If a step
fails before that, the request stays at its source; after it, the request goes on at the target, or,
if the target is gone, at its source, and the KV that did not come is recomputed.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from math import inf

from ballast.control.migration_events import (
    ActivationRefusedEvent,
    AnsweredEvent,
    BatchEnded,
    BlockFilledEvent,
    ContinueRequest,
    DeviceLostEvent,
    Devices,
    Event,
    Instruction,
    LookEvent,
    MarkDeparting,
    MigrateEvent,
    OrderActivation,
    SendStep,
)
from ballast.core.migration import (
    AT_ONCE,
    DepartedAnswer,
    DepartEvent,
    DropKvEvent,
    ExportKvEvent,
    ImportKvEvent,
    KvExportedAnswer,
    KvImportedAnswer,
    KvTailEvent,
    MigrationAnswer,
    wanted,
)
from ballast.core.request import Submission

ANSWER_SECONDS = 10.0
"""Time for a device to answer a step: it may be in a long job, or have a GiB of KV to read."""
ACTIVATION_SECONDS = 30.0
"""Time for weights to arrive at a device before requests of their model migrate there."""
REFUSED_SECONDS = 2.0
"""The same where the activation was refused, as it is while the weights are loading already."""


class _Step(enum.Enum):
    """The answer that a migration awaits."""

    EXPORT = "export"
    IMPORT = "import"
    DEPART = "depart"


@dataclass(slots=True)
class _Queued:
    """A request that is to migrate when others of its source have."""

    request_id: str
    batch: int | None
    """None: a hand-over from prefill to decode."""
    target: str | None
    """None: chosen when it begins."""


@dataclass(slots=True)
class _Migration:
    """A request on its way."""

    source: str
    target: str
    batch: int | None
    attempt: int
    """Number of this migration: a device's answer to an earlier one is stale."""
    step: _Step
    until: float
    """When the answer is late."""
    kv_lost: bool = False
    """Whether the worker that had imported the KV has died."""


@dataclass(slots=True)
class _AwaitedWeights:
    """Requests of one model and source that wait for its weights at `target`."""

    source: str
    model: str
    target: str
    until: float
    batch: int | None
    request_id: str | None = None
    """None: all that run when the weights are there."""


@dataclass(slots=True)
class _Batch:
    open: int
    """Requests that may yet move."""
    left: int = 0
    """Requests that have left the source."""
    target: str | None = None
    """Where they go; None: chosen for each when it begins."""


class Migrations:
    """Migrations between the devices of one server; at most AT_ONCE at a time off each device.

    A step's answer is awaited for ANSWER_SECONDS. `handle` has to be called with `LookEvent` at
    `due`, and, while `awaits_weights`, when a device has reported.
    """

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        self._migrations: dict[str, _Migration] = {}
        """By request."""
        self._queued: dict[str, deque[_Queued]] = {}
        """By source."""
        self._awaited: list[_AwaitedWeights] = []
        self._batches: dict[int, _Batch] = {}
        self._attempts = 0
        self._now = 0.0
        self._out: list[Instruction] = []

    @property
    def under_way(self) -> Collection[str]:
        """Ids of the requests whose migration has begun."""
        return self._migrations.keys()

    @property
    def busy(self) -> bool:
        """Whether any request may yet move."""
        return bool(self._migrations or self._awaited or any(self._queued.values()))

    @property
    def awaits_weights(self) -> bool:
        """Whether requests wait for weights to arrive elsewhere."""
        return bool(self._awaited)

    @property
    def due(self) -> float:
        """Time of the next `LookEvent`; inf: none is needed."""
        moving = min((m.until for m in self._migrations.values()), default=inf)
        return min(moving, min((a.until for a in self._awaited), default=inf))

    def handle(self, now: float, event: Event) -> list[Instruction]:
        """Handle an event at `now`, in seconds of any clock that does not go back."""
        self._now, self._out = now, []
        match event:
            case MigrateEvent():
                self._migrate_all(event)
            case BlockFilledEvent():
                self._hand_over(event)
            case AnsweredEvent(device, answer):
                self._answered(device, answer)
            case ActivationRefusedEvent(device, model):
                for awaited in self._awaited:
                    if (awaited.target, awaited.model) == (device, model):
                        awaited.until = min(awaited.until, now + REFUSED_SECONDS)
            case DeviceLostEvent(device):
                self._lose(device)
            case LookEvent():
                self._look()
        return self._out

    # -- orders -----------------------------------------------------------------------------------

    def _migrate_all(self, event: MigrateEvent) -> None:
        self._batches[event.batch] = _Batch(1, target=event.target)
        others = self._devices.others(event.source, event.model)
        others = [name for name in others if event.target in (None, name)]
        able = any(self._devices.has_weights(name, event.model) for name in others)
        if event.bring and others and not able:
            self._await_weights(event.source, event.model, others[0], event.batch)
        else:
            self._enqueue_running(event.source, event.model, event.batch)

    def _hand_over(self, event: BlockFilledEvent) -> None:
        """Migrate a request to a device that decodes. It stays if there is none, or if its weights
        or KV do not fit there."""
        found = self._devices.open_at(event.source, event.request_id)
        named = None if found is None else found.submission.model
        model = None if named is None else self._devices.base_of(event.source, named)
        if found is None or model is None:
            return
        others = self._devices.others(event.source, model)
        target = self._devices.choose_for_decode(found.submission, others)
        if target is None:
            return
        if self._devices.has_weights(target, model):
            self._enqueue(event.source, _Queued(event.request_id, None, target))
        else:
            self._await_weights(event.source, model, target, None, event.request_id)

    def _await_weights(
        self,
        source: str,
        model: str,
        target: str,
        batch: int | None,
        request_id: str | None = None,
    ) -> None:
        until = self._now + ACTIVATION_SECONDS
        self._awaited.append(_AwaitedWeights(source, model, target, until, batch, request_id))
        self._out.append(OrderActivation(target, model, f"its requests come from {source}"))

    def _look(self) -> None:
        """Let requests migrate whose weights have arrived; give up what has waited for too long."""
        awaited, self._awaited = self._awaited, []
        for each in awaited:
            there = self._devices.has_weights(each.target, each.model)
            goes_on = self._devices.running(each.source, each.model)
            if not there and goes_on and self._now < each.until:
                self._awaited.append(each)
            elif each.request_id is None:
                assert each.batch is not None, "a hand-over names its request"
                self._enqueue_running(each.source, each.model, each.batch)
            elif there:
                self._enqueue(each.source, _Queued(each.request_id, None, each.target))
        for request_id, migration in list(self._migrations.items()):
            if migration.until <= self._now and request_id in self._migrations:
                if migration.step is _Step.DEPART:
                    self._depart(request_id, migration, None)
                else:
                    self._fail(request_id, migration)

    # -- the queue --------------------------------------------------------------------------------

    def _able(self, source: str, model: str) -> list[str]:
        """Return the devices that requests of a model can migrate to."""
        others = self._devices.others(source, model)
        return [name for name in others if self._devices.has_weights(name, model)]

    def _enqueue_running(self, source: str, model: str, batch: int) -> None:
        running = self._devices.running(source, model)
        found = self._batches[batch]
        found.open += len(running) - 1
        for request_id in running:
            self._enqueue(source, _Queued(request_id, batch, found.target))
        self._end_batch_if_done(batch)

    def _enqueue(self, source: str, queued: _Queued) -> None:
        self._queued.setdefault(source, deque()).append(queued)
        self._begin(source)

    def _begin(self, source: str) -> None:
        """Begin migrations off a device, as many as may be under way at a time."""
        queue = self._queued.get(source)
        while queue and sum(m.source == source for m in self._migrations.values()) < AT_ONCE:
            queued = queue.popleft()
            target = self._target_of(source, queued)
            if target is None:
                ended = self._devices.open_at(source, queued.request_id) is None
                self._count_out(queued.batch, left=ended)
                continue
            self._attempts += 1
            one = source, target, queued.batch, self._attempts, _Step.EXPORT
            self._migrations[queued.request_id] = _Migration(*one, self._now + ANSWER_SECONDS)
            self._out.append(SendStep(source, ExportKvEvent(queued.request_id, self._attempts)))

    def _target_of(self, source: str, queued: _Queued) -> str | None:
        """Return where a request migrates; None: it stays."""
        found = self._devices.open_at(source, queued.request_id)
        up = self._devices.is_up(source)
        if found is None or not up or queued.request_id in self._migrations:
            return None
        if queued.target is not None:
            return queued.target if self._devices.is_up(queued.target) else None
        model = self._devices.base_of(source, found.submission.model)
        able = [] if model is None else self._able(source, model)
        return self._devices.choose(found.submission, able) if able else None

    # -- steps of a migration ---------------------------------------------------------------------

    def _answered(self, device: str, answer: MigrationAnswer) -> None:
        migration = self._migrations.get(answer.request_id)
        if migration is None or answer.attempt != migration.attempt:
            return  # it came late
        match migration.step, answer:
            case _Step.EXPORT, KvExportedAnswer() if device == migration.source:
                self._import(migration, answer)
            case _Step.IMPORT, KvImportedAnswer(_, tokens) if device == migration.target:
                if tokens and self._devices.open_at(migration.source, answer.request_id):
                    migration.step = _Step.DEPART
                    migration.until = self._now + ANSWER_SECONDS
                    self._out.append(MarkDeparting(migration.source, answer.request_id))
                    step = DepartEvent(answer.request_id, migration.attempt)
                    self._out.append(SendStep(migration.source, step))
                else:
                    self._fail(answer.request_id, migration)
            case _Step.DEPART, DepartedAnswer() if device == migration.source:
                self._depart(answer.request_id, migration, answer)

    def _import(self, migration: _Migration, exported: KvExportedAnswer) -> None:
        """Have the target read the KV that a request has so far."""
        source, target, pieces = migration.source, migration.target, exported.pieces
        found, memory = self._devices.open_at(source, exported.request_id), None
        if found is not None and exported.tokens and self._devices.is_up(target):
            memory = self._devices.offer(source, target, pieces)
        if found is None or memory is None:
            self._fail(exported.request_id, migration)
            return
        kv = wanted(found.submission, found.output, exported.tokens)
        step = ImportKvEvent(kv, exported.form, memory, pieces, migration.attempt)
        migration.step, migration.until = _Step.IMPORT, self._now + ANSWER_SECONDS
        self._out.append(SendStep(target, step))

    def _depart(
        self, request_id: str, migration: _Migration, departed: DepartedAnswer | None
    ) -> None:
        """Let a request go on at its target. `departed`: None: its source has not answered."""
        source, target = migration.source, migration.target
        found = self._devices.open_at(source, request_id)
        if found is None:
            self._fail(request_id, migration)  # it ended before it could depart
            return
        up = self._devices.is_up(target)
        goes_to = self._destination(source, target, found.submission)
        with_kv = goes_to == target and up and not migration.kv_lost
        with_kv = with_kv and departed is not None and departed.intact
        if with_kv:
            assert departed is not None
            tail = KvTailEvent(request_id, departed.tokens, departed.tail, migration.attempt)
            self._out.append(SendStep(target, tail))
        elif up:
            self._out.append(SendStep(target, DropKvEvent(request_id)))
        gone = departed is not None
        self._out.append(ContinueRequest(request_id, source, goes_to, with_kv, gone))
        self._end(request_id, migration, left=goes_to != source)

    def _destination(self, source: str, target: str, submission: Submission) -> str:
        """Return where a departed request goes on: at its target, else its source, else a third
        device. If none serves and its model leaves the source, it waits for the target's worker."""
        model = self._devices.base_of(source, submission.model) or submission.model
        others = [d for d in self._devices.others(source, model) if self._devices.is_up(d)]
        if target in others or not others:
            return target if others or self._devices.leaves(source, model) else source
        stays = source in self._devices.others(target, model)
        return source if stays else self._devices.choose(submission, others)

    def _fail(self, request_id: str, migration: _Migration) -> None:
        """End a migration whose request stays at its source, or has ended."""
        if self._devices.is_up(migration.target):
            self._out.append(SendStep(migration.target, DropKvEvent(request_id)))
        gone = self._devices.open_at(migration.source, request_id) is None
        self._end(request_id, migration, left=gone)

    def _end(self, request_id: str, migration: _Migration, *, left: bool) -> None:
        del self._migrations[request_id]
        self._count_out(migration.batch, left=left)
        self._begin(migration.source)

    def _lose(self, device: str) -> None:
        """End the migrations that a device that has died was part of. A request that is departing
        from another device to it goes on: its departure cannot be called back."""
        for awaited in [a for a in self._awaited if device in (a.source, a.target)]:
            self._awaited.remove(awaited)
            if awaited.batch is not None:
                self._count_out(awaited.batch, left=False)
        for request_id, migration in list(self._migrations.items()):
            if migration.source == device:
                self._fail(request_id, migration)
            elif migration.target == device:
                migration.kv_lost = True
                if migration.step is not _Step.DEPART:
                    self._fail(request_id, migration)

    # -- batches ----------------------------------------------------------------------------------

    def _count_out(self, batch: int | None, *, left: bool) -> None:
        if batch is None:
            return
        self._batches[batch].open -= 1
        self._batches[batch].left += left
        self._end_batch_if_done(batch)

    def _end_batch_if_done(self, batch: int) -> None:
        found = self._batches.get(batch)
        if found is not None and not found.open:
            del self._batches[batch]
            self._out.append(BatchEnded(batch, found.left))
