"""List the fleet's models for clients (`/v1/models`, `/running`), with the state of their
weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from ballast.core.errors import UnknownModel
from ballast.core.model import ModelSpec
from ballast.core.view import Residency
from ballast.fleet.twins import base_of
from ballast.server.http.request_context import Caller
from ballast.server.model_loads import PendingLoad
from ballast.server.openai.records import Model, ModelStatus, RunningModel
from ballast.server.service import Service

_STATUS = {
    Residency.RESIDENT: ModelStatus("loaded"),
    Residency.ACTIVATING: ModelStatus("loading"),
    Residency.ABSENT: ModelStatus("evicted"),
    Residency.EVICTING: ModelStatus("evicted"),
    Residency.FAILED: ModelStatus("failed", "its weights could not be brought in"),
}

_RUNNING: dict[Residency, Literal["ready", "starting", "stopping"]] = {
    Residency.RESIDENT: "ready",
    Residency.ACTIVATING: "starting",
    Residency.EVICTING: "stopping",
}
"""States of running models, as llama-swap names them."""


def status_of(residency: str) -> ModelStatus:
    """Convert a value of `Residency` to the status that clients see."""
    return _STATUS[Residency(residency)]


def listed(service: Service, caller: Caller) -> list[Model]:
    """List the models that serve and that a caller may use, in the fleet's order, each before its
    aliases. Those that could not be loaded or are set aside are in `/health`, and are described by
    name."""
    aside = service.models.set_aside(caller)
    models, aliases = service.models.visible_to(caller), service.controller.devices.fleet.aliases
    residencies = _residencies(service)
    served = [
        _serving(service, spec, name, residencies)
        for spec in models.values()
        if spec.name not in aside
        for name in (spec.name, *aliases.get(spec.name, ()))
        if name == spec.name or name not in models
    ]
    loading = service.models.awaited_names(caller).items()
    return served + [
        _awaited(service, load, name)
        for own, load in loading
        for name in (own, *aliases.get(own, ()))
    ]


def described(service: Service, name: str, caller: Caller) -> Model:
    """Describe a model that serves, or that failed to. Raises UnknownModel."""
    own = service.models.own_name(name)
    spec = service.models.visible_to(caller).get(own)
    if spec is not None:
        return _serving(service, spec, name, _residencies(service))
    load = service.models.awaited(own, caller)
    if load is not None:
        return _awaited(service, load, name)
    failed = service.models.failed(caller)
    if own in failed:
        return _failed(service, own, failed[own])
    raise UnknownModel(f"there is no model {name!r}")


def resident(service: Service, caller: Caller) -> list[RunningModel]:
    """List the models of a caller whose weights are on a device, or on their way there or away, in
    the fleet's order."""
    report, models = service.controller.devices.report, service.models.visible_to(caller)
    found: list[RunningModel] = []
    for m in () if report is None else report.models:
        spec, state = models.get(m.name), _RUNNING.get(Residency(m.residency))
        if spec is None or state is None:
            continue
        found.append(
            RunningModel(
                model=m.name,
                state=state,
                ttl=0.0 if spec.pinned else spec.ttl or 0.0,
                waiting=m.waiting,
                running=m.running,
                memory=_memory(service, m.name),
            )
        )
    return found


def _memory(service: Service, name: str) -> int:
    """Bytes of a model's weights and KV cache on all devices, shared weights included."""
    reports = (d.report for d in service.controller.devices.values())
    return sum(
        (m.weight_pages + m.kv_pages) * report.page_bytes
        for report in reports
        if report is not None
        for m in report.models
        if m.name == name
    )


def _residencies(service: Service) -> dict[str, str]:
    """Residency of each model that has been reported."""
    report = service.controller.devices.report
    return {} if report is None else {m.name: m.residency for m in report.models}


def _serving(service: Service, spec: ModelSpec, name: str, residencies: Mapping[str, str]) -> Model:
    """Describe a model that serves, under its own name or an alias."""
    host = spec.base or spec.name
    where = residencies.get(host, Residency.ABSENT.value)
    why = service.controller.devices.set_aside.get(spec.name)
    return Model(
        id=name,
        created=service.started,
        root=base_of(host),
        parent=None if spec.base is None else base_of(spec.base),
        max_model_len=spec.max_model_len,
        status=status_of(where) if why is None else ModelStatus("failed", why),
    )


def _awaited(service: Service, load: PendingLoad, name: str) -> Model:
    """Describe a model that has not been loaded yet, or an adapter of one."""
    own = name in (load.name, *load.settings.aliases)
    return Model(
        id=name,
        created=service.started,
        root=load.name,
        parent=None if own else load.name,
        max_model_len=None,
        status=ModelStatus("loading", load=service.loads.now(load)),
    )


def _failed(service: Service, name: str, why: str) -> Model:
    return Model(
        id=name,
        created=service.started,
        root=name,
        parent=None,
        max_model_len=None,
        status=ModelStatus("failed", why),
    )
