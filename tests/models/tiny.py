"""Small random checkpoints of real architectures, and a served model in plain memory of its own."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from ballast.core.job import SequenceWork
from ballast.core.model import uniform_kv
from ballast.core.request import Sampling
from ballast.core.settings import ModelSettings
from ballast.kernels.gpu.batch import GpuAttention, GpuBatch
from ballast.kernels.workspace import Workspace
from ballast.kv.layout import Layout
from ballast.kv.windows import leave
from ballast.models.encoder import EncoderModel
from ballast.models.fused.model import FusedModel
from ballast.models.fused.workspace import workspace_bytes
from ballast.models.gpu.executor import GpuExecutor, GpuTransformersModel
from ballast.models.gpu.fused import GpuFusedModel
from ballast.models.parallel.model import ParallelModel
from ballast.models.transformers import TransformersModel
from ballast.weights.checkpoint import load_host_model
from ballast.weights.sharding import WHOLE, Shard

GREEDY = Sampling()
ROWS, SAMPLED = 512, 64
"""Of the largest job of the fast path."""


def llama(
    path: Path, *, shard: str | None = None, dtype: torch.dtype = torch.float32, **more: Any
) -> Any:
    """Save a random Llama at `path`; the model itself. Weights are large, so that logits differ."""
    torch.manual_seed(zlib.crc32(str(sorted(more.items())).encode()))
    config = transformers.LlamaConfig(
        **{
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 150,
            "vocab_size": 331,
            "max_position_embeddings": 512,
            "initializer_range": 0.25,
            **more,
        }
    )
    return save(transformers.LlamaForCausalLM(config), path, shard=shard, dtype=dtype)


def save(
    model: Any, path: Path, *, shard: str | None = None, dtype: torch.dtype = torch.float32
) -> Any:
    """Save it in shards of at most `shard`; the model, in `dtype`."""
    model = model.to(dtype).eval()
    model.save_pretrained(path, **({"max_shard_size": shard} if shard else {}))
    return model


class Served:
    """A model whose weights and KV cache lie in plain arrays. `blocks` of KV are there."""

    def __init__(
        self,
        path: Path,
        *,
        blocks: int = 64,
        shard: Shard = WHOLE,
        ranks: Mapping[str, Any] | None = None,
        attention: Callable[[GpuBatch], GpuAttention] | None = None,
        gpu: Mapping[str, Any] | None = None,
        invariant: bool = False,
        **settings: Any,
    ) -> None:
        """`shard`: what part of the model, `ranks`: what that takes besides. `attention`: served as
        from a GPU, by this, and its executor takes `gpu` besides."""
        settings = {"model_impl": "generic", "linear": "plain", **settings}
        asked = ModelSettings(name=path.name, path=str(path), **settings)
        self.host = load_host_model(asked, shard=shard)
        if attention is not None or ranks is not None:  # as GPUs and ranks keep KV
            self.host.spec = uniform_kv(self.host.spec)
        self.spec = self.host.spec
        self.layout = Layout.of(self.spec, 65536)
        self.weights = [np.zeros(n, np.uint8) for n in self.spec.segment_bytes]
        # Bytes of 0xFF are NaN: what has not been written must not be read.
        kv_bytes = self.layout.pages(blocks * self.spec.kv_groups) * self.layout.page_bytes
        self.kv = np.full(kv_bytes + 64, 0xFF, np.uint8)
        base = -(-self.kv.ctypes.data // 64) * 64
        addresses = [w.ctypes.data for w in self.weights]
        where = (self.host, addresses, base, self.layout)
        self.model: TransformersModel | FusedModel | GpuExecutor
        if attention is not None:
            kind = GpuFusedModel if self.host.fused else GpuTransformersModel
            self.model = kind(*where, kv_bytes, torch.device("cpu"), attention, **(gpu or {}))
        elif self.host.fused:
            workspace = Workspace(workspace_bytes(self.spec, ROWS, SAMPLED, self.host.recipe))
            size = (workspace, ROWS, SAMPLED)
            if ranks is None:
                self.model = FusedModel(*where, *size, invariant=invariant)
            else:
                self.model = ParallelModel(*where, *size, **ranks)
        elif self.spec.pooling:
            self.model = EncoderModel(*where)
        else:
            self.model = TransformersModel(*where, invariant=invariant)
        self.fill()

    def fill(self) -> None:
        """What activation does: copy the segments."""
        for array, address in zip(self.weights, self.host.addresses, strict=True):
            ctypes.memmove(array.ctypes.data, address, array.nbytes)

    def table(self, blocks: Sequence[int]) -> list[int]:
        """Return a block table of a sequence: in place of each of `blocks`, one of each group."""
        groups = self.spec.kv_groups
        return [block * groups + group for block in blocks for group in range(groups)]

    def logits(self, *work: SequenceWork) -> torch.Tensor:
        return self.model.logits(work).clone()

    def generate(
        self, prompts: Sequence[Sequence[int]], n: int, chunk: int = 10_000
    ) -> list[list[int]]:
        """Greedy: all prompts together, each prefilled in chunks, then decoding side by side."""
        bt = self.spec.block_tokens
        sequences = [list(p) for p in prompts]
        done = [0] * len(prompts)
        each = -(-(max(map(len, prompts)) + n) // bt)
        order = np.random.default_rng(0).permutation(each * len(prompts)).tolist()
        tables = [self.table(order[i :: len(prompts)]) for i in range(len(prompts))]
        while True:
            work = []
            for i, tokens in enumerate(sequences):
                if len(tokens) == len(prompts[i]) + n:
                    continue
                end = min(len(tokens), done[i] + chunk)
                leave(self.spec, tables[i], done[i])
                sample = GREEDY if end == len(tokens) else None
                work.append(SequenceWork(str(i), tokens[done[i] : end], done[i], tables[i], sample))
                done[i] = end
            if not work:
                return [s[len(p) :] for s, p in zip(sequences, prompts, strict=True)]
            for sampled in self.model.run(work):
                sequences[int(sampled.request_id)].append(sampled.token)

    def close(self) -> None:
        self.host.close()
