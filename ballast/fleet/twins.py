"""Serve an adapter that is added to a running server, by a twin of its base.

The segments of a model, and the tables of its executor, are fixed when it is loaded. An adapter
that comes later therefore gets a *twin* of its base: a model of the same weights, in the same host
memory and device pages, with this adapter alone. At the next start the adapter is one of its base's
own. See docs/decisions/098-an-adapter-that-comes-later-has-a-twin.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ballast.core.settings import AdapterSettings, FleetSettings, ModelSettings

_MARK = "+"
"""Between the names of base and adapter; no name in a fleet file has it."""


def twin(base: ModelSettings, adapter: AdapterSettings, devices: Iterable[str]) -> ModelSettings:
    """Return the settings of the twin of `base` that serves `adapter` on `devices`."""
    return replace(
        base,
        name=f"{base.name}{_MARK}{adapter.name}",
        adapters=(adapter,),
        aliases=(),
        devices=tuple(devices),
        slo=adapter.slo,
        priority=adapter.priority,
        guarantee=0,
        limit=None,
        pinned=False,
        preload=False,
    )


def is_twin(name: str) -> bool:
    """Whether a model is the twin of another."""
    return _MARK in name


def base_of(name: str) -> str:
    """Return the name of the model whose twin `name` is; of others their own."""
    return name.partition(_MARK)[0]


def twin_of(fleet: FleetSettings, adapter: str) -> ModelSettings | None:
    """Find the twin that serves an adapter; None: there is none."""
    twins = (model for model in fleet.models if is_twin(model.name))
    return next((t for t in twins if any(a.name == adapter for a in t.adapters)), None)


def adapters_added_to(fleet: FleetSettings, base: str) -> list[str]:
    """Return the adapters that twins of a model serve."""
    twins = (m for m in fleet.models if is_twin(m.name) and base_of(m.name) == base)
    return [adapter.name for model in twins for adapter in model.adapters]


def with_twins(new: FleetSettings, running: FleetSettings) -> FleetSettings:
    """Return `new`, as it was read, with those adapters on twins that `running` serves so."""
    models = {model.name: model for model in new.models}
    for known in running.models:
        base = models.get(base_of(known.name))
        if not is_twin(known.name) or base is None:
            continue
        [name] = (adapter.name for adapter in known.adapters)
        own = {adapter.name: adapter for adapter in base.adapters}
        adapter = own.pop(name, None)
        if adapter is not None:
            models[base.name] = replace(base, adapters=tuple(own.values()))
            models[known.name] = replace(known, adapters=(adapter,))
    return replace(new, models=tuple(models.values()))
