"""Describe a decoder's architecture: its sizes, its tensors, and its attention windows.

Found by `ballast.weights.inspection`; sharding, packing and assembly go by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ballast.core.model import LayerKv, StateTensor
from ballast.weights.decoder_recipe import DecoderRecipe


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A tensor of a model; tied parameters are several `names` of one."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str | None = None
    """The dtype in which `transformers` always keeps it; None: the dtype the model is served in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Sizes and tensors of a decoder."""

    config: Any
    n_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    experts_per_token: int
    """Experts that compute each token in a layer; 0: there are none."""
    expert_intermediate: int
    vocab: int
    positions: int
    """Most tokens of one sequence."""
    fixed_rotary_positions: int
    """Sequence length up to which rotary embeddings do not depend on the sequence's length."""
    windows: tuple[int | None, ...]
    """Sliding window of each layer: positions that a query sees, its own included; None: all."""
    attention_layers: tuple[int, ...]
    """As `ModelSpec.attention_layers`, like `layer_kv` and `states`."""
    layer_kv: tuple[LayerKv, ...]
    kv_windows: tuple[int | None, ...]
    states: tuple[StateTensor, ...]
    alibi: bool = False
    """Whether keys hold positions (`ballast.weights.spelt_attention`)."""
    softcap: float | None
    """Scores s become softcap * tanh(s / softcap)."""
    segments: tuple[tuple[str, tuple[ModelTensor, ...]], ...]
    """(name, tensors), in load order: embeddings, layer 0 .. n-1, head if it is not tied."""
    prefix: str
    """Beginning of the names of layers' tensors, up to the layer's number."""
    linears: frozenset[str]
    """Weights of linear modules that are used by calling these modules and in no other way."""
    experts: Mapping[str, bool] = field(default_factory=dict)
    """Likewise the matrices of `transformers`' modules of experts, (experts, outputs, inputs);
    true: the last two the other way round."""
    recipe: DecoderRecipe | None
    """How the fast path computes a layer; None: it cannot compute layers of this kind."""
    conversions: tuple[Any, ...]
    """`transformers`' rules that convert a checkpoint's names and tensors to these."""
    base_prefix: str
    """Beginning of the names of tensors that belong to the model without its head."""

    @property
    def tied(self) -> bool:
        """Whether the output head is the embedding."""
        return self.segments[-1][0] != "head"
