"""Measure the activation memory of a model's jobs when it is loaded, by running jobs of all sizes.

What a job allocates beside weights and KV cache depends on the model's architecture, on the GEMM
library, and on the instructions that the library finds on the CPU: bfloat16 products go through
float32 copies on one machine and through none on the next. So jobs of all sizes are run once, on
the weights in the host tier, and PyTorch's allocations are counted. The peak follows from the
sizes, the library and the number of threads alone: the same machine measures the same each time.

Layers of one kind allocate alike, so one of each kind is run, not all. All tokens are the same, so
that all rows take the same experts, the most rows that an expert can have. CPU devices only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ballast.core.errors import BallastError, UnsupportedModel, brief
from ballast.core.job import SequenceWork
from ballast.core.model import JobMemory, ModelSpec
from ballast.core.request import Sampling
from ballast.core.settings import DeviceSettings
from ballast.core.units import KiB, ceil_div
from ballast.kernels.workspace import Workspace
from ballast.kv.layout import Layout
from ballast.models.executor import ModelExecutor
from ballast.models.fused.workspace import workspace_bytes
from ballast.models.module import layer_path
from ballast.models.transformers import TransformersModel
from ballast.weights.host import HostModel
from ballast.weights.segment import Segment

Make = Callable[[HostModel, Sequence[int], int, Layout, Workspace, DeviceSettings], ModelExecutor]
"""Makes a model's executor, as `ballast.models.on_cpu.on_cpu` does."""

PAGE_BYTES = 64 * KiB
"""Pages of KV in measured jobs."""
_TOKEN = 1
_SAMPLING = Sampling(logprobs=0)
"""Parameters of the measured jobs: log-probabilities need the most of PyTorch's memory."""
_DRAWN = 72
"""Bytes that NumPy takes per token of the vocabulary while one row is shaped and sampled, with
min-p, top-k and top-p of equal logits."""


def measured(host: HostModel, make: Make, device: DeviceSettings) -> HostModel:
    """Return `host` with the measured memory of its jobs on `device` in its spec.

    Takes over `host`, and closes it on failure. Jobs may run in other threads meanwhile:
    allocations are counted for the calling thread only. Raises UnsupportedModel if a job fails.
    """
    try:
        with intraop_threads(device.threads):
            peak = _peak(host, make, device)
    except BaseException:
        host.close()
        raise
    host.spec = replace(host.spec, job_memory=bound(host, peak, device))
    return host


def _peak(host: HostModel, make: Make, device: DeviceSettings) -> int:
    """Return the most bytes allocated at a time by jobs of any size."""
    size = (device.step_tokens, device.step_logits)
    workspace = Workspace(workspace_bytes(host.spec, *size, host.recipe))
    try:
        model = _shallow(host)
        layout = Layout.of(model.spec, PAGE_BYTES)
        kv = Workspace(layout.slab_bytes)
        executor = make(model, model.addresses, kv.address, layout, workspace, device)
        if isinstance(executor, TransformersModel) and executor.states is not None:
            executor.states.checked = False
        jobs = _jobs(host.spec, device.step_tokens, device.step_logits)
        peak = max(allocated(partial(executor.run, work)) for work in jobs)
        kv.forget()
        return peak
    except BallastError:
        raise
    except Exception as error:  # a module may raise anything; other models are served
        why = f"{host.spec.name}: a job of it fails: {brief(error)}"
        raise UnsupportedModel(why) from error
    finally:
        workspace.forget()


def bound(host: HostModel, peak: int, device: DeviceSettings) -> JobMemory:
    """Return the memory to set aside if PyTorch has allocated at most `peak` bytes at a time.

    The C library's heap has holes between its blocks: over jobs of mixed sizes it took 1.3 to 2.6
    times the bytes allocated at the peak. `AllocatorCap` frees memory beyond this bound.
    """
    vocab = host.spec.vocab
    logits = 0 if host.fused else 4 * device.step_logits * vocab
    size = (device.step_tokens, device.step_logits)
    kept = workspace_bytes(host.spec, *size, host.recipe) if host.fused else 0
    return JobMemory(
        step_tokens=device.step_tokens,
        step_logits=device.step_logits,
        kept=kept,
        freed=ceil_div(7 * max(peak, logits + _DRAWN * vocab), 4) + 256 * KiB,
    )


