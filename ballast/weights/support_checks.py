"""Refuse models that cannot be served: each check raises UnsupportedModel with the reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from ballast.core.errors import UnsupportedModel
from ballast.weights.carried_state import state_modules
from ballast.weights.config import text_config
from ballast.weights.meta_module import is_wrapper
from ballast.weights.probe import AttentionCall
from ballast.weights.row_call import lacking


def check_config(config: Any, kind: str) -> None:
    """Refuse quantized weights, encoders, and models that generate no text."""
    text = text_config(config)
    for part in (config, text):
        for key in ("quantization_config", "compression_config"):
            method = getattr(part, key, None)
            if method is not None:
                raise UnsupportedModel(
                    f"{kind}: its weights are quantised ({_quantization_method(method)}), which is "
                    "not supported"
                )
    if getattr(config, "is_encoder_decoder", False) or getattr(text, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{kind}: it has an encoder, whose output its decoder attends to")
    if type(config) not in AutoModelForCausalLM._model_mapping and not (
        is_wrapper(config) and type(config) in AutoModelForImageTextToText._model_mapping
    ):
        raise UnsupportedModel(f"{kind}: transformers generates no text with it")


def check_module(module: nn.Module, kind: str) -> None:
    """Refuse convolutions outside of modules that carry a state, and code that accepts neither
    positions nor the tokens to compute logits at."""
    carried = state_modules(module)
    for path, part in module.named_modules():
        if isinstance(part, nn.Conv1d) and path.rpartition(".")[0] not in carried:
            raise UnsupportedModel(
                f"{kind}: it has convolutions, over sounds or over tokens, whose state "
                "transformers' cache does not hold"
            )
    if (what := lacking(module)) is not None:
        raise UnsupportedModel(f"{kind}: transformers' code for it cannot be given {what}")


def check_attention(
    calls: Sequence[AttentionCall], n_layers: int, positions: int, kind: str, carries: bool
) -> None:
    """Refuse a model whose layers attend differently, bypass our attention, or require more of
    it. `carries`: some layers carry a state, and need not attend."""
    attending = [c.layer for c in calls]
    least = 1 if carries else n_layers
    if len(calls) < least or attending != [i for i in range(n_layers) if i in attending]:
        raise UnsupportedModel(
            f"{kind}: its attention cannot be replaced: its {n_layers} layers call transformers' "
            f"interface for that {len(calls)} times"
        )
    first = calls[0]
    for c in calls:
        if c.sinks not in (None, (c.query[1],)):
            raise UnsupportedModel(f"{kind}: its sinks are {c.sinks}, not one for each head")
        if c.more or c.scale is None:
            what = ", ".join(c.more) or "a scale of its own"
            raise UnsupportedModel(f"{kind}: its attention needs {what}, unknown to Ballast's")
        if c.mask is None or not c.mask.causal or not c.causal:
            raise UnsupportedModel(
                f"{kind}: layer {c.layer} does not see just the past, or just a window of it"
            )
        window = None if c.window is None or c.window >= positions else c.window
        if window != c.mask.window:
            raise UnsupportedModel(
                f"{kind}: layer {c.layer} passes on a window of {window} tokens, its mask has one "
                f"of {c.mask.window}"
            )
        if (c.query[1], c.softcap) != (first.query[1], first.softcap):
            raise UnsupportedModel(f"{kind}: its layers differ in the heads of their attention")
        if c.key[1] != c.value[1] or c.query[3] != c.key[3]:
            raise UnsupportedModel(
                f"{kind}: its queries, keys and values are of {c.query}, {c.key}, {c.value}"
            )
        if c.query[1] % c.key[1]:
            raise UnsupportedModel(f"{kind}: {c.key[1]} heads of keys for {c.query[1]} of queries")


def kv_sizes(calls: Sequence[AttentionCall]) -> tuple[int, int]:
    """Return the (heads, head size) of KV in which all layers' keys and values fit."""
    return (
        max(c.key[1] for c in calls),
        max(size for c in calls for size in (c.key[3], c.value[3])),
    )


def _quantization_method(quantization: Any) -> str:
    """Return the name of a quantization's method, if its configuration states it."""
    values = quantization if isinstance(quantization, dict) else vars(quantization)
    name = values.get("quant_method") or values.get("quant_algo") or "by an unnamed method"
    return str(getattr(name, "value", name))
