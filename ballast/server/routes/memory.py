"""Add the route `/admin/memory/release`: free pages' memory goes back to the machine."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from fastapi import FastAPI
from pydantic import Field
from starlette.responses import Response

from ballast.core.actions import ReleaseMemory
from ballast.core.errors import Unavailable
from ballast.core.units import format_bytes
from ballast.fleet.faults import unknown
from ballast.fleet.field_types import SizeOrNone
from ballast.fleet.schema import Keys
from ballast.server.admin.admin_service import AdminService
from ballast.server.http.faults import Fault
from ballast.server.http.json_response import answered
from ballast.server.service import Service

log = logging.getLogger(__name__)


class ReleaseMemoryKeys(Keys):
    """Body of a request to give free memory back."""

    devices: list[str] | None = Field(default=None, min_length=1)
    """None: all."""
    keep: SizeOrNone = 0
    """Bytes of each device's free pages that keep their memory."""


def add_memory_routes(
    app: FastAPI, service: Service, admin: AdminService, checked: dict[str, Any]
) -> None:
    """Add the route; `checked`: arguments of every admin route."""
    devices = service.controller.devices

    @app.post("/admin/memory/release", **checked)
    async def release(wanted: ReleaseMemoryKeys | None = None) -> Response:
        wanted = wanted or ReleaseMemoryKeys()
        names = list(devices if wanted.devices is None else dict.fromkeys(wanted.devices))
        for name in names:
            if name not in devices:
                why = f"there is no device {name!r}; {unknown(name, list(devices))}"
                raise Fault(409, why, "refused", "devices")
        order = ReleaseMemory(wanted.keep, "by an operator")
        released: dict[str, int] = {}
        refused: dict[str, Fault | Unavailable] = {}

        async def release_on(name: str) -> None:
            try:
                released[name] = (await admin.execute(order, name)).released
            except (Fault, Unavailable) as error:
                refused[name] = error
            else:
                log.info("%s: %s went back to the machine", name, format_bytes(released[name]))

        await asyncio.gather(*map(release_on, names))
        if not released:
            raise refused[names[0]]
        whys = {name: str(error) for name, error in refused.items()}
        return answered({"released": released, "refused": whys})
