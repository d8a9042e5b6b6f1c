"""Run a worker's process: `python -m ballast.cluster.worker.process --dir DIR --parent PID ...`.

Started by `LocalProcess`, or by `EarlyProcess`, of which it gets the rest of its arguments while it
imports. Heavy imports (PyTorch, models) happen when the device is built or in a
spare's warm-up. Only the server ends the process: signals of the terminal are ignored.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from ballast.cluster.logs import FORMAT_VARIABLE, set_up_logs
from ballast.cluster.segment_broker import SegmentClient
from ballast.cluster.tensor_parallel.remote_rank import start_ranks
from ballast.cluster.worker.device_thread import (
    MakeDevice,
    Outbox,
    Progress,
    Record,
    WorkerDevice,
)
from ballast.cluster.worker.early_process import AHEAD, arguments_from
from ballast.cluster.worker.flight_recorder import FlightRecorder
from ballast.cluster.worker.process_names import PREPARING, SERVING, SPARE, name_process
from ballast.cluster.worker.renewals import Renewals
from ballast.cluster.worker.worker import Worker
from ballast.core.settings import FleetSettings, ModelSettings
from ballast.isolation.confinement import confine_worker
from ballast.isolation.orphan import die_with
from ballast.isolation.zygote import wait_for_exit
from ballast.transport.curve import CurveClient, read_keys
from ballast.transport.kv_door import read_kv
from ballast.transport.page_descriptors import fetch_pages
from ballast.transport.sockets import WorkerSocket

_LOWEST_PRIORITY = 19
"""Nice value."""


def live_device(
    fleet: FleetSettings,
    outbox: Outbox,
    record: Record,
    progress: Progress,
    segments: SegmentClient | None,
    kv_fd: int | None = None,
    imported: Callable[[], object] = lambda: None,
    hosts: str = "",
) -> WorkerDevice:
    """Build a device that runs models; a `MakeDevice`. `kv_fd`: descriptor of the connection to the
    host's KV store; `imported`: returns once `import_ahead` has; `hosts`: address at which the
    host's agent passes on KV of other hosts; empty: this host is the only one.

    Its imports are local, so that the process starts and answers before they are loaded.
    """
    ranks = start_ranks(fleet)  # first: they start while the rest is imported
    imported()
    from ballast.weights.findings import Findings, RememberingIsolation
    from ballast.weights.manifest import fork_zygote

    # Nothing runs yet: the thread that imported has ended, the others only wait for messages, and
    # the zygote shares no state with them. It ends with this process. What reading checkpoints
    # needs beside PyTorch takes seconds to import: it does so alone, and only if there is something
    # to read.
    zygote = fork_zygote()
    findings = Findings.of_user()
    if findings is None or findings.is_empty:
        zygote.warm_up()
    isolation = zygote if findings is None else RememberingIsolation(zygote, findings)
    from ballast.cluster.kv_client import KvClient
    from ballast.cluster.machine_choice import machine_of
    from ballast.live.device import LiveDevice
    from ballast.memory.peer_reader import PeerReader
    from ballast.models.tokenizer_trial import vet_tokenizer

    def vet(settings: ModelSettings) -> None:
        vet_tokenizer(Path(settings.path), isolation)
        progress()

    own = fleet.device
    readable = own.gpu is None and own.tensor_parallel == 1
    device = LiveDevice(
        fleet,
        outbox,
        record=record,
        progress=progress,
        exchange=segments,
        isolation=isolation,
        vet=vet,
        make_machine=partial(machine_of, ranks=ranks),
        make_kv_bytes=partial(PeerReader, fetch_pages, from_host=partial(read_kv, hosts))
        if readable
        else None,
        kv_store=None if kv_fd is None or not fleet.kv.host_bytes else KvClient(kv_fd),
    )
    if readable:  # drivers and groups of ranks start programs, and talk over networks
        confine_worker()
    return device


def import_ahead() -> None:
    """Import what `live_device` needs, while the process waits to be configured. Nothing of it
    becomes garbage: collections would take a tenth of the time."""
    from ballast.kernels import compile_beside

    compile_beside.begin()
    gc.disable()
    try:
        import ballast.cluster.machine_choice
        import ballast.live.device
        import ballast.models.tokenizer_trial
        import ballast.weights.findings
        import ballast.weights.manifest  # noqa: F401
    finally:
        gc.enable()


def warm_up_live() -> None:
    """Do the slow parts of a start ahead of time, except loading models."""
    from ballast.live.warmup import warm_up

    warm_up()


def main(
    argv: Sequence[str] | None = None,
    make_device: MakeDevice = live_device,
    warm_up: Callable[[], None] = warm_up_live,
) -> NoReturn:
    """Run the process until its server orders its end, or ends itself.

    A spare warms up before it connects to the server.
    """
    # A terminal or a service manager signals the whole group; the server decides what that means.
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    argv = sys.argv[1:] if argv is None else argv
    ahead: threading.Thread | None = None
    if argv[:1] == [AHEAD]:
        die_with(int(argv[2]))
        ahead = _importing()
        argv = arguments_from(int(argv[1]))
        if argv is None:
            os._exit(0)
    parser = argparse.ArgumentParser(prog="ballast.cluster.worker.process")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--dir", type=Path, help="holds the socket")
    where.add_argument("--link", type=int, help="descriptor to read the keys of a connection from")
    parser.add_argument("--parent", type=int, required=True, help="process id of its parent")
    parser.add_argument("--flight", type=int, required=True, help="descriptor of flight memory")
    parser.add_argument("--segments", type=int, help="descriptor of the socket of shared weights")
    parser.add_argument("--kv", type=int, help="descriptor of the socket of the KV store")
    parser.add_argument("--renewals", type=int, help="descriptor to read of further servers from")
    parser.add_argument("--hosts", default="", help="address at which to read KV of other hosts")
    parser.add_argument("--spare", action="store_true", help="prepare for a start to come")
    arguments = parser.parse_args(argv)
    die_with(arguments.parent)
    name_process(PREPARING if arguments.spare else SERVING)
    set_up_logs("worker", os.environ.get(FORMAT_VARIABLE, "text"), "warning")
    from ballast.live.inbox import MonotonicClock

    if arguments.spare:
        _run_when_idle(warm_up)
        name_process(SPARE)
    place = arguments.dir if arguments.link is None else CurveClient(read_keys(arguments.link))
    socket = WorkerSocket(place)
    flight = FlightRecorder(arguments.flight)
    segments = None if arguments.segments is None else SegmentClient(arguments.segments)
    renewals = None if arguments.renewals is None else Renewals(arguments.renewals)
    if make_device is live_device:
        imported = partial(wait_for_exit, ahead or _importing())
        make_device = partial(
            live_device, kv_fd=arguments.kv, imported=imported, hosts=arguments.hosts
        )
    clock = MonotonicClock()
    code = Worker(socket, make_device, flight.record, clock, segments, renewals).run()
    logging.shutdown()
    # Nothing is left to clean up; the interpreter's own exit takes seconds of a busy CPU, and an
    # abandoned thread that still loads cannot be stopped.
    os._exit(code)


def _importing() -> threading.Thread:
    """Begin `import_ahead` on a thread."""
    thread = threading.Thread(target=import_ahead, name="imports", daemon=True)
    thread.start()
    return thread


def _run_when_idle(task: Callable[[], None]) -> None:
    """Run `task` at the lowest priority, and return when it has ended."""

    def run() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        task()

    # On a thread of its own, as a thread cannot raise its priority again.
    thread = threading.Thread(target=run, name="warm-up", daemon=True)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
