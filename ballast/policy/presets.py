"""Named combinations of policies."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ballast.core.errors import ConfigError
from ballast.policy.balloon import Balloon
from ballast.policy.base import DevicePolicy, OrderPolicy
from ballast.policy.kvswap import KvSwap
from ballast.policy.mirage import Mirage
from ballast.policy.order import least_recently_run
from ballast.policy.recompute import Recompute
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

    @property
    def swapping(self) -> KvSwap | None:
        """The policy that swaps KV layer by layer, if this is it."""
        return self.device if isinstance(self.device, KvSwap) else None


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a preset is made of."""

    device: Callable[..., DevicePolicy]
    """A dataclass; its fields are the preset's options."""
    order: OrderPolicy = least_recently_run


_KINDS = {
    "static": _Kind(FixedShares),
    "swap": _Kind(WholeModels),
    "balloon": _Kind(Balloon),
    "recompute": _Kind(Recompute),
    "mirage": _Kind(Mirage),
    "kvswap": _Kind(KvSwap),
}
PRESETS = tuple(_KINDS)


def resolve(name: str, options: Mapping[str, float] | None = None) -> Preset:
    """The preset `name`, tuned by `options` (fields of its device policy).

    Raises ConfigError for an unknown preset or option.
    """
    if name not in _KINDS:
        near = difflib.get_close_matches(name, PRESETS, 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ConfigError("preset", name, f"use one of {', '.join(PRESETS)}{hint}")
    kind = _KINDS[name]
    known = [f.name for f in dataclasses.fields(kind.device)]  # type: ignore[arg-type]
    for key, value in (options or {}).items():
        if key not in known:
            allowed = ", ".join(known) or "none"
            raise ConfigError(f"options.{key}", value, f"preset {name!r} has options: {allowed}")
    return Preset(name, kind.device(**(options or {})), kind.order, dict(options or {}))
