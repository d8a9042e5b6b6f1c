"""Change what the fleet serves, at an operator's request or when the fleet file is read again, and
record each operator's change so that it survives a restart.

Used by the routes below `/admin` and, on SIGHUP, by `serve`. Commands reach the devices through the
controller.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Container, Iterable
from dataclasses import replace

from ballast.core.actions import Change
from ballast.core.command import Add, CommandOutcome, Remove
from ballast.core.errors import (
    BallastError,
    InvalidRequest,
    NotKept,
    Unavailable,
    UnknownModel,
)
from ballast.core.fleet_orders import Drain, DrainHost, Place, Uncordon, Withdraw
from ballast.core.order import Order
from ballast.core.settings import AdapterSettings, FleetSettings, ModelSettings
from ballast.fleet.changes import Changes
from ballast.fleet.fleet_difference import FleetDifference, difference
from ballast.fleet.fleet_source import FleetReading, FleetSource
from ballast.fleet.levels import Levels, foreign, with_levels
from ballast.fleet.schema import NamedModelKeys
from ballast.fleet.twins import adapters_added_to, base_of, is_twin, twin_of, with_twins
from ballast.server.access.keys import warn_of_keys
from ballast.server.admin.added_models import prepared, tokenizer_of
from ballast.server.http.faults import Fault
from ballast.server.service import Service
from ballast.server.text.template_check import check_tokenizer
from ballast.server.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

PATIENCE = 30.0
"""Seconds in which open requests of a model that is removed may end."""
POLL_SECONDS = 0.1
AGAIN = 1
"""Further attempts to follow the fleet file where a worker died during the first."""
_STATUS = {"refused": 409, "invalid": 400, "unavailable": 503}
"""HTTP status by code of `CommandOutcome`; any other code is 500."""


class AdminService:
    """Carries out all changes of the fleet, and records those by operators.

    A change that was answered with success survives a restart; any other may have been made or not.
    An addition is recorded once the model serves, so that a model that kills the server is not
    loaded again at every start. A removal cannot be undone, and is recorded first.
    """

    def __init__(self, service: Service, source: FleetSource, reading: FleetReading) -> None:
        self._service = service
        self._controller = service.controller
        self._source = source
        self._file = reading.names
        self._models = asyncio.Lock()
        """Held while models are added, removed or placed, which may take minutes."""
        self._records = asyncio.Lock()
        """Held while changes are recorded, and by code that needs the records to stay as they are.
        Acquired after `_models`."""
        self._died = False
        """Whether a command of the fleet file found no worker."""
        warn_of_keys(reading.fleet.server, _all_names(reading.fleet))

    @property
    def changes(self) -> Changes:
        """Operators' changes of the fleet file that are in effect."""
        return self._source.changes

    async def execute(self, order: Order, device: str | None = None) -> CommandOutcome:
        """Carry out an order on all devices that it concerns, or on `device` alone. Raises Fault
        or Unavailable."""
        return _done(await self._controller.commands.execute(order, device))

    async def place(self, name: str, device: str) -> None:
        """Have one more device serve a model. Raises Fault, Unavailable or NotKept."""
        async with self._models:
            homes = self._controller.devices.homes(name)
            await self.execute(Place(name, device, "by an operator"))
            try:
                await self._keep_homes(name, [*homes, device])
            except NotKept:
                undoing = self._withdraw(name, device, 0.0)
                await self._try(f"withdrawing {name}, which cannot be kept", undoing)
                raise

    async def withdraw(self, name: str, device: str, patience: float) -> None:
        """Have a device serve a model no longer. Raises Fault, Unavailable or NotKept."""
        async with self._models:
            homes = self._controller.devices.homes(name)
            if device not in homes or len(homes) < 2:
                await self._withdraw(name, device, patience)  # raises Fault with the reason
                return
            before, model = self._source.changes, self._settings(name)
            assert isinstance(model, ModelSettings)
            await self._keep_homes(name, [home for home in homes if home != device])
            try:
                await self._withdraw(name, device, patience)
            except BaseException:
                async with self._records:
                    await self._restore({name}, self._source.changes.homed_as(name, before))
                self._controller.devices.set_homes(name, model.devices)
                raise

    async def _withdraw(self, name: str, device: str, patience: float) -> None:
        await self.execute(Withdraw(name, device, "by an operator", patience))

    async def drain(self, device: str) -> None:
        """Move the models and requests of a device, or of all devices of a host, to others, once
        the fleet has been loaded. Raises Fault or Unavailable."""
        await self._service.loads.wait_for_all()
        async with self._models:
            devices = await self._controller.workers.set_drained(device, True)
            order = Drain(device) if devices is None else DrainHost(tuple(devices))
            try:
                await self.execute(order)
            except BaseException:
                await self._controller.workers.set_drained(device, False)
                raise

    async def uncordon(self, device: str) -> None:
        """Send requests again to a drained device, or to the devices of a drained host. Raises
        Fault."""
        devices = await self._controller.workers.set_drained(device, False)
        for one in [device] if devices is None else devices:
            await self.execute(Uncordon(one))

    async def lend(self, lender: str, borrower: str, n_bytes: int) -> None:
        """Lend memory of one device to another until either is restarted. Raises Fault or
        Unavailable."""
        _done(await self._controller.commands.lend(lender, borrower, n_bytes))

    async def recall(self, lender: str, borrower: str, n_bytes: int | None, seconds: float) -> None:
        """Recall lent memory, `n_bytes` or all of it. Raises Fault or Unavailable."""
        _done(await self._controller.commands.recall(lender, borrower, n_bytes, seconds))

    async def release(self, lender: str, borrower: str) -> None:
        """Leave what a device lends to another to the fleet policy again. Raises Fault."""
        _done(await self._controller.commands.release(lender, borrower))

    async def _keep_homes(self, name: str, devices: list[str]) -> None:
        """Record the devices that serve a model from now on; not for a model without `devices`
        where the fleet's policy moves models. Raises NotKept."""
        model = self._settings(name)
        assert isinstance(model, ModelSettings)
        follows = self._controller.devices.fleet_policy.moves
        if model.devices or not follows:
            async with self._records:
                await self._keep(self._source.changes.homing(model, devices))
            self._controller.devices.set_homes(name, devices)

    async def add(self, entry: NamedModelKeys) -> str:
        """Add a model to the fleet; returns its name. Raises Fault, Unavailable or NotKept."""
        settings = await asyncio.to_thread(prepared, entry, self._controller.devices)
        if any(map(self._service.loads.find, settings.names)):
            raise Fault(409, f"there is a model {settings.name!r} already", "refused")
        async with self._models:
            instead = self._names(settings.name) & self._file
            # The command first: the worker tries out the tokenizer in an isolated process.
            outcome = await self.execute(Add(settings))
            try:
                for why in outcome.failed.values():
                    raise Fault(400, why, "invalid", "adapter")
                tokenizer = await self._tokenizer(settings)
                async with self._records:
                    await self._keep(self._source.changes.adding(entry, instead))
            except (NotKept, Fault):  # no client has seen the model yet
                undoing = self.execute(Remove(settings.name, 0.0))
                await self._try(f"removing {settings.name}, which cannot be kept", undoing)
                raise
            self._service.add_model(entry.name, tokenizer)
        return entry.name

    async def remove(self, name: str, patience: float) -> None:
        """Remove a model and its adapters. Raises Fault, Unavailable or NotKept."""
        async with self._models:
            fleet = self._controller.devices.fleet
            twin, later = twin_of(fleet, name), adapters_added_to(fleet, name)
            wanted = Remove(name if twin is None else twin.name, patience)
            if twin is None and isinstance(self._settings(name), AdapterSettings):
                raise Fault(409, f"{name} is an adapter: it goes with its base", "refused")
            if later:
                why = f"remove the adapters first that were added to it: {', '.join(later)}"
                raise Fault(409, why, "refused")
            names = self._names(name)
            refused = wanted.refusal(fleet, self._controller.devices.specs)
            if refused is not None:
                raise Fault(409, refused, "refused")
            async with self._records:
                before = self._source.changes
                await self._keep(before.removing(names, self._file))
            try:
                await self.execute(wanted)
            except BaseException:
                async with self._records:
                    await self._undo(names, before)
                raise
            self._service.remove_models(names)

    async def change(self, name: str, values: Levels) -> None:
        """Change the service levels and bounds of a model or an adapter. Raises Fault,
        RequestError, Unavailable or NotKept."""
        async with self._records:
            model = self._settings(name)
            if isinstance(model, AdapterSettings) and (base := foreign(values)):
                why = f"{base[0]}: {name} is an adapter, and takes this from its base"
                raise InvalidRequest(why, base[0].partition(".")[0])
            before = self._source.changes
            await self._keep(before.changing(model, values))
            try:
                await self.execute(Change.to(with_levels(model, values)))
            except BaseException:
                await self._undo({name}, before)
                raise

    # -- the fleet file again ---------------------------------------------------------------------

    async def reload(self) -> None:
        """Read the fleet file again, and make the changes that it contains; failures are logged."""
        await self._service.loads.wait_for_all()
        for _ in range(1 + AGAIN):
            while self._controller.devices.replacing:
                await asyncio.sleep(POLL_SECONDS)  # a worker is being replaced
            self._died = False
            await self._follow()
            if not self._died:
                return

    async def _follow(self) -> None:
        async with self._models:
            async with self._records:
                try:
                    reading = await asyncio.to_thread(self._source.read)
                except BallastError as error:
                    log.error("the fleet file is not followed, all stays as it was: %s", error)
                    return
                await asyncio.to_thread(self._source.settle, reading)
                self._file = reading.names
                wanted = with_twins(reading.fleet, self._controller.devices.fleet)
                reading = replace(reading, fleet=wanted)
                self._controller.devices.keep_unreadable(reading.fleet.own_names)
                self.configure(reading.fleet)
                found = difference(self._controller.devices.fleet, reading.fleet)
                failed = set(self._controller.devices.failed)
                for model in found.levels:
                    if model.name not in failed:
                        what = f"changing the levels of {model.name}"
                        await self._try(what, self.execute(Change.to(model)))
            # Additions before removals, so that a replaced model is always served. An alias moves
            # once its new model serves, unless it is that model's own name.
            self._controller.devices.set_aliases(
                _without(self._controller.devices.fleet, reading.fleet.own_names)
            )
            for new in reading.fleet.models:
                if new in found.added or new.name in failed:
                    await self._try_load(new)
            self._controller.devices.set_aliases(reading.fleet.aliases)
            await self._drop(found.removed)
        self._tell(found, failed)

    async def _try_load(self, new: ModelSettings) -> None:
        """Load a model of the fleet file; if that fails, list the reason with those that failed."""
        why = await self._try(f"adding {new.name}", self._load(new))
        devices = self._controller.devices
        if why is not None and new.name not in devices.specs:
            names = (new.name, *(a.name for a in new.adapters))
            devices.unreadable = {**devices.unreadable, **dict.fromkeys(names, why)}

    async def _drop(self, removed: Iterable[str]) -> None:
        for name in removed:
            names = self._names(name)
            if await self._try(f"removing {name}", self.execute(Remove(name, PATIENCE))) is None:
                self._service.remove_models(names)

    async def _load(self, model: ModelSettings) -> None:
        adding = model.name not in self._controller.devices.specs
        if adding:
            adapters = tuple(replace(a, aliases=()) for a in model.adapters)
            await self.execute(Add(replace(model, aliases=(), adapters=adapters)))
        try:
            tokenizer = await self._tokenizer(model)
        except Fault:
            if adding:
                await self.execute(Remove(model.name, 0.0))
            raise
        for name in (model.name, *(a.name for a in model.adapters)):
            self._service.add_model(name, tokenizer)

    async def _tokenizer(self, settings: ModelSettings) -> Tokenizer:
        """Load a model's tokenizer, and try its chat template; a twin has its base's. Raises
        Fault."""
        if is_twin(settings.name):
            return self._service.models.tokenizer(base_of(settings.name))
        tokenizer = await asyncio.to_thread(tokenizer_of, settings)
        name = settings.name
        spec = self._controller.devices.specs.get(name)
        await check_tokenizer(tokenizer, name, spec, self._service.templates)
        return tokenizer

    async def _try(self, what: str, doing: Awaitable[object]) -> str | None:
        """Returns why it was not done, which is logged; None if it was."""
        try:
            await doing
        except (BallastError, Fault) as error:
            log.error("%s was not done: %s", what, error)
            self._died = self._died or isinstance(error, Unavailable)
            return str(error)
        return None

    def _tell(self, found: FleetDifference, tried: Container[str]) -> None:
        """Log the result of a reload: the changes made, and those that take effect later. `tried`:
        models that had failed, which were added again."""
        for name, keys in found.again.items():
            if name not in tried:
                what = ", ".join(keys)
                log.warning("%s: %s counts once it is added again, or at a restart", name, what)
        if found.restart:
            log.warning("the fleet file's %s counts at a restart", ", ".join(found.restart))
        log.info(
            "the fleet file was read: added %s; removed %s; changed %s",
            *(
                ", ".join(names) or "none"
                for names in (
                    [m.name for m in found.added],
                    found.removed,
                    [m.name for m in found.levels],
                )
            ),
        )

    def configure(self, fleet: FleetSettings) -> None:
        """Apply the server's keys, quotas and limits; workers started from now on are watched by
        the new limits."""
        self._service.configure(fleet.server)
        self._controller.configure(fleet.server)
        warn_of_keys(fleet.server, _all_names(fleet))

    # -- records ----------------------------------------------------------------------------------

    async def _keep(self, changes: Changes) -> None:
        await asyncio.to_thread(self._source.keep, changes)

    async def _undo(self, names: set[str], before: Changes) -> None:
        """Restore the record of these names to `before`: the change has not been made."""
        await self._restore(names, self._source.changes.restoring(names, before))

    async def _restore(self, names: set[str], changes: Changes) -> None:
        try:
            await self._keep(changes)
        except NotKept as error:
            log.error("%s: at the next start, %s will be as was asked", error, ", ".join(names))

    def _names(self, name: str) -> set[str]:
        """The names of a model and of its adapters."""
        found = {name}
        for model in self._controller.devices.fleet.models:
            if model.name == name:
                found |= {a.name for a in model.adapters}
        return found

    def _settings(self, name: str) -> ModelSettings | AdapterSettings:
        """The settings of a model or an adapter. Raises UnknownModel."""
        found = self._controller.devices.fleet.named(name)
        if found is None:
            raise UnknownModel(f"there is no model {name!r}")
        return found


def _done(outcome: CommandOutcome) -> CommandOutcome:
    """Return the outcome of a command that succeeded. Raises Fault for any other."""
    if outcome.code is not None:
        raise Fault(_STATUS.get(outcome.code, 500), outcome.reason, outcome.code)
    return outcome


def _all_names(fleet: FleetSettings) -> set[str]:
    """All names of the fleet's models, aliases included."""
    return {name for model in fleet.models for name in model.names}


def _without(fleet: FleetSettings, names: set[str]) -> dict[str, tuple[str, ...]]:
    """The aliases of a fleet except `names`."""
    return {
        name: tuple(alias for alias in aliases if alias not in names)
        for name, aliases in fleet.aliases.items()
    }
