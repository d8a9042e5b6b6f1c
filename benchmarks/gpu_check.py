"""What a GPU does with all of this: tests, exactness, and the figures of docs/gpu.md.

One GPU, 10 minutes, no network; FastAPI, pyzmq, OR-Tools and msgspec are not needed. Weights are
random and made on the device. Parts, in this order; what time is too short for is listed as not
run:

- `tests`: those with the marker `gpu`.
- `exactness`: three small Llamas in a pool so small that they evict each other. Greedy tokens
  against `transformers` on the same GPU after the same tokens; in float32 a difference counts
  where the reference's margin is 1e-4 or more; in bfloat16 their part of all tokens, beside that
  which running the reference in a batch of two gives.
- `pool`: microseconds to map and to unmap a page that has memory, at the device's page size.
- `elastic_overhead`: that benchmark, on the GPU.
- `single_model`: tokens per second of decode steps at batch 1 and 32 over 1024 tokens of context,
  over what reading weights and KV once at the measured bandwidth allows; and over `transformers`.
- `graphs`: seconds of such a decode step with a CUDA graph and without, and whether the tokens are
  the same; seconds to record it, bytes of its pool, and bytes that the driver takes for it.
- `layouts`: microseconds that attention of a decode step takes, block-major and per-layer.
- `activation`: seconds to bring weights from pinned host memory into pages, and that over the
  bandwidth of one plain copy. The host's bytes are one buffer, copied again and again.
"""

from __future__ import annotations

import argparse
import json
import platform
import queue
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from ballast.bench.inprocess import InProcess
from ballast.core.errors import BallastError
from ballast.core.event import TransferDone
from ballast.core.job import Sampled, SequenceWork
from ballast.core.request import Sampling, Submission
from ballast.core.settings import GRAPH_BYTES, DeviceSettings, FleetSettings, ModelSettings
from ballast.core.units import GiB, MiB, ceil_div
from ballast.engine.inbox import MonotonicClock
from ballast.memory.copies import Copy
from ballast.memory.cuda_driver import CudaDriver
from ballast.memory.link_cuda import CudaLink
from ballast.memory.vm_cuda import CudaVm
from ballast.models.graphs import GraphCache

SECONDS = 600.0
PAGE = 2 * MiB
SIZES = {
    "0.1B": (768, 2048, 12, 12, 32000),
    "0.5B": (1280, 3584, 22, 20, 32000),
    "1B": (2048, 5632, 22, 32, 32000),
    "3B": (3072, 8192, 28, 24, 64000),
    "8B": (4096, 14336, 32, 32, 128256),
}
"""Hidden, intermediate, layers, heads (a fourth of them for KV), vocabulary."""


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    seconds: float
    """That it may take: it is not begun with less left."""
    run: Callable[[Gpu], dict[str, Any]]


class Gpu:
    """The first one that CUDA shows."""

    def __init__(self) -> None:
        self.driver = CudaDriver()
        self.device = torch.device("cuda", 0)
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self.free = torch.cuda.mem_get_info(0)[0]

    def facts(self) -> dict[str, Any]:
        told = torch.cuda.get_device_properties(0)
        return {
            "gpu": told.name,
            "memory_bytes": told.total_memory,
            "multiprocessors": told.multi_processor_count,
            "cuda_driver": ".".join(map(str, self.driver.version())),
            "torch": torch.__version__,
            "python": platform.python_version(),
        }

    def seconds(self, work: Callable[[], object], times: int) -> float:
        """Of one call: the median of `times`, after two that do not count."""
        found = []
        for i in range(times + 2):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            work()
            end.record()
            end.synchronize()
            if i >= 2:
                found.append(begin.elapsed_time(end) / 1e3)
        return float(statistics.median(found))

    def bandwidth(self) -> float:
        """Bytes per second that a sum over a gigabyte reads."""
        x = torch.ones(GiB // 4, dtype=torch.float32, device=self.device)
        return float(GiB / self.seconds(x.sum, 10))


@contextmanager
def pages_of(gpu: Gpu, n_bytes: int) -> Iterator[tuple[CudaVm, int]]:
    """Memory of whole pages, mapped in a row; and where."""
    n = ceil_div(n_bytes, PAGE)
    vm = CudaVm(gpu.driver, 0, PAGE, n)
    try:
        short = vm.populate(range(n))
        if short is not None:
            raise MemoryError(f"{short.pages} of {n} pages are not to be had")
        r = vm.reserve(n * PAGE)
        vm.map(r, 0, range(n))
        yield vm, r.base
    finally:
        torch.cuda.synchronize()
        vm.close()


def config_of(size: str) -> LlamaConfig:
    hidden, intermediate, layers, heads, vocab = SIZES[size]
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        vocab_size=vocab,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )


