"""Resolve the models and adapters that an operator adds, before any device is asked."""

from __future__ import annotations

from pathlib import Path

from ballast.cluster.device_set import DeviceSet
from ballast.core.errors import CheckpointError, ConfigError
from ballast.core.settings import ModelSettings
from ballast.fleet.fleet_file import adapter_settings, entry_settings
from ballast.fleet.schema import NamedModelKeys
from ballast.fleet.twins import is_twin, twin
from ballast.server.http.faults import Fault
from ballast.server.text.tokenizer import Tokenizer

MOST_TWINS = 64
"""Most adapters that are added while the server runs: each is a model to the memory policy."""


def prepared(entry: NamedModelKeys, devices: DeviceSet) -> ModelSettings:
    """Resolve the settings of a new model, or of the twin that is to serve a new adapter. May take
    long: it may fetch from a hub. Raises Fault."""
    home = Path(devices.fleet.home)
    try:
        if entry.adapter is None and entry.base is None:
            return entry_settings(entry, home)
        return _prepared_twin(entry, devices, home)
    except ConfigError as error:
        raise Fault(400, str(error), "invalid_request", error.key) from error


def _prepared_twin(entry: NamedModelKeys, devices: DeviceSet, home: Path) -> ModelSettings:
    models = {m.name: m for m in devices.fleet.models if not is_twin(m.name)}
    adapter = adapter_settings(entry, home, models)
    base = models[entry.base or ""]
    if base.name not in devices.specs:
        raise Fault(409, f"its base, {base.name!r}, is not served now", "refused", "base")
    if sum(is_twin(model.name) for model in devices.fleet.models) >= MOST_TWINS:
        why = f"{MOST_TWINS} adapters have been added while the server runs: restart it"
        raise Fault(409, why, "refused", "adapter")
    return twin(base, adapter, devices.homes(base.name))


def tokenizer_of(settings: ModelSettings) -> Tokenizer:
    """Load a model's tokenizer. Raises Fault."""
    try:
        return Tokenizer.load(settings.path, settings.tool_parser)
    except ConfigError as error:
        raise Fault(400, str(error), "invalid_request", error.key) from error
    except CheckpointError as error:
        raise Fault(400, str(error), "invalid_request", "path") from error
