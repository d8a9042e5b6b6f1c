"""Place models on devices at the start, and derive the settings of each device's worker.

Used by the controller, `FleetCommands`, the doctor and the simulator. The
preset's fleet policy chooses; only the headers of checkpoints are read, never weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ballast.core.errors import CheckpointError, ConfigError
from ballast.core.fleet import DeviceCapacity, ModelDemand
from ballast.core.model import ModelSpec, weight_pages
from ballast.core.settings import DeviceSettings, FleetSettings, ModelSettings, Role
from ballast.core.units import ceil_div, format_bytes
from ballast.engine.sizing import set_aside
from ballast.policy.base import FleetPolicy
from ballast.policy.presets import preset_of
from ballast.weights.stored import served_bytes

Homes = Mapping[str, Sequence[str]]
"""Names of the devices of each model."""


def homes_of(fleet: FleetSettings) -> dict[str, list[str]]:
    """Return the devices of each model of a fleet that is about to start.

    A model that no device has room for goes to the largest, which refuses it, so that the others
    are served. Raises ConfigError for a model that names an unknown device.
    """
    homes = {m.name: named(m, fleet) for m in fleet.models if m.devices}
    largest = max(_serving(fleet).values(), key=lambda d: d.budget_bytes)
    free = [m for m in fleet.models if not m.devices]
    on_device = bool(fleet.others) and not preset_of(fleet).requires.in_place
    misfits = [m for m in free if on_device and approximate_bytes(m, fleet) > largest.budget_bytes]
    found = placed([m for m in free if m not in misfits], fleet, homes)
    return homes | found | {m.name: [largest.name] for m in misfits}


def _serving(fleet: FleetSettings) -> dict[str, DeviceSettings]:
    """Return the devices that always serve, by name: models are placed on those first."""
    return {name: d for name, (d, _) in fleet.devices.items() if name not in fleet.standby}


def named(model: ModelSettings, fleet: FleetSettings) -> list[str]:
    """Return the devices that a model's settings name. Raises ConfigError for an unknown one."""
    for name in model.devices:
        if name not in fleet.devices:
            known = ", ".join(fleet.devices)
            raise ConfigError(f"{model.name}: devices", name, f"known here: {known}")
    return list(dict.fromkeys(model.devices))


def placed(
    models: Sequence[ModelSettings], fleet: FleetSettings, homes: Homes
) -> dict[str, list[str]]:
    """Choose devices for `models`, given the models that have `homes` already.

    Judges by the sizes of weights in the checkpoints' headers; whether KV and activations fit is
    known only after a device has loaded them. Raises ConfigError where a model fits nowhere.
    """
    devices = _serving(fleet)
    if len(devices) == 1:
        return {m.name: list(devices) for m in models}
    preset = preset_of(fleet)
    if preset.requires.in_place:  # no model takes more of a device than its KV
        sizes = {m.name: 1 for m in (*fleet.models, *models)}
    else:
        sizes = {m.name: approximate_bytes(m, fleet) for m in (*fleet.models, *models)}
    taken = dict.fromkeys(fleet.devices, 0)
    for name, at in homes.items():
        for device in at:
            taken[device] += sizes[name]
    largest = max(device.budget_bytes for device in devices.values())
    for model in models:
        if sizes[model.name] > largest:
            allowed = (
                f"{model.name} has {format_bytes(sizes[model.name])} of weights, the largest "
                f"device {format_bytes(largest)}"
            )
            raise ConfigError("devices", list(devices), allowed)
    needs = [ModelDemand(m.name, 0, sizes[m.name]) for m in models]
    rooms = [
        DeviceCapacity(name, max(device.page_bytes, device.budget_bytes - taken[name]))
        for name, device in devices.items()
    ]
    roles = {name: device.role for name, device in devices.items()}
    return placed_by_role(preset.fleet, needs, rooms, roles)


def placed_by_role(
    policy: FleetPolicy,
    needs: Sequence[ModelDemand],
    rooms: Sequence[DeviceCapacity],
    roles: Mapping[str, Role],
) -> dict[str, list[str]]:
    """Have the policy choose devices of both roles for each model: some that prefill and some that
    decode, which may be the same. `roles`: by device. Raises ConfigError."""
    if all(role is Role.BOTH for role in roles.values()):
        return policy.place(needs, rooms)
    found: dict[str, list[str]] = {}
    for role in (Role.PREFILL, Role.DECODE):
        able = [r for r in rooms if roles[r.device] in (role, Role.BOTH)]
        for name, at in policy.place(needs, able).items():
            found[name] = list(dict.fromkeys([*found.get(name, ()), *at]))
    return found


def need_of(
    spec: ModelSpec,
    devices: Iterable[DeviceSettings],
    work: Mapping[str, float],
    peak: Mapping[str, float] | None = None,
    in_place: bool = False,
) -> ModelDemand:
    """Return the memory that a model needs of a device: weights (not if they are read `in_place`),
    activations, and KV for one request of `step_tokens`, or as much as is guaranteed to it, which
    counts with its weights; the maximum over `devices`.

    `work`, `peak`: as in `ModelDemand`; `peak=None`: only the mean is known.
    """
    most = weights = 0
    for served in devices:
        page = served.page_bytes
        kept = spec.guaranteed_kv(page, in_place) * page
        weights = max(weights, weight_pages([spec], page) * page + kept)
        kv = max(kept, ceil_div(served.step_tokens * spec.kv_bytes_per_token, page) * page)
        arena = set_aside([spec], served)
        here = 0 if in_place else weight_pages([spec], page) * page
        most = max(most, here + kv + arena + page)
    return ModelDemand(
        spec.name,
        most,
        weights,
        work,
        spec.pinned,
        peak or {},
        spec.kv_bytes_per_token,
        spec.block_tokens,
        spec.slo.tpot,
    )


def part_of(fleet: FleetSettings, name: str, models: Collection[str], cores: int) -> FleetSettings:
    """Return the settings with which the worker of device `name` is started: `models` of the fleet,
    and the device's share of `cores`."""
    device, link = fleet.devices[name]
    if not fleet.others:
        return replace(fleet, models=tuple(m for m in fleet.models if m.name in models))
    return replace(
        fleet,
        models=tuple(m for m in fleet.models if m.name in models),
        device=device
        if device.gpu is not None
        else replace(device, threads=_share_of(device, fleet, cores)),
        link=link,
        others=(),
        other_links=(),
    )


def _share_of(own: DeviceSettings, fleet: FleetSettings, cores: int) -> int:
    """Return the threads of a CPU device: its setting, or an equal share of the cores that the
    other devices' settings leave."""
    if own.threads is not None:
        return own.threads
    devices = [device for device, _ in fleet.devices.values() if device.gpu is None]
    named = [d.threads for d in devices if d.threads is not None]
    return max(1, (cores - sum(named)) // (len(devices) - len(named)))


def approximate_bytes(model: ModelSettings, fleet: FleetSettings) -> int:
    """Return the approximate bytes of a model's weights; 1 if the checkpoint is unreadable, which
    its load reports."""
    if model.fault:
        return 1
    try:
        on_cpu = any(device.gpu is None for device, _ in fleet.devices.values())
        packed = on_cpu and model.linear != "plain"
        return max(1, served_bytes(Path(model.path), model.dtype, packed=packed))
    except (CheckpointError, OSError):
        return 1
