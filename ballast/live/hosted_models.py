"""Load a live device's models into its host tier, list those refused, and unload them.

Used by `LiveDevice` at start and by the command executor later. Weights are brought to the device
by activations, not here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from ballast.core.errors import BallastError, brief
from ballast.core.settings import DeviceSettings, FleetSettings, ModelSettings
from ballast.engine.sizing import check_room
from ballast.kv.layout import divided_blocks
from ballast.live.machine import Machine
from ballast.policy.presets import preset_of
from ballast.policy.requirements import Requirements
from ballast.weights.checkpoint import THREADS, clipped_context
from ballast.weights.host import HostModel, HostTier
from ballast.weights.sealed_model import brought

log = logging.getLogger(__name__)


class HostedModels:
    """Host models by name, and the reasons why others are not served. `by_name` is replaced, never
    changed, by the loop's thread and the commands' thread, so that any thread may read it."""

    def __init__(
        self,
        fleet: FleetSettings,
        machine: Machine,
        tier: HostTier,
        vet: Callable[[ModelSettings], object],
    ) -> None:
        """`vet` raises BallastError for a model that shall not be loaded."""
        self._fleet = fleet
        self._machine = machine
        self._vet = vet
        self.tier = tier
        self.by_name: dict[str, HostModel] = {}
        """Loaded models, in the fleet's order."""
        self.failed: dict[str, str] = {}
        """Models and adapters of the fleet that are not served, with the reason."""

    def load_all(
        self, device: DeviceSettings, progress: Callable[[], object], requires: Requirements
    ) -> None:
        """Load the fleet's models; one that cannot be read or has no room on `device` is refused.
        `requires`: the memory policy's."""
        in_place = requires.in_place
        for settings in self._fleet.models:
            name = settings.name
            try:
                others = [h.spec for h in self.by_name.values()]
                host = self.by_name[name] = self.load(settings)
                check_room(host.spec, others, device, in_place=in_place)
                self.failed |= host.failed
            except Exception as error:  # noqa: BLE001 - whatever it is, the others are served
                self.refuse(name, error)
            progress()

    def load(self, settings: ModelSettings, threads: int = THREADS) -> HostModel:
        """Load a model into the host tier. Raises as `load_host_model`, and what `vet` raises."""
        if not settings.fault and not brought(settings, self.tier):
            self._vet(settings)
        host = self._machine.load(settings, self.tier, threads)
        if (clipped := clipped_context(settings, host.spec)) is not None:
            log.warning("%s: %s", settings.name, clipped)
        if preset_of(self._fleet).requires.kv_staging:
            page = self._fleet.device.page_bytes
            if (divided := divided_blocks(host.spec, page)) is not None:
                log.warning("%s: %s", settings.name, divided)
        return host

    def add(self, host: HostModel) -> None:
        """List a model that has joined."""
        self.by_name = {**self.by_name, host.spec.name: host}
        self.failed |= host.failed

    def forget(self, name: str) -> None:
        """Note that a model is not served here any more: if it is added again, its files count."""
        self.tier.forget(name)

    def remove(self, name: str) -> None:
        """Unload a model that has left."""
        self.forget(name)
        host = self.by_name[name]
        self.by_name = {n: h for n, h in self.by_name.items() if n != name}
        self._machine.unload(host)

    def refuse(self, name: str, error: Exception) -> None:
        """Unload a model that cannot be served, and list it in `failed` with its adapters."""
        if not isinstance(error, BallastError):
            log.error("model %s", name, exc_info=error)
        host = self.by_name.pop(name, None)
        if host is not None:
            self.forget(name)
            self._machine.unload(host)
        settings = next(m for m in self._fleet.models if m.name == name)
        base = f"its base {name} is not served"
        self.failed |= dict.fromkeys((a.name for a in settings.adapters), base)
        self.failed[name] = str(error) if isinstance(error, BallastError) else brief(error)

    def unload_all(self) -> None:
        """Unload all models."""
        for host in self.by_name.values():
            self._machine.unload(host)
