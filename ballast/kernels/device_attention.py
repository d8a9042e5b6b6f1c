"""Which attention models on a GPU run: our Triton kernels, or PyTorch's operations without Triton.

One implementation for every model, dtype and block size. FlashInfer and PyTorch's `varlen_attn`
were removed: `docs/decisions/028-what-no-gpu-has-run-is-narrow.md`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.util import find_spec

import torch

from ballast.kernels.device_batch import Attention, DeviceBatch


def attention_kernels(device: torch.device) -> Callable[[DeviceBatch], Attention]:
    """Return the attention class for batches of `device`: Triton's on a GPU, where installed."""
    on_gpu = device.type == "cuda" and find_spec("triton") is not None
    names = ("triton_attention", "TritonAttention")
    module, kind = names if on_gpu else ("plain_attention", "PlainAttention")
    made: Callable[[DeviceBatch], Attention] = getattr(
        importlib.import_module(f"ballast.kernels.{module}"), kind
    )
    return made
