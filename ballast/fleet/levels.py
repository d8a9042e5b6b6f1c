"""Convert the settings that may change while a model or adapter serves: service levels and limits.

Converts between settings and the fleet file's dotted keys. Used by the admin
API and by operators' changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from typing import Any, TypeVar

from ballast.core.settings import AdapterSettings, ModelSettings
from ballast.fleet.schema import ADAPTER_KEYS, ADAPTER_LIMITS, LiveKeys

Value = float | int | bool | None
Levels = Mapping[str, Value]
"""Values by the fleet file's dotted keys: `slo.ttft`, `limits.waiting`."""
T = TypeVar("T", bound=ModelSettings | AdapterSettings)

_FIELDS = {
    "slo.ttft": ("slo", "ttft"),
    "slo.tpot": ("slo", "tpot"),
    "priority": ("priority",),
    "share": ("share",),
    "limits.running": ("max_running",),
    "limits.waiting": ("max_waiting",),
    "limits.queue_seconds": ("queue_seconds",),
    "pinned": ("pinned",),
    "ttl": ("ttl",),
    "guarantee": ("guarantee",),
    "limit": ("limit",),
}
"""Attribute path in the settings, by key."""


def said(keys: LiveKeys) -> dict[str, Value]:
    """Return the values that `keys` set, by dotted key, without those left open."""
    found: dict[str, Value] = {}
    for name, value in keys.model_dump(exclude_unset=True).items():
        if isinstance(value, dict):
            found |= {f"{name}.{inner}": v for inner, v in value.items()}
        else:
            found[name] = value
    return found


def keys_of(values: Levels) -> LiveKeys:
    """The inverse of `said`. Raises ValidationError where a value is out of range."""
    nested: dict[str, Any] = {}
    for key, value in values.items():
        name, _, inner = key.partition(".")
        if inner:
            nested.setdefault(name, {})[inner] = value
        else:
            nested[name] = value
    return LiveKeys.model_validate(nested)


def foreign(values: Levels) -> list[str]:
    """Return the keys that an adapter does not have, because it takes them from its base."""
    own = (*ADAPTER_KEYS, *(f"limits.{name}" for name in ADAPTER_LIMITS))
    return [key for key in values if key not in own and key.partition(".")[0] != "slo"]


def levels_of(model: ModelSettings | AdapterSettings) -> dict[str, Value]:
    """Return all levels of a model or adapter, by dotted key."""
    has = {key: path for key, path in _FIELDS.items() if hasattr(model, path[0])}
    return {key: reduce(getattr, path, model) for key, path in has.items()}  # type: ignore[misc]


def with_levels(model: T, values: Levels) -> T:
    """Return the model with other levels. Raises TypeError for levels that it does not have."""
    for key, value in values.items():
        first, *inner = _FIELDS[key]
        new: object = replace(model.slo, **{inner[0]: value}) if inner else value  # type: ignore[arg-type]
        model = replace(model, **{first: new})  # type: ignore[arg-type]
    return model
