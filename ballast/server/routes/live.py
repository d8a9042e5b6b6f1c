"""Add `/admin/live`: the server's state once a second, as a stream of events for the page.

The first event holds all; later ones leave out what is as it was (`LiveNow`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import msgspec
from fastapi import FastAPI, Request
from msgspec import UNSET, Raw, UnsetType
from starlette.responses import Response

from ballast.server.access.gate import Gate
from ballast.server.access.keys import presented
from ballast.server.http.faults import Fault
from ballast.server.http.json_response import encode
from ballast.server.http.request_context import context_of
from ballast.server.http.sse import EventStream, event
from ballast.server.observe.recent_requests import RequestNow
from ballast.server.observe.server_state import ServerNow
from ballast.server.routes.state import models_now, server_now
from ballast.server.service import Service

SECONDS = 1.0
MOST_STREAMS = 32
LAST_REQUESTS = 40
"""Ended requests that are sent."""
PATH = "/admin/live"


class LiveNow(msgspec.Struct, frozen=True):
    """What has changed since the last event. What is unset is as it was."""

    state: ServerNow
    """Without models and decisions, and its devices without theirs."""
    models: dict[str, Raw]
    """Models that changed, by name, each a `ModelNow`."""
    open: list[RequestNow]
    order: list[str] | UnsetType = UNSET
    """Names of all models."""
    ended: list[RequestNow] | UnsetType = UNSET
    """The requests that ended last, the latest first."""
    decisions: list[dict[str, object]] | UnsetType = UNSET


class _Feed:
    """Builds the events; the models' state is computed once a second for all listeners."""

    def __init__(self, service: Service, gate: Gate) -> None:
        self._service, self._gate = service, gate
        self._models: dict[str, bytes] = {}
        self._read_at = float("-inf")
        self._reading = asyncio.Lock()
        self.listeners = 0

    async def models(self) -> dict[str, bytes]:
        """Each model's state, encoded."""
        async with self._reading:
            if self._service.clock.now() >= self._read_at + SECONDS / 2:
                found = await asyncio.to_thread(models_now, self._service)
                self._models = {model.report.name: encode(model) for model in found}
                self._read_at = self._service.clock.now()
            return self._models

    async def events(self, request: Request) -> AsyncIterator[bytes]:
        """Yield an event a second until the server drains, or the key is no longer good."""
        known: dict[str, bytes] = {}
        ended = decided = object()
        caller = context_of(request.scope).caller
        with suppress(Fault):
            while True:
                models = await self.models()
                state = server_now(self._service, self._gate, [])
                requests = self._service.requests.listed(LAST_REQUESTS, caller.admin)
                newest, latest = self._service.requests.newest, self._newest_decision()
                bare = [msgspec.structs.replace(device, models=[]) for device in state.devices]
                yield event(
                    encode(
                        LiveNow(
                            msgspec.structs.replace(state, decisions=[], devices=bare),
                            {n: Raw(e) for n, e in models.items() if known.get(n) != e},
                            requests.open,
                            UNSET if list(known) == list(models) else list(models),
                            UNSET if newest is ended else requests.ended,
                            UNSET if latest is decided else state.decisions,
                        )
                    )
                )
                known, ended, decided = models, newest, latest
                if self._gate.draining:
                    return
                await asyncio.sleep(SECONDS)
                caller = self._service.keys.caller(presented(request.scope["headers"]))
                self._service.keys.check(caller, "GET", PATH)

    def _newest_decision(self) -> object:
        kept = self._service.controller.devices.decisions
        return kept[-1] if kept else None

    def leave(self) -> None:
        """Note that a listener is gone."""
        self.listeners -= 1


def add_live_route(app: FastAPI, service: Service, gate: Gate) -> None:
    """Add the route."""
    feed = _Feed(service, gate)

    @app.get(PATH, include_in_schema=False)  # it does not end
    async def live(request: Request) -> Response:
        if feed.listeners >= MOST_STREAMS:
            why = f"{MOST_STREAMS} pages listen already; read /admin/state"
            raise Fault(429, why, "overloaded")
        feed.listeners += 1
        return EventStream(feed.events(request), feed.leave)
