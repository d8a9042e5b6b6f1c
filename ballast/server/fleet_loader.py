"""Start the devices of a fleet and load its models, while the server answers.

Run by `serve`, once. A CPU device starts without models; they are then loaded one after the other,
first those that requests wait for. A GPU and a group of ranks load all of theirs as they start.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable, Iterable

from ballast.cluster.device import RemoteDevice
from ballast.cluster.logs import write_line
from ballast.cluster.placing import Homes, approximate_bytes, homes_of
from ballast.core.errors import BallastError, Unavailable
from ballast.core.settings import FleetSettings
from ballast.server.model_loads import PendingLoad
from ballast.server.service import Service
from ballast.server.text.template_check import check_tokenizer
from ballast.server.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

MOST_DEATHS = 2
"""Workers that may end while they load a model; then it is not loaded again."""
REFUSED_TIMES, REFUSED_SECONDS = 20, 1.0
"""Times that a load is tried again which memory in use prevents, and the time between two."""
POLL_SECONDS = 0.1


class FleetLoader:
    """Loads one fleet; `tell` receives the progress in words."""

    def __init__(self, service: Service, tell: Callable[[str], object] = lambda text: None) -> None:
        self._service = service
        self._controller = service.controller
        self._loads = service.loads
        self._tell = tell

    async def expect(self, fleet: FleetSettings) -> None:
        """Have requests for the fleet's models wait until these are loaded."""

        def measure() -> dict[str, int]:
            return {model.name: approximate_bytes(model, fleet) for model in fleet.models}

        self._loads.queue(fleet, await asyncio.to_thread(measure))
        self._tell(self._loads.progress())

    async def run(self, fleet: FleetSettings) -> None:
        """Load the fleet; returns when each model serves or has failed. Raises Unavailable if a
        device cannot start, or no model can be served, and ConfigError for a model that names an
        unknown device."""
        importing = asyncio.ensure_future(asyncio.to_thread(Tokenizer.prepare))
        preparing = asyncio.ensure_future(self._service.templates.prepare())
        try:
            homes = await asyncio.to_thread(homes_of, fleet)
            await self._controller.start_devices(_at_once(fleet, homes))
            homes |= await self._controller.kept_homes(fleet)
            await importing
            with contextlib.suppress(Unavailable):  # tried again when it is needed
                await preparing
        except BaseException:
            importing.cancel()
            preparing.cancel()
            await asyncio.wait({preparing})
            raise
        await self._load_all(fleet, homes)
        if not self._service.models.visible_to():
            raise Unavailable("no model of the fleet can be served")
        await self._controller.note_loaded()

    async def _load_all(self, fleet: FleetSettings, homes: Homes) -> None:
        """Load all models on their devices, each device's one after the other."""
        behind = {name: [d for d in at if _loads_behind(fleet, d)] for name, at in homes.items()}
        self._loads.assign(behind)
        devices = self._controller.devices.values()
        async with asyncio.TaskGroup() as tasks:
            for load in self._loads:
                if not load.homes:  # a device has started with it
                    tasks.create_task(self._serve(load))
            for device in devices:
                tasks.create_task(self._load_on(device, tasks))

    async def _load_on(self, device: RemoteDevice, tasks: asyncio.TaskGroup) -> None:
        """Load the models of one device."""
        while (load := self._loads.next(device.name)) is not None:
            self._loads.begin(load, device.name)
            self._tell(self._loads.progress())
            await self._load(device, load)
            load.loading.discard(device.name)
            # Its tokenizer is read while the device loads the next model.
            tasks.create_task(self._serve(load))

    async def _load(self, device: RemoteDevice, load: PendingLoad) -> None:
        """Load a model on a device; `RemoteDevice.failed` has the reason if that fails."""
        refused = deaths = 0
        while True:
            await self._until_up(device)
            try:
                outcome = await device.load(load.settings)
            except Unavailable as error:
                deaths += 1
                log.error("%s: %s was not loaded: %s", device.name, load.name, error)
                if deaths >= MOST_DEATHS or device.lost is not None:
                    device.failed = {**device.failed, load.name: str(error)}
                    return
                continue
            # What is open keeps memory that the model's jobs need: it becomes free.
            if outcome.code != "refused" or not len(device.requests):
                return
            refused += 1
            if refused > REFUSED_TIMES:
                return
            await asyncio.sleep(REFUSED_SECONDS)

    async def _until_up(self, device: RemoteDevice) -> None:
        """Wait until a worker serves, or none is to be expected."""
        while device.down is not None and device.lost is None:
            await asyncio.sleep(POLL_SECONDS)

    async def _serve(self, load: PendingLoad) -> None:
        """Serve a model that a device has loaded; list why, if it cannot be served."""
        devices, model = self._controller.devices, load.settings
        names = [model.name, *(a.name for a in model.adapters)]
        serves = model.name in devices.specs
        if load.ended.is_set() or (not serves and (load.homes or load.loading)):
            return  # another device has been first, or may still load it
        if serves:
            try:
                tokenizer = await asyncio.to_thread(Tokenizer.load, model.path, model.tool_parser)
                spec = devices.specs.get(model.name)
                await check_tokenizer(tokenizer, model.name, spec, self._service.templates)
                for name in names:
                    self._service.add_model(name, tokenizer)
            except BallastError as error:
                why = dict.fromkeys(names, str(error))
                devices.unreadable = {**devices.unreadable, **why}
        self._end(names)

    def _end(self, names: Iterable[str]) -> None:
        """Answer the requests that wait for a model."""
        failed = self._controller.devices.failed
        for name in names:
            if name in failed:
                write_line(f"ballast: {name} is not served: {failed[name]}", sys.stderr)
        self._loads.end(names)
        self._tell(self._loads.progress())


def _loads_behind(fleet: FleetSettings, device: str) -> bool:
    """Whether a device starts without models."""
    settings, _ = fleet.devices[device]
    return settings.gpu is None and settings.tensor_parallel == 1


def _at_once(fleet: FleetSettings, homes: Homes) -> Homes:
    """Return the devices that start with each model."""
    return {name: [d for d in at if not _loads_behind(fleet, d)] for name, at in homes.items()}
