"""Routes that only tell: `/metrics` for Prometheus, `/admin/state` for `ballast top`."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.responses import Response

from ballast.core.report import ModelReport
from ballast.server.metrics import CONTENT_TYPE, Metrics
from ballast.server.responses import encode
from ballast.server.service import Service
from ballast.server.timing import Quantiles


class ServedName(msgspec.Struct, frozen=True):
    """A model or an adapter, as clients ask for it: latencies of the last minute."""

    name: str
    ttft: Quantiles | None
    tpot: Quantiles | None


class ModelNow(msgspec.Struct, frozen=True):
    """One model of the fleet."""

    report: ModelReport
    names: list[ServedName]
    """The model's own, then its adapters'."""
    pinned: bool


class Now(msgspec.Struct, frozen=True):
    """A server at one moment."""

    device: str
    at: float
    """Seconds on the device's clock."""
    page_bytes: int
    total: int
    """Pages; likewise below."""
    free: int
    reclaiming: int
    owners: dict[str, int]
    jobs: int
    draining: bool
    lost: str | None
    """Why there is no worker, if there is none."""
    models: list[ModelNow]
    failed: dict[str, str]
    decisions: list[dict[str, Any]]
    """The last, oldest first, as the story tells them."""


def add_reading(app: FastAPI, service: Service) -> None:
    """Add the routes."""

    # Not a coroutine: writing it all takes a while, and other threads can do it.
    @app.get("/metrics")
    def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)

    @app.get("/admin/state")
    async def state() -> Response:
        return Response(encode(now(service)), media_type="application/json")


def now(service: Service) -> Now:
    """What there is to tell."""
    controller = service.controller
    report = controller.report
    assert report is not None  # there is one before any route
    return Now(
        device=report.device,
        at=report.now,
        page_bytes=report.page_bytes,
        total=report.total,
        free=report.free,
        reclaiming=report.reclaiming,
        owners=report.owners,
        jobs=report.jobs,
        draining=report.draining,
        lost=controller.lost,
        models=[_model(service, m) for m in report.models],
        failed=dict(controller.failed),
        decisions=[],
    )


def _model(service: Service, report: ModelReport) -> ModelNow:
    spec = service.controller.specs.get(report.name)
    names = [report.name] if spec is None else [s.name for s in spec.served]
    served = [_served(service.metrics, name) for name in names]
    return ModelNow(report, served, spec is not None and spec.pinned)


def _served(metrics: Metrics, name: str) -> ServedName:
    ttft, tpot = metrics.recent(name)
    return ServedName(name, ttft.quantiles(), tpot.quantiles())
