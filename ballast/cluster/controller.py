"""Where requests and orders go: the devices of one server, and which of them serves which model."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ballast.cluster.device import RemoteDevice
from ballast.cluster.fleet_policy_runner import FleetPolicyRunner
from ballast.cluster.lending.lending_pairs import LendingPairs
from ballast.cluster.migrations import Migrations
from ballast.cluster.pending_orders import changed, names_of, refusal, undoing
from ballast.cluster.placing import homes_of, named, part_of, placed
from ballast.cluster.request_router import RequestRouter
from ballast.cluster.suspicion import Suspicions
from ballast.cluster.worker.spare_worker import SpareWorker
from ballast.cluster.worker.worker_link import WorkerLink
from ballast.core.actions import Activate, Evict, Lend, Recall
from ballast.core.command import Add, CommandOutcome, DeviceCommand, ModelCommand, Remove
from ballast.core.errors import ConfigError, Unavailable
from ballast.core.migration import MigrationAnswer
from ballast.core.model import ModelSpec
from ballast.core.request import Submission
from ballast.core.settings import FleetSettings, ModelSettings, ServerSettings
from ballast.transport.worker_messages.lending_messages import LeaseMsg, PeerReportMsg

log = logging.getLogger(__name__)

PATIENCE = 30.0
"""Seconds for what has come to a device meanwhile, where a drain is given up; and for weights to
come before requests of their model do."""
SHORT_PATIENCE = 2.0
"""The same where bringing them was refused, as it is while they are on their way."""
POLL_SECONDS = 0.05
"""How often it is seen whether they have."""


class _Refused(Exception):
    """No device takes a model; says why."""


class Controller(RequestRouter):
    """Starts devices, has them carry out orders, and hears what they tell."""

    def __init__(self, make_worker: Callable[[], WorkerLink]) -> None:
        super().__init__()
        self._make_worker = make_worker
        self._spare: SpareWorker[WorkerLink] = SpareWorker(make_worker)
        self._suspicions = Suspicions()
        self.changing = asyncio.Lock()
        """Held while a model is added or removed: what follows is judged by what came of it."""
        self._lending_pairs = LendingPairs(self.devices)
        self._migrations = Migrations()
        self._tasks: set[asyncio.Future[None]] = set()
        """Of requests that go on elsewhere."""
        self._following: asyncio.Task[None] | None = None

    async def start(self, fleet: FleetSettings) -> None:
        """Returns when all devices serve. Raises Unavailable if one cannot, and ConfigError where
        there is no place for a model."""
        self.fleet = fleet
        homes = await asyncio.to_thread(homes_of, fleet)
        cores = len(os.sched_getaffinity(0))
        starting = []
        for name in fleet.devices:
            device = self.devices[name] = RemoteDevice(
                name, self._make_worker, self._spare, self._suspicions, self
            )
            models = {model for model, at in homes.items() if name in at}
            starting.append(
                asyncio.ensure_future(device.start(part_of(fleet, name, models, cores)))
            )
        try:
            await asyncio.gather(*starting)
        finally:
            for task in starting:
                task.cancel()
        if fleet.server.spare_worker:
            await self._spare.prepare()
        if self.fleet_policy.moves and fleet.others:
            self._following = asyncio.create_task(FleetPolicyRunner(self, self.fleet_policy).run())

    def configure(self, server: ServerSettings) -> None:
        """Other limits of the server; the next workers are watched by the new ones."""
        self.fleet = replace(self.fleet, server=server)
        for device in self.devices.values():
            device.fleet = replace(device.fleet, server=server)

    # -- orders -----------------------------------------------------------------------------------

    async def command(self, order: ModelCommand, device: str | None = None) -> CommandOutcome:
        """Have the devices that it concerns carry out an operator's order, or none of them; or
        only one of a model's devices.

        Raises Unavailable where one of them does not serve, or dies before it has answered.
        """
        if isinstance(order, Add | Remove):
            async with self.changing:
                return await self._command(order)
        if device is not None:
            found = self.devices.get(device)
            if found is None or not found.serves(order.model):
                return CommandOutcome("refused", f"{order.model} is not on {device!r}")
            return await found.command(order)
        return await self._command(order)

    async def place(self, model: str, device: str) -> CommandOutcome:
        """Serve a model on one more device. Raises Unavailable, as `command`."""
        async with self.changing:
            settings = next((m for m in self.fleet.models if m.name == model), None)
            found = self.devices.get(device)
            if settings is None or found is None:
                what = f"there is no device {device!r}" if settings else f"no model {model!r}"
                return CommandOutcome("refused", f"{what}; devices: {', '.join(self.devices)}")
            if found.cordoned:
                return CommandOutcome("refused", f"{device} is drained; uncordon it first")
            if found.takes(model):
                return CommandOutcome("refused", f"{device} serves {model} already")
            return await found.join(settings)

    async def withdraw_model(self, model: str, device: str, patience: float) -> CommandOutcome:
        """Take a model from one of its devices. Requests that run there go on at others that have
        its weights; what stays has `patience` seconds to end. Raises Unavailable, as `command`."""
        async with self.changing:
            here = [d for d in self.devices.values() if d.takes(model)]
            found = self.devices.get(device)
            if found not in here:
                return CommandOutcome("refused", f"{model} is not on {device!r}")
            if len(here) < 2:
                return CommandOutcome("refused", f"{model} is on no other device")
            assert found is not None
            return await self._take_off(found, model, patience)

    async def _take_off(self, device: RemoteDevice, model: str, patience: float) -> CommandOutcome:
        """Take a model from a device that is not its only one."""
        device.leaving.add(model)
        try:
            await self.migrate(device, model)
            outcome = await device.command(Remove(model, patience))
        except BaseException:
            device.leaving.discard(model)
            raise
        if outcome.code is not None:
            device.leaving.discard(model)
        return outcome

    async def drain(self, device: str) -> CommandOutcome:
        """Empty a device for maintenance, until it is `uncordon`ed.

        Models that no other device serves are placed on others first, those with the least weights
        for their budget; where none takes one, nothing changes. Then requests open there go on
        elsewhere: running ones with their KV, once their model's weights are there, others, and
        those whose KV cannot be had or finds no room, after the tokens that their clients have.
        Its weights are evicted. Raises Unavailable, as `command`.
        """
        async with self.changing:
            found = self.devices.get(device)
            if found is None:
                return CommandOutcome(
                    "refused", f"no device {device!r}; devices: {', '.join(self.devices)}"
                )
            others = [
                d
                for d in self.devices.values()
                if d is not found and d.down is None and not d.cordoned
            ]
            placed: list[tuple[RemoteDevice, str]] = []
            try:
                for model in list(found.specs):
                    if not any(d.takes(model) for d in others):
                        placed.append((await self._place_on_any(model, others), model))
            except BaseException as error:
                for d, name in placed:
                    with suppress(Unavailable):
                        await self._take_off(d, name, PATIENCE)
                if isinstance(error, _Refused):
                    return CommandOutcome("refused", f"{model} stays on {device}: {error}")
                raise
            found.cordoned = True
            bases = list(found.specs.values())
            for base in bases:
                await self._bring_elsewhere(base, found)
            moved = sum([await self.migrate(found, base.name) for base in bases])
            anew = self._hand_over(found)
            text = "%s is drained: %d requests go on elsewhere, %d with their KV"
            log.info(text, device, moved + anew, moved)
            with suppress(Unavailable):  # of a worker that dies no weights are left
                for model in list(found.specs):
                    outcome = await found.command(Evict(model, "its device is drained"))
                    if outcome.code is not None:
                        log.warning("%s keeps the weights of %s: %s", device, model, outcome.reason)
            return CommandOutcome()

    async def migrate(self, device: RemoteDevice, model: str) -> int:
        """Have requests of a model that run on a device go on, with their KV, at others that serve
        it and have its weights; how many went."""
        base = device.specs.get(model)
        running = [] if base is None else device.requests.running(base)

        def choose(submission: Submission) -> RemoteDevice | None:
            able = [d for d in self._others(device, model) if d.has_weights(model)]
            return self._chosen(submission, able) if able else None

        return await self._migrations.move_all(running, device, choose) if running else 0

    def prefilled(self, device: RemoteDevice, request_id: str) -> None:
        """A request has its first token at a device that only prefills: it goes on at another."""
        task = asyncio.ensure_future(self._decode_elsewhere(device, request_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _decode_elsewhere(self, device: RemoteDevice, request_id: str) -> None:
        """It stays where none decodes, and where weights or KV find no room there."""
        request = device.requests.get(request_id)
        base = None if request is None else device.base_of(request.submission.model)
        if request is None or base is None:
            return
        target = self._decoding(request.submission, self._others(device, base.name))
        if target is None:
            return
        await self._bring(base, target, device)
        if target.has_weights(base.name):
            await self._migrations.move_all([request_id], device, lambda submission: target)

    async def _bring_elsewhere(self, base: ModelSpec, device: RemoteDevice) -> None:
        """Have another device bring a model's weights while requests of it run on this one."""
        others = self._others(device, base.name)
        if others and not any(d.has_weights(base.name) for d in others):
            await self._bring(base, others[0], device)

    async def _bring(self, base: ModelSpec, target: RemoteDevice, source: RemoteDevice) -> None:
        """Have a device bring a model's weights; returns when they are there, no request of it runs
        at `source` any more, or they do not come."""
        if target.has_weights(base.name):
            return
        with suppress(Unavailable, TimeoutError):
            why = f"its requests come from {source.name}"
            outcome = await target.command(Activate(base.name, why))
            # Where it is refused they may be on their way.
            async with asyncio.timeout(PATIENCE if outcome.code is None else SHORT_PATIENCE):
                while source.requests.running(base) and not target.has_weights(base.name):
                    await asyncio.sleep(POLL_SECONDS)

    def _others(self, device: RemoteDevice, model: str) -> list[RemoteDevice]:
        """Further devices that take requests of a model now."""
        return [d for d in self._serving(model) if d is not device and d.down is None]

    async def uncordon(self, device: str) -> CommandOutcome:
        """A device that was drained takes requests again, of the models that it has."""
        found = self.devices.get(device)
        if found is None:
            return CommandOutcome(
                "refused", f"no device {device!r}; devices: {', '.join(self.devices)}"
            )
        found.cordoned = False
        return CommandOutcome()

    async def _place_on_any(self, model: str, devices: Sequence[RemoteDevice]) -> RemoteDevice:
        """Have one of some devices serve a model. Raises _Refused where none does."""
        settings = next(m for m in self.fleet.models if m.name == model)
        refused = "there is no other device"

        def filled(d: RemoteDevice) -> float:
            weights = sum(sum(spec.segment_bytes) for spec in d.specs.values())
            return weights / d.fleet.device.budget_bytes

        for d in sorted(devices, key=filled):
            outcome = await d.join(settings)
            if outcome.code is None:
                return d
            refused = f"{d.name}: {outcome.reason}"
        raise _Refused(refused)

    async def lend(self, lender: str, borrower: str, n_bytes: int) -> CommandOutcome:
        """Have a device lend free pages, so many bytes of them. Raises Unavailable."""
        device = self.devices.get(lender)
        way = next((c for c in self.lending if (c.lender, c.borrower) == (lender, borrower)), None)
        if device is None or way is None:
            return CommandOutcome("refused", f"there is no lending from {lender!r} to {borrower!r}")
        if way.means is None:
            return CommandOutcome("refused", f"{lender} cannot lend to {borrower}: {way.why}")
        if not self._lending_pairs.can_lend(lender, borrower):
            return CommandOutcome("refused", f"{lender} and {borrower} do not know each other yet")
        report = self.devices[borrower].report
        assert report is not None  # it has said that it knows the other
        pages = n_bytes // report.page_bytes
        if pages < 1:
            return CommandOutcome("invalid", f"{n_bytes} bytes are less than a page")
        if sum(report.borrowed.values()) + pages > report.total:
            return CommandOutcome(
                "refused", f"{borrower} would have borrowed more than it has itself"
            )
        return await device.command(Lend(borrower, pages, "by an operator"))

    async def recall(
        self, lender: str, borrower: str, n_bytes: int | None, seconds: float
    ) -> CommandOutcome:
        """Have a device ask back what it has lent, or so much of it; returns when it is there, or
        the borrower has been killed, as it is after so many seconds. Raises Unavailable, as
        `command`."""
        device = self.devices.get(lender)
        report = None if device is None else device.report
        if device is None or report is None:
            return CommandOutcome("refused", f"there is no device {lender!r}")
        pages = None if n_bytes is None else max(1, n_bytes // report.page_bytes)
        return await device.command(Recall(borrower, pages, seconds, "by an operator"))

    def name_homes(self, model: str, devices: Sequence[str]) -> None:
        """An operator has said where a model is: as if the fleet file named these devices."""
        models = (
            replace(m, devices=tuple(devices)) if m.name == model else m for m in self.fleet.models
        )
        self.fleet = replace(self.fleet, models=tuple(models))

    def name_aliases(self, aliases: Mapping[str, tuple[str, ...]]) -> None:
        """Replace the aliases of all models and adapters, by own name; none where it has none."""
        models = (
            replace(
                m,
                aliases=aliases.get(m.name, ()),
                adapters=tuple(replace(a, aliases=aliases.get(a.name, ())) for a in m.adapters),
            )
            for m in self.fleet.models
        )
        self.fleet = replace(self.fleet, models=tuple(models))

    async def _command(self, order: ModelCommand) -> CommandOutcome:
        refused = refusal(self.fleet, self.specs, order)
        if refused is not None:
            return CommandOutcome("refused", refused)
        several = len(self.devices) > 1  # a single one knows what it serves
        if several and isinstance(order, Add) and order.settings.name in self.specs:
            return CommandOutcome("refused", f"there is a model {order.settings.name!r} already")
        try:
            devices = await self._concerned(order)
        except ConfigError as error:
            return CommandOutcome("invalid", str(error))
        missing = [d.down for d in devices if d.down is not None]
        if missing:
            raise Unavailable(missing[0])
        done: list[tuple[RemoteDevice, ModelCommand | None]] = []
        outcome = CommandOutcome()
        try:
            for device in devices:
                undo = undoing(order, device.fleet)
                outcome = await device.command(order)
                if outcome.code is not None:
                    break
                done.append((device, undo))
        finally:
            if len(done) < len(devices):
                await self._undo(done)
        return outcome

    async def _undo(self, done: Iterable[tuple[RemoteDevice, ModelCommand | None]]) -> None:
        """A later device did not do what these did."""
        for device, order in done:
            if order is None:
                continue
            try:
                outcome = await device.command(order)
                failed = outcome.reason if outcome.code is not None else ""
            except Unavailable as error:
                failed = str(error)
            if failed:
                log.error("%s: what another device did not do stays done: %s", device.name, failed)

    async def _concerned(self, order: ModelCommand) -> list[RemoteDevice]:
        """Devices that have to carry out an order. Raises ConfigError."""
        match order:
            case Add(settings):
                return await self._for(settings)
            case Remove(name):
                return self._having(name) or self._serving(name)[:1]
            case _:
                here = [d for d in self.devices.values() if d.serves(order.model)]
                return here or self._serving(order.model)

    async def _for(self, settings: ModelSettings) -> list[RemoteDevice]:
        """Devices for one more model. Raises ConfigError."""
        homes = {m: [d.name for d in self._having(m)] for m in names_of(self.fleet)}
        names = named(settings, self.fleet) or homes.get(settings.name)
        if not names:
            found = await asyncio.to_thread(placed, [settings], self.fleet, homes)
            names = found[settings.name]
        return [self.devices[name] for name in names]

    # -- what devices tell ------------------------------------------------------------------------

    def take_over(self, device: RemoteDevice, in_flight: Collection[str]) -> None:
        """A device's worker has died: what it lent or borrowed is settled, and requests go on."""
        self._lending_pairs.worker_died(device)
        self._migrations.died(device)
        self._hand_on(device, in_flight)

    def serving(self, device: RemoteDevice, pages: str) -> None:
        """Its worker serves: it may lend to others, and borrow."""
        self._lending_pairs.worker_started(device, pages, self.lending)

    def said(self, device: RemoteDevice, message: LeaseMsg | PeerReportMsg) -> None:
        """Of pages that are lent."""
        self._lending_pairs.handle(device, message)

    def said_of_request(self, device: RemoteDevice, word: MigrationAnswer) -> None:
        """Of a request that moves from it or to it."""
        self._migrations.said(device, word)

    async def buried(self, device: RemoteDevice) -> None:
        """Its worker has been reaped; returns when nobody uses its memory any more."""
        await self._lending_pairs.worker_reaped(device)

    def carried_out(self, device: RemoteDevice, order: DeviceCommand) -> None:
        """A device has done what was ordered: what all of them serve follows."""
        if isinstance(order, Remove) and self._having(order.model):
            return
        if isinstance(order, Add) and order.settings in self.fleet.models:
            return  # on one more device
        left = names_of(self.fleet)
        self.fleet = changed(self.fleet, order)
        left -= names_of(self.fleet)
        self.unreadable = {n: why for n, why in self.unreadable.items() if n not in left}

    def decided(self, device: RemoteDevice | None, moment: float, what: dict[str, Any]) -> None:
        """Something was decided, by a device or (None) about devices."""
        if device is not None and len(self.devices) > 1:
            what = {**what, "device": device.name}
        self.decisions.append((moment, what))

    async def close(self, patience: float) -> None:
        """End the workers: what is open is finished within `patience` seconds, or fails."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait({self._following})
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(d.close(patience) for d in self.devices.values()))
        await self._spare.close()
