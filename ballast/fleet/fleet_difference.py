"""Compute the steps that turn a running server's fleet into another: models, levels, restarts.

Used by the admin service. Only compares settings; applies nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from ballast.core.settings import AdapterSettings, FleetSettings, ModelSettings
from ballast.fleet.levels import levels_of, with_levels


@dataclass(frozen=True, slots=True)
class FleetDifference:
    """Steps from one fleet to another; empty where they are equal except for `server` and
    aliases."""

    added: tuple[ModelSettings, ...]
    removed: tuple[str, ...]
    levels: tuple[ModelSettings | AdapterSettings, ...]
    """Models and adapters whose levels change while they serve; otherwise as they are."""
    again: Mapping[str, tuple[str, ...]]
    """By model, keys that take effect only when it is loaded again, named as in the fleet file."""
    restart: tuple[str, ...]
    """Keys that take effect only when the server starts again."""


_MODEL = {"max_model_len": "limits.context"}
_FLEET = {
    "story_path": "story",
    "kv": "kv_host",
    "device": "devices",
    "link": "links",
    "others": "devices",
    "other_links": "links",
}
_APART = ("models", "server", "home")
_NOT_KEYS = ("adapters", "aliases", "fault")


def difference(old: FleetSettings, new: FleetSettings) -> FleetDifference:
    """Return the steps from `old` to `new`."""
    before = {m.name: m for m in old.models}
    after = {m.name: m for m in new.models}
    levels: list[ModelSettings | AdapterSettings] = []
    again: dict[str, tuple[str, ...]] = {}
    for name in (n for n in before if n in after):
        a, b = before[name], after[name]
        changed = with_levels(a, levels_of(b))
        if changed != a:
            levels.append(changed)
        there = {adapter.name: adapter for adapter in b.adapters}
        for adapter in a.adapters:
            if adapter.name in there:
                other = with_levels(adapter, levels_of(there[adapter.name]))
                if other != adapter:
                    levels.append(other)
        if unlike := _unlike(changed, b):
            again[name] = unlike
    return FleetDifference(
        added=tuple(m for m in new.models if m.name not in before),
        removed=tuple(name for name in before if name not in after),
        levels=tuple(levels),
        again=again,
        restart=tuple(
            dict.fromkeys(
                _FLEET.get(f.name, f.name)
                for f in fields(FleetSettings)
                if f.name not in _APART and getattr(old, f.name) != getattr(new, f.name)
            )
        ),
    )


def _unlike(a: ModelSettings, b: ModelSettings) -> tuple[str, ...]:
    """Keys in which models of equal levels differ. A directory that is not there now is no other
    one: what was loaded from it is served on."""
    if b.fault:
        b = replace(b, path=a.path)
    found = [
        _MODEL.get(f.name, f.name)
        for f in fields(ModelSettings)
        if f.name not in _NOT_KEYS and getattr(a, f.name) != getattr(b, f.name)
    ]
    before = {x.name: x.path for x in a.adapters}
    after = {x.name: before.get(x.name, x.path) if x.fault else x.path for x in b.adapters}
    if before != after:
        found.append("adapters")
    return tuple(found)
