"""Run the jobs of models on a GPU: the base of all GPU executors, and any `transformers` decoder.

The generic path is that of `models/transformers.py`: the same module and attention, with parameters
and the job's tensors on the device. `models/gpu/fused.py` is the fast path. A job is filled into
the batch of its bucket, whose addresses do not change: over a batch of decodes, or of a short
prefill, a CUDA graph can be recorded (`models/gpu/graphs.py`). The host waits for the device only
to fetch tokens. Logits stay on the device where tokens can be chosen there
(`kernels/gpu/sampling.py`); the rest of sampling runs on the host, by the function that all devices
share.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ballast.core.errors import BrokenPromise
from ballast.core.job import SequenceWork
from ballast.core.request import Sampling
from ballast.core.units import MiB
from ballast.kernels import sampling
from ballast.kernels.gpu.attention import attention_kernels
from ballast.kernels.gpu.attention_plan import Bucket
from ballast.kernels.gpu.batch import GpuAttention, GpuBatch, Scratch
from ballast.kernels.gpu.kv import GpuKv
from ballast.kernels.gpu.lora import GpuLoraGroup
from ballast.kernels.gpu.sampling import GpuSampler
from ballast.kernels.paged_attention import LayerPlaces
from ballast.kv.layout import Layout
from ballast.memory.cuda.tensor import cuda_tensor_at
from ballast.memory.tensor import tensor_at
from ballast.models import attention
from ballast.models.adapters import AdaptedModules, adapters_of, targets_of
from ballast.models.barriers import ALL_ON_DEVICE, HostReads, host_reads
from ballast.models.executor import ModelExecutor, wanted_rows
from ballast.models.gpu.adapters import GpuAdapters, Place
from ballast.models.gpu.graphs import GraphCache
from ballast.models.gpu.recording import Recording, Stops
from ballast.models.module import View, layers_of, move, placed
from ballast.weights.host import HostModel
from ballast.weights.row_call import RowCall

CHUNK_BUCKETS = 8
"""Most batches kept of buckets with prefills over which no graph was recorded."""
PREFILL_BYTES = 32 * MiB
"""Bytes that a layer computes up to which a prefill is recorded. Launched one by one, a prefill of
some hundred tokens takes the host longer than the device; of larger ones, graphs would need more
memory and gain little."""


class GpuExecutor(ModelExecutor):
    """Runs the jobs of a model whose weights and KV cache are at addresses of one device."""

    def __init__(
        self,
        host: HostModel,
        segment_addresses: Sequence[int],
        kv_base: int,
        layout: Layout,
        kv_bytes: int,
        device: torch.device,
        make: Callable[[GpuBatch], GpuAttention] | None = None,
        graphs: GraphCache | None = None,
        common: Scratch | None = None,
        *,
        invariant: bool = False,
        host_pointers: Sequence[int] | None = None,
    ) -> None:
        """`kv_bytes`: bytes of addresses for its KV; `make`: makes the attention of a batch, by
        default the device's; `graphs`: of the device, if it has any; `common`: see `Scratch`;
        `invariant`: a row's result depends on no other row, and on no chunk's length: in 16 bits of
        attention here, of all of a layer in `GpuFusedModel`. `host_pointers`: where kernels find
        each segment in host memory, if they do: passes may read it there (`HostReads`).

        Raises UnsupportedModel if the module keeps state that cannot be set up without its weights.
        """
        super().__init__(host, kv_base, layout)
        # NVIDIA's images set TORCH_ALLOW_TF32_CUBLAS_OVERRIDE: 10-bit mantissas of factors.
        torch.set_float32_matmul_precision("highest")
        self._host, self._device = host, device
        on_gpu = device.type == "cuda"
        self._view: View = partial(cuda_tensor_at, device=device) if on_gpu else tensor_at
        self._scratch = Scratch(device, common)
        self._addresses = tuple(segment_addresses)
        self._pointers = None if host_pointers is None else tuple(host_pointers)
        self._reads = ALL_ON_DEVICE
        """What the present pass reads in host memory."""
        self._adapters = self._adapters_at(self._addresses)
        self._lora = self._adapters.lora
        """That of adapters on the device, whose tables graphs read."""
        self._set_up(host, self._addresses[: len(host.segments)])
        if on_gpu:
            # Streams of jobs wait for no other stream: buffers have to be filled by then.
            torch.cuda.current_stream(device).synchronize()
        item = self.dtype.itemsize
        memory = self._view(kv_base, (kv_bytes // item,), self.dtype)
        self._cache = GpuKv.over(memory, layout.shape, layout.stride_bytes // item)
        self._invariant = invariant
        self._make = make or attention_kernels(device)
        self._sampler = GpuSampler(device)
        self._kept: dict[Bucket, GpuBatch] = {}
        """Batches of decodes, and those over which a graph was recorded: it has their addresses."""
        self._chunks: OrderedDict[Bucket, GpuBatch] = OrderedDict()
        self._graphs = graphs
        self._cuts: tuple[int, ...] = ()
        """Layers at which the current pass stops, and its callbacks."""
        self._stops: Stops | None = None

    def close(self) -> None:
        """Free the pinned memory of its batches; no job follows. Before streams are destroyed."""
        self._scratch.close()

    @abstractmethod
    def _set_up(self, host: HostModel, addresses: tuple[int, ...]) -> None:
        """Build the computation from each segment at its address; touches no memory there."""

    @abstractmethod
    def _move(self, segment: int, address: int) -> None:
        """Compute with a segment of the model's own at another address from now on; touches no
        memory there."""

    @abstractmethod
    def _adapted(self, host: HostModel, addresses: Sequence[int]) -> Mapping[Place, GpuLoraGroup]:
        """Collect the matrices of adapters, whose segments are at `addresses`; called before
        `_set_up`."""

    @abstractmethod
    def _compute_logits(self, batch: GpuBatch, n: int) -> Tensor:
        """Return logits of the first `n` wanted rows, float32.

        Calls `_reach` and `_leave` for each layer, in order, around all work that uses its weights
        or KV.
        """

    @abstractmethod
    def _compute_hidden(self, batch: GpuBatch, n: int) -> Tensor:
        """Return the head's inputs for these rows, likewise."""

    @torch.inference_mode()
    def logits(self, work: Sequence[SequenceWork]) -> Tensor:
        self.check(work)
        bucket, places = self._bucket(work), self._places(work)
        cuts = tuple(sorted(self._begin_pass(work)))
        self._use(host_reads(self.barriers))
        # Graphs read neither host memory nor block tables of a layer's own.
        worth = places is None and not self._reads.units and self._worth_recording(bucket, cuts)
        graphs = self._graphs if worth else None
        recorded = None if graphs is None else graphs.find(self.spec.name, bucket, cuts)
        batch = self._filled(bucket if recorded is None else recorded.bucket, work, places)
        if recorded is not None:
            return recorded.replay(self.barriers)[: batch.n_wanted]
        recordable = batch.replayable and self._adapters.replayable(batch)
        if graphs is None or not recordable:
            return self._step(batch, batch.n_wanted, cuts, self.barriers)
        # Run the same kernels as will be recorded: this loads them, and results are equal.
        logits = self._step(batch, batch.bucket.wanted, cuts, self.barriers)
        graphs.want(self.spec.name, bucket, partial(self._recorded, batch, cuts), cuts)
        return logits[: batch.n_wanted]

    @torch.inference_mode()
    def hidden(self, work: Sequence[SequenceWork]) -> Tensor:
        batch = self.batch(work)
        self._cuts, self._stops = tuple(self._begin_pass(work)), self.barriers
        self._use(host_reads(self.barriers))
        return self._compute_hidden(batch, batch.n_wanted).cpu()

    @torch.inference_mode()
    def choose(
        self,
        logits: Tensor,
        params: Sequence[Sampling],
        positions: Sequence[int],
        shapes: Mapping[int, sampling.SamplingContext],
    ) -> tuple[list[int | sampling.NoToken], dict[int, sampling.Scores]]:
        """Sample on the device, and on the host only rows that `GpuSampler` has to move there."""
        return self._sampler.sample(logits, params, positions, shapes)

    def batch(self, work: Sequence[SequenceWork]) -> GpuBatch:
        """Return the batch of the job's bucket, filled with it. Raises BrokenPromise as `check`
        does."""
        self.check(work)
        return self._filled(self._bucket(work), work, self._places(work))

    def _places(self, work: Sequence[SequenceWork]) -> LayerPlaces | None:
        return None if self.barriers is None else self.barriers.places(work)

    def _filled(
        self, bucket: Bucket, work: Sequence[SequenceWork], places: LayerPlaces | None
    ) -> GpuBatch:
        batch = self._of(bucket)
        tokens = [token for w in work for token in w.tokens]
        counts = [len(w.tokens) for w in work]
        tables = [w.blocks for w in work]
        starts, adapters = [w.start for w in work], adapters_of(work)
        batch.fill(tokens, starts, counts, tables, wanted_rows(work), adapters, places)
        return batch

    def _bucket(self, work: Sequence[SequenceWork]) -> Bucket:
        blocks = sum(len(w.blocks) for w in work)
        counts = [len(w.tokens) for w in work]
        adapters = len(self.spec.adapters) if any(w.adapter is not None for w in work) else 0
        if max(counts) == 1:
            return Bucket.decode(len(work), blocks, adapters)
        return Bucket.holding(counts, len(wanted_rows(work)), blocks, adapters)

    def _of(self, bucket: Bucket) -> GpuBatch:
        batch = self._kept.get(bucket)
        if batch is not None:
            return batch
        batch = self._chunks.pop(bucket, None)
        if batch is None:
            how = (self._make, self._scratch, self._invariant)
            batch = GpuBatch(self._cache, self.spec.n_heads, bucket, *how)
        if bucket.decodes:
            self._kept[bucket] = batch
            return batch
        if len(self._chunks) == CHUNK_BUCKETS:
            self._chunks.popitem(last=False)
        self._chunks[bucket] = batch
        return batch

    def _worth_recording(self, bucket: Bucket, cuts: Sequence[int]) -> bool:
        """Whether a graph may be recorded of the bucket's passes, which wait for the layers `cuts`.

        Of decodes; of prefills up to `PREFILL_BYTES` that wait for no layer, whose pieces would
        take the memory of many, and without adapters, whose tiles a prefill counts on the host.
        """
        if bucket.decodes:
            return True
        spec = self.spec
        attention = (spec.n_heads + 2 * spec.kv_heads) * spec.head_dim
        each = (3 * spec.intermediate + attention + 2 * spec.hidden) * self.dtype.itemsize
        small = bucket.tokens * each <= PREFILL_BYTES
        return small and not cuts and not bucket.adapters

    def _step(self, batch: GpuBatch, n: int, cuts: tuple[int, ...], stops: Stops | None) -> Tensor:
        """Return logits of the first `n` wanted rows, float32."""
        self._cuts, self._stops = cuts, stops
        return self._compute_logits(batch, n)

    @torch.inference_mode()
    def _recorded(self, batch: GpuBatch, cuts: tuple[int, ...], recording: Recording) -> Tensor:
        self._kept[batch.bucket] = batch
        batch.forget_places()
        self._use(ALL_ON_DEVICE)
        return self._step(batch, batch.bucket.wanted, cuts, recording)

    def _use(self, reads: HostReads) -> None:
        """Compute with each segment where the pass that begins reads it."""
        changed = self._reads.units ^ reads.units
        self._reads = reads
        if not changed:
            return
        if self._pointers is None:
            raise BrokenPromise(f"{self.spec.name}: kernels do not find its weights on the host")
        places = zip(self._addresses, self._pointers, strict=True)
        now = [there if i in reads.units else here for i, (here, there) in enumerate(places)]
        own = len(self._host.segments)
        with torch.inference_mode(False):  # parameters take no tensors of that mode
            for i in changed:
                if i < own:
                    self._move(i, now[i])
        if any(i >= own for i in changed):
            moved = any(i >= own for i in reads.units)
            self._adapters.use(self._adapters_at(now).lora if moved else self._lora)

    def _adapters_at(self, addresses: Sequence[int]) -> GpuAdapters:
        """Return the adapters, with each segment of model and adapters at its address."""
        groups = self._adapted(self._host, addresses[len(self._host.segments) :])
        return GpuAdapters(groups, self.dtype, self._device, self._view, self._scratch)

    def _reach(self, layer: int, *_: Any) -> None:
        if layer in self._cuts and self._stops is not None:
            self._stops.wait(layer)

    def _leave(self, layer: int, *_: Any) -> None:
        if layer in self._cuts and self._stops is not None:
            self._stops.used(layer)