def tests(gpu: Gpu) -> dict[str, Any]:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/memory", "tests/kernels"]
    try:
        told = subprocess.run(
            [*command, "tests/models"], capture_output=True, text=True, timeout=150
        )
    except subprocess.TimeoutExpired:
        return {"passed": False, "why": "not done in 150 seconds"}
    lines = told.stdout.strip().splitlines()
    return {"passed": told.returncode == 0, "told": lines[-1:] or told.stderr[-500:]}


def exactness(gpu: Gpu) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16"):
        with tempfile.TemporaryDirectory() as scratch:
            found[dtype] = _exact(gpu, Path(scratch), dtype)
    found["passed"] = found["float32"]["wrong"] == 0
    return found


def _exact(gpu: Gpu, home: Path, dtype: str) -> dict[str, Any]:
    models = []
    for i, name in enumerate("abc"):
        torch.manual_seed(i)
        config = LlamaConfig(
            hidden_size=512,
            intermediate_size=1024,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            vocab_size=1024,
            max_position_embeddings=512,
            initializer_range=0.1,
            tie_word_embeddings=False,
        )
        LlamaForCausalLM(config).save_pretrained(home / name)
        models.append(ModelSettings(name=name, path=str(home / name), dtype=dtype))
    device = DeviceSettings(name="cuda:0", budget_bytes=4 * GiB, page_bytes=PAGE, step_tokens=64)
    fleet = FleetSettings(models=tuple(models), device=device)
    with InProcess(fleet) as server:
        state = server.device.state
        weights = max(m.weights.pages for m in state.models.values())
        kv = max(m.kv.most_pages(ceil_div(200, m.spec.block_tokens)) for m in state.models.values())
        n = state.arena.pages + 2 * weights + 3 * kv
    requests = [
        Submission(
            id=f"{m.name}{i}",
            model=m.name,
            prompt=tuple((7 * i + 3 * k + ord(m.name)) % 1024 for k in range(9 + 30 * i)),
            max_tokens=48,
            sampling=Sampling(),
            ignore_eos=True,
        )
        for i in range(4)
        for m in models
    ]
    with InProcess(replace(fleet, device=replace(device, budget_bytes=n * PAGE))) as server:
        answers = server.generate(requests)
        evictions = sum(m.evictions for m in server.device.snapshot().models)
    wrong = ties = tokens = batched = 0
    kind = getattr(torch, dtype)
    for m in models:
        reference = AutoModelForCausalLM.from_pretrained(m.path, dtype=kind).to(gpu.device).eval()
        for r in (r for r in requests if r.model == m.name):
            answer = answers[r.id]
            ids = torch.tensor([[*r.prompt, *answer.tokens]], device=gpu.device)
            with torch.inference_mode():
                logits = reference(ids).logits[0, len(r.prompt) - 1 : -1].float()
                twice = reference(ids.repeat(2, 1)).logits[0, len(r.prompt) - 1 : -1].float()
            top = logits.topk(2, dim=-1)
            ours = torch.tensor(answer.tokens, device=gpu.device)
            differs = top.indices[:, 0] != ours
            tie = top.values[:, 0] - top.values[:, 1] < 1e-4
            wrong += int((differs & ~tie).sum())
            ties += int((differs & tie).sum())
            batched += int((top.indices[:, 0] != twice.argmax(-1)).sum())
            tokens += len(answer.tokens)
    told = {"tokens": tokens, "wrong": wrong, "ties": ties, "evictions": evictions}
    return {**told, "reference_differs_from_itself_in_a_batch_of_two": batched}


def pool(gpu: Gpu) -> dict[str, Any]:
    vm = CudaVm(gpu.driver, 0, PAGE, 64)
    try:
        vm.populate(range(64))
        r = vm.reserve(64 * PAGE)
        both: dict[str, list[float]] = {"map": [], "unmap": []}
        for _ in range(8):
            for page in range(64):
                begun = time.perf_counter()
                vm.map(r, page, [page])
                mapped = time.perf_counter()
                vm.unmap(r, page, 1)
                both["map"].append(mapped - begun)
                both["unmap"].append(time.perf_counter() - mapped)
    finally:
        vm.close()
    found = {name: 1e6 * statistics.median(times[64:]) for name, times in both.items()}
    total = sum(found.values())
    return {"microseconds": {**found, "both": total}, "goal_met": total <= 70}


