"""Routes by which an operator changes what is served; `server/keys.py` asks for the admin key."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import FastAPI, Query
from pydantic import Field
from starlette.responses import Response

from ballast.core.actions import RECALL_SECONDS, Activate, Evict
from ballast.core.errors import UnknownModel
from ballast.core.model import ModelSpec
from ballast.fleet.faults import unknown
from ballast.fleet.levels import said
from ballast.fleet.schema import Keys, LiveKeys, NamedModelKeys, Size
from ballast.server.faults import Fault
from ballast.server.operating import PATIENCE, Operating
from ballast.server.reading import decisions, models_now
from ballast.server.responses import answered
from ballast.server.service import Service


class LendKeys(Keys):
    """What a device is to lend."""

    to: str
    memory: Size


class RecallKeys(Keys):
    """What it wants back."""

    to: str
    memory: Size | None = None
    """None: all."""
    seconds: Annotated[float, Field(ge=0, le=3600)] = RECALL_SECONDS


def add_admin(app: FastAPI, service: Service, operating: Operating) -> None:
    """Add the routes."""
    controller = service.controller

    def spec(name: str) -> ModelSpec:
        for base in controller.specs.values():
            for served in base.served:
                if served.name == name:
                    return served
        known = [s.name for base in controller.specs.values() for s in base.served]
        raise UnknownModel(f"there is no model {name!r}; {unknown(name, known)}")

    async def set_pinned(name: str, pinned: bool) -> None:
        base = spec(name).base
        if base is not None:
            raise Fault(409, f"{name} is an adapter; ask for its base, {base}", "refused")
        await operating.change(name, {"pinned": pinned})

    @app.get("/admin/models")
    async def models() -> Response:
        kept = operating.changes.model_dump(mode="json", exclude_unset=True)
        now = await asyncio.to_thread(models_now, service)
        told = {"models": now, "failed": controller.failed, "changes": kept}
        return answered(told)

    @app.post("/admin/models", status_code=201)
    async def add(entry: NamedModelKeys) -> Response:
        name = await operating.add(entry)
        return answered({"name": name, "status": "added"}, 201)

    @app.patch("/admin/models/{name:path}")
    async def change(name: str, levels: LiveKeys) -> Response:
        spec(name)
        await operating.change(name, said(levels))
        return answered({"name": name, "status": "changed"})

    @app.delete("/admin/models/{name:path}")
    async def remove(
        name: str, patience: Annotated[float, Query(ge=0, le=3600)] = PATIENCE
    ) -> Response:
        if name not in controller.failed:
            spec(name)
        await operating.remove(name, patience)
        return answered({"name": name, "status": "removed"})

    @app.post("/admin/models/{name:path}/pin")
    async def pin(name: str) -> Response:
        await set_pinned(name, True)
        return answered({"name": name, "status": "pinned"})

    @app.post("/admin/models/{name:path}/unpin")
    async def unpin(name: str) -> Response:
        await set_pinned(name, False)
        return answered({"name": name, "status": "unpinned"})

    @app.post("/admin/models/{name:path}/evict")
    async def evict(name: str, device: str | None = None) -> Response:
        await operating.order(Evict(spec(name).name, "by an operator"), device)
        return answered({"name": name, "status": "evicted"})

    @app.post("/admin/models/{name:path}/activate")
    async def activate(name: str, device: str | None = None) -> Response:
        await operating.order(Activate(spec(name).name, "by an operator"), device)
        return answered({"name": name, "status": "activated"})

    @app.post("/admin/models/{name:path}/place")
    async def place(name: str, device: str) -> Response:
        await operating.place(spec(name).name, device)
        return answered({"name": name, "device": device, "status": "placed"})

    @app.post("/admin/models/{name:path}/withdraw")
    async def withdraw(
        name: str, device: str, patience: Annotated[float, Query(ge=0, le=3600)] = PATIENCE
    ) -> Response:
        await operating.withdraw(spec(name).name, device, patience)
        return answered({"name": name, "device": device, "status": "withdrawn"})

    @app.post("/admin/devices/{name:path}/lend")
    async def lend(name: str, wanted: LendKeys) -> Response:
        await operating.lend(name, wanted.to, wanted.memory)
        return answered({"name": name, "to": wanted.to, "status": "lent"})

    @app.post("/admin/devices/{name:path}/recall")
    async def recall(name: str, wanted: RecallKeys) -> Response:
        await operating.recall(name, wanted.to, wanted.memory, wanted.seconds)
        return answered({"name": name, "to": wanted.to, "status": "recalled"})

    @app.get("/admin/story")
    async def story(
        last: Annotated[int, Query(ge=0, le=10_000)] = 100, model: str | None = None
    ) -> Response:
        return answered({"decisions": decisions(service, last, model)})
