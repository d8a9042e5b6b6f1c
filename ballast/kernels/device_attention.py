"""Which implementation of attention a model on a GPU gets: what is importable, and what fits it.

All write K and V by our own kernel, and all are compared with one reference. The order is that of
`NAMES`; nothing has been measured yet that would change it. What is not said to fit is not tried.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from ballast.core.errors import ConfigError
from ballast.kernels.device_batch import Attention, DeviceBatch
from ballast.kernels.device_kv import DeviceKv

NAMES = ("varlen", "flashinfer", "triton")
"""From the first to be taken to the last."""
HALVES = (torch.float16, torch.bfloat16)
WIDEST = 256
"""Head dimension up to which FlashAttention has kernels."""

_log = logging.getLogger(__name__)
_logged: set[str] = set()


@dataclass(frozen=True, slots=True)
class Fit:
    """What decides whether an implementation can serve a model on a device."""

    dtype: torch.dtype
    head_dim: int
    block_tokens: int
    capability: tuple[int, int]
    """Of the device, as CUDA counts."""
    sinks: bool = False
    """Of its layers."""

    @classmethod
    def of(cls, kv: DeviceKv, sinks: bool = False) -> Fit:
        capability = (0, 0)
        if kv.device.type == "cuda":
            capability = torch.cuda.get_device_capability(kv.device)
        return cls(kv.dtype, kv.head_dim, kv.block_tokens, capability, sinks)


def choose(
    kv: DeviceKv, asked: str | None = None, sinks: bool = False
) -> Callable[[DeviceBatch], Attention]:
    """What makes the attention of this model's batches: the first that fits, or the one `asked`.

    `sinks`: whether its layers have any. Says once which it is and why not another. Raises
    ConfigError where the one asked for does not fit, or Triton, which all of them take, is not
    there.
    """
    if find_spec("triton") is None:
        raise ConfigError("device", str(kv.device), "Triton is needed on a GPU")
    reasons = why_not(kv, sinks)
    name = asked or next(name for name in NAMES if reasons[name] is None)
    if name not in reasons or reasons[name] is not None:
        fitting = [n for n in NAMES if reasons[n] is None]
        raise ConfigError("attention", name, f"one of {fitting}: {reasons.get(name, 'unknown')}")
    others = "; ".join(f"{n}: {why}" for n, why in reasons.items() if why is not None)
    line = f"attention on {kv.device} ({kv.dtype}, heads of {kv.head_dim}): {name} ({others})"
    if line not in _logged:
        _logged.add(line)
        _log.info("%s", line)
    module, made = _MADE[name]
    make: Callable[[DeviceBatch], Attention] = getattr(importlib.import_module(module), made)
    return make


def why_not(kv: DeviceKv, sinks: bool = False) -> dict[str, str | None]:
    """By name, what speaks against an implementation for this model."""
    fit = Fit.of(kv, sinks)
    return {name: _WHY_NOT[name](fit) for name in NAMES}


def why_not_varlen(fit: Fit) -> str | None:
    """Of `torch.nn.attention.varlen`; it is FlashAttention 2, unless another was activated."""
    try:
        module = importlib.import_module("torch.nn.attention.varlen")
        parameters: Mapping[str, object] = inspect.signature(module.varlen_attn_out).parameters
    except (ImportError, AttributeError):
        parameters = {}
    if "block_table" not in parameters:
        return f"PyTorch {torch.__version__} has no block tables"
    return "no sinks" if fit.sinks else _why_not_flash(fit, flash_version())


def flash_version() -> str:
    """Which FlashAttention PyTorch calls: FA2, or what `activate_flash_attention_impl` was told."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    return (current() if current else None) or "FA2"


def _why_not_flash(fit: Fit, version: str) -> str | None:
    if fit.dtype not in HALVES:
        return f"no {fit.dtype}"
    if fit.head_dim % 8 or fit.head_dim > WIDEST:
        return f"no heads of {fit.head_dim}"
    # FlashAttention 2 takes blocks of multiples of 256 tokens; the later ones are for one
    # generation of GPUs each.
    if version == "FA2":
        if fit.capability < (8, 0):
            return "the GPU is older than compute capability 8.0"
        return "blocks are not multiples of 256 tokens" if fit.block_tokens % 256 else None
    major = {"FA3": 9, "FA4": 10}.get(version)
    return None if fit.capability[0] == major else f"{version} is not for this GPU"


def why_not_flashinfer(fit: Fit) -> str | None:
    if find_spec("flashinfer") is None:
        return "not installed"
    if fit.dtype not in HALVES:
        return f"no {fit.dtype}"
    if fit.capability < (8, 0):
        return "the GPU is older than compute capability 8.0"
    if fit.sinks:
        # Its function takes them, and only kernels of other backends than the default look.
        return "no sinks"
    return None if fit.head_dim in (64, 128, 256) else f"no heads of {fit.head_dim}"


def _why_not_triton(fit: Fit) -> str | None:
    return None


_WHY_NOT: dict[str, Callable[[Fit], str | None]] = {
    "varlen": why_not_varlen,
    "flashinfer": why_not_flashinfer,
    "triton": _why_not_triton,
}
_MADE = {
    "varlen": ("ballast.kernels.varlen_attention", "VarlenAttention"),
    "flashinfer": ("ballast.kernels.flashinfer_attention", "FlashInferAttention"),
    "triton": ("ballast.kernels.triton_attention", "TritonAttention"),
}
