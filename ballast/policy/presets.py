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


def option_names(name: str) -> tuple[str, ...]:
    """Options of the preset `name`.

    An option means the same, and has the same default, in every preset that has it. Raises
    ConfigError for an unknown preset.
    """
    return tuple(f.name for f in dataclasses.fields(_kind(name).device))  # type: ignore[arg-type]


def shared_options(name: str, options: Mapping[str, float]) -> dict[str, float]:
    """Those of `options` that the preset `name` has: what makes it comparable with theirs."""
    known = option_names(name)
    return {key: value for key, value in options.items() if key in known}


def resolve(name: str, options: Mapping[str, float] | None = None) -> Preset:
    """The preset `name`, tuned by `options` (fields of its device policy).

    Raises ConfigError for an unknown preset or option.
    """
    kind = _kind(name)
    known = option_names(name)
    for key, value in (options or {}).items():
        if key not in known:
            allowed = ", ".join(known) or "none"
            raise ConfigError(f"options.{key}", value, f"preset {name!r} has options: {allowed}")
    return Preset(name, kind.device(**(options or {})), kind.order, dict(options or {}))


def _kind(name: str) -> _Kind:
    """The preset `name`. Raises ConfigError for an unknown one, with the nearest."""
    if name not in _KINDS:
        near = difflib.get_close_matches(name, PRESETS, 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ConfigError("preset", name, f"use one of {', '.join(PRESETS)}{hint}")
    return _KINDS[name]
