"""What `scripts/gpu_check` times: pages, decode steps, attention and activations."""

from __future__ import annotations

import queue
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

import torch
from transformers import LlamaConfig

from ballast.core.errors import DeviceError
from ballast.core.event import TransferDone
from ballast.core.job import Sampled, SequenceWork
from ballast.core.settings import GRAPH_BYTES, KvLayout
from ballast.core.units import GiB, KiB, MiB, ceil_div
from ballast.engine.inbox import MonotonicClock
from ballast.kernels.device_attention import choose, why_not
from ballast.kernels.device_batch import DeviceBatch
from ballast.kernels.device_kv import DeviceKv
from ballast.kernels.device_plan import Bucket
from ballast.memory.cuda_calls import Driver
from ballast.memory.cuda_pins import Pins
from ballast.memory.link_cuda import CudaLink
from ballast.memory.pool import Pool
from ballast.memory.vm_cuda import CudaVm
from ballast.models.graphs import GraphCache
from ballast.weights.host import HostTier
from ballast.weights.residency import WeightsOnDevice
from ballast.weights.segment import PackedTensor, Segment
from benchmarks.gpu_apart import Findings, attempted
from benchmarks.gpu_device import (
    PAGE,
    SIZES,
    SPARE,
    Gpu,
    bytes_of,
    config_of,
    wall_seconds,
)
from benchmarks.gpu_model import Random, reference, spec_of

CONTEXT, SEQUENCES = 1024, 32
BATCHES = (1, SEQUENCES)
GOALS = {"batch_1": 0.85, "batch_32": 0.70}
"""Of the bandwidth roofline, of an 8B model, by batch."""
TIMES = 20
"""That a step is run."""
Configs = Mapping[str, LlamaConfig]
CONFIGS = {size: config_of(size) for size in SIZES}
STEP_CONFIGS = {size: CONFIGS[size] for size in ("8B", "1B")}


def pool(gpu: Gpu, found: Findings) -> None:
    """Microseconds a page, of recycled pages: mapped and made accessible, and unmapped."""
    found["microseconds"] = alone = page_times(gpu.driver, PAGE, 1, 512)
    found["goal_met"] = alone["both"] <= 70
    found["microseconds_of_64_at_once"] = page_times(gpu.driver, PAGE, 64, 16)
    with gpu.busy(0.5):
        # Where this is far more, the driver waits for the kernel.
        found["microseconds_beside_a_kernel"] = page_times(gpu.driver, PAGE, 1, 64)
    for times in (4, 16):
        n_bytes = times * PAGE
        found[f"microseconds_of_{n_bytes // MiB}_MiB"] = page_times(gpu.driver, n_bytes, 1, 64)
    if gpu.device.type == "cuda":
        found["one_call_unmaps_many"] = one_call_unmaps_many(gpu.driver)


