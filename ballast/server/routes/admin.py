"""Add the routes below `/admin` by which operators change the fleet; they need the admin key.

Each route calls `AdminService`; `access.keys` checks the key.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Query, Request
from pydantic import Field
from starlette.responses import Response

from ballast.core.actions import RECALL_SECONDS, ActivateCommand, EvictCommand
from ballast.core.errors import Unavailable, UnknownModel
from ballast.core.model import ModelSpec
from ballast.fleet.faults import unknown
from ballast.fleet.field_types import Size
from ballast.fleet.levels import said
from ballast.fleet.schema import Keys, LiveKeys, NamedModelKeys
from ballast.server.admin.admin_service import PATIENCE, AdminService
from ballast.server.admin.simulations import Simulations
from ballast.server.http.faults import Fault
from ballast.server.http.json_response import answered
from ballast.server.routes.kv import add_kv_routes
from ballast.server.routes.memory import add_memory_routes
from ballast.server.routes.simulations import add_simulation_routes
from ballast.server.routes.state import decisions, models_now
from ballast.server.service import Service


class LendKeys(Keys):
    """Body of a request to lend a device's memory."""

    to: str
    memory: Size


class ReleaseKeys(Keys):
    """Body of a request to leave what a device lends to another to the fleet policy."""

    to: str


class RecallKeys(Keys):
    """Body of a request to recall lent memory."""

    to: str
    memory: Size | None = None
    """Amount to recall; None: all of it."""
    seconds: Annotated[float, Field(ge=0, le=3600)] = RECALL_SECONDS


_NAME = 100
"""Most characters of a parameter's name that an error repeats."""


async def _check_parameters(request: Request) -> None:
    """Raise Fault (400) for a query parameter that the route does not take: a command whose
    `device` was ignored, for example, would reach all devices."""
    known = [field.alias for field in request.scope["route"].dependant.query_params]
    for name in request.query_params:
        if name not in known:
            hint = unknown(name[:_NAME], known) if known else "the route takes none"
            why = f"{name[:_NAME]}: there is no such parameter; {hint}"
            raise Fault(400, why, "invalid_request", name[:_NAME])


CHECKED: dict[str, Any] = {"dependencies": [Depends(_check_parameters)]}
"""Arguments of every route: its query parameters are checked."""


def add_admin_routes(
    app: FastAPI, service: Service, admin: AdminService, simulations: Simulations
) -> None:
    """Add the routes below `/admin` by which operators change the fleet. Where a path fits two
    routes, the one added first counts."""
    _add_model_routes(app, service, admin)
    _add_pin_routes(app, service, admin)
    _add_residency_routes(app, service, admin)
    _add_placement_routes(app, service, admin)
    _add_device_routes(app, admin)
    add_kv_routes(app, service, CHECKED)
    add_memory_routes(app, service, admin, CHECKED)
    _add_story_route(app, service)
    add_simulation_routes(app, simulations, CHECKED)


def _spec(service: Service, name: str) -> ModelSpec:
    """Find a model or adapter by its name or alias, without regard to the caller's key. Raises
    UnknownModel."""
    own = service.models.own_name(name)
    for base in service.controller.devices.specs.values():
        for served in base.served:
            if served.name == own:
                return served
    if service.loads.find(own) is not None:
        raise Unavailable(f"{own} has not been loaded yet")
    known = [s.name for base in service.controller.devices.specs.values() for s in base.served]
    raise UnknownModel(f"there is no model {name!r}; {unknown(name, known)}")


def _add_model_routes(app: FastAPI, service: Service, admin: AdminService) -> None:
    """Add routes to list, add, change and remove models."""
    controller = service.controller

    @app.get("/admin/models", **CHECKED)
    async def models() -> Response:
        kept = admin.changes.model_dump(mode="json", exclude_unset=True)
        now = await asyncio.to_thread(models_now, service)
        content = {"models": now, "failed": controller.devices.failed, "changes": kept}
        return answered(content)

    @app.post("/admin/models", status_code=201, **CHECKED)
    async def add(entry: NamedModelKeys) -> Response:
        name = await admin.add(entry)
        return answered({"name": name, "status": "added"}, 201)

    @app.patch("/admin/models/{name:path}", **CHECKED)
    async def change(name: str, levels: LiveKeys) -> Response:
        await admin.change(_spec(service, name).name, said(levels))
        return answered({"name": name, "status": "changed"})

    @app.delete("/admin/models/{name:path}", **CHECKED)
    async def remove(
        name: str, patience: Annotated[float, Query(ge=0, le=3600)] = PATIENCE
    ) -> Response:
        own = service.models.own_name(name)
        await admin.remove(
            own if own in controller.devices.failed else _spec(service, own).name, patience
        )
        return answered({"name": name, "status": "removed"})


