"""Load the fleet file: YAML to frozen `FleetSettings`, or a ConfigError that names the key.

Used by the server, the command line and benchmarks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ballast.core.errors import ConfigError
from ballast.core.kv_tiers import KvTierSettings
from ballast.core.settings import (
    AdapterSettings,
    DeviceSettings,
    FleetSettings,
    HostsSettings,
    LinkSettings,
    ModelSettings,
)
from ballast.fleet.cross_checks import check_fleet, check_kind
from ballast.fleet.document import read_document
from ballast.fleet.entry_directory import (
    ADAPTER,
    CATALOGUE,
    CHECKPOINT,
    DirectoryKind,
    find_directory,
)
from ballast.fleet.faults import HIDDEN, first_fault
from ballast.fleet.hub import fetch
from ballast.fleet.key_hints import place_of
from ballast.fleet.schema import (
    ADAPTER_KEYS,
    ADAPTER_LIMITS,
    ApiKeyKeys,
    FleetKeys,
    ModelKeys,
    NamedModelKeys,
    ServerKeys,
    SimulatedFleetKeys,
)


def load_fleet(
    path: str | Path,
    *,
    presets: Collection[str],
    environ: Mapping[str, str] | None = None,
    fetch_hub: Callable[[str, str], str] = fetch,
    simulated: bool = False,
    partial: bool = False,
) -> FleetSettings:
    """Read, check and resolve the fleet file at `path`.

    Relative model paths start at the file's directory; hub ids are fetched by
    `fetch_hub(id, key)`. `presets` are the names that `preset` may have. A fleet that is only
    `simulated` may name models of the catalogue, and needs no devices: without any, its device has
    a budget of 0. Raises ConfigError naming the key (``models[2].slo.ttft``), its value and what is
    allowed. Entries whose directory is not there are named together; where `partial`, they have a
    `fault` instead, unless that leaves no model.
    """
    file = Path(path)
    keys = read_keys(file, presets=presets, environ=environ, simulated=simulated)
    return resolved(
        keys, numbered(keys.models), file.parent, fetch_hub, simulated=simulated, partial=partial
    )


def read_keys(
    file: Path,
    *,
    presets: Collection[str],
    environ: Mapping[str, str] | None = None,
    simulated: bool = False,
) -> FleetKeys:
    """The file's keys, checked; no path is looked at yet. Raises ConfigError."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("fleet file", str(file), f"it cannot be read: {error}") from error
    values = read_document(text, os.environ if environ is None else environ, str(file))
    keys = _check(values, str(file), SimulatedFleetKeys if simulated else FleetKeys)
    check_fleet(keys, presets)
    return keys


Placed = Sequence[tuple[str, NamedModelKeys]]
"""Entries, each with what an error calls it: ``models[2]``."""


def numbered(entries: Sequence[NamedModelKeys]) -> Placed:
    """Entries as they stand in the file."""
    return [(f"models[{i}]", entry) for i, entry in enumerate(entries)]


def resolved(
    keys: FleetKeys,
    entries: Placed,
    home: Path,
    fetch_hub: Callable[[str, str], str] = fetch,
    *,
    simulated: bool = False,
    partial: bool = False,
) -> FleetSettings:
    """Settings with these models; relative paths start at `home`; `partial` as for `load_fleet`.
    Raises ConfigError."""
    home = home.absolute()
    devices = keys.device_settings() or [DeviceSettings(budget_bytes=0)]
    for i, device in enumerate(devices):
        if simulated and device.tensor_parallel > 1:
            allowed = "how long several ranks take is not simulated: 1"
            raise ConfigError(f"devices[{i}].tensor_parallel", device.tensor_parallel, allowed)
    links = [_link(keys, device.name) for device in devices]
    models, faults = _models(entries, home, fetch_hub, simulated)
    if faults and (not partial or all(model.fault for model in models)):
        first, *others = faults
        why = "; ".join((first.allowed, *map(str, others)))
        raise ConfigError(first.key, first.value, why)
    return FleetSettings(
        models=models,
        device=devices[0],
        link=links[0],
        others=tuple(devices[1:]),
        other_links=tuple(links[1:]),
        placement=keys.placement,
        preset=keys.preset,
        options=dict(keys.options),
        home=str(home),
        story_path=None if keys.story is None else str(home / keys.story),
        story_bytes=keys.story_bytes,
        story_parts=keys.story_parts,
        kv=_kv_tiers(keys, home),
        hosts=None if keys.hosts is None else HostsSettings(**keys.hosts.model_dump()),
        server=keys.server.settings(),
    )


def _link(keys: FleetKeys, device: str) -> LinkSettings:
    named = {link.device: link for link in keys.links}
    # That of no device in particular paces CPUs alone.
    everyone = None if device.startswith("cuda") else named.get(None)
    link = named.get(device, everyone)
    return LinkSettings(
        device=device,
        bytes_per_second=None if link is None else link.bandwidth,
        mixed_bytes_per_second=None if link is None else link.mixed,
        shared=link is not None and link.shared,
        peer_bytes_per_second=None if link is None else link.peer,
    )


