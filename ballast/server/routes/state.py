"""Add the read-only routes `/metrics` (Prometheus), `/admin/state` (`ballast top`),
`/admin/requests` and `/admin/history`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request
from starlette.responses import PlainTextResponse, Response

from ballast import __version__
from ballast.cluster.device import RemoteDevice
from ballast.core.report import DeviceReport, ModelReport
from ballast.core.settings import Slo
from ballast.server.access.gate import Gate
from ballast.server.http.json_response import answered
from ballast.server.http.request_context import context_of
from ballast.server.observe.memory_history import History
from ballast.server.observe.metrics import CONTENT_TYPE, Metrics
from ballast.server.observe.recent_requests import KEPT, RequestList
from ballast.server.observe.server_state import DeviceNow, ModelNow, NameNow, ServerNow
from ballast.server.routes.catalogue import status_of
from ballast.server.routes.health import status
from ballast.server.routes.openapi_document import responses_of
from ballast.server.service import Service

DAY = 86400.0
LAST_DECISIONS = 50
"""Decisions in `/admin/state`; `/admin/story` returns more."""


def add_observe_routes(app: FastAPI, service: Service, gate: Gate) -> None:
    """Add the routes."""

    # Not a coroutine: FastAPI runs it on a thread, since encoding all metrics is slow.
    @app.get("/metrics", response_class=PlainTextResponse)
    def metrics(deprecated: bool = False) -> Response:
        text = service.metrics.text(deprecated or service.settings.deprecated_metrics)
        return Response(text, media_type=CONTENT_TYPE)

    @app.get("/admin/state", responses=responses_of(ServerNow))
    async def state() -> Response:
        # Sorting the latencies of many models is slow.
        models = await asyncio.to_thread(models_now, service)
        return answered(server_now(service, gate, models))

    @app.get("/admin/requests", responses=responses_of(RequestList))
    async def requests(
        request: Request, last: Annotated[int, Query(ge=0, le=KEPT)] = 100
    ) -> Response:
        admin = context_of(request.scope).caller.admin
        return answered(service.requests.listed(last, admin))

    @app.get("/admin/history", responses=responses_of(History))
    async def history(seconds: Annotated[float, Query(gt=0, le=DAY)] = DAY) -> Response:
        return answered(service.history.last(seconds, service.wall.now()))


def models_now(service: Service) -> list[ModelNow]:
    """Collect the state of the models that serve. Safe from any thread."""
    report = service.controller.devices.report
    models = {} if report is None else {m.name: m for m in report.models}
    fleet = [m.name for m in service.controller.devices.fleet.models if m.name in models]
    return [_model(service, models[name]) for name in dict.fromkeys([*fleet, *models])]


def decisions(service: Service, last: int, model: str | None = None) -> list[dict[str, Any]]:
    """Return the last `last` decisions, oldest first; only those about `model`, if one is named."""
    since = service.wall.now() - asyncio.get_running_loop().time()
    found = [
        {"time": round(since + moment, 3), **what}
        for moment, what in service.controller.devices.decisions
        if model in (None, what.get("model"))
    ]
    return found[-last:] if last > 0 else []


def server_now(service: Service, gate: Gate, models: list[ModelNow]) -> ServerNow:
    """Collect the state of the server, with the state of its models."""
    controller = service.controller
    report = controller.devices.report or _unreported(controller.devices)
    return ServerNow(
        version=__version__,
        time=service.wall.now(),
        uptime=service.clock.now(),
        preset=controller.devices.fleet.preset,
        status=status(service, gate),
        reason=controller.devices.down,
        restarts=controller.devices.restarts,
        open=controller.devices.open_requests,
        device=report.device,
        page_bytes=report.page_bytes,
        total=report.total,
        free=report.free,
        reclaiming=report.reclaiming,
        owners=report.owners,
        jobs=report.jobs,
        models=models,
        failed=dict(controller.devices.failed),
        decisions=decisions(service, LAST_DECISIONS),
        devices=[_device(d) for d in controller.devices.values()],
        loading=[service.loads.now(load) for load in service.loads],
        lending=list(controller.devices.lending),
        leases=list(controller.leases.pairs.standing),
        kv=controller.kept_kv.report(),
    )


def _device(device: RemoteDevice) -> DeviceNow:
    report = device.report or _unreported([device.name])
    status: Literal["ok", "standby", "restarting", "lost"] = "ok"
    if device.stands_by:
        status = "standby"
    elif device.down is not None:
        status = "restarting" if device.lost is None else "lost"
    return DeviceNow(
        device=device.name,
        status=status,
        reason="it waits for a host with room" if device.waits_for_host else device.down,
        restarts=device.restarts,
        open=len(device.requests),
        page_bytes=report.page_bytes,
        total=report.total,
        free=report.free,
        reclaiming=report.reclaiming,
        owners=report.owners,
        jobs=report.jobs,
        models=list(report.models),
        failed=dict(device.failed),
        borrowed=report.borrowed,
        fetched_tokens=report.fetched_tokens,
        moved_in=device.moved_in,
        cordoned=device.cordoned,
        host=device.host,
        cached_pages=sum(model.cached_pages for model in report.models),
    )


def _unreported(names: Iterable[str]) -> DeviceReport:
    """Return the report of devices whose workers start and have not reported yet."""
    return DeviceReport(
        device=", ".join(names),
        now=0.0,
        page_bytes=1,
        total=0,
        free=0,
        reclaiming=0,
        owners={},
        models=(),
        jobs=0,
        draining=False,
    )


def _model(service: Service, report: ModelReport) -> ModelNow:
    spec = service.controller.devices.specs.get(report.name)
    status = status_of(report.residency).value
    if spec is None:  # it has just been removed
        return ModelNow(status, report, [_name(service.metrics, report.name, None)], False)
    served = [s for s in spec.served if service.models.serves(s.name)] or [spec]
    names = [_name(service.metrics, s.name, s.slo) for s in served]
    homes = [d.name for d in service.controller.devices.values() if d.serves(report.name)]
    return ModelNow(status, report, names, spec.pinned, homes, spec.guarantee, spec.limit)


def _name(metrics: Metrics, name: str, slo: Slo | None) -> NameNow:
    ttft, tpot = metrics.recent(name)
    return NameNow(name, slo, metrics.generated(name), ttft.quantiles(), tpot.quantiles())
