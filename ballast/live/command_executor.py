"""Carry out operators' commands on a live device, on a thread of its own beside the loop.

Used by `LiveDevice.command`. Adding a model loads it into the host tier beside the loop; everything
that changes the device's state is posted to the loop as a command, and never done here.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Protocol

from ballast.core.actions import Join, Leave, LoopCommand, ReleaseMemory
from ballast.core.command import Add, CommandOutcome, DeviceCommand, Remove
from ballast.core.errors import BallastError, ConfigError, DeviceError
from ballast.core.event import CommandEvent, Event
from ballast.core.fleet_state import OPERATOR
from ballast.core.model import ModelSpec
from ballast.core.settings import ModelSettings
from ballast.core.units import ceil_div
from ballast.engine.build import Hosted, build_newcomer
from ballast.engine.loop import Loop
from ballast.engine.model import ModelState
from ballast.engine.sizing import check_room
from ballast.engine.state import DeviceState
from ballast.live.hosted_models import HostedModels
from ballast.live.machine import Machine
from ballast.live.runner import Executor
from ballast.memory.reserve import PopulatedReserve
from ballast.weights.checkpoint import THREADS
from ballast.weights.host import HostModel, HostTier

log = logging.getLogger(__name__)

OnOutcome = Callable[[CommandOutcome], None]
"""Called with how a command has ended."""
ENDING = "the device ends"
NICENESS = 10
"""Niceness of the thread that loads models, so that serving comes first."""


class CommandRefused(BallastError):
    """The state of the device does not allow it."""


class OperatedDevice(Protocol):
    """A live device whose models can change; `ballast.live.device.LiveDevice` is one."""

    models: HostedModels
    tier: HostTier
    machine: Machine
    state: DeviceState
    loop: Loop
    executors: dict[str, tuple[Executor, ...]]
    reserve: PopulatedReserve

    @property
    def specs(self) -> dict[str, ModelSpec]: ...

    def post(self, event: Event) -> None: ...

    def executors_of(self, host: HostModel, m: ModelState) -> tuple[Executor, ...]: ...

    def forget_model(self, name: str) -> None: ...

    def beside_jobs(self) -> AbstractContextManager[object]: ...


class CommandExecutor:
    """Carries out commands; those that load or wait run one at a time, on a thread of their own."""

    def __init__(self, device: OperatedDevice) -> None:
        self._device = device
        self._thread = ThreadPoolExecutor(1, "operator", initializer=_stand_back)
        self._loader = ThreadPoolExecutor(1, "loader")
        """Loads the models of a fleet that starts, at the priority of what serves."""
        self._turn = threading.Lock()
        """Held by the thread that carries a command out: models are loaded one at a time."""
        self._numbers = itertools.count(1)
        self._open: dict[str, Future[str | None]] = {}
        """Results of commands that the loop has not ended yet, by id."""
        self._lock = threading.Lock()
        """Held while `_open` or `_closed` change."""
        self._closed = False

    def carry_out(self, command: DeviceCommand, done: OnOutcome, by: str = OPERATOR) -> None:
        """Begin a command and return at once; from any thread. `done` is called once, by any
        thread. `by`: who ordered it."""
        match command:
            case Add() | Remove():
                at_start = isinstance(command, Add) and command.at_start
                try:
                    thread = self._loader if at_start else self._thread
                    thread.submit(self._work, command, done, by)
                except RuntimeError:
                    done(CommandOutcome("unavailable", ENDING))
            case ReleaseMemory():
                result = self._submit(command, by)
                result.add_done_callback(lambda a: self._release(command, a.result(), done))
            case _:
                result = self._submit(command, by)
                result.add_done_callback(lambda a: done(self._outcome(a.result())))

    def command_ended(self, id: str, refusal: str | None) -> None:
        """Take the result of a command from the loop: None, or why it was refused."""
        with self._lock:
            result = self._open.pop(id)
        result.set_result(refusal)

    def close(self) -> None:
        """Abandon loads in progress and fail open commands. The loop must have returned."""
        with self._lock:
            self._closed = True
            left = list(self._open.values())
            self._open.clear()
        for result in left:
            result.set_result(ENDING)
        self._device.tier.closing = True
        for thread in (self._thread, self._loader):
            thread.shutdown(wait=True, cancel_futures=True)

    # -- in the operator's thread -----------------------------------------------------------------

    def _work(self, command: Add | Remove, done: OnOutcome, by: str) -> None:
        device = self._device
        failed: dict[str, str] = {}
        try:
            with self._turn, device.beside_jobs():
                if isinstance(command, Add):
                    threads = THREADS if command.at_start else 1
                    failed = dict(self._add(command.settings, threads, by).failed)
                else:
                    self._remove(command, by)
            outcome = CommandOutcome(specs=device.specs, failed=failed)
        except (CommandRefused, DeviceError) as error:
            outcome = CommandOutcome("unavailable" if self._closed else "refused", str(error))
        except BallastError as error:
            outcome = CommandOutcome("invalid", str(error))
        except Exception as error:
            log.exception("%s failed", type(command).__name__)
            outcome = CommandOutcome("broken", f"{type(error).__name__}: {error}")
        done(outcome)

    def _add(self, settings: ModelSettings, threads: int, by: str) -> HostModel:
        device = self._device
        for name in (settings.name, *(a.name for a in settings.adapters)):
            if name in device.state.named:
                raise CommandRefused(f"there is a model {name!r} already")
        host = device.models.load(settings, threads)
        try:
            self._join(host, by)
        except BaseException:
            device.models.forget(settings.name)
            device.machine.unload(host)
            raise
        return host

    def _join(self, host: HostModel, by: str) -> None:
        """Build the model's engine state here, since it takes time, and have the loop add it."""
        device, name = self._device, host.spec.name
        try:  # its executors could not even be made where its activations alone have no room
            in_place = device.state.weights_in_place
            check_room(host.spec, [], device.state.settings, in_place=in_place)
        except ConfigError as error:
            raise CommandRefused(str(error)) from error
        hosted = Hosted(host.spec, host.addresses)
        m, new = build_newcomer(device.state, hosted, device.machine.copy)
        try:
            device.executors[name] = device.executors_of(host, m)
            device.loop.commands.ready[name] = m, new
            refusal = self._submit(Join(name), by).result()
            if refusal is not None:
                raise CommandRefused(refusal)
        except BaseException:
            self._discard(m)
            raise
        device.models.add(host)

    def _discard(self, m: ModelState) -> None:
        """Release the engine state of a model that has not joined."""
        self._device.forget_model(m.spec.name)
        self._device.loop.commands.ready.pop(m.spec.name, None)
        m.kv.close()
        m.weights.close()

    def _remove(self, command: Remove, by: str) -> None:
        device, name = self._device, command.model
        result = self._submit(Leave(name), by)
        try:
            refusal = result.result(timeout=command.patience)
        except TimeoutError:
            self._submit(Leave(name, at_once=True), by).result()
            refusal = result.result()
        if refusal is not None:
            raise CommandRefused(refusal)
        device.forget_model(name)
        device.models.remove(name)

    # -- in any thread ----------------------------------------------------------------------------

    def _submit(self, operation: LoopCommand, by: str) -> Future[str | None]:
        """Have the loop do it."""
        result: Future[str | None] = Future()
        with self._lock:
            if self._closed:
                result.set_result(ENDING)
                return result
            id = f"operation-{next(self._numbers)}"
            self._open[id] = result
        self._device.post(CommandEvent(id, operation, by))
        return result

    def _release(self, command: ReleaseMemory, refusal: str | None, done: OnOutcome) -> None:
        """Have the reserve's thread give memory back, unless the loop has refused it."""
        if refusal is not None:
            done(self._outcome(refusal))
            return
        page = self._device.state.settings.page_bytes

        def given_back(pages: Future[int]) -> None:
            if pages.cancelled():
                done(CommandOutcome("unavailable", ENDING))
            elif (error := pages.exception()) is not None:
                done(CommandOutcome("broken", f"{type(error).__name__}: {error}"))
            else:
                done(CommandOutcome(specs=self._device.specs, released=pages.result() * page))

        pages = self._device.reserve.release(ceil_div(command.kept_bytes, page))
        pages.add_done_callback(given_back)

    def _outcome(self, refusal: str | None) -> CommandOutcome:
        if refusal is None:
            return CommandOutcome(specs=self._device.specs)
        return CommandOutcome("unavailable" if self._closed else "refused", refusal)


def _stand_back() -> None:
    """Lower the priority of this thread and of those that it starts."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
