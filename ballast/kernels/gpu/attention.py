"""Choose the attention kernels on a GPU: our Triton kernels, or plain PyTorch operations.

One implementation for every model, dtype and block size. FlashInfer and PyTorch's `varlen_attn`
were removed: `docs/decisions/028-what-no-gpu-has-run-is-narrow.md`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.util import find_spec

import torch

from ballast.kernels.gpu.batch import GpuAttention, GpuBatch


def attention_kernels(device: torch.device) -> Callable[[GpuBatch], GpuAttention]:
    """Return the attention class for batches of `device`: Triton's on a GPU, where installed."""
    on_gpu = device.type == "cuda" and find_spec("triton") is not None
    names = ("triton.attention", "TritonAttention")
    module, kind = names if on_gpu else ("plain.attention", "PlainAttention")
    made: Callable[[GpuBatch], GpuAttention] = getattr(
        importlib.import_module(f"ballast.kernels.{module}"), kind
    )
    return made
