"""Find the recipe of a decoder's layers from its tensors' names and shapes and by running parts.

Parts that are small enough are called to see what they compute: norms and activations. The rest is
taken from the configuration. The result is a proposal: `ballast.weights.recipe_agreement` checks
that it is what the module computes, so the search need not be right for every family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isclose
from typing import Any

import torch
from torch import Tensor, nn

from ballast.weights.decoder_recipe import (
    BOTH,
    GELU,
    GELU_TANH,
    POST,
    PRE,
    SILU,
    DecoderRecipe,
    matrices,
    vectors,
)

_NORMS = {
    ("input_layernorm", "post_attention_layernorm"): PRE,
    ("post_attention_layernorm", "post_feedforward_layernorm"): POST,
    (
        "input_layernorm",
        "post_attention_layernorm",
        "post_feedforward_layernorm",
        "pre_feedforward_layernorm",
    ): BOTH,
}
"""Positions of a layer's norms, by their sorted names."""
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    SILU: torch.nn.functional.silu,
    GELU: torch.nn.functional.gelu,
    GELU_TANH: lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}
_SAME = 1e-5
"""Largest difference on small numbers of two activations, or two norms, that count as the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSizes:
    """Sizes of the attention and the MLP, the same in every layer."""

    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int


def find_rotary(module: nn.Module) -> Any:
    """Find the submodule that computes rotary angles, or None."""
    named = module.named_modules()
    return next((part for path, part in named if path.endswith("rotary_emb")), None)


def candidates(
    module: Any,
    layers: Sequence[Mapping[str, tuple[int, ...]]],
    path: str,
    scales: Sequence[float | None],
    softcap: float | None,
    sizes: LayerSizes,
) -> Iterator[DecoderRecipe]:
    """Yield recipes that the module may have, the likeliest first; none if it has no gated layers
    of these sizes, all alike.

    `module` computes on the CPU, and may lack its later layers. `layers`: for all layers, shapes of
    tensors by their names within the layer; `path`: of the list of layers; `scales`: factor of each
    layer's attention scores.
    """
    first = layers[0]
    structure = _structure(first, sizes.head_dim)
    if structure is None or any(layer != first for layer in layers):
        return
    if first != _expected(structure, first, sizes):
        return
    model = module.get_submodule(path.rpartition(".")[0])
    layer = module.get_submodule(path)[0]
    offset = _norm_offset(getattr(model, "norm", None))
    activation = _activation(layer.mlp)
    text = module.config.get_text_config()
    if offset is None or activation is None or len(set(scales)) != 1 or scales[0] is None:
        return
    usual = isclose(scales[0], sizes.head_dim**-0.5, rel_tol=1e-9)
    embeddings = module.get_input_embeddings()
    scale = getattr(embeddings, "scalar_embed_scale", None)
    known = replace(
        structure,
        norm_offset=offset,
        activation=activation,
        embedding_scale=float(scale or getattr(text, "embedding_multiplier", None) or 1.0),
        embedding_scale_rounded=scale is not None,
        residual_scale=float(getattr(text, "residual_multiplier", None) or 1.0),
        attention_scale=None if usual else scales[0],
        softcap=softcap,
        logits_divisor=float(getattr(text, "logits_scaling", None) or 1.0),
        logits_softcap=getattr(text, "final_logit_softcapping", None),
    )
    for rotary, width in _rotaries(find_rotary(module), text, len(layers)):
        if 0 < width <= sizes.head_dim:
            yield replace(known, rotary=rotary, partial_rotary=width != sizes.head_dim)


def _structure(layer: Mapping[str, tuple[int, ...]], head_dim: int) -> DecoderRecipe | None:
    """Return the recipe of a layer as far as its tensors' names show it; None: of no known kind."""
    norms = sorted({name.split(".")[0] for name in layer if "layernorm" in name})
    where = _NORMS.get(tuple(norms))
    if where is None:
        return None
    if ("self_attn.q_norm.weight" in layer) != ("self_attn.k_norm.weight" in layer):
        return None
    whole = layer.get("self_attn.q_norm.weight", (head_dim,)) != (head_dim,)
    return DecoderRecipe(
        norms=where,
        whole_head_norms=whole,
        mlp_bias=any(n.startswith("mlp.") and n.endswith(".bias") for n in layer),
        qkv_stored_whole="self_attn.qkv_proj.weight" in layer,
        gate_up_stored_whole="mlp.gate_up_proj.weight" in layer,
    )


