"""A Llama of random weights that are made on a GPU, in pages, as if they had been brought there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch
from transformers import LlamaForCausalLM

from ballast.core.job import SequenceWork
from ballast.core.model import ModelSpec
from ballast.core.request import Sampling
from ballast.core.units import ceil_div
from ballast.kv.layout import Layout
from ballast.memory.cuda.calls import Driver
from ballast.memory.cuda.tensor import cuda_tensor_at
from ballast.memory.cuda.vm import CudaVm
from ballast.models.gpu.executor import GpuExecutor, GpuTransformersModel
from ballast.models.gpu.fused import GpuFusedModel
from ballast.models.gpu.graphs import GraphCache
from ballast.weights import packing
from ballast.weights.architecture import Architecture
from ballast.weights.host import HostBytes, HostModel
from ballast.weights.inspection import inspect_model
from ballast.weights.segment import Segment, pack


class _Nowhere:
    """Stands for bytes in host memory that nobody reads."""

    def __init__(self, n: int) -> None:
        self._n = n

    def addresses(self) -> tuple[int, ...]:
        return (0,) * self._n


def segments_of(architecture: Architecture, dtype: str, fused: bool) -> tuple[Segment, ...]:
    """As they lie for the fast path of a GPU, or for the generic one."""
    layout = packing.fused(architecture, dtype, packed=False) if fused else None
    return tuple(pack(*s) for s in layout or packing.as_stored(architecture, dtype))


def spec_of(config: Any, dtype: str = "bfloat16", fused: bool = True) -> ModelSpec:
    """Of a Llama of that configuration, in blocks of 16 tokens."""
    architecture = inspect_model(config)
    segments = segments_of(architecture, dtype, fused)
    return ModelSpec(
        name="random",
        n_layers=architecture.n_layers,
        n_heads=architecture.heads,
        kv_heads=architecture.kv_heads,
        head_dim=architecture.head_dim,
        hidden=architecture.hidden,
        intermediate=architecture.intermediate,
        vocab=architecture.vocab,
        dtype=dtype,
        max_model_len=config.max_position_embeddings,
        block_tokens=16,
        segment_bytes=tuple(s.n_bytes for s in segments),
        fingerprint="",
    )


def reference(config: Any, batch: int, context: int, device: torch.device) -> Callable[[], object]:
    """A decode step of `transformers`, with weights and a cache of its own."""
    with device:
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
        ids = torch.zeros((batch, context), dtype=torch.int64)
    with torch.inference_mode():
        cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values

    def step() -> None:
        with torch.inference_mode():
            result = model(ids[:, :1], past_key_values=cache, use_cache=True)
            result.logits[:, -1].argmax(-1).tolist()
            cache.crop(-1)

    return step


class Random:
    """Weights in bfloat16, and KV for `sequences` of `context` tokens, of any content."""

    def __init__(
        self,
        driver: Driver,
        device: torch.device,
        config: Any,
        page: int,
        sequences: int,
        context: int,
        make: Any = None,
        graphs: GraphCache | None = None,
        impl: str = "fused",
    ) -> None:
        """`make`: attention, chosen if not given; `graphs`: of the device; `impl`: as `model_impl`,
        or `gemms`: fused, but without our own kernel for a decode of one sequence; `invariant`:
        fused, a row's result independent of the others. Raises
        DeviceError; MemoryError where pages are short."""
        self._device, self._sequences = device, sequences
        architecture = inspect_model(config)
        fused = impl != "generic"
        segments = segments_of(architecture, "bfloat16", fused)
        self.spec = spec = spec_of(config, fused=fused)
        memory = cast(HostBytes, _Nowhere(len(segments)))
        windows = architecture.windows
        host = HostModel(
            spec, lambda: config, Path(), segments, memory, windows=windows, fused=fused
        )
        layout = Layout.of(spec, page)
        self._each = ceil_div(context, spec.block_tokens)
        blocks = self._each * sequences
        sizes = [ceil_div(n, page) for n in spec.segment_bytes]
        kv_pages = ceil_div(blocks, layout.blocks_per_slab) * layout.slab_pages
        n = sum(sizes) + kv_pages
        self._vm = CudaVm(driver, 0, page, n)
        try:
            short = self._vm.populate(range(n))
            if short is not None:
                raise MemoryError(f"{short.pages} of {n} pages are not to be had")
            r = self._vm.reserve(n * page)
            self._vm.map(r, 0, range(n))
            addresses, at = [], 0
            for size in (*sizes, kv_pages):
                addresses.append(r.address(at))
                at += size
            for address, segment in zip(addresses, segments, strict=False):
                count = segment.n_bytes // 2
                cuda_tensor_at(address, (count,), torch.bfloat16, device).normal_(0, 0.02)
            kv = addresses[-1]
            cuda_tensor_at(kv, (kv_pages * page,), torch.uint8, device).zero_()
            where = (addresses[:-1], kv, layout, kv_pages * page, device)
            self.served = self._model(impl, host, *where, make, graphs)
        except BaseException:
            self._vm.close()
            raise

    def _model(self, impl: str, *where: Any) -> GpuExecutor:
        if impl == "generic":
            return GpuTransformersModel(*where)
        return GpuFusedModel(*where, one_row=impl != "gemms", invariant=impl == "invariant")

    @property
    def weight_bytes(self) -> int:
        """That a decode step reads: all but the embeddings' table, of which it reads some rows."""
        return sum(self.spec.segment_bytes) - 2 * self.spec.vocab * self.spec.hidden

    @property
    def kv_bytes(self) -> int:
        """Of one token."""
        return self.spec.kv_bytes_per_token

    def decodes(self, batch: int, context: int) -> list[SequenceWork]:
        """A job in which each of so many sequences gets the token after `context` others."""
        return [
            SequenceWork(
                request_id=str(i),
                tokens=[i],
                start=context,
                blocks=range(i * self._each, (i + 1) * self._each),
                sample=Sampling(),
            )
            for i in range(batch)
        ]

    def prefill(self, tokens: int) -> list[SequenceWork]:
        """A job of so many first tokens of one sequence."""
        blocks = range(ceil_div(tokens, self.spec.block_tokens))
        return [SequenceWork("0", list(range(tokens)), 0, blocks, Sampling())]

    def __enter__(self) -> Random:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        self.served.close()
        self._vm.close()
