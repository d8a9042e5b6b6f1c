"""The GPU that is measured: what it is, how long things take on it, and memory of it."""

from __future__ import annotations

import gc
import importlib.metadata
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ballast.core.errors import DeviceError
from ballast.core.units import GiB, MiB
from ballast.live.cuda_runner import GpuCompute, TorchOnGpu
from ballast.memory.cuda.devices import driver_version
from ballast.memory.cuda.driver import CudaDriver

PAGE = 2 * MiB
SIZES = {
    "0.1B": (768, 2048, 12, 12, 32000),
    "0.5B": (1280, 3584, 22, 20, 32000),
    "1B": (2048, 5632, 22, 32, 32000),
    "3B": (3072, 8192, 28, 24, 64000),
    "8B": (4096, 14336, 32, 32, 128256),
}
"""Hidden, intermediate, layers, heads (a fourth of them for KV), vocabulary."""
SPARE = 4 * GiB
"""Beside weights and KV: PyTorch's own memory, and what a prefill computes."""
_PACKAGES = ("triton", "transformers", "cuda-bindings", "numba")
_NVIDIA = Path("/proc/driver/nvidia/version")


class Gpu:
    """The first one that CUDA shows."""

    def __init__(self) -> None:
        self.driver = CudaDriver()
        self.device = torch.device("cuda", 0)
        torch.cuda.set_device(self.device)
        # PyTorch makes the primary context where it first needs it; our calls need it current.
        self.context = self.driver.retain_context(self.driver.device(0))
        self.driver.set_current(self.context)

    @property
    def free(self) -> int:
        """Bytes of the device that nobody has."""
        return self.driver.free_and_total()[0]

    def facts(self) -> dict[str, Any]:
        """All that a figure depends on, but the code."""
        result = torch.cuda.get_device_properties(0)
        return {
            "gpu": result.name,
            "memory_bytes": result.total_memory,
            "multiprocessors": result.multi_processor_count,
            "capability": f"{result.major}.{result.minor}",
            "peak_bytes_per_second": _peak(result),
            "nvidia_driver": nvidia_driver(),
            "cuda_driver": ".".join(map(str, self.driver.version())),
            "torch": torch.__version__,
            "torch_cuda": torch.version.cuda,
            **{name: version for name in _PACKAGES if (version := _version(name)) is not None},
            "python": platform.python_version(),
            "kernel": platform.release(),
        }

    def seconds(self, work: Callable[[], object], times: int) -> float:
        """Of one call, by the device's clock: the median of `times`, after two for nothing."""
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

    def replayed(self, work: Callable[[], object]) -> Callable[[], object]:
        """The same as a CUDA graph. What it uses has to live as long."""
        work()  # compiles kernels, which a capture does not allow
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay

    def bandwidth(self) -> float:
        """Bytes per second of its memory: the better of a sum over 2 GiB and a copy of 1 GiB."""
        x = torch.ones(GiB // 2, dtype=torch.float32, device=self.device)
        read = 2 * GiB / self.seconds(x.sum, 10)
        half = len(x) // 2
        copied = 2 * GiB / self.seconds(lambda: x[:half].copy_(x[half:]), 10)
        return float(max(read, copied))

    def link_bandwidth(self) -> float:
        """Bytes per second of one plain copy from pinned host memory."""
        host = torch.empty(GiB, dtype=torch.uint8, pin_memory=True)
        target = torch.empty(GiB, dtype=torch.uint8, device=self.device)
        return float(GiB / self.seconds(partial(target.copy_, host, non_blocking=True), 5))

    def compute(self) -> GpuCompute:
        return TorchOnGpu(0)

    def held(self) -> tuple[int, int]:
        """Bytes of the device that nobody has, and that PyTorch's allocator has."""
        return self.free, torch.cuda.memory_reserved(0)

    def give_back(self) -> None:
        """What PyTorch keeps unused, so that pages can be made of it."""
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    @contextmanager
    def busy(self, seconds: float) -> Iterator[Callable[[], bool]]:
        """A kernel runs meanwhile, for at least `seconds`, on a stream that waits for no other.
        Yields a function that returns whether it still runs."""
        cuda: Any = torch.cuda
        stream = cuda.Stream(self.device)
        with cuda.stream(stream):
            cuda._sleep(int(seconds * 2e9))  # cycles, of at most 2 GHz
        try:
            yield lambda: not stream.query()
        finally:
            stream.synchronize()


def nvidia_driver() -> str | None:
    """Its version; None where neither NVML nor the kernel tells."""
    try:
        return driver_version()
    except DeviceError:
        words = _NVIDIA.read_text().split() if _NVIDIA.exists() else []
        return next((word for word in words if word.count(".") == 2 and word[0].isdigit()), None)


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


Configs = Mapping[str, LlamaConfig]
CONFIGS = {size: config_of(size) for size in SIZES}


def on_meta(config: LlamaConfig) -> LlamaForCausalLM:
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def bytes_of(config: LlamaConfig) -> int:
    """Of its weights in bfloat16."""
    return sum(2 * int(p.numel()) for p in on_meta(config).parameters())


def wall_seconds(work: Callable[[], object], times: int) -> float:
    """Of one call that waits for what it has launched: the median, after two that do not count."""
    found = []
    for _ in range(times + 2):
        begun = time.perf_counter()
        work()
        found.append(time.perf_counter() - begun)
    return statistics.median(found[2:])


def _peak(result: Any) -> float | None:
    """Of its memory, by clock (kHz) and width (bits), twice a cycle; where PyTorch tells them."""
    clock, width = (getattr(result, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))
    return 2e3 * clock * width / 8 if clock and width else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
