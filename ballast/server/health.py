"""Routes for probes: whether the process lives, and whether to send it requests."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from ballast.server import visit
from ballast.server.gate import Gate
from ballast.server.responses import encode
from ballast.server.service import Service


def add_health(app: FastAPI, service: Service, gate: Gate) -> None:
    """`/live` and `/health`. Why models failed is told only to those who may know of models."""

    @app.get("/live")
    async def live() -> Response:
        return _told(200, status="live")

    @app.get("/health")
    async def health() -> Response:
        more: dict[str, Any] = {}
        if visit.current().caller.known:
            more["failed"] = service.failed
        if service.controller.down is not None:
            status = "restarting" if service.controller.lost is None else "lost"
            return _told(503, status=status, reason=service.controller.down, **more)
        if gate.draining:
            return _told(503, status="draining", **more)
        return _told(200, status="ok", **more)


def _told(status_code: int, **content: Any) -> Response:
    return Response(encode(content), status_code, media_type="application/json")
