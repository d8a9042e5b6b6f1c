"""Measure what goes on between the CPU devices of a server: `ballast profile --peers`.

Memory by the code that workers lend and migrate with, in this process; starts of workers and the
way of a message by worker processes of their own.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import queue
import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

from ballast.bench.progress import Progress, quiet
from ballast.cluster.placing import part_of
from ballast.cluster.segment_broker import SegmentBroker
from ballast.cluster.worker.early_process import COMMAND
from ballast.cluster.worker.local_worker import LocalWorker
from ballast.cluster.worker.spare_worker import SpareWorker
from ballast.core.actions import EvictCommand
from ballast.core.errors import ConfigError, DeviceError, Unavailable
from ballast.core.event import Event
from ballast.core.migration import KvReadEvent
from ballast.core.settings import FleetSettings, ServerSettings
from ballast.core.units import MiB, ceil_div
from ballast.memory.peer_reader import PeerReader
from ballast.memory.vm import Exported
from ballast.memory.vm_memfd import MemfdVm
from ballast.sim.peer_costs import PeerCosts
from ballast.transport.worker_messages.admin_messages import CommandDoneMsg, CommandMsg

COPIED = 64 * MiB
"""Bytes of memory that are lent, read and copied."""
MESSAGES = 50
PATIENCE = 600.0
"""Seconds for a worker to start, or for a spare to be prepared."""
POLL_SECONDS = 0.005


def measure_peers(
    fleet: FleetSettings,
    rounds: int = 4,
    progress: Progress = quiet,
    command: Sequence[str] = COMMAND,
) -> PeerCosts:
    """Measure the costs between devices as the fleet's first one. `command`: of its workers. Raises
    ConfigError where it is no CPU device of one rank, Unavailable where it cannot start."""
    own = fleet.device
    if own.gpu is not None or own.tensor_parallel > 1:
        raise ConfigError("--peers", own.name, "measured on CPU devices of one rank so far")
    progress("measuring memory between devices", 0, None)
    costs = memory_costs(own.page_bytes, rounds)
    progress("measuring starts of workers", 0, None)
    cores = len(os.sched_getaffinity(0))
    part = part_of(fleet, next(iter(fleet.devices)), fleet.own_names, cores)
    part = replace(part, server=ServerSettings(), others=(), other_links=())
    try:
        return asyncio.run(asyncio.wait_for(_processes(costs, part, command), PATIENCE))
    except TimeoutError as error:
        raise Unavailable(f"workers did not start within {PATIENCE:g} s") from error


def memory_costs(page_bytes: int, rounds: int) -> PeerCosts:
    """Measure mapping, reading and copying of another device's pages: medians of `rounds`."""
    n = max(2, ceil_div(COPIED, page_bytes))
    found: list[tuple[float, float, float, float]] = []
    with closing(MemfdVm(page_bytes, n)) as lender, closing(MemfdVm(page_bytes, n)) as borrower:
        for vm in (lender, borrower):
            ctypes.memset(vm.window.address(0), 1, n * page_bytes)
        first = borrower.attach(_received(lender.export(())))
        lent = range(first, first + n)
        for _ in range(rounds):
            at = [time.perf_counter()]
            borrower.enter(lent)
            at.append(time.perf_counter())
            own, away = borrower.window.address(0), borrower.window.address(first)
            for page in range(0, n * page_bytes, page_bytes):  # its page tables, as use makes them
                ctypes.memmove(away + page, own + page, page_bytes)
            copied = time.perf_counter()
            for page in range(0, n * page_bytes, page_bytes):
                ctypes.memmove(own + page, away + page, page_bytes)
            at.append(time.perf_counter() - copied)
            began = time.perf_counter()
            borrower.leave(lent)
            borrower.forget(lent)
            at.append(time.perf_counter() - began)
            read = _read_seconds(lender, borrower, n * page_bytes)
            found.append((at[1] - at[0], at[2], at[3], read))
        borrower.detach(first)
    borrow, home, give_back, read = map(statistics.median, zip(*found, strict=True))
    n_bytes = n * page_bytes
    return PeerCosts(
        borrow=borrow / n, give_back=give_back / n, home=n_bytes / home, read=n_bytes / read
    )


def _received(exported: Exported) -> Exported:
    """Return an export as another process receives it, with a descriptor of its own."""
    assert exported.fd is not None
    return replace(exported, fd=os.dup(exported.fd))


def _read_seconds(source: MemfdVm, target: MemfdVm, n_bytes: int) -> float:
    """Read the memory of one device to that of another, as KV of a request that moves is."""
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    with closing(PeerReader(lambda address: _received(source.export(())), events.put)) as reader:
        began = time.perf_counter()
        reader.start("read", "", [(0, n_bytes)], [(target.window.address(0), n_bytes)], 1)
        event = events.get()
        seconds = time.perf_counter() - began
    if isinstance(event, KvReadEvent) and event.error is not None:
        raise DeviceError("pread", event.error)
    return seconds


async def _processes(costs: PeerCosts, fleet: FleetSettings, command: Sequence[str]) -> PeerCosts:
    """Measure starts of workers and the way of a message; all weights are in host memory when
    workers start, as those of a worker that has died are."""
    broker = SegmentBroker(fleet.has_gpus)
    spares = SpareWorker(lambda: LocalWorker(command, broker), tick=POLL_SECONDS)
    first = LocalWorker(command, broker)
    try:
        await first.start(fleet)
        await first.close()
        cold = LocalWorker(command, broker)
        try:
            cold_start = await _start_seconds(cold, fleet)
            message = await _message_seconds(cold, fleet)
            listening = asyncio.create_task(_listen(cold))  # unheard, it would count as hung
            prepare = await _prepare_seconds(spares, fleet)
            listening.cancel()
            await asyncio.wait({listening})
        finally:
            await cold.close()
        ready = spares.take()
        if ready is None:
            raise Unavailable("the spare worker ended")
        try:
            start = await _start_seconds(ready, fleet)
        finally:
            await ready.close()
    finally:
        await spares.close()
    return replace(costs, message=message, start=start, cold_start=cold_start, prepare=prepare)


async def _listen(worker: LocalWorker) -> None:
    while await worker.receive() is not None:
        pass


async def _prepare_seconds(spares: SpareWorker[LocalWorker], fleet: FleetSettings) -> float:
    began = time.perf_counter()
    spares.prepare(fleet.server)
    while not spares.waits:
        await asyncio.sleep(POLL_SECONDS)
    return time.perf_counter() - began


async def _start_seconds(worker: LocalWorker, fleet: FleetSettings) -> float:
    began = time.perf_counter()
    await worker.start(fleet)
    return time.perf_counter() - began


async def _message_seconds(worker: LocalWorker, fleet: FleetSettings) -> float:
    """Return the time of a message to a worker and its answer, from loop to loop: a message between
    two devices goes from one to the server, and on to the other."""
    model, found = fleet.models[0].name, []
    for number in range(1, MESSAGES + 1):
        began = time.perf_counter()
        worker.send(CommandMsg.of(number, EvictCommand(model)))
        while not isinstance(message := await worker.receive(), CommandDoneMsg):
            if message is None:
                raise Unavailable(f"the worker ended: {worker.exit_reason()}")
        found.append(time.perf_counter() - began)
    return statistics.median(found)
