"""Carry out operators' commands (add, remove, place, drain, lend, recall) over several devices.

Used by the controller (for the server's admin API) and by `FleetPolicyRunner`. A command about a
model that one device refuses is undone on the devices that have carried it out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress

from ballast.cluster.awaited_moves import Moves, move_requests
from ballast.cluster.device import RemoteDevice
from ballast.cluster.device_set import DeviceSet
from ballast.cluster.lending.awaited_leases import AwaitedLeases
from ballast.cluster.output_stream import OutputStream
from ballast.cluster.pending_commands import names_of, refusal, undoing
from ballast.cluster.placing import named, placed
from ballast.control.request_router import RequestRouter
from ballast.core.actions import EvictCommand, Lend, Recall
from ballast.core.command import Add, CommandOutcome, ModelCommand, Remove
from ballast.core.errors import ConfigError, Unavailable
from ballast.core.model import ModelSpec
from ballast.core.report import DeviceReport
from ballast.core.settings import ModelSettings

log = logging.getLogger(__name__)

UNDO_SECONDS = 30.0
"""Time given to requests that came to a device during a drain, when the drain is undone."""


class _Refused(Exception):
    """No device accepts a model; the text is the reason."""


class FleetCommands:
    """Changes which models devices serve, and which pages they lend, by operators' commands.

    Each command returns its outcome, and raises Unavailable where a device that it needs does not
    serve, or dies before it has answered.
    """

    def __init__(
        self,
        devices: DeviceSet,
        router: RequestRouter[RemoteDevice, OutputStream],
        migrations: Moves,
        leases: AwaitedLeases,
    ) -> None:
        self._devices = devices
        self._router = router
        self._migrations = migrations
        self._leases = leases
        self.changing = asyncio.Lock()
        """Held while a model is added, removed or moved; the next change sees the result."""

    # -- models -----------------------------------------------------------------------------------

    async def execute(self, command: ModelCommand, device: str | None = None) -> CommandOutcome:
        """Carry out a command about a model on all devices that it concerns, or on none of them.

        `device`: the only device to carry it out; ignored when adding or removing a model.
        """
        if isinstance(command, Add | Remove):
            async with self.changing:
                return await self._execute(command)
        if device is not None:
            found = self._devices.get(device)
            if found is None or not found.serves(command.model):
                return CommandOutcome("refused", f"{command.model} is not on {device!r}")
            return await found.command(command)
        return await self._execute(command)

    async def place(self, model: str, device: str) -> CommandOutcome:
        """Serve a model on one more device."""
        async with self.changing:
            settings = next((m for m in self._devices.fleet.models if m.name == model), None)
            found = self._devices.get(device)
            if settings is None or found is None:
                what = f"there is no device {device!r}" if settings else f"no model {model!r}"
                return CommandOutcome("refused", f"{what}; devices: {', '.join(self._devices)}")
            if found.cordoned:
                return CommandOutcome("refused", f"{device} is drained; uncordon it first")
            if found.takes(model):
                return CommandOutcome("refused", f"{device} serves {model} already")
            return await found.join(settings)

    async def withdraw(self, model: str, device: str, patience: float) -> CommandOutcome:
        """Take a model from one of its devices. Its running requests move to other devices that
        have its weights; requests that stay have `patience` seconds to end."""
        async with self.changing:
            here = [d for d in self._devices.values() if d.takes(model)]
            found = self._devices.get(device)
            if found not in here:
                return CommandOutcome("refused", f"{model} is not on {device!r}")
            if len(here) < 2:
                return CommandOutcome("refused", f"{model} is on no other device")
            assert found is not None
            return await self._withdraw(found, model, patience)

    # -- devices ----------------------------------------------------------------------------------

    async def drain(self, device: str) -> CommandOutcome:
        """Empty a device for maintenance, until it is `uncordon`ed.

        Models that no other device serves are placed on others first, on the least filled that
        accepts each; if none does, nothing changes. Then the device's open requests move to other
        devices: running ones with their KV, once their model's weights are resident there; waiting
        ones, and those whose KV cannot be moved, continue after the tokens that their clients have.
        Finally the device's weights are evicted.
        """
        async with self.changing:
            found = self._devices.get(device)
            if found is None:
                return self._unknown(device)
            refused = await self._place_elsewhere(found)
            if refused is not None:
                return CommandOutcome("refused", refused)
            found.cordoned = True
            await self._empty(found)
            await self._evict_all(found)
            return CommandOutcome()

    async def uncordon(self, device: str) -> CommandOutcome:
        """Allow requests again on a drained device, for the models that it still serves."""
        found = self._devices.get(device)
        if found is None:
            return self._unknown(device)
        found.cordoned = False
        return CommandOutcome()

    def _unknown(self, device: str) -> CommandOutcome:
        return CommandOutcome(
            "refused", f"no device {device!r}; devices: {', '.join(self._devices)}"
        )

    # -- lending ----------------------------------------------------------------------------------

    async def lend(self, lender: str, borrower: str, n_bytes: int) -> CommandOutcome:
        """Have a device lend `n_bytes` of free pages, rounded down to whole pages."""
        report = self._report(borrower)
        if lender not in self._devices or report is None:
            return CommandOutcome("refused", f"there is no lending from {lender!r} to {borrower!r}")
        pages = n_bytes // report.page_bytes
        if pages < 1:
            return CommandOutcome("invalid", f"{n_bytes} bytes are less than a page")
        return await self._order(lender, Lend(borrower, pages, "by an operator"))

    async def recall(
        self, lender: str, borrower: str, n_bytes: int | None, seconds: float
    ) -> CommandOutcome:
        """Have a device recall `n_bytes` of the pages that it has lent (None: all). Returns when
        they are back; a borrower that keeps them for longer than `seconds` is killed."""
        report = self._report(lender)
        if report is None:
            return CommandOutcome("refused", f"there is no device {lender!r}")
        pages = None if n_bytes is None else max(1, n_bytes // report.page_bytes)
        return await self._order(lender, Recall(borrower, pages, seconds, "by an operator"))

    async def release(self, lender: str, borrower: str) -> CommandOutcome:
        """Leave what a device lends to another to the fleet policy again."""
        if not self._leases.release(lender, borrower):
            why = f"no operator has ordered what {lender} lends to {borrower}"
            return CommandOutcome("refused", why)
        return CommandOutcome()

    def _report(self, device: str) -> DeviceReport | None:
        found = self._devices.get(device)
        return None if found is None else found.report

    async def _order(self, lender: str, command: Lend | Recall) -> CommandOutcome:
        """Order lending or a recall as an operator, and await the end. Raises Unavailable."""
        order = await self._leases.carry_out(lender, command, by_operator=True)
        if order.refused is None:
            return CommandOutcome()
        if order.lost:
            raise Unavailable(order.refused)
        return CommandOutcome("refused", order.refused)

    # -- steps of a command about a model ---------------------------------------------------------

    async def _execute(self, command: ModelCommand) -> CommandOutcome:
        """Carry out a command on all devices that it concerns; undo it if one refuses."""
        fleet, specs = self._devices.fleet, self._devices.specs
        refused = refusal(fleet, specs, command)
        if refused is not None:
            return CommandOutcome("refused", refused)
        several = len(self._devices) > 1  # a single one knows what it serves
        if several and isinstance(command, Add) and command.settings.name in specs:
            return CommandOutcome("refused", f"there is a model {command.settings.name!r} already")
        try:
            devices = await self._concerned(command)
        except ConfigError as error:
            return CommandOutcome("invalid", str(error))
        missing = [d.down for d in devices if d.down is not None]
        if missing:
            raise Unavailable(missing[0])
        done: list[tuple[RemoteDevice, ModelCommand | None]] = []
        outcome = CommandOutcome()
        try:
            for device in devices:
                undo = undoing(command, device.fleet)
                outcome = await device.command(command)
                if outcome.code is not None:
                    break
                done.append((device, undo))
        finally:
            if len(done) < len(devices):
                await _undo(done)
        return outcome

    async def _concerned(self, command: ModelCommand) -> list[RemoteDevice]:
        """Return the devices that have to carry out a command. Raises ConfigError."""
        match command:
            case Add(settings):
                return await self._homes_for(settings)
            case Remove(name):
                return self._devices.assigned(name) or self._devices.serving(name)[:1]
            case _:
                here = [d for d in self._devices.values() if d.serves(command.model)]
                return here or self._devices.serving(command.model)

    async def _homes_for(self, settings: ModelSettings) -> list[RemoteDevice]:
        """Choose devices for one more model. Raises ConfigError."""
        fleet = self._devices.fleet
        homes = {m: [d.name for d in self._devices.assigned(m)] for m in names_of(fleet)}
        names = named(settings, fleet) or homes.get(settings.name)
        if not names:
            found = await asyncio.to_thread(placed, [settings], fleet, homes)
            names = found[settings.name]
        return [self._devices[name] for name in names]

    async def _withdraw(self, device: RemoteDevice, model: str, patience: float) -> CommandOutcome:
        """Take a model from a device that is not its only one."""
        device.leaving.add(model)
        try:
            await move_requests(self._migrations, device, model)
            outcome = await device.command(Remove(model, patience))
        except BaseException:
            device.leaving.discard(model)
            raise
        if outcome.code is not None:
            device.leaving.discard(model)
        return outcome

    # -- steps of a drain -------------------------------------------------------------------------

    async def _place_elsewhere(self, device: RemoteDevice) -> str | None:
        """Place each model that only this device serves on another one. On failure undo the
        placements and return the reason; else return None."""
        others = [
            d
            for d in self._devices.values()
            if d is not device and d.down is None and not d.cordoned
        ]
        placed: list[tuple[RemoteDevice, str]] = []
        try:
            for model in list(device.specs):
                if not any(d.takes(model) for d in others):
                    placed.append((await self._place_on_any(model, others), model))
        except BaseException as error:
            for d, name in placed:
                with suppress(Unavailable):
                    await self._withdraw(d, name, UNDO_SECONDS)
            if isinstance(error, _Refused):
                return f"{model} stays on {device.name}: {error}"
            raise
        return None

    async def _place_on_any(self, model: str, devices: Sequence[RemoteDevice]) -> RemoteDevice:
        """Serve a model on one of `devices`, trying the least filled first. Raises _Refused where
        none accepts it."""
        settings = next(m for m in self._devices.fleet.models if m.name == model)
        refused = "there is no other device"
        for d in sorted(devices, key=_filled):
            outcome = await d.join(settings)
            if outcome.code is None:
                return d
            refused = f"{d.name}: {outcome.reason}"
        raise _Refused(refused)

    async def _empty(self, device: RemoteDevice) -> None:
        """Move all open requests of a device to others."""
        bases: list[ModelSpec] = list(device.specs.values())
        moves = (move_requests(self._migrations, device, base.name, bring=True) for base in bases)
        moved = sum(await asyncio.gather(*moves))
        anew = self._router.hand_over(device)
        text = "%s is drained: %d requests go on elsewhere, %d with their KV"
        log.info(text, device.name, moved + anew, moved)

    async def _evict_all(self, device: RemoteDevice) -> None:
        """Evict the weights of all models of a device."""
        with suppress(Unavailable):  # a worker that dies leaves no weights behind
            for model in list(device.specs):
                outcome = await device.command(EvictCommand(model, "its device is drained"))
                if outcome.code is not None:
                    text = "%s keeps the weights of %s: %s"
                    log.warning(text, device.name, model, outcome.reason)


def _filled(device: RemoteDevice) -> float:
    """Return the bytes of weights that a device serves, as a fraction of its budget."""
    weights = sum(sum(spec.segment_bytes) for spec in device.specs.values())
    return weights / device.fleet.device.budget_bytes


async def _undo(done: Iterable[tuple[RemoteDevice, ModelCommand | None]]) -> None:
    """Undo a command on the devices that have carried it out, after a later device refused it."""
    for device, command in done:
        if command is None:
            continue
        try:
            outcome = await device.command(command)
            failed = outcome.reason if outcome.code is not None else ""
        except Unavailable as error:
            failed = str(error)
        if failed:
            log.error("%s: what another device did not do stays done: %s", device.name, failed)
