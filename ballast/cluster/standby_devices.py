"""Have devices serve while load asks for them: the driver of `control.standby`.

Part of the controller. What the fleet policy then places on a device that has come is up to it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from ballast.cluster.device import RemoteDevice
from ballast.cluster.device_set import DeviceSet
from ballast.cluster.fleet_commands import FleetCommands
from ballast.cluster.worker.worker_link import WorkerSource
from ballast.control.device_observer import DeviceObserver
from ballast.control.standby import BeginServing, EndServing, Standby, Utilisation
from ballast.core.fleet_orders import Drain
from ballast.core.fleet_state import CommandOutcome

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0


class StandbyDevices(DeviceObserver[RemoteDevice]):
    """Follows the reports of all devices, for those on standby."""

    def __init__(
        self,
        names: Sequence[str],
        devices: DeviceSet,
        workers: WorkerSource,
        commands: FleetCommands,
    ) -> None:
        """`names`: of the devices on standby."""
        self._machine = Standby(names)
        self._names, self._devices = tuple(names), devices
        self._workers, self._commands = workers, commands
        self._computed: dict[str, float] = {}
        """Lane seconds of each device's jobs at the last look."""
        self._looked_at = 0.0

    def reported(self, device: RemoteDevice) -> None:
        now = asyncio.get_running_loop().time()
        if not self._names or now < self._looked_at + LOOK_SECONDS:
            return
        seconds, self._looked_at = now - self._looked_at, now
        serving = {
            name: self._utilisation(one, seconds)
            for name, one in self._devices.items()
            if one.down is None and one.report is not None
        }
        match self._machine.look(now, serving):
            case BeginServing(name):
                log.warning("requests are late: %s is to serve", name)
                self._devices[name].cordoned = False
                self._workers.want(name, True)
            case EndServing(name):
                log.warning("%s is not needed any more", name)
                self._commands.order(Drain(name), lambda outcome: self._drained(name, outcome))

    def _utilisation(self, device: RemoteDevice, seconds: float) -> Utilisation:
        assert device.report is not None
        models = device.report.models
        computed = sum(m.lane_seconds for m in models)
        done = max(0.0, computed - self._computed.get(device.name, computed))
        self._computed[device.name] = computed
        busy = done / seconds / device.fleet.device.lanes
        return Utilisation(sum(m.late for m in models), busy)

    def _drained(self, name: str, outcome: CommandOutcome) -> None:
        if outcome.code is not None:
            log.warning("%s serves on: %s", name, outcome.reason)
        else:
            self._workers.want(name, False)
            self._devices[name].kill("it is on standby")
        self._machine.ended(empty=outcome.code is None)
