"""Routes by which an operator changes what is served; `server/keys.py` asks for the admin key."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

from fastapi import FastAPI, Query
from starlette.responses import Response

from ballast.core.actions import Activate, Change, Evict
from ballast.core.command import Add, Order, Outcome, Remove
from ballast.core.errors import CheckpointError, ConfigError, UnknownModel
from ballast.core.model import ModelSpec
from ballast.core.settings import ModelSettings
from ballast.fleet.file import entry_settings
from ballast.fleet.schema import NamedModelKeys
from ballast.server.faults import Fault
from ballast.server.reading import decisions, models_now
from ballast.server.responses import answered
from ballast.server.service import Service
from ballast.server.tokenizer import Tokenizer

PATIENCE = 30.0
"""Seconds that open requests of a model that is removed have to end."""
_STATUS = {"refused": 409, "invalid": 400, "unavailable": 503}
"""By code of `Outcome`; any other is 500."""


def add_admin(app: FastAPI, service: Service) -> None:
    """Add the routes."""
    controller = service.controller

    async def order(wanted: Order) -> Outcome:
        outcome = await controller.command(wanted)
        if outcome.code is not None:
            raise Fault(_STATUS.get(outcome.code, 500), outcome.reason, outcome.code)
        return outcome

    def spec(name: str) -> ModelSpec:
        for base in controller.specs.values():
            for served in base.served:
                if served.name == name:
                    return served
        raise UnknownModel(f"there is no model {name!r}")

    @app.get("/admin/models")
    async def models() -> Response:
        return answered({"models": models_now(service), "failed": controller.failed})

    @app.post("/admin/models")
    async def add(entry: NamedModelKeys) -> Response:
        settings, tokenizer = await asyncio.to_thread(_prepared, entry, controller.fleet.home)
        await order(Add(settings))
        service.learn(settings.name, tokenizer)
        return answered({"name": settings.name, "status": "added"}, 201)

    @app.delete("/admin/models/{name:path}")
    async def remove(
        name: str, patience: Annotated[float, Query(ge=0, le=3600)] = PATIENCE
    ) -> Response:
        if name not in controller.failed:
            spec(name)
        await order(Remove(name, patience))
        return answered({"name": name, "status": "removed"})

    @app.post("/admin/models/{name:path}/pin")
    async def pin(name: str) -> Response:
        await order(_pinned(spec(name), True))
        return answered({"name": name, "status": "pinned"})

    @app.post("/admin/models/{name:path}/unpin")
    async def unpin(name: str) -> Response:
        await order(_pinned(spec(name), False))
        return answered({"name": name, "status": "unpinned"})

    @app.post("/admin/models/{name:path}/evict")
    async def evict(name: str) -> Response:
        await order(Evict(spec(name).name, "by an operator"))
        return answered({"name": name, "status": "evicted"})

    @app.post("/admin/models/{name:path}/activate")
    async def activate(name: str) -> Response:
        await order(Activate(spec(name).name, "by an operator"))
        return answered({"name": name, "status": "activated"})

    @app.get("/admin/story")
    async def story(
        last: Annotated[int, Query(ge=0, le=10_000)] = 100, model: str | None = None
    ) -> Response:
        return answered({"decisions": decisions(service, last, model)})


def _prepared(entry: NamedModelKeys, home: str) -> tuple[ModelSettings, Tokenizer]:
    """What takes long: fetching from a hub, and the tokenizer. Raises Fault."""
    try:
        settings = entry_settings(entry, Path(home))
        return settings, Tokenizer.load(settings.path)
    except ConfigError as error:
        raise Fault(400, str(error), "invalid_request", error.key) from error
    except CheckpointError as error:
        raise Fault(400, str(error), "invalid_request", "path") from error


def _pinned(spec: ModelSpec, pinned: bool) -> Change:
    """All else as it is. Raises Fault."""
    if spec.base is not None:
        why = f"{spec.name} is an adapter; ask for its base, {spec.base}"
        raise Fault(409, why, "refused")
    return Change(
        model=spec.name,
        slo=spec.slo,
        priority=spec.priority,
        max_waiting=spec.max_waiting,
        queue_seconds=spec.queue_seconds,
        share=spec.share,
        max_running=spec.max_running,
        pinned=pinned,
        why="by an operator",
    )