def page_times(driver: Driver, page: int, at_once: int, rounds: int) -> dict[str, float]:
    """By operation, each page's median."""
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
    told = {k: 1e6 * statistics.median(v[rounds // 8 :]) for k, v in both.items()}
    return {**told, "both": sum(told.values()), "create": 1e6 * made}


def one_call_unmaps_many(driver: Driver, n: int = 64) -> str | float:
    """Microseconds a page, if the driver takes several mappings in a row at once; else its error.
    Documented is that it takes what one call mapped; some say that it takes more."""
    base = driver.reserve(n * PAGE, PAGE)
    handles = [driver.create(0, PAGE) for _ in range(n)]
    for i, handle in enumerate(handles):
        driver.map(base + i * PAGE, PAGE, handle)
    driver.set_access(base, n * PAGE, 0)
    told: str | float
    try:
        begun = time.perf_counter()
        driver.unmap(base, n * PAGE)
        told = 1e6 * (time.perf_counter() - begun) / n
    except DeviceError as error:
        told = str(error)
        for i in range(n):
            driver.unmap(base + i * PAGE, PAGE)
    for handle in handles:
        driver.release(handle)
    driver.free(base, n * PAGE)
    return told


def single_model(
    gpu: Gpu, found: Findings, configs: Configs = STEP_CONFIGS, make: Any = None
) -> None:
    """Tokens per second of decode steps over 1024 tokens of context, host's work included; their
    part of what reading weights and KV once at the measured bandwidth allows."""
    found["bytes_per_second"] = bandwidth = gpu.bandwidth()
    gpu.give_back()
    for size, config in configs.items():
        kv_bytes = SEQUENCES * (CONTEXT + 64) * spec_of(config).kv_bytes_per_token
        if bytes_of(config) + kv_bytes + SPARE > gpu.free:
            found[size] = {"not_run": "it does not fit"}
            continue
        for impl in ("fused", "generic", "one_row"):
            steps = attempted(partial(decode_steps, gpu, config, bandwidth, impl, make))
            if "broke_off" in steps:
                steps = {"steps": steps}
            for key, told in steps.items():
                if (size, impl) == ("8B", "fused") and key in GOALS:
                    told["goal_met"] = told["of_roofline"] >= GOALS[key]
                found[f"{size}_{impl}_{key}"] = told
            gpu.give_back()
        for batch in BATCHES:
            theirs = attempted(partial(_of_transformers, gpu, config, batch))
            found[f"{size}_transformers_batch_{batch}"] = theirs
            ours = found.get(f"{size}_fused_batch_{batch}")
            if ours is not None and "seconds" in theirs:
                ratio = theirs["seconds"] / ours["seconds"]
                found[f"{size}_over_transformers_batch_{batch}"] = ratio
            gpu.give_back()


def _of_transformers(gpu: Gpu, config: LlamaConfig, batch: int) -> dict[str, Any]:
    try:
        seconds = wall_seconds(reference(config, batch, CONTEXT, gpu.device), TIMES)
    except torch.OutOfMemoryError:
        return {"not_run": "it does not fit"}
    return {"seconds": seconds, "tokens_per_second": batch / seconds}


def decode_steps(
    gpu: Gpu, config: LlamaConfig, bandwidth: float, impl: str, make: Any
) -> dict[str, dict[str, Any]]:
    """By batch: with CUDA graphs and without. `impl`, `make`: as `gpu_model.Random` takes them."""
    compute = gpu.compute()
    stream, twin = gpu.driver.new_stream(), gpu.driver.new_stream()
    cache = GraphCache(GRAPH_BYTES, lambda _: compute.recorder(twin))
    shape = (gpu.driver, gpu.device, config, PAGE, SEQUENCES, CONTEXT + 64)
    found: dict[str, dict[str, Any]] = {}
    made = Random(*shape, make=make, graphs=cache, impl=impl)
    with made as model:
        for batch in BATCHES[:1] if impl == "one_row" else BATCHES:
            work = model.decodes(batch, CONTEXT)

            def step(work: list[SequenceWork] = work) -> list[int]:
                with compute.on(stream):
                    return tokens_of(model.served.run(work))

            told = with_and_without(step, cache, stream, gpu.held, TIMES)
            least = (model.weight_bytes + batch * CONTEXT * model.kv_bytes) / bandwidth
            seconds = min(told["seconds_with_graph"], told["seconds_without"])
            found[f"batch_{batch}"] = {
                "seconds": seconds,
                "tokens_per_second": batch / seconds,
                "of_roofline": least / seconds,
                **told,
            }
        cache.close()
    for made_stream in (stream, twin):
        gpu.driver.destroy_stream(made_stream)
    return found


def tokens_of(results: Sequence[object]) -> list[int]:
    return [told.token for told in results if isinstance(told, Sampled)]


def with_and_without(
    step: Callable[[], list[int]],
    cache: GraphCache,
    stream: int,
    free: Callable[[], tuple[int, int]],
    times: int,
) -> dict[str, Any]:
    """A decode step, before there is a graph of it and after. It ends with its tokens, on the host,
    so that the wall clock says how long it takes."""

    def median() -> tuple[float, list[int]]:
        tokens: list[int] = []

        def run() -> None:
            tokens[:] = step()

        with cache.on(stream):
            return wall_seconds(run, times), tokens

    eager, expected = median()
    before, reserved = free()
    begun = time.perf_counter()
    cache.record_one()
    recording = time.perf_counter() - begun
    after, now = free()
    replays = cache.report().replays
    replayed, tokens = median()
    if cache.report().replays == replays:
        raise RuntimeError("nothing could be recorded: the log says why")
    return {
        "seconds_without": eager,
        "seconds_with_graph": replayed,
        "same_tokens": tokens == expected,
        "recording_seconds": recording,
        "pool_bytes": max(0, now - reserved),
        "driver_bytes": max(0, before - after - max(0, now - reserved)),
    }


def layouts(
    gpu: Gpu,
    found: Findings,
    layers: int = 32,
    heads: int = 32,
    kv_heads: int = 8,
    dim: int = 128,
    n: int = 32,
    context: int = 2048,
) -> None:
    """Microseconds that the attention of all layers of a decode step takes."""
    found["shape"] = f"{n} sequences of {context} tokens, {layers} layers, {heads}/{kv_heads} heads"
    q = torch.randn(n, heads, dim, dtype=torch.bfloat16, device=gpu.device)
    for block, layout in product((16, 256), KvLayout):
        shape = (layers, 2, block, kv_heads, dim)
        stride = torch.Size(shape).numel()
        each = context // block
        memory = torch.randn(n * each * stride, dtype=torch.bfloat16, device=gpu.device)
        order = torch.randperm(n * each).tolist()
        tables = [order[i * each : (i + 1) * each] for i in range(n)]
        kv = DeviceKv.over(memory, layout, shape, stride)
        for name, why in why_not(kv).items():
            key = f"{name}_blocks_of_{block}_{layout.value}"
            if why is not None:
                found[key] = {"not_run": why}
                continue
            try:
                batch = DeviceBatch(kv, heads, Bucket.decode(n, n * each, each), choose(kv, name))
                batch.fill([0] * n, [context - 1] * n, [1] * n, tables, [0] * n)

                def step(batch: DeviceBatch = batch) -> None:
                    for layer in range(layers):
                        batch.attend(layer, q, dim**-0.5, batch.out)

                found[key] = 1e6 * gpu.seconds(step, 20)
            except Exception as error:  # noqa: BLE001 - of PyTorch, Triton or FlashInfer
                found[key] = {"not_run": str(error)[:300]}
        del memory, kv
        gpu.give_back()


@contextmanager
def host_bytes(n_bytes: int, writable: bool) -> Iterator[int]:
    """An address of zeros in the host tier, sealed as weights are; `writable`: for a device that
    could not lock them else."""
    tensor = PackedTensor(("zeros",), (n_bytes,), "uint8", 0, n_bytes, "plain", ("zeros",))
    tier = HostTier()
    tier.writable = writable
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
    pins, told = Pins(gpu.driver, 0), queue.SimpleQueue[TransferDone]()
    link = CudaLink(gpu.driver, 0, MonotonicClock(), told.put)
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
                    found[size] = activated(gpu.driver, spec, link, told, address, rate, page)
                if size in found and "bytes" in found[size]:
                    large = activated(gpu.driver, spec, link, told, address, rate, 16 * page)
                    found[f"{size}_in_pages_of_{16 * page // KiB}_KiB"] = large
            finally:
                pins.unpin(address)
    finally:
        link.close()
        pins.close()


def activated(
    driver: Driver,
    spec: Any,
    link: CudaLink,
    told: queue.SimpleQueue[TransferDone],
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
            done = told.get()
            ended = time.perf_counter()
            if done.error is not None:
                raise RuntimeError(done.error)
            weights.landed()
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
