"""The fleet's models as clients see them, and where their weights are."""

from __future__ import annotations

from ballast.core.errors import UnknownModel
from ballast.core.model import ModelSpec
from ballast.core.view import Residency
from ballast.server.responses import Model, ModelStatus
from ballast.server.service import Service

_STATUS = {
    Residency.RESIDENT: ModelStatus("loaded"),
    Residency.ACTIVATING: ModelStatus("loading"),
    Residency.ABSENT: ModelStatus("evicted"),
    Residency.EVICTING: ModelStatus("evicted"),
    Residency.FAILED: ModelStatus("failed", "its weights could not be brought in"),
}


def status_of(residency: str) -> ModelStatus:
    """What clients are told of a value of `Residency`."""
    return _STATUS[Residency(residency)]


def listed(service: Service) -> list[Model]:
    """Those that serve, in the fleet's order, and then those that failed to."""
    return [
        *(_serving(service, spec) for spec in service.models.values()),
        *(_failed(service, name) for name in service.failed),
    ]


def described(service: Service, name: str) -> Model:
    """One of those listed. Raises UnknownModel."""
    spec = service.models.get(name)
    if spec is not None:
        return _serving(service, spec)
    if name in service.failed:
        return _failed(service, name)
    raise UnknownModel(f"there is no model {name!r}")


def _serving(service: Service, spec: ModelSpec) -> Model:
    base = spec.base or spec.name
    report = service.controller.report
    reports = report.models if report is not None else ()
    where = next((m.residency for m in reports if m.name == base), Residency.ABSENT.value)
    return Model(
        id=spec.name,
        created=service.started,
        root=base,
        parent=spec.base,
        max_model_len=spec.max_model_len,
        status=status_of(where),
    )


def _failed(service: Service, name: str) -> Model:
    return Model(
        id=name,
        created=service.started,
        root=name,
        parent=None,
        max_model_len=None,
        status=ModelStatus("failed", service.failed[name]),
    )
