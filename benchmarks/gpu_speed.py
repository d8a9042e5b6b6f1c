"""What `scripts/gpu_check` times of jobs: decode steps and sampling."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import LlamaConfig

from ballast.core.job import SampledToken, SequenceWork
from ballast.core.request import Sampling
from ballast.core.settings import GRAPH_BYTES
from ballast.kernels.gpu.sampling import GpuSampler
from ballast.kernels.sampling import sample
from ballast.models.gpu.graphs import GraphCache
from benchmarks.gpu_apart import Findings, attempted
from benchmarks.gpu_device import CONFIGS, PAGE, SPARE, Configs, Gpu, bytes_of, wall_seconds
from benchmarks.gpu_model import Random, reference, spec_of

CONTEXT, SEQUENCES = 1024, 32
BATCHES = (1, SEQUENCES)
PREFILLS = (32, 256)
"""New tokens of one sequence."""
GOALS = {"batch_1": 0.85, "batch_32": 0.70}
"""Of the bandwidth roofline, of an 8B model, by batch."""
WITHOUT = "seconds_without"
TIMES = 20
"""That a step is run."""
STEADY = 10
"""Times as often with a graph: in a median of 20 the host's part looked twice as long."""
STEP_CONFIGS = {size: CONFIGS[size] for size in ("8B", "1B")}


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
        for impl in ("fused", "generic", "gemms"):
            steps = attempted(partial(decode_steps, gpu, config, bandwidth, impl, make))
            if "broke_off" in steps:
                steps = {"steps": steps}
            for key, result in steps.items():
                if (size, impl) == ("8B", "fused") and key in GOALS:
                    result["goal_met"] = result["of_roofline"] >= GOALS[key]
                found[f"{size}_{impl}_{key}"] = result
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
    """By batch, and of prefills: with CUDA graphs and without; of decodes what the device takes
    with a graph (`device_seconds`): the rest is the host's. `impl`, `make`: as `gpu_model.Random`
    takes them."""
    compute = gpu.compute()
    stream, twin = gpu.driver.new_stream(), gpu.driver.new_stream()
    cache = GraphCache(GRAPH_BYTES, lambda _: compute.recorder(twin))
    shape = (gpu.driver, gpu.device, config, PAGE, SEQUENCES, CONTEXT + 64)
    found: dict[str, dict[str, Any]] = {}
    made = Random(*shape, make=make, graphs=cache, impl=impl)
    with made as model:
        for batch in BATCHES[:1] if impl == "gemms" else BATCHES:
            work = model.decodes(batch, CONTEXT)

            def step(work: list[SequenceWork] = work) -> list[int]:
                with compute.on(stream):
                    return tokens_of(model.served.run(work))

            result = with_and_without(step, cache, stream, gpu.held, TIMES)
            with torch.inference_mode(), compute.on(stream), cache.on(stream):
                recorded = cache.find(model.spec.name, model.served.batch(work).bucket)
                if recorded is not None:
                    replay = partial(recorded.replay, None)
                    result["device_seconds"] = gpu.seconds(replay, TIMES)
            least = (model.weight_bytes + batch * CONTEXT * model.kv_bytes) / bandwidth
            seconds = min(v for k, v in result.items() if k in ("seconds_with_graph", WITHOUT))
            found[f"batch_{batch}"] = {
                "seconds": seconds,
                "tokens_per_second": batch / seconds,
                "of_roofline": least / seconds,
                **result,
            }
        for n in PREFILLS if impl != "gemms" else ():
            prompt = model.prefill(n)

            def prefill(work: list[SequenceWork] = prompt) -> list[int]:
                with compute.on(stream):
                    return tokens_of(model.served.run(work))

            result = with_and_without(prefill, cache, stream, gpu.held, TIMES)
            seconds = min(v for k, v in result.items() if k in ("seconds_with_graph", WITHOUT))
            found[f"prefill_{n}"] = {"seconds": seconds, **result}
        cache.close()
    for made_stream in (stream, twin):
        gpu.driver.destroy_stream(made_stream)
    return found


def tokens_of(results: Sequence[object]) -> list[int]:
    return [result.token for result in results if isinstance(result, SampledToken)]


def with_and_without(
    step: Callable[[], list[int]],
    cache: GraphCache,
    stream: int,
    free: Callable[[], tuple[int, int]],
    times: int,
) -> dict[str, Any]:
    """A decode step, before there is a graph of it and after. It ends with its tokens, on the host,
    so that the wall clock says how long it takes."""

    def median(times: int = times) -> tuple[float, list[int]]:
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
    replayed, tokens = median(STEADY * times)
    if cache.report().replays == replays:
        return {WITHOUT: eager, "broke_off": "nothing could be recorded: the log says why"}
    return {
        WITHOUT: eager,
        "seconds_with_graph": replayed,
        "same_tokens": tokens == expected,
        "recording_seconds": recording,
        "pool_bytes": max(0, now - reserved),
        "driver_bytes": max(0, before - after - max(0, now - reserved)),
    }


ASKED = {
    "temperature": Sampling(temperature=0.8),
    "top_p": Sampling(temperature=0.8, top_p=0.9),
    "top_k_and_top_p": Sampling(temperature=0.8, top_k=20, top_p=0.95),
}
"""What clients ask for, of `sampling`."""


def sampling(
    gpu: Gpu, found: Findings, rows: int = 32, vocab: int = 128_256, times: int = TIMES
) -> None:
    """Seconds to choose the tokens of a step from logits on the device, and on the host once they
    are moved; rows that were moved all the same, and whether tokens are the same."""
    torch.manual_seed(0)
    on_host, positions = torch.randn(rows, vocab) * 3, range(rows)
    logits, sampler = on_host.to(gpu.device), GpuSampler(gpu.device)
    for name, asked in ASKED.items():
        params = [replace(asked, seed=i) for i in range(rows)]
        expected, _ = sample(on_host, params, positions)
        sampler.moved = 0
        tokens, _ = sampler.sample(logits, params, positions, {})
        moved = sampler.moved

        def here(params: list[Sampling] = params) -> object:
            return sampler.sample(logits, params, positions, {})

        def there(params: list[Sampling] = params) -> object:
            return sample(logits.cpu(), params, positions)

        found[name] = {
            "seconds": wall_seconds(here, times),
            "seconds_on_host": wall_seconds(there, 1),
            "rows": rows,
            "rows_moved": moved,
            "passed": tokens == expected,
        }