def elastic_overhead(gpu: Gpu) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "found.json"
        command = [sys.executable, "-m", "benchmarks.elastic_overhead", "--quick"]
        subprocess.run(
            [*command, "--device", "cuda:0", "--json", str(file)],
            check=True,
            capture_output=True,
            timeout=120,
        )
        told: dict[str, Any] = json.loads(file.read_text())
    return {k: told[k] for k in ("throughput_ratio", "p99_tpot_ratio", "goal_met")}


def single_model(gpu: Gpu) -> dict[str, Any]:
    from benchmarks.gpu_model import Random

    bandwidth = gpu.bandwidth()
    found: dict[str, Any] = {"read_bytes_per_second": bandwidth}
    context = 1024
    for size in ("1B", "8B"):
        config = config_of(size)
        n_bytes = 2 * sum(p.numel() for p in _on_meta(config).parameters())
        if n_bytes + 8 * GiB > torch.cuda.mem_get_info(0)[0]:
            found[size] = {"not_run": "it does not fit"}
            continue
        made = Random(gpu.driver, gpu.device, config, PAGE, sequences=32, context=context + 64)
        with made as model:
            for batch in (1, 32):
                work = model.decodes(batch, context)
                seconds = gpu.seconds(partial(model.served.run, work), 20)
                least = (model.weight_bytes + batch * context * model.kv_bytes) / bandwidth
                theirs = gpu.seconds(model.reference(config, batch, context), 10)
                found[f"{size}_batch_{batch}"] = {
                    "tokens_per_second": batch / seconds,
                    "of_roofline": least / seconds,
                    "over_transformers": theirs / seconds,
                }
    return found


def graphs(gpu: Gpu) -> dict[str, Any]:
    from ballast.engine.runner_cuda import TorchOnGpu
    from benchmarks.gpu_model import Random

    compute = TorchOnGpu(0)
    stream, twin = gpu.driver.new_stream(), gpu.driver.new_stream()
    found: dict[str, Any] = {"passed": True}
    context = 1024
    for size in ("0.1B", "1B", "8B"):
        config = config_of(size)
        n_bytes = 2 * sum(p.numel() for p in _on_meta(config).parameters())
        if n_bytes + 8 * GiB > torch.cuda.mem_get_info(0)[0]:
            found[size] = {"not_run": "it does not fit"}
            continue
        cache = GraphCache(GRAPH_BYTES, lambda _: compute.recorder(twin))
        made = Random(
            gpu.driver, gpu.device, config, PAGE, sequences=32, context=context + 64, graphs=cache
        )
        with made as model:
            for batch in (1, 32):
                work = model.decodes(batch, context)

                def step(model: Random = model, work: list[SequenceWork] = work) -> list[int]:
                    with compute.on(stream):
                        return _tokens(model.served.run(work))

                told = with_and_without(step, cache, stream, free_bytes, 20)
                found[f"{size}_batch_{batch}"] = told
                found["passed"] = found["passed"] and told["same_tokens"]
            cache.close()
    for made_stream in (stream, twin):
        gpu.driver.destroy_stream(made_stream)
    return found


def free_bytes() -> tuple[int, int]:
    """Of the device, and of PyTorch's allocator there."""
    return torch.cuda.mem_get_info(0)[0], torch.cuda.memory_reserved(0)


def _tokens(results: Sequence[object]) -> list[int]:
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
        tokens, found = [], []
        with cache.on(stream):
            for _ in range(times + 2):
                begun = time.perf_counter()
                tokens = step()
                found.append(time.perf_counter() - begun)
        return statistics.median(found[2:]), tokens

    eager, expected = median()
    before, reserved = free()
    begun = time.perf_counter()
    cache.record_one()
    recording = time.perf_counter() - begun
    after, now = free()
    replays = cache.report().replays
    replayed, tokens = median()
    told = cache.report()
    if told.replays == replays:
        raise RuntimeError("nothing could be recorded: the log says why")
    return {
        "seconds_without": eager,
        "seconds_with": replayed,
        "speedup": eager / replayed,
        "same_tokens": tokens == expected,
        "recording_seconds": recording,
        "pool_bytes": max(0, now - reserved),
        "driver_bytes": max(0, before - after - max(0, now - reserved)),
    }