def allocated(run: Callable[[], object]) -> int:
    """Return the most bytes that PyTorch's CPU allocator gave this thread at a time during `run`.

    Allocations that libraries make through it are included.
    """
    autograd: Any = torch.autograd
    # Not `torch.profiler`: it is process-wide, writes to its log, and imports a compiler.
    # This one records the calling thread only.
    config = autograd.ProfilerConfig(
        autograd.ProfilerState.CPU,
        False,  # shapes
        True,  # memory
        False,  # stacks
        False,  # operations
        False,  # modules
        torch._C._profiler._ExperimentalConfig(),
    )
    autograd._enable_profiler_legacy(config)
    try:
        run()
    finally:
        threads = autograd._disable_profiler_legacy()
    total = 0
    for events in threads:
        now = peak = 0
        for event in events:
            if event.kind() == "memory_alloc":
                now += event.cpu_memory_usage()
                peak = max(peak, now)
        total += peak
    return total


@contextmanager
def intraop_threads(n: int | None) -> Iterator[None]:
    """Give operations of the calling thread `n` threads of PyTorch; None: as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if n is None else n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _jobs(spec: ModelSpec, step_tokens: int, step_logits: int) -> Iterator[list[SequenceWork]]:
    """Yield jobs of `step_tokens` tokens, of half of them, and so on: with fewer rows a library may
    use other algorithms that need more memory. The last job is one token with the longest
    context."""
    n = step_tokens
    while n:
        yield _job(spec, n, min(n, step_logits))
        if spec.adapters:
            adapted = _job(spec, n, min(n, step_logits))
            yield [replace(w, adapter=i % len(spec.adapters)) for i, w in enumerate(adapted)]
        n //= 2


def _job(spec: ModelSpec, n: int, sampled: int) -> list[SequenceWork]:
    """Return a job of prefill chunks beside decodes: `n` tokens, of which `sampled` are sampled.

    All of KV is in one block, as the results do not matter.
    """
    counts = [1] * (sampled - 1)
    left = n - len(counts)
    while left:
        counts.append(min(left, spec.max_model_len))
        left -= counts[-1]
    work = []
    for i, count in enumerate(counts):
        start = spec.max_model_len - 1 if n == 1 and not spec.pooling else 0
        blocks = [0] * ceil_div(start + count, spec.block_tokens) * spec.kv_groups
        sampling = _SAMPLING if i >= len(counts) - sampled else None
        tokens, embed = [_TOKEN] * count, bool(spec.pooling)
        work.append(SequenceWork(f"profile{i}", tokens, start, blocks, sampling, embed=embed))
    return work


def _shallow(host: HostModel) -> HostModel:
    """Return the model with only its first layers, enough to hold one of each kind after the first
    layer: the first layer's input is the embeddings, beside which later layers need memory.

    Shares the memory of `host`, and must not be closed. Has all layers if these are not numbered.
    """
    depth = host.spec.n_layers
    layers = host.segments[1 : 1 + depth]
    paths = [layer_path(s) for s in layers]
    numbered = all(p.endswith(f".{i}") for i, p in enumerate(paths))
    if not (host.fused or numbered):
        return host
    kinds = [_kind(s, p) for s, p in zip(layers, paths, strict=True)]
    later = kinds[1:]
    n = max(1 + (1 + later.index(kind) if kind in later else 0) for kind in kinds)
    dropped = tuple(f"{path}." for path in paths[n:] if path)
    adapters = tuple(
        replace(
            a,
            deltas=tuple(d for d in a.deltas if not d.module.startswith(dropped)),
            packed=tuple(d for d in a.packed if not d.module.startswith(dropped)),
        )
        for a in host.adapters
    )
    shallow = replace(
        host,
        spec=replace(
            host.spec,
            n_layers=n,
            attention_layers=tuple(i for i in host.spec.attention_layers if i < n),
            layer_kv=tuple(kv for kv in host.spec.layer_kv if kv.layer < n),
            states=tuple(s for s in host.spec.states if not s.module.startswith(dropped)),
        ),
        segments=host.segments[: 1 + n] + host.segments[1 + depth :],
        windows=host.windows[:n],
        adapters=adapters,
    )
    shallow.addresses = host.addresses[: 1 + n] + host.addresses[1 + depth :]
    return shallow


def _kind(layer: Segment, path: str) -> object:
    """Return a value that is equal for layers with tensors of the same names, shapes and
    layouts."""
    return tuple(
        (tuple(name.removeprefix(path) for name in t.names), t.shape, t.layout)
        for t in layer.tensors
    )
