"""Run a server from start to end: bind the socket, start the workers, answer requests, drain, stop.

Called by `ballast serve`.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import uvicorn

from ballast.cluster.controller import Controller
from ballast.cluster.kv_broker import KvBroker
from ballast.cluster.logs import write_line
from ballast.cluster.segment_broker import SegmentBroker
from ballast.cluster.worker.local_worker import COMMAND, LocalWorker
from ballast.fleet.fleet_source import FleetReading, FleetSource
from ballast.isolation.confinement import conceal_memory, missing
from ballast.isolation.hangup import note_hangup, take_hangup
from ballast.live.inbox import MonotonicClock
from ballast.server.access.gate import Gate
from ballast.server.access.keys import Guard
from ballast.server.admin.admin_service import AdminService
from ballast.server.app import create_app
from ballast.server.fleet_loader import FleetLoader
from ballast.server.http.address import bound, is_loopback
from ballast.server.http.connection import new_loop, protocol
from ballast.server.http.connection_limits import Connections, limited
from ballast.server.http.cors import Cors
from ballast.server.http.file_limit import OTHER_FILES, check_files
from ballast.server.http.origins import SameOrigin, check_origins
from ballast.server.http.route_match import RouteMatch
from ballast.server.http.watchdog import Watchdog
from ballast.server.observe.request_log import log_request
from ballast.server.observe.request_watch import Listener, Watch
from ballast.server.observe.tracing import Tracing, tracing
from ballast.server.service import Service
from ballast.server.text.chat_template import TemplateRenderer
from ballast.server.without_torch import forgo_torch

log = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 75
"""Seconds after which an idle connection is closed: later than clients and proxies commonly close
theirs, since a request that crosses the closing of its connection is lost."""
LAST_SECONDS = 5.0
"""Seconds for connections to close, and then for the workers to end, once all requests are
answered."""

STOP_SECONDS = 6 * LAST_SECONDS
"""Seconds for the whole shutdown, beside `drain_seconds`; then the watchdog ends the process."""
BEAT_SECONDS = 0.5
"""Seconds between two beats of the watchdog."""


class WallClock:
    """Seconds since 1970, to date answers; never used to measure."""

    def now(self) -> float:
        return time.time()


def serve(
    source: FleetSource,
    host: str = "127.0.0.1",
    port: int = 8000,
    ready: Callable[[int], None] | None = None,
    *,
    otlp_endpoint: str | None = None,
    reading: FleetReading | None = None,
    worker_command: Sequence[str] = COMMAND,
    own_process: bool = False,
    progress: Callable[[str], object] = lambda text: None,
) -> int:
    """Serve until SIGTERM or SIGINT, then drain; returns the exit code.

    Requests are answered while models are still being loaded: one for such a model waits for it.
    `port` 0 takes a free port; `progress` receives in words how far loading is, and `ready` is
    called with the port once each model serves or has failed. On the first signal new requests are
    refused, and open ones have the settings' `drain_seconds` to finish; a second signal cuts that
    short. On SIGHUP the fleet file is read again. Outside the
    main thread no signals are handled. Traces go to the collector at `otlp_endpoint`, or at the one
    that the environment names, if any. `reading`: of `source`, if it has been read. `own_process`:
    the process is the server's own. A watchdog ends it where it hangs, also after this function has
    returned, it can import no PyTorch from now on, and other processes cannot read its memory.

    Raises ConfigError if the fleet is wrong, the address cannot be bound or the process may not
    open as many files as it needs, Unavailable if no model can be served.
    """
    if own_process:
        note_hangup()
        forgo_torch()
        conceal_memory()
    reading = reading or source.read()
    for name, why in reading.fleet.faults.items():
        log.warning("%s is left out, others are served: %s", name, why)
    check_files(reading.fleet)
    check_origins(reading.fleet.server)
    source.settle(reading)
    tracer = tracing(otlp_endpoint, MonotonicClock(), WallClock())
    with asyncio.Runner(loop_factory=new_loop) as runner:
        watchdog = Watchdog()
        if own_process:
            watchdog.start()
        return runner.run(
            _serve(source, reading, host, port, ready, progress, tracer, worker_command, watchdog)
        )


async def _serve(
    source: FleetSource,
    reading: FleetReading,
    host: str,
    port: int,
    ready: Callable[[int], None] | None,
    progress: Callable[[str], object],
    tracer: Tracing | None,
    worker_command: Sequence[str],
    watchdog: Watchdog,
) -> int:
    operator = OperatorSignals()
    beating = asyncio.ensure_future(_beat(watchdog))
    with bound(host, port) as listener, operator.by_signals():
        broker = SegmentBroker(writable=reading.fleet.has_gpus)
        kv_broker = KvBroker.of(reading.fleet.kv, reading.fleet.server.keys)
        controller = Controller(
            lambda: LocalWorker(worker_command, broker, kv_broker), broker, kv_broker
        )
        controller.prepare(reading.fleet)
        templates = TemplateRenderer()
        clock, wall = MonotonicClock(), WallClock()
        service = Service(controller, {}, clock, wall, reading.fleet.server, templates)
        admin = AdminService(service, source, reading)
        loader = FleetLoader(service, progress)
        await loader.expect(reading.fleet)
        loading = asyncio.ensure_future(loader.run(reading.fleet))
        connections = Connections(
            lambda: service.settings.most_connections,
            lambda: OTHER_FILES + len(broker),
            lambda: service.settings.most_connections_each,
        )
        try:
            await _answer(
                service,
                admin,
                loading,
                host,
                listener,
                operator,
                ready,
                tracer,
                watchdog,
                connections,
            )
            return 0
        finally:
            watchdog.end_within(STOP_SECONDS)
            loading.cancel()
            await asyncio.wait({loading})
            await templates.close()
            await controller.close(LAST_SECONDS)
            if kv_broker is not None:
                kv_broker.shut()
            if tracer is not None:
                await tracer.close(LAST_SECONDS)
            beating.cancel()


async def _beat(watchdog: Watchdog) -> None:
    """Report regularly to the watchdog that the event loop turns."""
    while True:
        watchdog.beat()
        await asyncio.sleep(BEAT_SECONDS)


async def _answer(
    service: Service,
    admin: AdminService,
    loading: asyncio.Future[None],
    name: str,
    listener: socket.socket,
    operator: OperatorSignals,
    ready: Callable[[int], None] | None,
    tracer: Tracing | None,
    watchdog: Watchdog,
    connections: Connections,
) -> None:
    """Answer requests until the operator stops the server and it has drained. Raises what `loading`
    raises, if the fleet cannot be loaded."""
    gate = create_app(service, admin)
    gate.crowded = connections.crowded
    service.metrics.connections.set_function(lambda: connections.open)
    http = _http_server(service, gate, tracer, connections, name)
    host, port = listener.getsockname()[:2]
    running = asyncio.ensure_future(http.serve(sockets=[listener]))
    if await _first(running, http.up):
        running.result()  # it has ended: raise its error
    log.info("answering at http://%s:%d while models are loaded", host, port)
    announcing = asyncio.ensure_future(_announce_loaded(loading, service, host, port, ready))
    reloading = asyncio.ensure_future(_reload(operator, admin))
    stopping = asyncio.ensure_future(operator.to_stop.wait())
    await asyncio.wait({announcing, stopping, running}, return_when=asyncio.FIRST_COMPLETED)
    for task in (stopping, reloading):
        task.cancel()
    if announcing.done():  # the fleet cannot be loaded
        service.loads.give_up()
        http.should_exit = True
        await running
        announcing.result()
    announcing.cancel()
    if not running.done():
        watchdog.end_within(service.settings.drain_seconds + STOP_SECONDS)
        await _drain(service, gate, operator)
        http.should_exit = True
    await running


async def _announce_loaded(
    loading: asyncio.Future[None],
    service: Service,
    host: str,
    port: int,
    ready: Callable[[int], None] | None,
) -> None:
    """Announce that the fleet is loaded, once it is; never returns. Raises what `loading` does."""
    await asyncio.shield(loading)
    gc.freeze()  # loaded objects stay: collections can skip them
    atexit.register(gc.unfreeze)  # except the last: libraries report leaks
    _announce(service, host, port)
    if ready is not None:
        ready(port)
    await asyncio.Event().wait()


def _http_server(
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


async def _drain(service: Service, gate: Gate, operator: OperatorSignals) -> None:
    """Accept no new requests, wait for the open ones, and fail those left."""
    gate.draining = True
    log.warning("draining: %d requests are open", gate.open)
    idle = asyncio.ensure_future(gate.idle.wait())
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(service.settings.drain_seconds):
            await _first(idle, operator.to_hurry)
    idle.cancel()
    service.loads.give_up()
    service.controller.router.fail_all("unavailable", "the server stopped before this was finished")


async def _reload(operator: OperatorSignals, admin: AdminService) -> None:
    """Reload the fleet file at each request for it; requests during a reload cause one more."""
    while True:
        await operator.to_reload.wait()
        operator.to_reload.clear()
        try:
            await admin.reload()
        except Exception:
            log.exception("the fleet file could not be followed")


async def _first(task: asyncio.Future[Any], event: asyncio.Event) -> bool:
    """Wait for the task or the event; returns whether the task is done. If not, it continues."""
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
    return task.done()


class HttpServer(uvicorn.Server):
    """uvicorn's server without its signal handlers, and with an event (`up`) for when it
    listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()


