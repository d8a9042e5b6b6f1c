"""Any decoder that `transformers` knows, its weights and KV cache in memory that comes and goes.

The module is built once, on the meta device; its parameters become views of device addresses that
stay the same as long as the model exists. Nothing there is touched until a job runs, and jobs run
only while the model is resident.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ballast.core.errors import BrokenPromise, UnsupportedModel
from ballast.core.job import Sampled, SequenceWork
from ballast.kernels import sampling
from ballast.kernels.paged_attention import KvArray, PagedBatch, warm_up
from ballast.memory.tensor import tensor_at
from ballast.models import attention
from ballast.weights.architecture import build
from ballast.weights.host import HostModel, Segment

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class KvLayout(Protocol):
    """What is asked of `ballast.kv.layout.Layout`."""

    @property
    def stride_bytes(self) -> int: ...


class ServedModel:
    """Runs the jobs of one model (`ballast.engine.runner.Executor`).

    One job at a time; different models may run at the same time on different threads.
    """

    def __init__(
        self,
        host: HostModel,
        segment_addresses: Sequence[int],
        kv_base: int,
        layout: KvLayout,
    ) -> None:
        """`segment_addresses[i]`: where segment i of `host` is while the model is resident.

        `kv_base`: address of block 0. Neither needs to be backed by memory yet. Raises
        UnsupportedModel where the module keeps state that cannot be set up without its weights.
        """
        self.spec = spec = host.spec
        self.dtype = DTYPES[spec.dtype]
        if layout.stride_bytes % self.dtype.itemsize:
            raise BrokenPromise(f"{spec.name}: blocks are {layout.stride_bytes} bytes apart")
        self._kv = KvArray(
            kv_base,
            layout.stride_bytes // self.dtype.itemsize,
            spec.n_layers,
            spec.block_tokens,
            spec.kv_heads,
            spec.head_dim,
            self.dtype,
        )
        self._module = build(host.config)
        self._module.set_attn_implementation(attention.NAME)  # type: ignore[operator]
        _place(self._module, host.segments, segment_addresses)
        _set_up_buffers(self._module, host.config.model_type)
        warm_up(self.dtype)
        sampling.warm_up()

    def run(self, work: Sequence[SequenceWork]) -> list[Sampled]:
        """Compute KV for all of `work`, and sample where it asks for that, in its order."""
        sampled = [w for w in work if w.sample is not None]
        logits = self.logits(work)
        if not sampled:
            return []
        tokens, logprobs = sampling.sample(
            logits,
            [w.sample for w in sampled if w.sample is not None],
            [w.end for w in sampled],
        )
        return [
            Sampled(w.request_id, token, logprob)
            for w, token, logprob in zip(sampled, tokens, logprobs, strict=True)
        ]

    @torch.inference_mode()
    def logits(self, work: Sequence[SequenceWork]) -> Tensor:
        """(n, vocab) float32: at the last position of each sequence in `work` that samples."""
        counts = [len(w.tokens) for w in work]
        starts = [w.start for w in work]
        for w in work:
            if w.end > self.spec.max_model_len:
                raise BrokenPromise(
                    f"{w.request_id}: {w.end} tokens, the model has {self.spec.max_model_len}"
                )
        batch = PagedBatch(self._kv, self.spec.n_heads, starts, counts, [w.blocks for w in work])
        ends = np.cumsum(counts)
        rows = [end - 1 for w, end in zip(work, ends, strict=True) if w.sample is not None]
        tokens = np.fromiter((t for w in work for t in w.tokens), np.int64, batch.n_tokens)
        # Position of a row: its index, less where its sequence begins, plus where that starts.
        shift = np.asarray(starts) - (ends - counts)
        positions = np.arange(batch.n_tokens) + np.repeat(shift, counts)
        with attention.running(attention.JobContext.of(batch)):
            output = self._module(
                input_ids=torch.from_numpy(tokens)[None],
                position_ids=torch.from_numpy(positions)[None],
                use_cache=False,
                logits_to_keep=torch.tensor(rows, dtype=torch.int64),
            )
        logits: Tensor = output.logits[0].float()
        return logits


def _place(module: nn.Module, segments: Sequence[Segment], addresses: Sequence[int]) -> None:
    """Make every parameter (and persistent buffer) a view of its place; touches nothing."""
    left = set(module.state_dict())
    for segment, base in zip(segments, addresses, strict=True):
        for packed in segment.tensors:
            view = tensor_at(base + packed.offset, packed.shape, DTYPES[packed.dtype])
            # Tied names share one Parameter, as they did before.
            parameter = nn.Parameter(view, requires_grad=False)
            for name in packed.names:
                path, _, leaf = name.rpartition(".")
                owner = module.get_submodule(path)
                if leaf in owner._parameters:
                    owner._parameters[leaf] = parameter
                else:
                    owner._buffers[leaf] = view
                left.discard(name)
    if left:
        raise BrokenPromise(f"no segment holds {sorted(left)}")


def _set_up_buffers(module: nn.Module, kind: str) -> None:
    """Give buffers that no checkpoint holds (rotary frequencies) their values, on the CPU.

    They were made on the meta device. `transformers` knows how to set each up; parameters are
    marked so that it leaves those alone. What it leaves alone, or draws at random, differs when that
    is done twice.
    """
    waiting: dict[str, nn.Module] = {}
    for path, owner in module.named_modules():
        for leaf, buffer in owner._buffers.items():
            if buffer is not None and buffer.is_meta:
                waiting[f"{path}.{leaf}"] = owner
    for parameter in module.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    initialise: Any = module._init_weights
    found: list[dict[str, Tensor]] = []
    for before in (0, 1):
        for path, owner in waiting.items():
            leaf = path.rpartition(".")[2]
            owner._buffers[leaf] = torch.full_like(_buffer(owner, leaf), before, device="cpu")
        for owner in dict.fromkeys(waiting.values()):
            with torch.no_grad():
                initialise(owner)
        found.append({p: _buffer(o, p.rpartition(".")[2]).clone() for p, o in waiting.items()})
    for path in waiting:
        if not torch.equal(found[0][path], found[1][path]):
            raise UnsupportedModel(f"{kind}: nothing says how to set up its buffer {path}")


def _buffer(owner: nn.Module, leaf: str) -> Tensor:
    buffer = owner._buffers[leaf]
    assert buffer is not None
    return buffer
