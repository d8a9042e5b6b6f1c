"""Combine memory, compute, fleet and admission policies under the names of presets.

Used by the command line, the engine, the cluster, the simulator and benchmarks: `resolve` builds a
preset from its name and options, `preset_of` that of a fleet file.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ballast.core.errors import ConfigError
from ballast.core.settings import DeviceSettings, FleetSettings
from ballast.policy.admission.late_last import LateLast
from ballast.policy.admission.least_harm import LeastHarm
from ballast.policy.admission.slack import Slack
from ballast.policy.admission.turns_by_slack import TurnsBySlack
from ballast.policy.base import AdmissionPolicy, ComputePolicy, FleetPolicy, MemoryPolicy
from ballast.policy.compute.adbs import AdaptiveBatches
from ballast.policy.compute.basic_orders import FirstComeFirstServed, RoundRobin
from ballast.policy.compute.chunks import Chunks
from ballast.policy.compute.deadline import Deadline
from ballast.policy.fleet.by_price import ByPrice
from ballast.policy.fleet.elastic_lending import ElasticLending
from ballast.policy.fleet.fixed_placement import FixedPlacement, RandomPlacement
from ballast.policy.fleet.link_aware import LinkAware
from ballast.policy.fleet.migrate import LeastPressure
from ballast.policy.fleet.replicate import ReplicateUnderLoad
from ballast.policy.memory.arbiter import Arbiter
from ballast.policy.memory.balloon import Balloon
from ballast.policy.memory.host_direct import HostDirect
from ballast.policy.memory.kvswap import KvSwap
from ballast.policy.memory.lru import LeastRecentlyUsed
from ballast.policy.memory.mirage import Mirage
from ballast.policy.memory.quotas import Quotas
from ballast.policy.memory.recompute import Recompute
from ballast.policy.memory.rotary import Rotary
from ballast.policy.memory.static import FixedShares
from ballast.policy.memory.swap import WholeModels
from ballast.policy.memory.swiftcache import SwiftCache
from ballast.policy.requirements import Requirements

ORDERS: Mapping[str, Callable[..., ComputePolicy]] = {
    "round-robin": RoundRobin,
    "deadline": Deadline,
    "fcfs": FirstComeFirstServed,
    "adbs": AdaptiveBatches,
    "chunks": Chunks,
}
"""Compute policies by name: dataclasses, whose fields are options."""
PLACEMENTS: Mapping[str, FleetPolicy] = {
    "weights": FixedPlacement(),
    "work": FixedPlacement(by_work=True),
    "follow": ReplicateUnderLoad(),
    "both": ReplicateUnderLoad(by_work=True),
    "kvpr": LeastPressure(),
    "link": LinkAware(),
    "swiftcache": ElasticLending(),
    "price": ByPrice(),
    "random": RandomPlacement(),
}
"""Fleet policies, by the values of `placement` in a fleet file."""
JOIN = "+"
"""Joins the names of a preset and of an order of compute."""
_PLACEMENT = "work"


@dataclass(frozen=True, slots=True)
class Preset:
    """A memory, a compute, a fleet and an admission policy with their options."""

    name: str
    """The name that was resolved, with the order's name if that is not the preset's own."""
    memory: MemoryPolicy
    compute: ComputePolicy
    order: str
    """Name of the compute policy."""
    options: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Options that were given."""
    placement: str = _PLACEMENT
    """Name of the fleet policy."""
    admission: AdmissionPolicy = dataclasses.field(default_factory=LateLast)

    @property
    def fleet(self) -> FleetPolicy:
        """The fleet policy, with its options."""
        policy = PLACEMENTS[self.placement]
        given = {name: self.options[name] for name in policy.options if name in self.options}
        return dataclasses.replace(policy, **given) if given else policy  # type: ignore[type-var]

    @property
    def values(self) -> dict[str, float]:
        """Values of all options, given or default."""
        policies = (self.memory, self.compute, self.admission)
        values = {name: getattr(p, name) for p in policies for name in _fields(type(p))}
        return values | {name: getattr(self.fleet, name) for name in self.fleet.options}

    @property
    def requires(self) -> Requirements:
        """The memory policy's requirements of its device."""
        return self.memory.requires

    def refusal(self, device: DeviceSettings) -> ConfigError | None:
        """Return the error of a fleet whose device does not meet a policy's requirements, or
        None."""
        for key, value, requires in (
            ("preset", self.name, self.memory.requires),
            ("preset", self.name, self.compute.requires),
            ("placement", self.placement, self.fleet.requires),
        ):
            if (why := requires.refusal(device)) is not None:
                return ConfigError(key, value, f"another one for {device.name}: {why}")
        return None


@dataclass(frozen=True, slots=True)
class _Kind:
    """Policies of a preset before options are applied."""

    memory: Callable[..., MemoryPolicy]
    """A dataclass; its fields are the preset's options."""
    order: str = "round-robin"
    """Name of its compute policy, one of `ORDERS`."""
    placement: str = _PLACEMENT
    """Name of its fleet policy, one of `PLACEMENTS`."""
    admission: Callable[..., AdmissionPolicy] = LateLast
    """A dataclass, like `memory`."""


