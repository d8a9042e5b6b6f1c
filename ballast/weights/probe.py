"""Find what a decoder requires of its attention, by running its module on the meta device.

Stand-ins for attention, masks and experts replace the real ones for one call. `transformers` builds
no mask for an attention implementation of our own, so the probe requests one and examines it: a
layer that attends to less than its whole past is found by its mask, whatever its configuration
says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.moe import ExpertsInterface

from ballast.core.model import StateTensor
from ballast.weights.carried_state import StateShapes, carrying
from ballast.weights.latent import latent_size
from ballast.weights.row_call import RowCall
from ballast.weights.spelt_attention import set_attention

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
    latent: int | None
    """Elements of a token's latent, which stands for keys and values; None: there is none."""
    source: int | None
    """Layer that passed the same keys and values before; None: they are the layer's own."""


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
    keys: list[tuple[Tensor, Tensor, int | None]] = field(default_factory=list)
    """Keys, values and layer of each call; no longer when the module has run."""
    states: tuple[StateTensor, ...] = ()
    """What modules prepared by `carry` carry from token to token."""


_trace: ContextVar[ProbeResult] = ContextVar(_NAME)


def probe(module: nn.Module, positions: int) -> ProbeResult:
    """Run a module once, on the meta device, or on the CPU if `make_weightless` has prepared it.

    Raises whatever the module raises if it cannot be run so.
    """
    set_attention(module, _NAME)
    module.set_experts_implementation(_NAME)  # type: ignore[operator]
    trace = ProbeResult(positions)
    token = _trace.set(trace)
    device = next(module.parameters()).device
    ids = torch.zeros(1, _TOKENS, dtype=torch.long, device=device)
    shapes = StateShapes()
    try:
        with torch.no_grad(), carrying(shapes):
            # With a padding mask, `transformers` does not look for packed sequences in positions.
            padding = torch.ones(ids.shape, device=ids.device)
            call, counted = RowCall(module), torch.arange(_TOKENS, device=device)
            output = call(module, ids[0], counted, ids[0, :1], attention_mask=padding)
    finally:
        _trace.reset(token)
        trace.keys.clear()
    trace.logits = tuple(output.logits.shape)
    trace.states = shapes.tensors
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
    layer: int | None = getattr(module, "layer_idx", None)
    mask = _known(trace, attention_mask)
    if (spelt := more.pop("spelt", None)) is not None:
        mask, more["a bias of its own"] = _together(trace, *spelt)
    source = next((own for k, v, own in trace.keys if k is key and v is value), None)
    trace.keys.append((key, value, layer))
    trace.calls.append(
        AttentionCall(
            layer=layer,
            query=tuple(query.shape),
            key=tuple(key.shape),
            value=tuple(value.shape),
            scale=scaling,
            softcap=softcap,
            window=sliding_window,
            mask=mask,
            causal=bool(causal),
            sinks=None if s_aux is None else tuple(s_aux.shape),
            more=tuple(
                sorted(
                    name
                    for name, value in more.items()
                    if name not in _HARMLESS and value is not None and value is not False
                )
            ),
            latent=latent_size(module),
            source=source,
        )
    )
    return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None


def _known(trace: ProbeResult, given: Tensor | None) -> Mask | None:
    return next((mask for made, mask in trace.masks if made is given), None)


def _together(
    trace: ProbeResult, operands: Sequence[Tensor], own: Sequence[int | None]
) -> tuple[Mask | None, bool]:
    """Return the mask among what a module that spells its attention out adds to its scores, within
    the window of a mask of its `own`, and whether it adds something else."""
    found = [mask for x in operands if (mask := _known(trace, x)) is not None]
    others = [x for x in operands if _known(trace, x) is None]
    mask = next(iter(found), Mask(True) if own else None)
    for window in own:
        mask = Mask(True, window) if window is not None and mask == Mask(True) else mask
    return mask, len(found) > 1 or any(bool(x.any()) for x in others)


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
    down: Tensor | None = getattr(module, "down_proj", None)  # None: it is run without
    if down is not None:
        width = down[0].numel() // hidden_states.shape[-1]
        trace.expert_intermediate = max(trace.expert_intermediate, width)
    trace.experts_per_token = max(trace.experts_per_token, top_k_index.shape[-1])
    return torch.zeros_like(hidden_states)


AttentionInterface.register(_NAME, _attend)
AttentionMaskInterface.register(_NAME, _mask)
ExpertsInterface.register(_NAME, _experts)