def _on_meta(config: LlamaConfig) -> LlamaForCausalLM:
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def layouts(gpu: Gpu) -> dict[str, Any]:
    from ballast.kernels.device_attention import choose
    from ballast.kernels.device_batch import DeviceBatch
    from ballast.kernels.device_kv import DeviceKv, KvLayout
    from ballast.kernels.device_plan import Bucket

    found: dict[str, Any] = {}
    layers, block, heads, kv_heads, dim, n, context = 32, 16, 32, 8, 128, 32, 2048
    shape = (layers, 2, block, kv_heads, dim)
    stride = torch.Size(shape).numel()
    each = context // block
    memory = torch.randn(n * each * stride, dtype=torch.bfloat16, device=gpu.device)
    order = torch.randperm(n * each).tolist()
    tables = [order[i * each : (i + 1) * each] for i in range(n)]
    for layout in KvLayout:
        kv = DeviceKv.over(memory, layout, shape, stride)
        batch = DeviceBatch(kv, heads, Bucket.decode(n, n * each, each), choose(kv))
        batch.fill([0] * n, [context - 1] * n, [1] * n, tables, [0] * n)
        q = torch.randn(batch.n_tokens, heads, dim, dtype=torch.bfloat16, device=gpu.device)

        def step(batch: DeviceBatch = batch, q: torch.Tensor = q) -> None:
            for layer in range(layers):
                batch.attend(layer, q, dim**-0.5, batch.out)

        found[layout.value] = 1e6 * gpu.seconds(step, 20)
    return {"microseconds": found}


def activation(gpu: Gpu) -> dict[str, Any]:
    host = torch.empty(GiB, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(GiB, dtype=torch.uint8, device=gpu.device)
    rate = GiB / gpu.seconds(partial(target.copy_, host, non_blocking=True), 5)
    found: dict[str, Any] = {"link_bytes_per_second": rate}
    told: queue.Queue[TransferDone] = queue.Queue()
    link = CudaLink(gpu.driver, 0, MonotonicClock(), told.put)
    try:
        for i, size in enumerate(SIZES):
            n_bytes = 2 * sum(p.numel() for p in _on_meta(config_of(size)).parameters())
            if n_bytes + 2 * GiB > torch.cuda.mem_get_info(0)[0]:
                found[size] = {"not_run": "it does not fit"}
                continue
            with pages_of(gpu, n_bytes) as (_, base):
                copies = [
                    Copy(base + at, host.data_ptr(), min(GiB, n_bytes - at))
                    for at in range(0, n_bytes, GiB)
                ]
                begun = time.perf_counter()
                link.start(i, copies)
                done = told.get()
                seconds = time.perf_counter() - begun
                if done.error is not None:
                    raise RuntimeError(done.error)
            found[size] = {"seconds": seconds, "of_link": n_bytes / seconds / rate}
    finally:
        link.close()
    return found


PARTS = (
    Part("tests", 150, tests),
    Part("exactness", 60, exactness),
    Part("pool", 5, pool),
    Part("elastic_overhead", 60, elastic_overhead),
    Part("single_model", 60, single_model),
    Part("graphs", 60, graphs),
    Part("layouts", 20, layouts),
    Part("activation", 40, activation),
)


def check(gpu: Gpu, parts: Sequence[Part] = PARTS, seconds: float = SECONDS) -> dict[str, Any]:
    """What each part found, why it broke off, or that time was too short."""
    ends = time.monotonic() + seconds
    found: dict[str, Any] = {}
    for part in parts:
        begun = time.monotonic()
        if ends - begun < part.seconds:
            found[part.name] = {"not_run": f"less than {part.seconds:g} seconds were left"}
            continue
        try:
            found[part.name] = part.run(gpu)
        except Exception as error:  # noqa: BLE001
            found[part.name] = {"broke_off": f"{type(error).__name__}: {error}"}
        found[part.name]["took_seconds"] = time.monotonic() - begun
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", type=Path, default=Path("gpu_results.json"), metavar="FILE")
    parser.add_argument("--only", nargs="*", choices=[p.name for p in PARTS], metavar="PART")
    args = parser.parse_args(argv)
    parts = [p for p in PARTS if args.only is None or p.name in args.only]
    try:
        if not torch.cuda.is_available():
            raise RuntimeError(f"PyTorch {torch.__version__} finds none")
        gpu = Gpu()
    except (BallastError, RuntimeError) as error:
        print(f"gpu_check: no GPU: {error}. On one it would run:", file=sys.stderr)
        for part in parts:
            print(f"  {part.name} (up to {part.seconds:g} s)", file=sys.stderr)
        return 2
    found = {"machine": gpu.facts(), **check(gpu, parts)}
    args.json.write_text(json.dumps(found, indent=2) + "\n")
    from benchmarks.common import flatten

    for key, value in flatten(found).items():
        print(f"{key:58} {value:.6g}" if isinstance(value, float) else f"{key:58} {value}")
    broken = any("broke_off" in told or told.get("passed") is False for told in found.values())
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