_KINDS = {
    "static": _Kind(FixedShares),
    "swap": _Kind(WholeModels),
    "lru": _Kind(LeastRecentlyUsed),
    "balloon": _Kind(Balloon, "deadline"),
    "recompute": _Kind(Recompute),
    "mirage": _Kind(Mirage),
    "kvswap": _Kind(KvSwap),
    "muxserve": _Kind(Quotas, "adbs"),
    "prism": _Kind(Balloon, "deadline", "kvpr", Slack),
    "swiftcache": _Kind(SwiftCache, "deadline", "swiftcache"),
    "superinfer": _Kind(Rotary, "deadline", admission=TurnsBySlack),
    "c2cserve": _Kind(HostDirect, "chunks", "link"),
    "ballast": _Kind(Arbiter, "deadline", "price", LeastHarm),
}
PRESETS = tuple(_KINDS)


def option_names(name: str) -> tuple[str, ...]:
    """Return the options of preset `name`: of its memory policy, its order of compute, its order of
    admission and its fleet policy.

    An option means the same, and has the same default, in every preset that has it. Raises
    ConfigError for an unknown preset.
    """
    kind, compute, _ = _parts(name)
    return _all_fields(kind, ORDERS[compute], kind.placement)


def shared_options(name: str, options: Mapping[str, float]) -> dict[str, float]:
    """Return those of `options` that the preset `name` has too, so that presets are compared with
    equal options."""
    known = option_names(name)
    return {key: value for key, value in options.items() if key in known}


def resolve(
    name: str,
    options: Mapping[str, float] | None = None,
    order: str | None = None,
    placement: str | None = None,
) -> Preset:
    """Return the preset `name` with `options`, which are fields of its policies.

    `name` may end in another order of compute than the preset's own (`swap+deadline`); `order`
    replaces the preset's own order unless `name` states one. `placement` names a fleet policy in
    place of the preset's own. Raises ConfigError for an unknown preset, order, placement or option.
    """
    kind, order_name, named = _parts(name)
    if not named and order is not None:
        if order not in ORDERS:
            raise ConfigError("order", order, f"use one of {', '.join(ORDERS)}")
        order_name = order
    placement = placement or kind.placement
    if placement not in PLACEMENTS:
        raise ConfigError("placement", placement, f"use one of {', '.join(PLACEMENTS)}")
    given = dict(options or {})
    known = _all_fields(kind, ORDERS[order_name], placement)
    for key in given.keys() - set(known):
        allowed = ", ".join(known) or "none"
        raise ConfigError(f"options.{key}", given[key], f"preset {name!r} has options: {allowed}")
    return Preset(
        name,
        kind.memory(**_own(kind.memory, given)),
        ORDERS[order_name](**_own(ORDERS[order_name], given)),
        order_name,
        given,
        placement,
        kind.admission(**_own(kind.admission, given)),
    )


def preset_of(fleet: FleetSettings) -> Preset:
    """Return the preset of a fleet, with its options and placement. Raises ConfigError as
    `resolve`, and if one of the fleet's devices does not meet a policy's requirements; where a
    device cannot follow the load, a placement that only the preset names gives way to `work`."""
    preset = resolve(fleet.preset, fleet.options, placement=fleet.placement)
    devices = (fleet.device, *fleet.others)
    needed = preset.fleet.requires
    if fleet.placement is None and any(needed.refusal(device) for device in devices):
        preset = resolve(fleet.preset, fleet.options, placement=_PLACEMENT)
    for device in devices:
        if (refusal := preset.refusal(device)) is not None:
            raise refusal
    return preset


def _parts(name: str) -> tuple[_Kind, str, bool]:
    """Return a preset's policies, its order of compute, and whether the name states the order."""
    memory, join, order_name = name.partition(JOIN)
    kind = _KINDS.get(memory)
    if kind is None:
        raise ConfigError(
            "preset", name, f"use one of {', '.join(PRESETS)}{_near(memory, PRESETS)}"
        )
    if join and order_name not in ORDERS:
        allowed = f"{memory} may be followed by {JOIN} and one of {', '.join(ORDERS)}"
        raise ConfigError("preset", name, f"{allowed}{_near(order_name, tuple(ORDERS))}")
    return kind, order_name or kind.order, bool(order_name)


def _fields(policy: Callable[..., object]) -> list[str]:
    return [f.name for f in dataclasses.fields(policy)]  # type: ignore[arg-type]


def _all_fields(
    kind: _Kind, compute: Callable[..., ComputePolicy], placement: str
) -> tuple[str, ...]:
    own = (*_fields(kind.memory), *_fields(compute), *_fields(kind.admission))
    return tuple(dict.fromkeys((*own, *PLACEMENTS[placement].options)))


def _own(policy: Callable[..., object], options: Mapping[str, float]) -> dict[str, float]:
    """Return those of the options that are fields of this policy."""
    return {key: options[key] for key in _fields(policy) if key in options}


def _near(name: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, names, 1)
    return f" (did you mean {near[0]!r}?)" if near else ""
