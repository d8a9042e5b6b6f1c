"""Supervise one device's worker process from the server: start it, replace it when it dies.

Used by the controller, the router and the other parts of `ballast.cluster` that run in the server.
Open requests survive a crash: the next worker continues each after the tokens that its client has.
Runs on the server's event loop and never touches device memory.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

from ballast.cluster.loop_timers import LoopTimers
from ballast.cluster.worker.worker_link import WorkerSource
from ballast.control.device_observer import DeviceObserver
from ballast.control.device_record import DeviceRecord
from ballast.control.suspicion import Suspicions
from ballast.core.command import Add, Remove
from ballast.core.errors import BallastError, Unavailable
from ballast.core.fleet_state import OPERATOR, Command, CommandOutcome
from ballast.core.migration import Piece
from ballast.core.settings import FleetSettings, ModelSettings
from ballast.transport.worker_messages.admin_messages import CommandDoneMsg, CommandMsg
from ballast.transport.worker_messages.codec import ToServer, ToWorker
from ballast.transport.worker_messages.lending_messages import LeaseMsg, PeerReportMsg
from ballast.transport.worker_messages.lifecycle_messages import (
    DrainedMsg,
    DrainMsg,
    ReadyMsg,
    StatusMsg,
    StopMsg,
)
from ballast.transport.worker_messages.migration_messages import MigrationAnswerMsg
from ballast.transport.worker_messages.request_messages import OutputsMsg

log = logging.getLogger(__name__)

WORKER_LOST = "worker_lost"
"""Code of `FailedOutput` for requests whose worker died and could not be replaced."""
STANDBY = "it is on standby: no load asks for it"
LOST_AFTER = 3
"""Consecutive failed starts after which requests fail instead of waiting."""
BACKOFF_SECONDS, LONGEST_BACKOFF_SECONDS = 0.5, 60.0
STEADY_SECONDS = 60.0
"""Lifetime of a worker after which its death starts a new count of failures: the next worker is
started without delay."""


Answered = Callable[[CommandOutcome], object]


async def outcome_of(begin: Callable[[Answered], object]) -> CommandOutcome:
    """Return the outcome that what `begin` begins is answered with. It goes on if its caller does
    not wait. Raises Unavailable for one that is `unavailable`."""
    ended: asyncio.Future[CommandOutcome] = asyncio.get_running_loop().create_future()

    def end(outcome: CommandOutcome) -> None:
        if not ended.done():  # its caller may have been cancelled
            ended.set_result(outcome)

    begin(end)
    outcome = await ended
    if outcome.code == "unavailable":
        raise Unavailable(outcome.reason)
    return outcome


def _as_loaded(model: ModelSettings) -> ModelSettings:
    """Return a model's settings without those that its devices do not know."""
    adapters = tuple(replace(adapter, aliases=()) for adapter in model.adapters)
    return replace(model, devices=(), aliases=(), adapters=adapters)


