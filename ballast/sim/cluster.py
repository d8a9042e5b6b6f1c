"""A cluster in virtual time: devices of known kinds, the models that each serves, one workload."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ballast.cluster.fleet import FleetBook
from ballast.cluster.placing import need_of
from ballast.core.cost import Traffic
from ballast.core.entries import Sink
from ballast.core.errors import ConfigError
from ballast.core.event import Output
from ballast.core.fleet import Room
from ballast.core.model import ModelSpec
from ballast.core.request import Submission
from ballast.core.settings import DeviceSettings
from ballast.core.units import MiB
from ballast.engine.state import DeviceState
from ballast.policy.presets import Preset
from ballast.sim.controller import Controller, Told
from ballast.sim.device import SimDevice
from ballast.sim.profile import DeviceProfile, device_profile
from ballast.sim.simulate import simulate_devices

USABLE = 0.9
"""Share of a device's memory that is the pool's; an assumption, as of common engines' defaults."""
SERVED = DeviceSettings(budget_bytes=0, page_bytes=2 * MiB, step_tokens=2048, step_logits=256)

Heard = Callable[[str, float, Output], None]
"""(device, when, what a client is told)."""
Watch = Callable[[str, float, DeviceState], None]
"""(device, when, its state): after each turn, and the leap that follows it."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Devices of one kind."""

    number: int
    profile: DeviceProfile
    lanes: int = 1


def kinds_of(text: str, lanes: int = 1, engine: str | None = None) -> list[Kind]:
    """Parse `4xH100-80G,2xA100-80G@eager`: each a device's name, or a profile's file, and how many.
    All of them have so many `lanes`, and `engine` serves on those that name none.

    Raises ConfigError, which lists the known names.
    """
    kinds = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(?:(\d+)\s*x\s*)?(\S+)\s*", part)
        if found is None or (found[1] is not None and int(found[1]) < 1):
            raise ConfigError("devices", text, "write NUMBERxDEVICE, as in 4xH100-80G,2xA100-80G")
        kinds.append(Kind(int(found[1] or 1), device_profile(found[2], engine), lanes))
    return kinds


class Cluster:
    """Devices, and which of them serves which model."""

    def __init__(
        self,
        kinds: Sequence[Kind],
        specs: Sequence[ModelSpec],
        preset: Preset,
        heard: Heard,
        served: DeviceSettings = SERVED,
        traffic: Mapping[str, Traffic] | None = None,
        watch: Watch | None = None,
        told: Told = lambda at, action, refused: None,
        sink_of: Callable[[str], Sink | None] = lambda device: None,
    ) -> None:
        """`served`: what devices have in common (its budget is each one's own); `traffic`: by
        model, what is expected, for a fleet policy that places by work. `told` is called with how
        models move; `sink_of` returns, by device, the sink of its story.

        Raises ConfigError for a model that no device can serve.
        """
        profiles: dict[str, DeviceProfile] = {}
        kind_of: dict[str, str] = {}
        """By device. Measured profiles may have the same name and not be equally fast."""
        lanes: dict[str, int] = {}
        for i, kind in enumerate(kinds):
            for _ in range(kind.number):
                name = f"{kind.profile.device}:{len(profiles)}"
                profiles[name], kind_of[name] = kind.profile, str(i)
                lanes[name] = kind.lanes
        settings = {
            name: replace(_settings(p, served, name), lanes=lanes[name])
            for name, p in profiles.items()
        }
        rooms = [Room(n, settings[n].budget_bytes, kind_of[n]) for n in profiles]
        by_kind = {kind_of[n]: p for n, p in profiles.items()}
        kept = dict.fromkeys(replace(s, name="", budget_bytes=0) for s in settings.values())
        needs = [need_of(s, kept, _work(s, by_kind, traffic or {})) for s in specs]
        homes = preset.fleet.place(needs, rooms)
        self.devices: dict[str, SimDevice] = {}
        """By name, those that serve or may come to serve any model."""
        for room in rooms:
            name, profile = room.device, profiles[room.device]
            own = [s for s in specs if name in homes[s.name]]
            if not own and not preset.fleet.moves:
                continue
            observe = None if watch is None else functools.partial(watch, name)
            said = functools.partial(heard, name)
            self.devices[name] = SimDevice(
                settings[name], own, preset, profile.of(own), said, sink_of(name), observe
            )
        self.controller = Controller(
            self.devices,
            FleetBook(homes, needs, rooms, preset.fleet),
            specs,
            lambda device, spec: profiles[device].costs(spec),
            told,
        )

    @property
    def jobs(self) -> int:
        """Run so far, on all devices."""
        return sum(device.state.jobs for device in self.devices.values())

    def run(self, arrivals: Iterable[Submission]) -> float:
        """Serve `arrivals`, in order, to the last answer; when that was, in virtual seconds."""
        return simulate_devices(self.controller, arrivals)


def _settings(profile: DeviceProfile, served: DeviceSettings, name: str) -> DeviceSettings:
    """Of one device: its own where its profile was measured on it, else `served`."""
    if profile.served is not None:
        return replace(served, name=name, **profile.served.model_dump())
    if profile.hardware is None:
        raise ConfigError(
            "devices", profile.device, "its profile has neither `hardware` nor `served`: no memory"
        )
    budget = int(USABLE * profile.hardware.memory_bytes) // served.page_bytes * served.page_bytes
    return replace(served, name=name, budget_bytes=budget)


def _work(
    spec: ModelSpec, kinds: Mapping[str, DeviceProfile], traffic: Mapping[str, Traffic]
) -> dict[str, float]:
    """By kind of device; adapters' requests are their base's work."""
    expected = [(traffic[s.name], s.slo.tpot) for s in spec.served if s.name in traffic]
    if not expected:
        return {}
    costs = {name: p.costs(spec) for name, p in kinds.items()}
    most = spec.max_running
    return {name: sum(c.work(t, tpot, most) for t, tpot in expected) for name, c in costs.items()}
