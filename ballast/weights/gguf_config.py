"""Translate a GGUF header to the configuration and the tensors' names of `transformers`.

A header key, an architecture or a tensor that is not known here is refused by name: what it means
would be left out of the computation without a word.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

from ballast.core.errors import UnsupportedModel

_ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}
"""`model_type` and class by `general.architecture`. Mistral's files are `llama`'s."""
PERMUTED = frozenset({"llama"})
"""Architectures whose files hold the rows of queries and keys in the order of Meta's rotary
embeddings."""

_KEYS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
"""Keys that a header must have, by what `transformers` calls them."""
_OTHER_KEYS = frozenset({
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "vocab_size",
    "rope.dimension_count", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.finetuned", "tensor_data_layout",
    "use_parallel_residual",
})  # fmt: skip
_ABSENT_IF_ZERO = frozenset({"attention.sliding_window", "expert_count", "expert_used_count"})

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_IN_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.([a-z_]+)\.(weight|bias)")
ROPE_FACTORS = "rope_freqs.weight"
"""What rotary frequencies are divided by, in place of Llama 3's settings."""


def tensor_name(name: str) -> str:
    """Return what `transformers` calls a tensor. Raises UnsupportedModel for an unknown one."""
    if name in _TOP:
        return _TOP[name]
    found = _IN_LAYER.fullmatch(name)
    if found is None or found[2] not in _PARTS:
        raise UnsupportedModel(f"GGUF: its tensor {name!r:.100} is not one of a Llama-like decoder")
    return f"model.layers.{found[1]}.{_PARTS[found[2]]}.{found[3]}"


def config_values(
    values: Mapping[str, Any], tensors: Collection[str], factors: list[float] | None = None
) -> dict[str, Any]:
    """Return the values of config.json. `tensors`: names of all; `factors`: elements of
    `ROPE_FACTORS`, if there.

    Raises UnsupportedModel with what is unknown or missing.
    """
    name = values.get("general.architecture")
    if not isinstance(name, str) or name not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise UnsupportedModel(f"GGUF: its architecture {name!r:.80} is not one of {known}")
    own = {k.removeprefix(f"{name}."): v for k, v in values.items() if k.startswith(f"{name}.")}
    _check_keys(name, own)
    found = {theirs: _number(name, own, key) for key, theirs in _KEYS.items()}
    heads = found["num_attention_heads"]
    head_dim = own.get("attention.key_length", found["hidden_size"] // max(1, heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.get(key, head_dim) != head_dim:
            what = f"{name}.{key} is {own[key]!r:.40}, and its heads have {head_dim!r:.40}"
            raise UnsupportedModel(f"GGUF: {what}; others than these are not served")
    kind, architecture = _ARCHITECTURES[name]
    found |= {
        "architectures": [architecture],
        "model_type": kind,
        "head_dim": head_dim,
        "num_key_value_heads": _number(name, {"attention.head_count_kv": heads} | own, _KV_HEADS),
        "vocab_size": len(values.get("tokenizer.ggml.tokens", ())) or own.get("vocab_size"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "rope_parameters": _rope(name, own, factors),
        "hidden_act": "silu",
    }
    if kind == "llama":
        found["attention_bias"] = "blk.0.attn_q.bias" in tensors
        found["mlp_bias"] = "blk.0.ffn_gate.bias" in tensors
    if kind == "qwen3":
        found["attention_bias"] = "blk.0.attn_q.bias" in tensors
    return found


_KV_HEADS = "attention.head_count_kv"


def _check_keys(name: str, own: Mapping[str, Any]) -> None:
    for key, value in own.items():
        if key in _KEYS or key in _OTHER_KEYS or (key in _ABSENT_IF_ZERO and not value):
            continue
        what = f"its header's {name}.{key:.80} ({value!r:.40})"
        raise UnsupportedModel(f"GGUF: {what} is not among what is served")


def _number(name: str, own: Mapping[str, Any], key: str) -> Any:
    """Return a number above 0. Raises UnsupportedModel, for lists by layer, too."""
    found = own.get(key)
    if isinstance(found, list) and found and all(one == found[0] for one in found):
        found = found[0]
    if type(found) not in (int, float) or not 0 < found < 2**31:  # type: ignore[operator]
        raise UnsupportedModel(f"GGUF: its header's {name}.{key} is {found!r:.40}, not a number")
    return found


def _rope(name: str, own: Mapping[str, Any], factors: list[float] | None) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": float(own.get("rope.freq_base", 10000.0))}
    kind = own.get("rope.scaling.type", "none")
    if kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": float(_number(name, own, "rope.scaling.factor"))}
        if kind == "yarn":
            key = "rope.scaling.original_context_length"
            rope["original_max_position_embeddings"] = _number(name, own, key)
    elif kind == "none":
        rope["rope_type"] = "default"
    else:
        raise UnsupportedModel(f"GGUF: its rotary embeddings are scaled by {kind!r:.40}")
    if factors is None:
        return rope
    if kind == "none" and (llama3 := _llama3(rope["rope_theta"], factors)) is not None:
        return llama3
    raise UnsupportedModel(f"GGUF: its {ROPE_FACTORS} are others than Llama 3's")


def _llama3(theta: float, factors: list[float]) -> dict[str, Any] | None:
    """Return Llama 3's settings if its frequencies are divided by these; else None."""
    low, high, context = 1.0, 4.0, 8192
    factor = round(max(factors), 3)
    for i, given in enumerate(factors):
        length = 2 * math.pi * theta ** (i / len(factors))
        smooth = min(1.0, max(0.0, (context / length - low) / (high - low)))
        expected = 1 / ((1 - smooth) / factor + smooth)
        if not math.isclose(given, expected, rel_tol=1e-3):
            return None
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }
