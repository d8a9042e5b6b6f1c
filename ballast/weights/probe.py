"""Find what a decoder requires of its attention, by running its module on the meta device.

Stand-ins for attention, masks and experts replace the real ones for one call. `transformers` builds
no mask for an attention implementation of our own, so the probe requests one and examines it: a
layer that attends to less than its whole past is found by its mask, whatever its configuration
says.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.moe import ExpertsInterface

_NAME = "ballast_probe"
_TOKENS = 3
_HARMLESS = {"dropout", "logits_to_keep", "position_ids", "use_cache"}


@dataclass(frozen=True, slots=True)
class Mask:
    """Positions that a query attends to: if `causal`, the last `window`, or all before it."""

    causal: bool
    window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """One call of the attention. Shapes are (1, heads, tokens, head_dim)."""

    layer: int | None
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    scale: float | None
    softcap: float | None
    window: int | None
    """The window passed as an argument of attention."""
    mask: Mask | None
    """The mask passed; None: there was none, or one that was altered on its way."""
    causal: bool
    sinks: tuple[int, ...] | None
    """Shape of the sinks: one more score for each head."""
    more: tuple[str, ...]
    """Names of arguments beyond all of these."""


@dataclass(slots=True)
class ProbeResult:
    """Arguments that one call of a module passed to attention, masks and experts."""

    positions: int
    """Most tokens of a sequence; windows are found up to that length."""
    calls: list[AttentionCall] = field(default_factory=list)
    """Calls of the attention, in their order."""
    logits: tuple[int, ...] = ()
    """Shape of the logits, which were requested at one position."""
    experts_per_token: int = 0
    expert_intermediate: int = 0
    masks: list[tuple[Tensor, Mask]] = field(default_factory=list)


_trace: ContextVar[ProbeResult] = ContextVar(_NAME)


def probe(module: nn.Module, positions: int) -> ProbeResult:
    """Run a module once, on the meta device, or on the CPU if `make_weightless` has prepared it.

    Raises whatever the module raises if it cannot be run so.
    """
    module.set_attn_implementation(_NAME)  # type: ignore[operator]
    module.set_experts_implementation(_NAME)  # type: ignore[operator]
    trace = ProbeResult(positions)
    token = _trace.set(trace)
    device = next(module.parameters()).device
    ids = torch.zeros(1, _TOKENS, dtype=torch.long, device=device)
    try:
        with torch.no_grad():
            # With a padding mask, `transformers` does not look for packed sequences in positions.
            padding = torch.ones(ids.shape, device=ids.device)
            output = module(
                input_ids=ids, attention_mask=padding, use_cache=False, logits_to_keep=ids[0, :1]
            )
    finally:
        _trace.reset(token)
    trace.logits = tuple(output.logits.shape)
    return trace


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    trace = _trace.get()
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    trace.calls.append(
        AttentionCall(
            layer=getattr(module, "layer_idx", None),
            query=tuple(query.shape),
            key=tuple(key.shape),
            value=tuple(value.shape),
            scale=scaling,
            softcap=softcap,
            window=sliding_window,
            mask=next((mask for made, mask in trace.masks if made is attention_mask), None),
            causal=bool(causal),
            sinks=None if s_aux is None else tuple(s_aux.shape),
            more=tuple(
                sorted(
                    name
                    for name, value in more.items()
                    if name not in _HARMLESS and value is not None and value is not False
                )
            ),
        )
    )
    return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    device: torch.device,
    **unused: Any,
) -> Tensor:
    trace = _trace.get()
    mask = torch.ones(batch_size, 1, q_length, kv_length, dtype=torch.bool, device=device)
    trace.masks.append((mask, _look_into(mask_function, trace.positions)))
    return mask


def _look_into(function: Callable[..., Any], positions: int) -> Mask:
    """Evaluate a mask function for late positions. A window is the same at all of them; chunks, for
    instance, are not."""
    windows = set()
    for q in {positions - 1, positions - 2, positions // 2}:
        keys = torch.arange(q + 2)
        try:
            seen = function(torch.tensor(0), torch.tensor(0), torch.tensor(q), keys)
            n = int(seen.sum())
            # A window sees exactly the last n positions up to the query's own.
            if n == 0 or not bool(seen[q + 1 - n : q + 1].all()) or seen.shape != keys.shape:
                return Mask(False)
        except Exception:  # noqa: BLE001 - one that cannot be asked is none that we know
            return Mask(False)
        if n <= q:
            windows.add(n)
    return Mask(True, min(windows, default=None)) if len(windows) <= 1 else Mask(False)


def _experts(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    trace = _trace.get()
    down: Tensor = module.down_proj  # type: ignore[assignment]
    width = down[0].numel() // hidden_states.shape[-1]
    trace.experts_per_token = max(trace.experts_per_token, top_k_index.shape[-1])
    trace.expert_intermediate = max(trace.expert_intermediate, width)
    return torch.zeros_like(hidden_states)


AttentionInterface.register(_NAME, _attend)
AttentionMaskInterface.register(_NAME, _mask)
ExpertsInterface.register(_NAME, _experts)
