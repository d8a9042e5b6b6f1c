"""Build the HTTP server of a service: the application within what guards it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn

from ballast.server.access.gate import Gate
from ballast.server.access.keys import Guard
from ballast.server.http.connection import protocol
from ballast.server.http.connection_limits import Connections, limited
from ballast.server.http.cors import Cors
from ballast.server.http.origins import SameOrigin
from ballast.server.http.route_match import RouteMatch
from ballast.server.observe.request_log import log_request
from ballast.server.observe.request_watch import Listener, Watch
from ballast.server.observe.tracing import Tracing
from ballast.server.service import Service

KEEP_ALIVE_SECONDS = 75
"""Seconds after which an idle connection is closed: later than clients and proxies commonly close
theirs, since a request that crosses the closing of its connection is lost."""
LAST_SECONDS = 5.0
"""Seconds for connections to close once all requests are answered."""


def http_server(
    service: Service, gate: Gate, tracer: Tracing | None, connections: Connections, name: str
) -> HttpServer:
    """Build the HTTP server, with the application inside its gate, keys, CORS, checks of host and
    route, and request watch. `name`: of the address that it listens on."""
    listeners: list[Listener] = [service.requests.over, log_request]
    listeners += [] if tracer is None else [tracer]
    guarded = Cors(Guard(gate, service.keys), lambda: service.settings)
    checked = SameOrigin(guarded, lambda: service.settings, (name,))
    app = Watch(
        RouteMatch(checked, gate.routes),
        service.metrics,
        service.clock,
        listeners,
        service.requests.arrived,
    )
    return HttpServer(
        uvicorn.Config(
            app,
            http=limited(
                protocol(), connections, send_seconds=lambda: service.settings.send_seconds
            ),
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=int(LAST_SECONDS),
        )
    )


class HttpServer(uvicorn.Server):
    """uvicorn's server without its signal handlers, and with an event (`up`) for when it
    listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    def accept(self) -> asyncio.Protocol:
        """Return the protocol of a connection that was not accepted by this server's listener."""
        protocol: asyncio.Protocol = self.config.http_protocol_class(
            config=self.config,  # type: ignore[call-arg]
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        return protocol

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    def stop_accepting(self) -> None:
        """Accept no more connections, close idle ones, and close others after their answers."""
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
