"""Readings that a server might give."""

from __future__ import annotations

from typing import Any

from ballast.core.settings import Slo
from ballast.server.observe.latency import Quantiles
from ballast.server.observe.server_state import ModelNow, NameNow, ServerNow
from ballast.server.routes.catalogue import status_of
from tests.server.observe.test_metrics import model


def served(
    name: str,
    tokens: int = 0,
    ttft: Quantiles | None = None,
    slo: Slo | None = None,
) -> NameNow:
    return NameNow(name, slo, tokens, ttft, None)


def present(
    name: str,
    residency: str = "resident",
    pinned: bool = False,
    names: list[NameNow] | None = None,
    **numbers: float,
) -> ModelNow:
    report = model(name, residency, **numbers)
    return ModelNow(status_of(residency).value, report, names or [served(name)], pinned)


def reading(*models: ModelNow, **more: Any) -> ServerNow:
    owners = {"arena:lane0": 10}
    for m in models:
        owners[f"weights:{m.report.name}"] = m.report.weight_pages
        owners[f"kv:{m.report.name}"] = m.report.kv_pages
    result: dict[str, Any] = {
        "version": "1.2",
        "time": 1000.0,
        "uptime": 100.0,
        "preset": "balloon",
        "status": "ok",
        "reason": None,
        "restarts": 0,
        "open": 0,
        "device": "cpu:0",
        "page_bytes": 4096,
        "total": 100,
        "free": 100 - sum(owners.values()),
        "reclaiming": 0,
        "owners": owners,
        "jobs": 7,
        "models": list(models),
        "failed": {},
        "decisions": [],
        "devices": [],
    }
    return ServerNow(**(result | more))