def entry_settings(
    entry: NamedModelKeys, home: Path, fetch_hub: Callable[[str, str], str] = fetch
) -> ModelSettings:
    """One more model, for a server that runs. Raises ConfigError."""
    if entry.path is None:
        raise ConfigError("path", None, "the key is required")
    return entry.settings(find_directory(entry.path, "path", home, fetch_hub, CHECKPOINT), ())


def adapter_settings(
    entry: NamedModelKeys,
    home: Path,
    bases: Collection[str],
    fetch_hub: Callable[[str, str], str] = fetch,
) -> AdapterSettings:
    """One more adapter of one of the models `bases`, for a server that runs. Raises ConfigError."""
    check_kind(entry, entry.name, bases)
    path = find_directory(entry.adapter or "", "adapter", home, fetch_hub, ADAPTER)
    return entry.adapter_settings(path)


def _models(
    entries: Placed, home: Path, fetch_hub: Callable[[str, str], str], simulated: bool
) -> tuple[tuple[ModelSettings, ...], list[ConfigError]]:
    """The models, each with its adapters, in the entries' order; the faults of those that are not
    there."""
    faults: list[ConfigError] = []

    def located(at: str, text: str, wanted: DirectoryKind) -> tuple[str, str]:
        """The directory of an entry, and what is wrong with it."""
        try:
            return find_directory(text, at, home, fetch_hub, wanted), ""
        except ConfigError as error:
            faults.append(error)
            return text, str(error)

    bases: dict[str, tuple[str, str]] = {}
    adapters: dict[str, list[AdapterSettings]] = {}
    for at, entry in entries:
        if simulated and entry.path is not None and entry.path.startswith(CATALOGUE):
            bases[entry.name] = entry.path, ""
        elif entry.path is not None:
            bases[entry.name] = located(f"{at}.path", entry.path, CHECKPOINT)
        if entry.adapter is not None and entry.base is not None:
            path, fault = located(f"{at}.adapter", entry.adapter, ADAPTER)
            adapter = replace(entry.adapter_settings(path), fault=fault)
            adapters.setdefault(entry.base, []).append(adapter)
    found = []
    for _, entry in entries:
        if entry.name in bases:
            path, fault = bases[entry.name]
            settings = entry.settings(path, tuple(adapters.get(entry.name, ())))
            found.append(replace(settings, fault=fault))
    return tuple(found), faults


def _check(values: Any, source: str, form: type[FleetKeys]) -> FleetKeys:
    if not isinstance(values, dict):
        raise ConfigError(source, values, "a fleet file is a mapping with `models` and `devices`")
    try:
        return form.model_validate(_with_defaults(values))
    except ValidationError as error:
        raise _config_error(error) from None


def _with_defaults(values: dict[Any, Any]) -> dict[Any, Any]:
    """`defaults` laid under every model; wrong shapes pass through, to be named by the schema."""
    defaults, models = values.get("defaults"), values.get("models")
    if not isinstance(defaults, dict) or not isinstance(models, list):
        return values
    try:
        ModelKeys.model_validate(defaults)
    except ValidationError as error:
        raise _config_error(error, "defaults") from None
    return {**values, "models": [_merge(_meant(defaults, model), model) for model in models]}


def _meant(defaults: dict[Any, Any], model: Any) -> dict[Any, Any]:
    """The part of `defaults` that an entry can have: an adapter leaves the rest to its base."""
    if not isinstance(model, dict) or "adapter" not in model:
        return defaults
    limits = defaults.get("limits")
    kept = {k: v for k, v in limits.items() if k in ADAPTER_LIMITS} if limits else {}
    return {k: v for k, v in {**defaults, "limits": kept}.items() if k in ADAPTER_KEYS}


def _merge(under: Any, over: Any) -> Any:
    if not isinstance(under, dict) or not isinstance(over, dict):
        return over
    return {**under, **{key: _merge(under.get(key), value) for key, value in over.items()}}


def _config_error(error: ValidationError, *prefix: str) -> ConfigError:
    """The first fault of `error`; what may be a secret is not told."""
    fault = first_fault(error, FleetKeys, *prefix, pointer=place_of)
    parts = (*prefix, *error.errors(include_url=False)[0]["loc"])
    if parts[:1] == ("server",) and fault.value is not None and not _shown(parts):
        return ConfigError(fault.key, HIDDEN, fault.allowed)
    return fault


def _shown(parts: tuple[str | int, ...]) -> bool:
    """Whether the value at this place of `server` can hold no secret, wherever one was put."""
    plain = ServerKeys.model_fields.keys() - {"keys", "admin_key"}
    if len(parts) > 1 and parts[1] == "keys":
        plain = ApiKeyKeys.model_fields.keys() - {"key"}
    return not plain.isdisjoint(str(part) for part in parts[1:])


def _kv_tiers(keys: FleetKeys, home: Path) -> KvTierSettings:
    """Return the settings of KV tiers. Raises ConfigError for a disk without host memory."""
    disk = keys.kv_disk
    if disk is None:
        return KvTierSettings(host_bytes=keys.kv_host)
    if not keys.kv_host:
        allowed = "what is on disk is read into host memory: set kv_host as well"
        raise ConfigError("kv_disk", disk.path, allowed)
    return KvTierSettings(
        host_bytes=keys.kv_host, disk_path=str(home / disk.path), disk_bytes=disk.bytes
    )
