"""Describe encoders of BERT's kind: which checkpoints are, and how they pool.

An encoder sees a whole text at once, so it is run by `transformers`' own forward, one text or
several of equal length at a time, and has no KV: its blocks hold nothing of use.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification
from transformers.conversion_mapping import get_model_conversion_mapping

from ballast.core.errors import BallastError, UnsupportedModel, brief
from ballast.core.model import SCORE
from ballast.weights.architecture import Architecture
from ballast.weights.meta_module import build_module
from ballast.weights.module_segments import find_layers, tensors_by_segment
from ballast.weights.pooling import pooling_of

_GENERATES = ("ForCausalLM", "LMHeadModel")
_LEAST_HEAD = 8
"""Size of the only head of KV in name, of one layer."""


def encoder_pooling(directory: Path, config: Any, values: Mapping[str, Any]) -> str:
    """Return the `ModelSpec.pooling` of a checkpoint; empty: it is no encoder.

    Without `modules.json` embeddings are means, as in sentence-transformers. Raises
    UnsupportedModel for ways of pooling, and for heads, that are not served.
    """
    if type(config) not in AutoModelForMaskedLM._model_mapping:
        return ""
    classes = [str(c) for c in values.get("architectures") or ()]
    if getattr(config, "is_decoder", False) or any(c.endswith(_GENERATES) for c in classes):
        return ""
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        return ""
    if any(c.endswith("ForSequenceClassification") for c in classes):
        if type(config) not in AutoModelForSequenceClassification._model_mapping:
            raise UnsupportedModel(f"{kind}: transformers classifies no texts with it")
        if config.num_labels != 1:
            why = f"its head has {config.num_labels} labels; rerankers of one are served"
            raise UnsupportedModel(f"{kind}: {why}")
        return SCORE
    pooling = pooling_of(directory)
    if pooling == "":
        why = "mean, cls and last pooling, with or without normalising, are served"
        raise UnsupportedModel(f"{kind}: its modules.json asks for other steps; {why}")
    return pooling or "mean"


def inspect_encoder(config: Any, pooling: str) -> Architecture:
    """Build an encoder's module, without weights, and return its architecture. Raises
    UnsupportedModel with the reason."""
    kind = config.model_type
    try:
        return _inspect(config, kind, pooling)
    except BallastError:
        raise
    except Exception as error:  # the model's code may raise anything
        raise UnsupportedModel(f"{kind}: {brief(error)}") from error


def _inspect(config: Any, kind: str, pooling: str) -> Architecture:
    module: Any = build_module(config, torch.bfloat16, pooling)
    prefix, n_layers = find_layers(module, kind)
    vocab, hidden = module.get_input_embeddings().weight.shape
    positions = _positions(module, config)
    if positions < 1:
        raise UnsupportedModel(f"{kind}: its configuration bounds no context length")
    return Architecture(
        config=config,
        n_layers=n_layers,
        heads=int(getattr(config, "num_attention_heads", 1)),
        kv_heads=1,
        head_dim=_LEAST_HEAD,
        hidden=hidden,
        intermediate=int(getattr(config, "intermediate_size", None) or 4 * hidden),
        experts_per_token=0,
        expert_intermediate=0,
        vocab=vocab,
        positions=positions,
        fixed_rotary_positions=positions,
        windows=(None,) * n_layers,
        attention_layers=(0,) if n_layers > 1 else (),
        layer_kv=(),
        kv_windows=(),
        states=(),
        softcap=None,
        segments=tensors_by_segment(module, prefix, n_layers, kind),
        prefix=prefix,
        linears=frozenset(),
        recipe=None,
        conversions=tuple(get_model_conversion_mapping(module)),
        base_prefix=str(module.base_model_prefix),
    )


def _positions(module: nn.Module, config: Any) -> int:
    """Return the most tokens of a text. RoBERTa's positions begin after that of padding."""
    most = int(getattr(config, "max_position_embeddings", None) or 0)
    tables = [part for part in module.modules() if not isinstance(part, nn.Embedding)]
    padded = [part.padding_idx for part in tables if hasattr(part, "padding_idx")]
    return most - max((int(str(i)) + 1 for i in padded if i is not None), default=0)
