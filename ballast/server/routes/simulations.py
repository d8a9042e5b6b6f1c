"""Add the routes that simulate this server's fleet, plan devices for it, and play its story.

Each answers with a stream of events (`admin.simulations`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import FastAPI
from pydantic import Field
from starlette.responses import Response

from ballast.fleet.schema import Keys
from ballast.server.admin.simulation_job import (
    HERE,
    MOST_SECONDS,
)
from ballast.server.admin.simulations import Simulations
from ballast.server.routes.openapi_document import STREAM

_Devices = Annotated[str, Field(pattern=r"^[A-Za-z0-9@:,+. -]{1,100}$")]
_Rate = Annotated[float, Field(gt=0, le=1000)]
_Seconds = Annotated[float, Field(ge=1, le=MOST_SECONDS)]
_Workload = Literal["recorded", "bursty", "poisson", "gamma"]


class SimulateKeys(Keys):
    """Body of a request to simulate the fleet that is served."""

    devices: _Devices = HERE
    presets: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    workload: _Workload = "bursty"
    rate: _Rate | None = None
    seconds: _Seconds = 300.0
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0


class PlanKeys(SimulateKeys):
    """Body of a request for the fewest devices that suffice for the fleet."""

    devices: _Devices
    target: Annotated[float, Field(gt=0, le=1)] = 0.99


def add_simulation_routes(app: FastAPI, simulations: Simulations, checked: dict[str, Any]) -> None:
    """Add the routes; `checked`: arguments of every admin route."""

    @app.post("/admin/simulate", responses=STREAM, **checked)
    async def simulate(wanted: SimulateKeys) -> Response:
        return simulations.stream("simulate", wanted.model_dump())

    @app.post("/admin/plan", responses=STREAM, **checked)
    async def plan(wanted: PlanKeys) -> Response:
        return simulations.stream("plan", wanted.model_dump())

    @app.post("/admin/story/play", responses=STREAM, **checked)
    async def play() -> Response:
        return simulations.stream("story", {})
