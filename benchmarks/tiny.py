"""Configurations of any kind of model that `transformers` knows, made small.

Sizes go by the names that configurations give them; what else a kind needs, so that its sizes fit
each other, is in `PARTICULAR`. Windows are shorter than prompts, weights are large, and heads are
not tied, so that a fault in serving shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING

VOCAB = 1000


def _named(value: Any, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


SIZES: dict[str, Any] = {
    **_named(64, "hidden_size n_embd d_model hidden_dim dim_model embedding_size emb_dim"),
    **_named(
        96,
        "intermediate_size n_inner ffn_dim ffn_hidden_size decoder_ffn_dim encoder_ffn_dim dim_ff "
        "intermediate_size_mlp d_ff inner_dim dff shared_expert_intermediate_size "
        "shared_intermediate_size block_ff_dim",
    ),
    **_named(3, "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers"),
    **_named(4, "num_attention_heads n_head n_heads num_heads"),
    **_named(4, "decoder_attention_heads encoder_attention_heads"),
    **_named(2, "num_key_value_heads num_kv_heads n_kv_heads kv_n_heads"),
    **_named(16, "head_dim dim_head v_head_dim kv_channels d_kv attention_head_dim"),
    **_named(VOCAB, "vocab_size vocab_size_per_layer_input"),
    **_named(512, "max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length"),
    **_named(6, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    **_named(2, "num_experts_per_tok moe_top_k moe_k"),
    **_named(48, "moe_intermediate_size expert_intermediate_size"),
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "hidden_size_per_layer_input": 16,
    "sliding_window": 24,
    "initializer_range": 0.25,
    "init_std": 0.25,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "is_decoder": True,
    "depth": 2,
    "embed_dim": 64,
    "out_hidden_size": 64,
    "image_size": 32,
    "patch_size": 8,
}
"""By the name of a field, in whichever configuration has it."""

_LATENT = (
    *("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots3_note_text"),
    *("glm4_moe_lite", "glm_moe_dsa", "minicpm3", "sarvam_mla", "youtu"),
)
_GRANITE = ("granite", "granite_swa", "granitemoe", "granitemoehybrid", "granitemoeshared")
# 1.0, the default, saturates attention at these weights: float32 is then off by 4e-4 by itself.
_SCALED = {"attention_multiplier": 0.25}
_EVERY_HEAD = {"num_key_value_heads": 4}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_MROPE = {**_ROPE, "mrope_section": [2, 3, 3]}
_MROPE_TEXT = {"text_config": {"rope_parameters": _MROPE}}
_MULTIMODAL_ROPE = (
    *("glm46v", "glm4v", "glm_ocr", "glmga", "paddleocr_vl", "qwen2_vl", "qwen2_5_vl"),
    "qwen2_5_omni_thinker",
)
_LATENT_TEXT = {"text_config": _EVERY_HEAD}
# At larger weights the two forms of gated delta nets differ by up to 2e-4 in `transformers`.
_DELTA = {
    "initializer_range": 0.15,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_DELTA_TEXT = ("minicpm_ocr", "minicpmv4_6", "minicpmv4_7", "qwen3_5", "qwen3_5_moe")
_SCAN = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}
_GEMMA3N = {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.9, 0.0, 0.0]}
_VQ = {"base_channels": 32, "channel_multiplier": [1, 1], "resolution": 32}
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention", "conv"]}
PARTICULAR: dict[str, dict[str, Any]] = {
    **dict.fromkeys(_LATENT, _EVERY_HEAD),
    **dict.fromkeys(_GRANITE, _SCALED),
    **dict.fromkeys(_MULTIMODAL_ROPE, _MROPE_TEXT),
    **dict.fromkeys(("mistral_large4", "unlimited_ocr", "kimi_k25"), _LATENT_TEXT),
    "cohere_compass": {"text_config": {"rope_parameters": {"full_attention": _ROPE}}},
    "cosmos3_edge": {"text_config": {"rope_parameters": _MROPE}},
    "hunyuan_vl": {"text_config": {"rope_parameters": _MROPE}},
    "molmo2": {
        "vision_config": {"image_size": [32, 32]},
        "adapter_config": {"vision_feature_layer": [2, 1]},
    },
    "glm4v_moe": {"text_config": {"rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}}},
    "bloom": {"seq_length": 512},
    "chameleon": {"vocabulary_map": {"<image>": 9}, "vq_config": _VQ},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_top_k": 2},
    },
    "dots1": {"n_shared_experts": 1},
    "dots3_note": {"text_config": _EVERY_HEAD},
    "emu3": {"vocabulary_map": {"<image>": 9}, "vq_config": _VQ},
    "gemma3n": {"text_config": _GEMMA3N},
    "gemma3n_text": _GEMMA3N,
    "gpt_neo": {"attention_types": [[["global", "local"], 1], [["global"], 1]], "window_size": 24},
    "gptj": {"rotary_dim": 8},
    "granite4_vision": {"deepstack_layer_map": [[1, 0]], "spatial_target_layers": [1]},
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), _CONVOLUTIONS),
    **dict.fromkeys(("olmo_hybrid", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), _DELTA),
    **{kind: {"text_config": _DELTA} for kind in _DELTA_TEXT},
    "bamba": {**_SCAN, "attn_layer_indices": [1]},
    "falcon_h1": {**_SCAN, "mamba_d_ssm": 128},
    "granitemoehybrid": {**_SCALED, **_SCAN, "layer_types": ["mamba", "attention", "mamba"]},
    "bailing_hybrid": {**_EVERY_HEAD, **_DELTA},
    "kimi_linear": {**_EVERY_HEAD, **_DELTA, "linear_num_heads": 4, "linear_head_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 16},
    "longcat_flash": {**_EVERY_HEAD, "head_dim": 8, "num_layers": 2},
    "mamba2": {"num_heads": 8},
    "reformer": {"axial_pos_embds_dim": [32, 32], "axial_pos_shape": [16, 32]},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_head_dim": 32},
    "zamba2": {"layers_block_type": ["mamba", "hybrid", "mamba"]},
    "zaya": {"num_experts_per_tok": 1},
}
"""By `model_type`: beside `SIZES`, or in their place."""


def tiny(kind: str, **changes: Any) -> Any:
    """A small configuration of a `model_type`, with `changes`. Raises whatever its class raises."""
    made = CONFIG_MAPPING[kind]
    return made(**merged(_sizes_for(made), PARTICULAR.get(kind, {}), changes))


def merged(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """Later ones win; values of configurations within configurations one by one."""
    found: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            within = key.endswith("_config") and isinstance(value, Mapping)
            found[key] = merged(found.get(key) or {}, value) if within else value
    return found


def fields_of(kind: Any) -> set[str]:
    """Names of the fields of a configuration's class."""
    return {name for base in kind.__mro__ for name in getattr(base, "__annotations__", {})}


def _sizes_for(kind: Any) -> dict[str, Any]:
    known = fields_of(kind)
    found = {name: value for name, value in SIZES.items() if name in known}
    if kind.sub_configs:
        default = kind()
        for name in kind.sub_configs:
            part = getattr(default, name, None)
            if part is not None:
                found[name] = {"model_type": part.model_type, **_sizes_for(type(part))}
    return found
