"""Small random models of many families, made so that a fault in serving them would show.

Weights are large and the head is its own, so that greedy output does not settle on one token. Norms
and biases, which a new model has at one and zero, are drawn at random too. Windows are shorter than
the prompts, caps small enough to bend scores, and tokens go through several experts of a layer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from ballast.weights.meta_module import left_out
from benchmarks.tiny import VOCAB, tiny

__all__ = ["FAMILIES", "VOCAB", "config", "make"]

_WINDOW = {"sliding_window": 24}
_MIXED: dict[str, Any] = {
    **_WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_LOCAL = {"num_local_experts": 6, "num_experts_per_tok": 3}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
_ROUTED = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {**_EXPERTS, "mlp_only_layers": [1]},
    "mixtral": {**_LOCAL, **_WINDOW},
    "opt": {
        "word_embed_proj_dim": 64,
        "ffn_dim": 96,
        "init_std": 0.25,
    },
    "gemma2": {
        **_MIXED,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 20.0,
    },
    "phi3": {**_WINDOW, "partial_rotary_factor": 0.5},
    "gpt_neox": {"rotary_pct": 0.25},
    "mistral": _WINDOW,
    "gemma": {"num_key_value_heads": 1},
    "gemma3_text": {**_MIXED, "query_pre_attn_scalar": 16},
    "gpt2": {
        "n_embd": 64,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 512,
    },
    "gpt_bigcode": {
        "n_embd": 64,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 512,
    },
    "phi": {"partial_rotary_factor": 0.5, "qk_layernorm": True},
    "phimoe": {**_LOCAL, "sliding_window": None},
    "starcoder2": _WINDOW,
    "stablelm": {"use_qkv_bias": True, "qk_layernorm": True},
    "olmo2": {},
    "olmo3": _MIXED,
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 3},
    "cohere2": {**_MIXED, "logit_scale": 1.0},
    "granite": {"logits_scaling": 2.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5},
    "granitemoe": {**_LOCAL, "attention_multiplier": 0.2},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 40},
    "glm4": {"partial_rotary_factor": 0.5},
    "glm4_moe": {**_ROUTED, "n_shared_experts": 1, "use_qk_norm": True},
    "nemotron": {},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "exaone4": _MIXED,
    "gpt_oss": {**_MIXED, **_LOCAL},
    "qwen3_next": {},
    "bamba": {},
    "lfm2": {},
    "deepseek_v3": {"v_head_dim": 12},
}
"""What is particular to each: `model_type`, and what its configuration says."""


def config(family: str, **changes: Any) -> Any:
    """Its configuration, small, with what is particular to it, and `changes`."""
    return tiny(family, **{**FAMILIES[family], **changes})


def make(
    directory: Path, config: Any, seed: int = 0, auto: Any = AutoModelForCausalLM
) -> PreTrainedModel:
    """Save a random model of `config`; the model, in evaluation, with `transformers`' attention."""
    torch.manual_seed(seed)
    with left_out():  # as of serving: the text is the same
        model: PreTrainedModel = auto.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.dim() == 1 or "bias" in name:
                tensor.add_(torch.randn_like(tensor), alpha=0.1)
    model.eval().save_pretrained(directory)
    return model
