"""Build the ASGI application: add all routes, turn errors into responses, and put it behind
`Gate`."""

from __future__ import annotations

import difflib
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route

from ballast import __version__
from ballast.core.errors import BallastError
from ballast.server.access.gate import Gate
from ballast.server.admin.admin_service import AdminService
from ballast.server.admin.pulls import Pulls
from ballast.server.admin.simulations import Simulations
from ballast.server.http.faults import Fault
from ballast.server.http.json_response import answered
from ballast.server.http.json_route import json_route
from ballast.server.http.request_context import context_of
from ballast.server.openai.records import Model, ModelList, RunningList, Version
from ballast.server.routes.adapters import add_adapter_routes
from ballast.server.routes.admin import add_admin_routes
from ballast.server.routes.catalogue import described, listed, resident
from ballast.server.routes.generate import add_generating_routes
from ballast.server.routes.health import add_health
from ballast.server.routes.live import add_live_route
from ballast.server.routes.ollama import add_ollama_routes
from ballast.server.routes.openapi_document import ERRORS, document, responses_of
from ballast.server.routes.page import add_page
from ballast.server.routes.state import add_observe_routes
from ballast.server.routes.texts import add_text_routes
from ballast.server.service import Service

_LONGEST_WORD = 40
"""Most characters of a path's last word that are compared with routes: a longer word is no typing
error."""
_PREFIX = "/v1"
"""What clients' base addresses end with, and what is often forgotten there, or given twice."""
_LIKE = 0.75
"""Least likeness of a word to the one that is suggested: `delete` is no `release`."""
_OPERATORS = frozenset(f"/api/{verb}" for verb in ("copy", "create", "delete", "push"))
"""Routes of Ollama's that clients do not have here."""


def create_app(service: Service, admin: AdminService) -> Gate:
    """Build the application, behind its gate."""
    app = FastAPI(
        title="Ballast", docs_url=None, redoc_url=None, openapi_url=None, responses=ERRORS
    )
    app.router.route_class = json_route()
    document(app)
    gate = Gate(
        app, lambda: service.settings, service.quotas, most_weight=lambda: service.most_weight
    )
    _add_faults(app)
    _add_reading(app, service)
    add_health(app, service, gate)
    add_observe_routes(app, service, gate)
    add_live_route(app, service, gate)
    add_admin_routes(app, service, admin, Simulations(service))
    add_adapter_routes(app, service, admin)
    add_generating_routes(app, service)
    add_text_routes(app, service)
    add_ollama_routes(app, service, Pulls(admin, lambda: service.settings.pull))
    add_page(app)
    gate.routes = app.routes
    return gate


def _add_reading(app: FastAPI, service: Service) -> None:
    """Add the routes that list models and the version, and change nothing."""

    @app.get("/v1/models", responses=responses_of(ModelList))
    async def models(request: Request) -> Response:
        return answered(ModelList(data=listed(service, context_of(request.scope).caller)))

    @app.get("/v1/models/{name:path}", responses=responses_of(Model))
    async def model(name: str, request: Request) -> Response:
        return answered(described(service, name, context_of(request.scope).caller))

    @app.get("/running", responses=responses_of(RunningList))
    async def running(request: Request) -> Response:
        found = resident(service, context_of(request.scope).caller)
        return answered(RunningList(running=found))

    @app.get("/version", responses=responses_of(Version))
    async def version() -> Response:
        return answered(Version(version=__version__))


def _near(app: FastAPI, request: Request) -> str:
    """Suggest the route whose path the request's ends with, without `/v1` or after something else;
    or the last word of a route's path where that of the request's is almost the same; else an empty
    text."""
    routes = {route.path for route in app.routes if isinstance(route, Route)}
    paths = sorted(path for path in routes if "{" not in path and path != "/")
    asked = request.url.path.rstrip("/")
    within = [path for path in paths if asked.endswith(path.removeprefix(_PREFIX))]
    if within and asked not in paths:
        return f"; did you mean {max(within, key=len)!r}?"
    if asked in _OPERATORS:
        return "; an operator adds and removes models, by /admin/models"
    last = asked.rpartition("/")[2][:_LONGEST_WORD]
    ends = sorted({path.rpartition("/")[2] for path in paths})
    close = difflib.get_close_matches(last, ends, n=1, cutoff=_LIKE)
    return f"; did you mean {close[0]!r}?" if close and close[0] != last else ""


def _form(request: Request) -> Any:
    """The type that the route expects as body; None without a body or a route."""
    route = request.scope.get("route")
    bodies = route.dependant.body_params if isinstance(route, APIRoute) else []
    return bodies[0].field_info.annotation if len(bodies) == 1 else None


def _add_faults(app: FastAPI) -> None:
    """Have every error answered in the error envelope of the client's API."""

    async def ours(request: Request, error: Exception) -> Response:
        return Fault.of(error).response(context_of(request.scope))

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        fault = Fault.of_validation(error.errors(), _form(request), error.body)
        return fault.response(context_of(request.scope))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
        what = f"{request.method} {request.url.path}: {error.detail}{_near(app, request)}"
        response = Fault(error.status_code, what, code).response(context_of(request.scope))
        response.headers.update(error.headers or {})  # `Allow` of a 405
        return response

    for kind in (Fault, BallastError):
        app.add_exception_handler(kind, ours)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, ours)
