"""Add the probe routes: `/live` (the process runs) and `/health` (the server takes requests)."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from ballast.server.access.gate import Gate
from ballast.server.http.json_response import encode
from ballast.server.http.request_context import context_of
from ballast.server.observe.server_state import Status
from ballast.server.service import Service

_ANY: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}


def add_health(app: FastAPI, service: Service, gate: Gate) -> None:
    """Add `/live` and `/health`, which answer GET and HEAD without a key, even when the server is
    overloaded. How many models of how many serve, and why the others do not, is shown only to
    callers with a valid key, where keys are required."""

    @app.head("/live", include_in_schema=False)
    @app.get("/live")
    async def live() -> Response:
        return _answer(200, status="live")

    @app.head("/health", include_in_schema=False)
    @app.get("/health", responses={503: {"description": "Not now", "content": _ANY}})
    async def health(request: Request) -> Response:
        content: dict[str, Any] = {"status": status(service, gate)}
        if content["status"] == "starting":
            content["reason"] = service.loads.progress()
        elif service.controller.devices.down is not None:
            content["reason"] = service.controller.devices.down
        elif service.controller.devices.missing:
            content["missing"] = service.controller.devices.missing
        caller = context_of(request.scope).caller
        if caller.known:
            failed = {**service.models.failed(caller), **service.models.set_aside(caller)}
            loaded = service.models.visible_to(caller).keys()
            content["serving"] = len(loaded - failed.keys())
            content["models"] = len(loaded | failed.keys())
            content["failed"] = failed
        return _answer(200 if content["status"] == "ok" else 503, **content)


def status(service: Service, gate: Gate) -> Status:
    """State of the server: `ok` where it can take requests, else the reason. While it is
    `starting`, requests for models that have been loaded are answered, and others wait."""
    controller = service.controller
    if len(service.loads) > 0:
        return "draining" if gate.draining else "starting"
    if controller.devices.down is not None:
        return "restarting" if controller.devices.lost is None else "lost"
    return "draining" if gate.draining else "ok"


def _answer(status_code: int, **content: Any) -> Response:
    return Response(encode(content), status_code, media_type="application/json")
