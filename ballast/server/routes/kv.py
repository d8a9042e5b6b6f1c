"""Add the routes `/admin/kv`: see the host's KV tiers, change their size, scrub what they hold."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from ballast.core.errors import UnknownModel
from ballast.fleet.field_types import SizeOrNone
from ballast.fleet.schema import Keys
from ballast.kv.directory import Tier
from ballast.server.http.faults import Fault
from ballast.server.http.json_response import answered
from ballast.server.service import Service


class KvTierKeys(Keys):
    """Body of a request to change the tiers' sizes."""

    host: SizeOrNone | None = None
    disk: SizeOrNone | None = None


def add_kv_routes(app: FastAPI, service: Service, checked: dict[str, Any]) -> None:
    """Add the routes; `checked`: arguments of every admin route."""
    kept = service.controller.kept_kv

    def _report() -> dict[str, Any]:
        found = kept.report()
        if found is None:
            raise Fault(409, "the fleet file sets no kv_host", "refused")
        return asdict(found)

    @app.get("/admin/kv", **checked)
    async def tiers() -> Response:
        return answered(_report())

    @app.patch("/admin/kv", **checked)
    async def resize(sizes: KvTierKeys) -> Response:
        if sizes.disk is not None and all(t["tier"] != Tier.DISK for t in _report()["tiers"]):
            raise Fault(409, "no kv_disk: the fleet file sets none, or it failed", "refused")
        kept.resize(sizes.host, sizes.disk)
        return answered(_report())

    @app.delete("/admin/kv", **checked)
    async def scrub(model: str | None = None, key: str | None = None) -> Response:
        _report()
        own = None if model is None else service.models.own_name(model)
        try:
            return answered({"scrubbed": await kept.scrub(own, key)})
        except KeyError:
            raise UnknownModel(f"there is no model {model!r}") from None