def _add_pin_routes(app: FastAPI, service: Service, admin: AdminService) -> None:
    """Add routes to pin and unpin models; a pinned model is not evicted."""

    async def set_pinned(name: str, pinned: bool) -> None:
        model = _spec(service, name)
        if model.base is not None:
            raise Fault(409, f"{name} is an adapter; ask for its base, {model.base}", "refused")
        if model.guarantee and not pinned:
            raise Fault(409, f"{name} has a guarantee, which includes its weights", "refused")
        await admin.change(model.name, {"pinned": pinned})

    @app.post("/admin/models/{name:path}/pin", **CHECKED)
    async def pin(name: str) -> Response:
        await set_pinned(name, True)
        return answered({"name": name, "status": "pinned"})

    @app.post("/admin/models/{name:path}/unpin", **CHECKED)
    async def unpin(name: str) -> Response:
        await set_pinned(name, False)
        return answered({"name": name, "status": "unpinned"})


def _add_residency_routes(app: FastAPI, service: Service, admin: AdminService) -> None:
    """Add routes to activate and evict models."""

    async def evicted(name: str) -> str | None:
        """Evict a model if it is resident; returns the reason if it was refused."""
        try:
            await admin.execute(EvictCommand(name, "by an operator"))
        except (Fault, Unavailable) as error:
            return str(error)
        return None

    @app.post("/admin/models/evict", **CHECKED)
    async def evict_all() -> Response:
        names = list(service.controller.devices.specs)
        outcomes = await asyncio.gather(*map(evicted, names))
        refused = {name: why for name, why in zip(names, outcomes, strict=True) if why is not None}
        gone = [name for name in names if name not in refused]
        return answered({"evicted": gone, "refused": refused})

    @app.post("/admin/models/{name:path}/evict", **CHECKED)
    async def evict(name: str, device: str | None = None) -> Response:
        await admin.execute(EvictCommand(_spec(service, name).name, "by an operator"), device)
        return answered({"name": name, "status": "evicted"})

    @app.post("/admin/models/{name:path}/activate", **CHECKED)
    async def activate(name: str, device: str | None = None) -> Response:
        await admin.execute(ActivateCommand(_spec(service, name).name, "by an operator"), device)
        return answered({"name": name, "status": "activated"})


def _add_placement_routes(app: FastAPI, service: Service, admin: AdminService) -> None:
    """Add routes to change which devices serve a model."""

    @app.post("/admin/models/{name:path}/place", **CHECKED)
    async def place(name: str, device: str) -> Response:
        await admin.place(_spec(service, name).name, device)
        return answered({"name": name, "device": device, "status": "placed"})

    @app.post("/admin/models/{name:path}/withdraw", **CHECKED)
    async def withdraw(
        name: str, device: str, patience: Annotated[float, Query(ge=0, le=3600)] = PATIENCE
    ) -> Response:
        await admin.withdraw(_spec(service, name).name, device, patience)
        return answered({"name": name, "device": device, "status": "withdrawn"})


def _add_device_routes(app: FastAPI, admin: AdminService) -> None:
    """Add routes to drain devices, and to have them lend pages to each other."""

    @app.post("/admin/devices/{name:path}/drain", **CHECKED)
    async def drain(name: str) -> Response:
        await admin.drain(name)
        return answered({"name": name, "status": "drained"})

    @app.post("/admin/devices/{name:path}/uncordon", **CHECKED)
    async def uncordon(name: str) -> Response:
        await admin.uncordon(name)
        return answered({"name": name, "status": "uncordoned"})

    @app.post("/admin/devices/{name:path}/lend", **CHECKED)
    async def lend(name: str, wanted: LendKeys) -> Response:
        await admin.lend(name, wanted.to, wanted.memory)
        return answered({"name": name, "to": wanted.to, "status": "lent"})

    @app.post("/admin/devices/{name:path}/recall", **CHECKED)
    async def recall(name: str, wanted: RecallKeys) -> Response:
        await admin.recall(name, wanted.to, wanted.memory, wanted.seconds)
        return answered({"name": name, "to": wanted.to, "status": "recalled"})

    @app.post("/admin/devices/{name:path}/release", **CHECKED)
    async def release(name: str, wanted: ReleaseKeys) -> Response:
        await admin.release(name, wanted.to)
        return answered({"name": name, "to": wanted.to, "status": "released"})


def _add_story_route(app: FastAPI, service: Service) -> None:
    """Add the route that lists the last decisions of all devices."""

    @app.get("/admin/story", **CHECKED)
    async def story(
        last: Annotated[int, Query(ge=0, le=10_000)] = 100, model: str | None = None
    ) -> Response:
        own = None if model is None else service.models.own_name(model)
        return answered({"decisions": decisions(service, last, own)})