class RemoteDevice(DeviceRecord):
    """One device: its present worker, and the settings with which the next one is started."""

    def __init__(
        self,
        name: str,
        workers: WorkerSource,
        suspicions: Suspicions,
        observers: Sequence[DeviceObserver[RemoteDevice]],
    ) -> None:
        super().__init__(name, suspicions, LoopTimers())
        self._workers = workers
        self.worker = workers.first(name)
        self._observers = tuple(observers)
        self._numbers = itertools.count(1)
        self._commands: dict[int, tuple[Command, Answered]] = {}
        """Those that the present worker has not answered, by id, each with what to call then."""
        self._supervisor: asyncio.Task[None] | None = None
        self.kept = False
        """Whether it served models before this server started."""
        self._ending = False
        self._drained = asyncio.Event()

    @property
    def host(self) -> str:
        """Name of its host; empty: the server's, or none now."""
        return self._workers.host_of(self.name)

    @property
    def stands_by(self) -> bool:
        """Whether it does not serve because no load asks for it."""
        return self._workers.stands_by(self.name)

    @property
    def waits_for_host(self) -> bool:
        """Whether it waits until a host has room for it."""
        return self._workers.waits(self.name)

    async def start(self, fleet: FleetSettings) -> None:
        """Start the worker; returns when the device serves. Raises Unavailable if it cannot."""
        ready = await self.worker.start(fleet)
        self.fleet = replace(fleet, models=ready.kept or fleet.models)
        self._serve(ready)
        self._supervisor = asyncio.create_task(self._supervise())
        self.kept = bool(ready.kept)
        for settings in fleet.models if self.kept else ():
            await self.load(settings)

    def stand_by(self, fleet: FleetSettings) -> None:
        """Start the worker when the device is wanted (`WorkerSource.want`)."""
        self.fleet, self.down = fleet, STANDBY
        self._supervisor = asyncio.create_task(self._supervise(serves=False))

    async def remove_others(self, wanted: FleetSettings) -> None:
        """Remove the models of a device that was kept which the fleet has no longer, or on other
        devices, or of which it says something else now. Raises as `command`."""
        models = {_as_loaded(m): m for m in wanted.models}
        for settings in self.fleet.models:
            found = models.get(_as_loaded(settings))
            if found is None or (found.devices and self.name not in found.devices):
                await self.command(Remove(settings.name, 0.0))

    def offer(self, reader: str, pieces: Sequence[Piece]) -> str | None:
        return self._workers.offer_kv(self.name, reader, self.pages, pieces)

    def tell(self, message: ToWorker) -> None:
        self.worker.send(message)

    def order(self, command: Command, answered: Answered, by: str = OPERATOR) -> None:
        # Whoever orders has returned by then, and what fails there does not end the supervision.
        loop = asyncio.get_running_loop()

        def later(outcome: CommandOutcome) -> None:
            loop.call_soon(answered, outcome)

        down = self.down or ("the server is stopping" if self._ending else None)
        if down is not None:
            later(CommandOutcome("unavailable", down))
        elif isinstance(command, Remove) and self._is_without(command.model):
            outcome = CommandOutcome(specs=dict(self.specs))
            self._carried_out(command, outcome)
            later(outcome)
        else:
            id = next(self._numbers)
            self._commands[id] = command, later
            self.worker.send(CommandMsg.of(id, command, by))

    def _is_without(self, model: str) -> bool:
        """Whether a model of its fleet is not served, as it could not be loaded."""
        known = {m.name for m in self.fleet.models} | self.failed.keys()
        return model in known.difference(self.specs)

    async def command(self, command: Command) -> CommandOutcome:
        """Have the worker carry out an operator's command; later ones start with its result.

        Raises Unavailable where no worker serves, or it dies before it has answered: the next
        worker then starts with the fleet as it was.
        """
        return await outcome_of(partial(self.order, command))

    def kill(self, why: str) -> None:
        self.worker.kill(why)

    async def load(self, settings: ModelSettings) -> CommandOutcome:
        """Load a model of the fleet on the device that has started without it. One that cannot be
        loaded is listed in `failed`, as if the worker had started with it. Raises as `command`."""
        here = map(_as_loaded, self.fleet.models)
        if settings.name in self.specs and _as_loaded(settings) in here:
            return CommandOutcome(specs=dict(self.specs))  # since before this server
        outcome = await self.command(Add(settings, at_start=True))
        if outcome.code is not None:
            self.fleet = Add(settings).applied(self.fleet)
            base = f"its base {settings.name} is not served"
            adapters = dict.fromkeys((a.name for a in settings.adapters), base)
            self.failed = {**self.failed, **adapters, settings.name: outcome.reason}
        return outcome

    def _began(self, request_id: str) -> None:
        for observer in self._observers:
            observer.first_token(self, request_id)

    def _carried_out(self, command: Command, outcome: CommandOutcome) -> None:
        if self.carried_out(command, outcome):
            for observer in self._observers:
                observer.command_done(self, command)

    async def close(self, patience: float) -> None:
        """End the worker: open requests finish within `patience` seconds, or fail."""
        self._ending = True
        self.requests.pause()
        if self._supervisor is None:
            await self.worker.close()
            return
        if self.down is None:
            self.worker.send(DrainMsg())
            await self._wait_until_drained(patience)
        if self.down is None and not self._drained.is_set():
            self.worker.send(StopMsg("the server is stopping"))
            await self._wait_until_drained(patience)
        self.requests.fail_all("unavailable", "the server is stopping")
        self._fail_commands("the server is stopping")
        self._supervisor.cancel()
        await asyncio.wait({self._supervisor})
        await self.worker.close(patience if self._drained.is_set() else 0.0)

    async def _wait_until_drained(self, seconds: float) -> None:
        drained = asyncio.ensure_future(self._drained.wait())
        assert self._supervisor is not None
        await asyncio.wait(
            {drained, self._supervisor}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
        )
        drained.cancel()

    # -- workers --------------------------------------------------------------------------------

    async def _supervise(self, *, serves: bool = True) -> None:
        """Handle the worker's messages; replace the worker when it dies. `serves`: whether there is
        one."""
        clock = asyncio.get_running_loop().time
        failures = 0
        try:
            if not serves:
                await self._replace(failures)
            while True:
                began = clock()
                why = await self._listen()
                had_work = bool(self.requests.sent)
                self._mourn(why)
                if self._ending:
                    return
                await self.worker.close()
                for observer in self._observers:
                    await observer.worker_reaped(self)
                # Requests are convicted after a few crashes; other causes may recur without end.
                fresh = had_work or clock() - began > STEADY_SECONDS
                failures = 0 if fresh else failures + 1
                await self._replace(failures)
        except Exception as error:  # of any kind: no request may wait for ever
            log.exception("workers cannot be supervised")
            self._give_up(f"{type(error).__name__}: {error}")
            self._fail_commands(f"{self.lost}")

    async def _listen(self) -> str:
        """Handle the worker's messages until it has ended; return how it ended."""
        try:
            while (message := await self.worker.receive()) is not None:
                self._handle(message)
        except BallastError as error:
            log.error("the worker cannot be understood: %s", error)
            return str(error)
        return self.worker.exit_reason()

    def _handle(self, message: ToServer) -> None:
        match message:
            case OutputsMsg():
                for output in message.unwrap():
                    self.requests.deliver(output)
                self.requests.dispatch()
            case StatusMsg():
                self.report = message.report
                self.requests.reported()
                for observer in self._observers:
                    observer.reported(self)
                self._remember(message)
            case CommandDoneMsg():
                if (done := self._commands.pop(message.id, None)) is not None:
                    command, answered = done
                    self._carried_out(command, message.outcome)
                    answered(message.outcome)
            case LeaseMsg() | PeerReportMsg():
                for observer in self._observers:
                    observer.lending_message(self, message)
            case MigrationAnswerMsg():
                for observer in self._observers:
                    observer.migration_message(self, message.answer)
            case DrainedMsg():
                self._drained.set()
            case _:
                log.warning("unexpected message %s", type(message).__name__)

    def _remember(self, status: StatusMsg) -> None:
        """Report the worker's decisions to the observers, with times on the event loop's clock.

        Decisions are kept for longer than the worker lives, whose clock dated them.
        """
        since = asyncio.get_running_loop().time() - status.report.now
        for decision in status.decisions:
            fields = {key: value for key, value in decision.items() if key != "at"}
            for observer in self._observers:
                observer.decision_made(self, since + decision["at"], fields)

    def _serve(self, ready: ReadyMsg) -> None:
        self._drained.clear()
        self.worker_serves(ready)
        for observer in self._observers:
            observer.worker_ready(self)

    def _mourn(self, why: str) -> None:
        """Note the worker's death: its requests wait for the next worker, or move elsewhere."""
        why = f"the worker is gone ({why})"
        self._fail_commands(why)
        if not self._ending:
            waiting = len(self.requests.sent)
            log.error("%s: %s; %d requests wait for the next", self.name, why, waiting)
        in_flight = self.worker_gone(why, self.worker.in_flight())
        if not self._ending:
            self._notify_death(in_flight)

    async def _replace(self, failures: int) -> None:
        """Start a worker, again and again until one serves."""
        attempts = 0
        while True:
            if failures + attempts > 0:
                seconds = BACKOFF_SECONDS * 2 ** min(failures + attempts - 1, 10)
                await asyncio.sleep(min(LONGEST_BACKOFF_SECONDS, seconds))
            try:
                await self.worker.close()
                self.worker = await self._workers.next(self.name)
                ready = await self.worker.start(self.fleet)
            except (BallastError, OSError) as error:
                attempts += 1
                self.down = str(error) or type(error).__name__
                log.error("%s: a worker could not be started: %s", self.name, self.down)
                if attempts >= LOST_AFTER:
                    self._give_up(self.down)
                continue
            self.restarts += self.report is not None
            log.warning("%s: a new worker serves; %d requests go on", self.name, len(self.requests))
            self._serve(ready)
            if self.fleet.server.spare_worker:
                await self._workers.prepare(self.fleet.server)
            return

    def _give_up(self, why: str) -> None:
        """Declare the device lost: requests fail that no other device can take."""
        self.down = self.lost = why
        try:
            self._notify_death(())
        finally:
            self.requests.fail_all(WORKER_LOST, why)

    def _fail_commands(self, reason: str) -> None:
        """Answer all commands: the worker will not."""
        pending, self._commands = self._commands, {}
        for command, answered in pending.values():
            what = f"{command.verb} was not done: {reason}"
            answered(CommandOutcome("unavailable", what))

    def _notify_death(self, in_flight: Collection[str]) -> None:
        for observer in self._observers:
            observer.worker_died(self, in_flight)
