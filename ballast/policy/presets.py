"""Named combinations of policies."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ballast.core.errors import ConfigError
from ballast.policy.balloon import Balloon
from ballast.policy.base import DevicePolicy, OrderPolicy
from ballast.policy.order import least_recently_run
from ballast.policy.static import FixedShares
from ballast.policy.swap import WholeModels


@dataclass(frozen=True, slots=True)
class Preset:
    """A combination of policies, resolved with its options."""

    name: str
    device: DevicePolicy
    order: OrderPolicy
    options: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Those given."""


_DEVICE: dict[str, Callable[..., Any]] = {
    "static": FixedShares,
    "swap": WholeModels,
    "balloon": Balloon,
}
PRESETS = tuple(_DEVICE)


def resolve(name: str, options: Mapping[str, float] | None = None) -> Preset:
    """The preset `name`, tuned by `options` (fields of its device policy).

    Raises ConfigError for an unknown preset or option.
    """
    if name not in _DEVICE:
        near = difflib.get_close_matches(name, PRESETS, 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ConfigError("preset", name, f"use one of {', '.join(PRESETS)}{hint}")
    kind = _DEVICE[name]
    known = [f.name for f in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for key, value in (options or {}).items():
        if key not in known:
            allowed = ", ".join(known) or "none"
            raise ConfigError(f"options.{key}", value, f"preset {name!r} has options: {allowed}")
    return Preset(name, kind(**(options or {})), least_recently_run, dict(options or {}))