class GpuTransformersModel(GpuExecutor):
    """Runs the jobs of any decoder through its own module."""

    def _set_up(self, host: HostModel, addresses: tuple[int, ...]) -> None:
        self._module: Any = placed(host, addresses, self._view, self._device)
        self._segments = host.segments
        self._call = RowCall(self._module)
        self._modules = AdaptedModules(self._module, self._adapters.adds())
        for i, layer in enumerate(layers_of(self._module, host)):
            layer.register_forward_pre_hook(partial(self._reach, i))
            layer.register_forward_hook(partial(self._leave, i))

    def _move(self, segment: int, address: int) -> None:
        move(self._module, self._segments[segment], address, self._view)

    def _adapted(self, host: HostModel, addresses: Sequence[int]) -> Mapping[Place, GpuLoraGroup]:
        found = targets_of(host.adapters, addresses)
        return {path: GpuLoraGroup(inputs, (target,)) for path, (inputs, target) in found.items()}

    def _compute_logits(self, batch: GpuBatch, n: int) -> Tensor:
        output = self._forward(self._module, batch, batch.wanted)
        logits: Tensor = output.logits[0, :n].float()
        return logits

    def _compute_hidden(self, batch: GpuBatch, n: int) -> Tensor:
        output = self._forward(self._module.base_model, batch)
        hidden: Tensor = output.last_hidden_state[0, batch.wanted[:n]]
        return hidden

    def _forward(self, module: Any, batch: GpuBatch, wanted: Tensor | None = None) -> Any:
        with (
            attention.running(attention.JobContext(batch, batch.out, self.spec.kv_heads)),
            self._modules.job(batch.adapted, head=module is self._module),
        ):
            return self._call(module, batch.tokens, batch.positions, wanted)