class OperatorSignals:
    """Events that the operator's signals set: stop (first SIGTERM or SIGINT), stop now (second),
    read the fleet file again (SIGHUP)."""

    def __init__(self) -> None:
        self.to_stop = asyncio.Event()
        self.to_hurry = asyncio.Event()
        self.to_reload = asyncio.Event()

    @contextlib.contextmanager
    def by_signals(self) -> Iterator[None]:
        """Handle SIGTERM, SIGINT and SIGHUP in the `with` block, where this is the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        handlers = {
            signal.SIGTERM: self._once_more,
            signal.SIGINT: self._once_more,
            signal.SIGHUP: self.to_reload.set,
        }
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        if take_hangup():
            self.to_reload.set()
        try:
            yield
        finally:
            for number in handlers:
                loop.remove_signal_handler(number)
            note_hangup()  # the process is not to end by one now, either

    def _once_more(self) -> None:
        (self.to_hurry if self.to_stop.is_set() else self.to_stop).set()


def _announce(service: Service, host: str, port: int) -> None:
    if not is_loopback(host) and not service.keys.asked:
        log.warning("listening on %s without keys: everybody who reaches it can use it", host)
    if lacking := missing():
        log.warning("children are confined less: this kernel has no %s", " and no ".join(lacking))
    shown = f"[{host}]" if ":" in host else host
    names = ", ".join(service.models.visible_to())
    write_line(f"ballast: serving {names} at http://{shown}:{port}/v1", sys.stdout)
