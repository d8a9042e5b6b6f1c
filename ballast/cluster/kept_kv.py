"""Scrub KV of models and API keys that have gone, from all tiers of the host, and report on these.

Part of the controller. KV on the devices goes with the model there; what lies in the tiers below
would outlive it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from ballast.cluster.device import RemoteDevice
from ballast.cluster.device_set import DeviceSet
from ballast.cluster.kv_broker import KvBroker
from ballast.control.device_observer import DeviceObserver
from ballast.core.actions import ScrubKv
from ballast.core.command import Remove
from ballast.core.errors import NotKept
from ballast.core.fleet_state import Command
from ballast.core.model import ModelSpec
from ballast.core.settings import ServerSettings
from ballast.kv.directory import Tier
from ballast.kv.tier_shelf import TierShelf


@dataclass(frozen=True, slots=True)
class TierReport:
    """One tier of the host's KV."""

    tier: str
    capacity_bytes: int
    used_bytes: int
    blocks: int
    bytes_of: dict[str, int]
    """By tenant (API key; empty: without one)."""


@dataclass(frozen=True, slots=True)
class KvReport:
    """The host's KV tiers, fastest first, and what has happened in them since the start."""

    tiers: list[TierReport]
    counts: dict[str, int]
    """Blocks, by the names of `StoreCounts`."""
    disk_fault: str
    """Why the disk is not used, or not any more; empty: it is, or there is none."""


class KeptKv(DeviceObserver[RemoteDevice]):
    """Keeps no KV of what has left the fleet. Used on the event loop."""

    def __init__(self, devices: DeviceSet, broker: KvBroker | None) -> None:
        """`broker`: None: there are no tiers."""
        self._devices, self._broker = devices, broker
        self._prints: dict[str, set[str]] = {}
        """Fingerprints of each model, its adapters' included, by the model's name."""

    def worker_ready(self, device: RemoteDevice) -> None:
        self._note(device.specs)

    def command_done(self, device: RemoteDevice, command: Command) -> None:
        self._note(device.specs)
        if isinstance(command, Remove) and not self._devices.assigned(command.model):
            self._forget(command.model)

    def fleet_loaded(self) -> None:
        """Scrub KV that an earlier server left of models that the fleet has no longer; none while
        a model could not be loaded, whose KV that may be."""
        if self._broker is not None and not self._devices.failed:
            self._note(self._devices.specs)
            self._broker.store.scrub_others(set[str]().union(*self._prints.values()))

    def configure(self, old: ServerSettings, new: ServerSettings) -> None:
        """Scrub KV of keys that there are no longer, and store none of it from now on."""
        gone = {key.name for key in old.keys} - {key.name for key in new.keys}
        if self._broker is not None:
            for key in new.keys:
                self._broker.store.accept(tenant=key.name)
            for name in gone:
                self._broker.store.refuse(tenant=name)
        for name in gone:
            for device in self._devices.values():
                device.order(ScrubKv(tenant=name, why="its key has gone"), lambda outcome: None)

    async def scrub(self, model: str | None, key: str | None) -> int:
        """Remove KV of a model (by its name) or of a key, or of both together, from all devices and
        tiers; None: of all. Returns the number of blocks in tiers. Raises KeyError for a model that
        is not known, and NotKept where a disk that was given up keeps KV."""
        if self._broker is None:
            return 0
        # Devices first: what they are storing then counts no longer.
        order = ScrubKv(model, key, "by an operator")
        await asyncio.gather(
            *(device.command(order) for device in self._devices.values() if device.down is None),
            return_exceptions=True,
        )
        store = self._broker.store
        prints = [None] if model is None else self._prints[model]
        scrubbed = sum(store.scrub(model=one, tenant=key) for one in prints)
        if store.disk_keeps:
            raise NotKept(f"kv_disk is not used, and its file remains: {store.disk_fault}")
        return scrubbed

    def resize(self, host_bytes: int | None, disk_bytes: int | None) -> None:
        """Change the tiers' capacities (None: as it is), up to the sizes with which the server
        started."""
        if self._broker is not None and host_bytes is not None:
            self._broker.store.resize(host_bytes)
        if self._broker is not None and disk_bytes is not None:
            self._broker.store.resize_disk(disk_bytes)

    def report(self) -> KvReport | None:
        """Return the state of the tiers; None: there are none."""
        if self._broker is None:
            return None
        store = self._broker.store
        tiers = [_tier(tier, store.directory.shelves[tier]) for tier in store.directory.shelves]
        return KvReport(tiers, asdict(store.counts), store.disk_fault)

    def _note(self, specs: Mapping[str, ModelSpec]) -> None:
        for name, base in specs.items():
            prints = {served.fingerprint for served in base.served}
            self._prints.setdefault(name, set()).update(prints)
            if self._broker is not None:
                for one in prints:
                    self._broker.store.accept(model=one)

    def _forget(self, model: str) -> None:
        prints = self._prints.pop(model, set())
        others = set[str]().union(*self._prints.values())
        if self._broker is not None:
            for one in prints - others:
                self._broker.store.refuse(model=one)


def _tier(tier: Tier, shelf: TierShelf) -> TierReport:
    n_bytes = shelf.bytes_of()
    return TierReport(tier.value, shelf.capacity, shelf.n_bytes, len(shelf), n_bytes)
