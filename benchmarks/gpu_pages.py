"""What `scripts/gpu_check` times of memory: pages, and activations."""

from __future__ import annotations

import queue
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ballast.core.event import TransferDoneEvent
from ballast.core.units import GiB, KiB, MiB, ceil_div
from ballast.live.inbox import MonotonicClock
from ballast.memory.cuda.calls import Driver
from ballast.memory.cuda.link import CudaLink
from ballast.memory.cuda.pinning import PinnedMemory
from ballast.memory.cuda.vm import CudaVm
from ballast.memory.pool import Pool
from ballast.weights.host import HostTier
from ballast.weights.residency import WeightsOnDevice
from ballast.weights.segment import PackedTensor, Segment
from benchmarks.gpu_apart import Findings
from benchmarks.gpu_device import CONFIGS, PAGE, Configs, Gpu
from benchmarks.gpu_model import spec_of

KERNEL_SECONDS = 0.5
"""How long a kernel lasts at least, beside which pages are mapped and unmapped."""


def pool(gpu: Gpu, found: Findings) -> None:
    """Microseconds a page, of recycled pages: mapped and made accessible, and unmapped."""
    found["microseconds"] = alone = page_times(gpu.driver, PAGE, 1, 512)
    found["goal_met"] = alone["both"] <= 70
    found["microseconds_of_64_at_once"] = page_times(gpu.driver, PAGE, 64, 16)
    with gpu.busy(KERNEL_SECONDS) as running:
        found["microseconds_beside_a_kernel"] = beside = page_times(gpu.driver, PAGE, 1, 64)
        # Calls that wait for it end when it does: one of the first, which no median shows.
        found["calls_wait_for_kernels"] = not running()
    found["longest_of_kernel"] = max(beside["longest_map"], beside["longest_unmap"]) / (
        1e6 * KERNEL_SECONDS
    )
    for times in (4, 16):
        n_bytes = times * PAGE
        found[f"microseconds_of_{n_bytes // MiB}_MiB"] = page_times(gpu.driver, n_bytes, 1, 64)


def page_times(driver: Driver, page: int, at_once: int, rounds: int) -> dict[str, float]:
    """Microseconds a page by operation, the median but for the first eighth of the rounds; and the
    longest call of all rounds (`longest_...`)."""
    n = max(at_once, 8)
    vm = CudaVm(driver, 0, page, n)
    try:
        begun = time.perf_counter()
        vm.populate(range(n))
        made = (time.perf_counter() - begun) / n
        r = vm.reserve(n * page)
        both: dict[str, list[float]] = {"map": [], "unmap": []}
        for i in range(rounds):
            at = i * at_once % n
            begun = time.perf_counter()
            vm.map(r, at, range(at, at + at_once))
            mapped = time.perf_counter()
            vm.unmap(r, at, at_once)
            both["unmap"].append((time.perf_counter() - mapped) / at_once)
            both["map"].append((mapped - begun) / at_once)
    finally:
        vm.close()
    medians = {k: 1e6 * statistics.median(v[rounds // 8 :]) for k, v in both.items()}
    longest = {f"longest_{k}": 1e6 * at_once * max(v) for k, v in both.items()}
    return {**medians, "both": sum(medians.values()), "create": 1e6 * made, **longest}


@contextmanager
def host_bytes(n_bytes: int, writable: bool) -> Iterator[int]:
    """An address of zeros in the host tier, sealed as weights are; `writable`: for a device that
    could not lock them else."""
    tensor = PackedTensor(("zeros",), (n_bytes,), "uint8", 0, n_bytes, "plain", ("zeros",))
    tier = HostTier()
    tier.make_writable(writable)
    held = tier.hold("zeros", Segment("zeros", n_bytes, (tensor,)), lambda piece: b"", 8)
    try:
        yield held.address
    finally:
        tier.release(held)


def activation(gpu: Gpu, found: Findings, configs: Configs = CONFIGS, page: int = PAGE) -> None:
    """Seconds to bring a model's weights into recycled pages as a device does, and that over the
    bandwidth of one plain copy. The host's bytes are one segment, copied again and again."""
    found["link_bytes_per_second"] = rate = gpu.link_bandwidth()
    gpu.give_back()
    specs = {size: spec_of(config) for size, config in configs.items()}
    largest = max(n for spec in specs.values() for n in spec.segment_bytes)
    pins, result = PinnedMemory(gpu.driver, 0), queue.SimpleQueue[TransferDoneEvent]()
    link = CudaLink(gpu.driver, 0, MonotonicClock(), result.put)
    try:
        with host_bytes(ceil_div(largest, PAGE) * PAGE, not pins.reads_only) as address:
            found["pins_read_only"] = pins.reads_only
            begun = time.perf_counter()
            found["pinned"] = pins.pin(address, ceil_div(largest, PAGE) * PAGE)
            found["pinning_bytes_per_second"] = largest / (time.perf_counter() - begun)
            try:
                for size, spec in specs.items():
                    if sum(spec.segment_bytes) + GiB > gpu.free:
                        found[size] = {"not_run": "it does not fit"}
                        continue
                    found[size] = activated(gpu.driver, spec, link, result, address, rate, page)
                for times in (4, 8, 16) if "bytes" in found.get(size, ()) else ():
                    large = activated(gpu.driver, spec, link, result, address, rate, times * page)
                    del large["goal_met"]  # of the default size alone
                    found[f"{size}_in_pages_of_{times * page // KiB}_KiB"] = large
            finally:
                pins.unpin(address)
    finally:
        link.close()
        pins.close()


def activated(
    driver: Driver,
    spec: Any,
    link: CudaLink,
    result: queue.SimpleQueue[TransferDoneEvent],
    address: int,
    rate: float,
    page: int,
) -> dict[str, Any]:
    """The best of three activations after one that makes the pages."""
    n = sum(ceil_div(n_bytes, page) for n_bytes in spec.segment_bytes)
    vm = CudaVm(driver, 0, page, n)
    pool = Pool(vm, n)
    weights = WeightsOnDevice(spec, pool, vm, link, [address] * len(spec.segment_bytes))
    try:
        times: list[tuple[float, float, float]] = []
        for _ in range(4):
            begun = time.perf_counter()
            short = weights.activate(1)
            mapped = time.perf_counter()
            if short is not None:
                raise MemoryError(f"{short.pages} of {n} pages are not to be had")
            done = result.get()
            ended = time.perf_counter()
            if done.error is not None:
                raise RuntimeError(done.error)
            weights.transfer_landed()
            weights.evict()
            times.append((ended - begun, mapped - begun, time.perf_counter() - ended))
        seconds, mapping, evicting = min(times[1:])
        n_bytes = sum(spec.segment_bytes)
        return {
            "bytes": n_bytes,
            "seconds": seconds,
            "of_link": n_bytes / seconds / rate,
            "goal_met": n_bytes / seconds / rate >= 0.9,
            "mapping_seconds": mapping,
            "copies_of_link": n_bytes / (seconds - mapping) / rate,
            "evicting_seconds": evicting,
            "first_seconds": times[0][0],
        }
    finally:
        weights.close()
        vm.close()
