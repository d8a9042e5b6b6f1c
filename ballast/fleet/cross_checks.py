"""Check rules of a fleet file that concern several keys: names, devices, links, API keys, adapters.

Called by `fleet.fleet_file` after the schema's own checks. Raises ConfigError.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ballast.core.errors import ConfigError
from ballast.core.settings import DeviceSettings, Role
from ballast.fleet.faults import HIDDEN, unknown
from ballast.fleet.schema import (
    ADAPTER_KEYS,
    ADAPTER_LIMITS,
    FleetKeys,
    NamedModelKeys,
    ServerKeys,
)


def check_fleet(keys: FleetKeys, presets: Collection[str]) -> None:
    """Check rules that concern more than one key. Raises ConfigError.

    `presets`: the names that `preset` may have.
    """
    if keys.preset.partition("+")[0] not in presets:
        raise ConfigError("preset", keys.preset, unknown(keys.preset, presets))
    seen: dict[str, int] = {}
    for i, model in enumerate(keys.models):
        for name in model.names:
            if name in seen:
                key = "name" if name == model.name else "aliases"
                allowed = f"models[{seen[name]}] has that name already"
                raise ConfigError(f"models[{i}].{key}", name, allowed)
        seen |= dict.fromkeys(model.names, i)
    _check_api_keys(keys.server)
    bases = [model.name for model in keys.models if model.adapter is None]
    for i, model in enumerate(keys.models):
        check_kind(model, f"models[{i}]", bases)
    if keys.devices:
        _check_devices(keys)


def _check_devices(keys: FleetKeys) -> None:
    names: dict[str, int] = {}
    for i, device in enumerate(keys.device_settings()):
        if device.name in names:
            allowed = f"devices[{names[device.name]}] has that name already"
            raise ConfigError(f"devices[{i}].name", device.name, allowed)
        names[device.name] = i
        if device.tensor_parallel > 1 and device.keep_free is not None:
            allowed = "groups keep all memory so far: leave it out"
            raise ConfigError(f"devices[{i}].keep_free", device.keep_free, allowed)
        if device.gpu is None and device.graphs is not None:
            allowed = "only GPUs have CUDA graphs"
            raise ConfigError(f"devices[{i}].graphs", device.graphs, allowed)
        if device.name.startswith("cuda"):
            _check_gpu(keys, device, f"devices[{i}]")
        if device.tensor_parallel > 1:
            _check_group(keys, device, f"devices[{i}]")
        if device.page_bytes * device.tensor_parallel > device.budget_bytes:
            allowed = "it must hold one page at least, on each rank"
            raise ConfigError(f"devices[{i}].budget", device.budget_bytes, allowed)
    _check_roles(keys.device_settings())
    _check_links(keys, names)
    for i, model in enumerate(keys.models):
        for name in model.devices:
            if name not in names:
                raise ConfigError(f"models[{i}].devices", name, unknown(name, names))
        if len(set(model.devices)) < len(model.devices):
            allowed = "each device is named once"
            raise ConfigError(f"models[{i}].devices", list(model.devices), allowed)


def _check_links(keys: FleetKeys, devices: Collection[str]) -> None:
    """Each link is of one of the devices, or of none in particular; a device has one."""
    linked: dict[str | None, int] = {}
    for i, link in enumerate(keys.links):
        at = f"links[{i}].device"
        if link.device in linked:
            raise ConfigError(at, link.device, f"links[{linked[link.device]}] is its link already")
        if link.device is not None and link.device not in devices:
            raise ConfigError(at, link.device, unknown(link.device, devices))
        if link.mixed is not None and link.bandwidth is None:
            raise ConfigError(f"links[{i}].mixed", link.mixed, "bandwidth must be given, too")
        if link.shared and (link.bandwidth is None or link.device is not None):
            allowed = "only a link of a bandwidth, and of no device in particular, is shared"
            raise ConfigError(f"links[{i}].shared", link.shared, allowed)
        if link.peer is not None and link.device is not None:
            allowed = "devices have one link between them: name it with the link of none"
            raise ConfigError(f"links[{i}].peer", link.peer, allowed)
        linked[link.device] = i


def _check_roles(devices: Sequence[DeviceSettings]) -> None:
    """Requests get a first token somewhere, and can go on from there."""
    for i, device in enumerate(devices):
        at = f"devices[{i}].role"
        if device.role is Role.BOTH:
            continue
        if device.gpu is not None or device.tensor_parallel > 1 or not device.prefix_cache:
            allowed = "KV moves between CPU devices of one rank with a `prefix_cache`, so far"
            raise ConfigError(at, device.role.value, allowed)
        other = Role.DECODE if device.role is Role.PREFILL else Role.PREFILL
        if all(d.role is device.role for d in devices):
            raise ConfigError(at, device.role.value, f"another device has to {other.value}")


def _check_gpu(keys: FleetKeys, device: DeviceSettings, at: str) -> None:
    if device.gpu is None:
        allowed = "a GPU is called cuda: and its number, for example cuda:0"
        raise ConfigError(f"{at}.name", device.name, allowed)
    if device.threads is not None:
        allowed = "a GPU has none; `lanes` divide its multiprocessors"
        raise ConfigError(f"{at}.threads", device.threads, allowed)
    if device.tensor_parallel > 1:
        allowed = "1: groups are of CPUs; each GPU is a device of its own"
        raise ConfigError(f"{at}.tensor_parallel", device.tensor_parallel, allowed)
    for i, link in enumerate(keys.links):
        if link.device == device.name and link.bandwidth is not None:
            allowed = "a GPU's link is as fast as it is: only links of CPU devices are paced"
            raise ConfigError(f"links[{i}].bandwidth", link.bandwidth, allowed)


def _check_group(keys: FleetKeys, device: DeviceSettings, at: str) -> None:
    """Refuse settings that a device of several ranks does not support yet."""
    if device.lanes > 1:
        allowed = "a device with `tensor_parallel` runs one job at a time: 1"
        raise ConfigError(f"{at}.lanes", device.lanes, allowed)
    if device.invariant:
        allowed = "0: the sums of groups depend on the number of rows"
        raise ConfigError(f"{at}.invariant", device.invariant, allowed)


def _check_api_keys(server: ServerKeys) -> None:
    """Names and keys are unique: a request has one tenant, and an operator is nobody else."""
    names: dict[str, str] = {}
    secrets = {} if server.admin_key is None else {server.admin_key: "server.admin_key"}
    for i, key in enumerate(server.keys):
        at = f"server.keys[{i}]"
        if key.name in names:
            raise ConfigError(f"{at}.name", key.name, f"{names[key.name]} has that name already")
        if key.key in secrets:
            raise ConfigError(f"{at}.key", HIDDEN, f"{secrets[key.key]} is the same key")
        names[key.name] = secrets[key.key] = at


def check_kind(model: NamedModelKeys, at: str, bases: Collection[str]) -> None:
    """Check that an entry is a checkpoint or an adapter, wholly. `bases`: what adapters can stand
    on. Raises ConfigError."""
    if model.adapter is None:
        if model.base is not None:
            raise ConfigError(f"{at}.base", model.base, "only an adapter has a base")
        if model.path is None:
            raise ConfigError(f"{at}.path", None, "the key is required")
        return
    for name in sorted(model.model_fields_set):
        if name not in ADAPTER_KEYS:
            known = ", ".join(ADAPTER_KEYS)
            allowed = f"an adapter takes it from its base; known here: {known}"
            raise ConfigError(f"{at}.{name}", getattr(model, name), allowed)
    for name in sorted(model.limits.model_fields_set.difference(ADAPTER_LIMITS)):
        known = ", ".join(ADAPTER_LIMITS)
        allowed = f"an adapter takes it from its base; known here: {known}"
        raise ConfigError(f"{at}.limits.{name}", getattr(model.limits, name), allowed)
    if model.base is None:
        raise ConfigError(f"{at}.base", None, "the key is required beside `adapter`")
    if model.base not in bases:
        allowed = f"it must name a model with a path: {unknown(model.base, bases)}"
        raise ConfigError(f"{at}.base", model.base, allowed)
