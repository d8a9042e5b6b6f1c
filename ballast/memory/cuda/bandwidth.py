"""Measure the bandwidth of copies to, from and within a GPU, by CUDA events; used by `doctor`."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import ExitStack
from ctypes import addressof, c_char
from dataclasses import dataclass

from ballast.core.units import MiB, ceil_div
from ballast.memory.cuda.calls import Driver

N_BYTES = 256 * MiB
"""Bytes of each copy: several times a GPU's cache."""
TIMES = 4
"""The first of which, that finds clocks low and pages new, counts as little as any slow one."""


@dataclass(frozen=True, slots=True)
class MeasuredBandwidth:
    """Bytes a second, the best of several copies."""

    to_device: float
    to_host: float
    """Both over page-locked memory."""
    memory: float
    """Read and written, by copies within it."""


def measure_bandwidth(driver: Driver, ordinal: int, n_bytes: int = N_BYTES) -> MeasuredBandwidth:
    """Measure the bandwidth, with twice `n_bytes` of device memory. Raises DeviceError,
    OutOfMemory."""
    device = driver.device(ordinal)
    with ExitStack() as after:
        context = driver.retain_context(device)
        after.callback(driver.release_context, device)
        driver.set_current(context)
        grain = driver.granularity(device)
        size = ceil_div(n_bytes, grain) * grain
        here = _memory(driver, device, size, after)
        there = _memory(driver, device, size, after)
        host = _pinned(driver, size, after)
        stream = driver.new_stream()
        after.callback(driver.destroy_stream, stream)
        events = [driver.new_event(timed=True) for _ in range(2)]
        for event in events:
            after.callback(driver.destroy_event, event)

        def rate(copy: Callable[[int, int, int, int], None], to: int, source: int) -> float:
            took = []
            for _ in range(TIMES):
                driver.record(events[0], stream)
                copy(to, source, size, stream)
                driver.record(events[1], stream)
                driver.finish(stream)
                took.append(driver.elapsed(*events))
            return size / max(min(took), 1e-9)

        return MeasuredBandwidth(
            rate(driver.copy_to_device, here, host),
            rate(driver.copy_to_host, host, here),
            2 * rate(driver.copy_within, there, here),
        )


def _memory(driver: Driver, device: int, size: int, after: ExitStack) -> int:
    address = driver.reserve(size, 0)
    after.callback(driver.free, address, size)
    handle = driver.create(device, size)
    after.callback(driver.release, handle)
    driver.map(address, size, handle)
    after.callback(driver.unmap, address, size)
    driver.set_access(address, size, device)
    return address


def _pinned(driver: Driver, size: int, after: ExitStack) -> int:
    room = mmap.mmap(-1, size)
    address = addressof(c_char.from_buffer(room))
    after.callback(lambda: room)  # which keeps the mapping until it is unpinned
    driver.pin(address, size, read_only=False)
    after.callback(driver.unpin, address)
    return address
