"""Run a server from start to end: bind the socket, start the workers, answer requests, drain, stop.

Called by `ballast serve`.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ballast.cluster.controller import Controller
from ballast.cluster.handed_weights import HandedWeights
from ballast.cluster.hosts.hosted_workers import HostedWorkers, RayHosts, hosted_on_ray
from ballast.cluster.kv_broker import KvBroker
from ballast.cluster.logs import write_line
from ballast.cluster.segment_broker import SegmentBroker
from ballast.cluster.worker.early_process import COMMAND, EarlyProcess
from ballast.cluster.worker.local_worker import LocalWorker
from ballast.cluster.worker.spare_worker import LocalWorkers
from ballast.core.settings import FleetSettings
from ballast.fleet.fleet_source import FleetReading, FleetSource
from ballast.isolation.confinement import conceal_memory, missing
from ballast.isolation.hangup import note_hangup
from ballast.live.inbox import MonotonicClock
from ballast.server.http.address import bound, is_loopback
from ballast.server.http.connection import new_loop
from ballast.server.http.file_limit import OTHER_FILES, check_files
from ballast.server.http.origins import check_origins
from ballast.server.http.watchdog import Watchdog
from ballast.server.observe.tracing import Tracing, tracing
from ballast.server.operator_signals import OperatorSignals
from ballast.server.restart import RestartHandover, code_digest, listener_of, received, start_again
from ballast.server.without_torch import forgo_torch

if TYPE_CHECKING:  # their imports take as long as a worker's, beside which they run (`_serve`)
    from ballast.server.access.gate import Gate
    from ballast.server.admin.admin_service import AdminService
    from ballast.server.http.connection_limits import Connections
    from ballast.server.service import Service

log = logging.getLogger(__name__)

LAST_SECONDS = 5.0
"""Seconds for the workers to end once all requests are answered."""
STOP_SECONDS = 6 * LAST_SECONDS
"""Seconds for the whole shutdown, beside `drain_seconds`; then the watchdog ends the process."""
BEAT_SECONDS = 0.5
"""Seconds between two beats of the watchdog."""
ROOM_SECONDS = 2.0
"""Seconds after which a device that waits for a host is not expected to find one at once."""


class _Processes(NamedTuple):
    """How workers of this host are started."""

    command: Sequence[str]
    early: EarlyProcess | None
    """Becomes the first one."""


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
    ray: RayHosts | None = None,
    own_process: bool = False,
    early: EarlyProcess | None = None,
    progress: Callable[[str], object] = lambda text: None,
) -> int:
    """Serve until SIGTERM or SIGINT, then drain; returns the exit code.

    Requests are answered while models are still being loaded: one for such a model waits for it.
    `port` 0 takes a free port; `progress` receives in words how far loading is, and `ready` is
    called with the port once each model serves or has failed. On the first signal new requests are
    refused, and open ones have the settings' `drain_seconds` to finish; a second signal cuts that
    short. On SIGHUP the fleet file is read again; on SIGUSR2 the process drains and starts the same
    command anew (`restart`), if it is the server's own. Outside the main thread no signals are
    handled. Traces go to the collector at `otlp_endpoint`, or at the one
    that the environment names, if any. `reading`: of `source`, if it has been read. `ray`:
    a Ray cluster, on whose nodes devices are placed. `own_process`:
    the process is the server's own. A watchdog ends it where it hangs, also after this function has
    returned, it can import no PyTorch from now on, and other processes cannot read its memory.
    `early`: becomes the first worker of this host.

    Raises ConfigError if the fleet is wrong, the address cannot be bound or the process may not
    open as many files as it needs, Unavailable if no model can be served.
    """
    handed, code = _take_process() if own_process else (None, "")
    reading = reading or source.read()
    for name, why in reading.fleet.faults.items():
        log.warning("%s is left out, others are served: %s", name, why)
    check_files(reading.fleet)
    check_origins(reading.fleet.server)
    source.settle(reading)
    tracer = tracing(otlp_endpoint, MonotonicClock(), WallClock())
    operator = OperatorSignals(restarts=own_process)
    with (
        listener_of(handed, host, port) or bound(host, port) as listener,
        asyncio.Runner(loop_factory=new_loop) as runner,
    ):
        watchdog = Watchdog()
        if own_process:
            watchdog.start()
        weights = HandedWeights() if handed is None else handed.weights
        left = runner.run(
            _serve(
                *(source, reading, weights, host, listener, operator),
                *(ready, progress, tracer, _Processes(worker_command, early), watchdog, ray),
            )
        )
        if operator.listener is not None:
            watchdog.stop()
            start_again(RestartHandover(code, operator.listener.detach(), left))
    return 0


async def _serve(
    source: FleetSource,
    reading: FleetReading,
    weights: HandedWeights,
    host: str,
    listener: socket.socket,
    operator: OperatorSignals,
    ready: Callable[[int], None] | None,
    progress: Callable[[str], object],
    tracer: Tracing | None,
    processes: _Processes,
    watchdog: Watchdog,
    ray: RayHosts | None,
) -> HandedWeights:
    """Serve until the operator stops the server; returns the weights that it had loaded."""
    beating = asyncio.ensure_future(_beat(watchdog))
    with operator.by_signals():
        broker = SegmentBroker(writable=reading.fleet.has_gpus)
        kv_broker = KvBroker.of(reading.fleet.kv, reading.fleet.server.keys)
        drop_handed = _adopt(weights, broker, reading.fleet)
        controller = await _controller(reading.fleet, ray, processes, broker, kv_broker)
        from ballast.server.admin.admin_service import AdminService
        from ballast.server.fleet_loader import FleetLoader
        from ballast.server.http.connection_limits import Connections
        from ballast.server.service import Service
        from ballast.server.text.chat_template import TemplateRenderer

        templates = TemplateRenderer()
        clock, wall = MonotonicClock(), WallClock()
        service = Service(controller, {}, clock, wall, reading.fleet.server, templates)
        admin = AdminService(service, source, reading)
        loader = FleetLoader(service, progress)
        await loader.expect(reading.fleet)
        loading = asyncio.ensure_future(loader.run(reading.fleet))
        loading.add_done_callback(lambda loaded: loaded.cancelled() or drop_handed())
        sampling = asyncio.ensure_future(service.keep_history())
        connections = Connections(
            lambda: service.settings.most_connections,
            lambda: OTHER_FILES + len(broker),
            lambda: service.settings.most_connections_each,
        )
        try:
            await _answer(
                *(service, admin, loading, host, listener),
                *(operator, ready, tracer, watchdog, connections),
            )
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
            sampling.cancel()
            beating.cancel()
    return broker.handed()


def _take_process() -> tuple[RestartHandover | None, str]:
    """Make this process the server's own; returns what the server before it in this process has
    handed over, and the digest of the code."""
    note_hangup()
    code = code_digest()
    handed = received(code)
    forgo_torch()
    conceal_memory()
    os.environ["RUST_BACKTRACE"] = "0"  # else each panic of a tokenizer holds the loop up
    return handed, code


async def _controller(
    fleet: FleetSettings,
    ray: RayHosts | None,
    processes: _Processes,
    broker: SegmentBroker,
    kv_broker: KvBroker | None,
) -> Controller:
    """Return the controller of a fleet. Workers of this host begin to import at once."""
    command, early = processes
    if ray is not None:
        if early is not None:
            early.close()
        hosted = await hosted_on_ray(ray, fleet, command)
        controller = Controller(hosted, hosted)
        controller.prepare(fleet)
        return controller
    local = LocalWorkers(lambda: LocalWorker(command, broker, kv_broker, early))
    controller = Controller(local, broker, kv_broker)
    controller.prepare(fleet)
    await local.begin()
    return controller


def _adopt(
    weights: HandedWeights, broker: SegmentBroker, fleet: FleetSettings
) -> Callable[[], object]:
    """Take over the weights that the server before this one had loaded, as far as they hold;
    returns what frees those of them that no worker has taken."""
    try:
        drop = broker.adopt(weights, fleet.models)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        log.warning("weights are read anew after the restart: %s", error)
        return lambda: None
    if weights.models:
        log.info("files of weights in memory since before the restart: %d", len(broker))
    return drop


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
    from ballast.server.app import create_app
    from ballast.server.http_server import http_server

    gate = create_app(service, admin)
    gate.crowded = connections.crowded
    service.metrics.connections.set_function(lambda: connections.open)
    http = http_server(service, gate, tracer, connections, name)
    host, port = listener.getsockname()[:2]
    running = asyncio.ensure_future(http.serve(sockets=[listener]))
    if await _first(running, http.up):
        running.result()  # it has ended: raise its error
    log.info("answering at http://%s:%d while models are loaded", host, port)
    if isinstance(service.controller.workers, HostedWorkers):
        service.controller.workers.answer_http(http.accept)
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
        if operator.keep_listening(listener):
            http.stop_accepting()
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


async def _drain(service: Service, gate: Gate, operator: OperatorSignals) -> None:
    """Accept no new requests, wait for the open ones, and fail those left."""
    gate.draining = True
    then = "; a restart follows" if operator.restarting else ""
    log.warning("draining: %d requests are open%s", gate.open, then)
    idle = asyncio.ensure_future(gate.idle.wait())
    hopeless = asyncio.ensure_future(_fail_waiting(service))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(service.settings.drain_seconds):
            await _first(idle, operator.to_hurry)
    idle.cancel()
    hopeless.cancel()
    service.loads.give_up()
    service.controller.router.fail_all("unavailable", "the server stopped before this was finished")


async def _fail_waiting(service: Service) -> None:
    """Fail requests that wait for a device that waits for a host, until cancelled."""
    while True:
        await asyncio.sleep(ROOM_SECONDS)
        if service.controller.fail_waiting():
            service.loads.give_up()


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


def _announce(service: Service, host: str, port: int) -> None:
    if not is_loopback(host) and not service.keys.asked:
        log.warning("listening on %s without keys: everybody who reaches it can use it", host)
    if lacking := missing():
        log.warning("children are confined less: this kernel has no %s", " and no ".join(lacking))
    shown = f"[{host}]" if ":" in host else host
    names = ", ".join(service.models.visible_to())
    write_line(f"ballast: serving {names} at http://{shown}:{port}/v1", sys.stdout)