def _expected(
    recipe: DecoderRecipe, layer: Mapping[str, tuple[int, ...]], sizes: LayerSizes
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a layer of that structure. Biases and norms of heads,
    which it may or may not have, are included if `layer` has them."""
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    outputs = {
        "qkv": (queries, keys, keys),
        "o": (sizes.hidden,),
        "gate_up": (sizes.intermediate, sizes.intermediate),
        "down": (sizes.hidden,),
    }
    inputs = {"o": queries, "down": sizes.intermediate}
    found: dict[str, tuple[int, ...]] = {}
    for role, modules in matrices(recipe).items():
        rows = outputs[role] if len(modules) > 1 else (sum(outputs[role]),)
        for name, n in zip(modules, rows, strict=True):
            found[f"{name}.weight"] = n, inputs.get(role, sizes.hidden)
            if f"{name}.bias" in layer:
                found[f"{name}.bias"] = (n,)
    of_heads = (queries, keys) if recipe.whole_head_norms else (sizes.head_dim, sizes.head_dim)
    widths = dict(zip(("q_norm", "k_norm"), of_heads, strict=True))
    for role, name in vectors(recipe).items():
        if role not in widths or f"{name}.weight" in layer:
            found[f"{name}.weight"] = (widths.get(role, sizes.hidden),)
    return found


def _norm_offset(norm: Any) -> bool | None:
    """Whether a norm multiplies by 1 + w; None: it is another kind of norm."""
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, Tensor) or getattr(norm, "bias", None) is not None:
        return None
    x = torch.linspace(-3, 2, weight.numel()).expand(2, -1) * torch.tensor([[1.0], [0.1]])
    made: Tensor = norm(x)
    epsilon = float(getattr(norm, "eps", None) or getattr(norm, "variance_epsilon", None) or 0.0)
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
    for offset in (False, True):
        if torch.allclose(made, normed * (weight + offset), rtol=0, atol=_SAME):
            return offset
    return None


def _activation(mlp: nn.Module) -> str | None:
    """Return the name of an MLP's activation: its only module that is not a linear layer, compared
    by its outputs."""
    others = [part for part in mlp.children() if not isinstance(part, nn.Linear)]
    if len(others) != 1:
        return None
    # Some activations are clipped at large values, others are not.
    x = torch.cat([torch.linspace(-6, 6, 257), torch.tensor([-1e3, -50, -11, 11, 50, 1e3])])
    made: Tensor = others[0](x.clone())
    for name, function in _ACTIVATIONS.items():
        if torch.allclose(made, function(x), rtol=1e-6, atol=_SAME):
            return name
    return None


def _rotaries(
    rotary: Any, text: Any, n_layers: int
) -> Iterator[tuple[tuple[str | None, ...], int]]:
    """Yield `DecoderRecipe.rotary`, and the number of elements of a head that are rotated."""
    kinds = getattr(text, "layer_types", None)
    if getattr(rotary, "inv_freq", None) is not None:
        names = ("",) * n_layers
    elif isinstance(kinds, list) and len(kinds) == n_layers:
        names = tuple(kinds)
    else:
        return
    widths = {2 * len(getattr(rotary, frequencies(name), ())) for name in names}
    if len(widths) != 1:
        return
    (width,) = widths
    rotating = getattr(text, "no_rope_layers", None)  # 1: the layer rotates
    if isinstance(rotating, list) and len(rotating) == n_layers and not all(rotating):
        yield tuple(n if turns else None for n, turns in zip(names, rotating, strict=True)), width
        return
    yield () if set(names) == {""} else names, width
    if isinstance(kinds, list) and len(kinds) == n_layers and len(set(kinds)) > 1:
        windowed = [kind == "sliding_attention" for kind in kinds]
        yield tuple(n if w else None for n, w in zip(names, windowed, strict=True)), width


def frequencies(name: str) -> str:
    """Return the attribute of the rotary module with the frequencies `name` of a recipe."""
    return f"{name}_inv_freq" if name else "inv_freq"


def scaling(name: str) -> str:
    """Return the attribute of the rotary module with the factor of the cosines and sines of set
    `name`."""
    return f"{name}_attention_scaling" if name else "attention_scaling"
