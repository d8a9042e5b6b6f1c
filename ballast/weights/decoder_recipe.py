"""Describe how a Llama-like decoder computes its layers, as a recipe of features.

The fast path (`models/fused/model.py`) goes by a `DecoderRecipe` instead of names of model
families. Its defaults are Llama's. `weights/recipe_search.py` finds the recipe of a module, and
`weights/recipe_agreement.py` checks that the module computes what its recipe says.
"""

from __future__ import annotations

from dataclasses import dataclass

PRE = "pre"
"""A norm before attention and one before the MLP (Llama)."""
POST = "post"
"""A norm of what attention adds to the hidden states, and one of what the MLP adds (OLMo 2)."""
BOTH = "both"
"""All four of these norms (Gemma 2)."""

SILU = "silu"
GELU = "gelu"
"""x Φ(x), by the error function."""
GELU_TANH = "gelu_tanh"
"""Its approximation by tanh (Hendrycks and Gimpel 2016)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderRecipe:
    """Computation of one decoder: embeddings, layers of attention and a gated MLP, a norm, a head.

    Per layer, with the norms that it has, and f the activation::

        hidden += residual_scale * norm(o(attention(rotate(norm(qkv(norm(hidden)))))))
        hidden += residual_scale * norm(down(f(gate(norm(hidden))) * up(norm(hidden))))

    All norms are by the root of the mean square, with the configuration's `rms_norm_eps`.
    """

    norms: str = PRE
    """PRE, POST or BOTH."""
    norm_offset: bool = False
    """Whether norms multiply by 1 + w instead of w (Gemma)."""
    whole_head_norms: bool = False
    """Whether queries, and keys, of all heads are normed together (OLMo 2), if they are at all."""
    activation: str = SILU
    """SILU, GELU or GELU_TANH."""
    mlp_bias: bool = False
    qkv_stored_whole: bool = False
    """Whether queries, keys and values are one stored matrix, in that order (Phi-3)."""
    gate_up_stored_whole: bool = False
    """Whether gate and up are one stored matrix, in that order (Phi-3)."""
    embedding_scale: float = 1.0
    embedding_scale_rounded: bool = False
    """Whether that scale is rounded to the dtype in which the model is served (Gemma)."""
    residual_scale: float = 1.0
    """Factor of what attention and MLP add to the hidden states (Granite)."""
    attention_scale: float | None = None
    """Factor of attention scores; None: head_dim ** -0.5."""
    softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap); None: they stay."""
    partial_rotary: bool = False
    """Whether only the first elements of a head are rotated."""
    rotary: tuple[str | None, ...] = ()
    """Rotary frequencies of each layer, by their name in the rotary module: "" for `inv_freq`, a
    kind of layer (`config.layer_types`) for those of that kind; None: it does not rotate (NoPE).
    Empty: all layers by `inv_freq`."""
    logits_divisor: float = 1.0
    logits_softcap: float | None = None
    """`softcap` of logits, after the division."""

    @property
    def norms_before(self) -> bool:
        """Whether norms come before attention and before the MLP."""
        return self.norms != POST

    @property
    def lands_apart(self) -> bool:
        """Whether outputs of attention and MLP are normed or scaled before they are added to hidden
        states."""
        return self.norms != PRE or self.residual_scale != 1.0

    def rotary_of(self, layer: int) -> str | None:
        """Name of the layer's rotary frequencies, as in `rotary`."""
        return self.rotary[layer] if self.rotary else ""

    @property
    def rotary_sets(self) -> tuple[str, ...]:
        """Names of all rotary frequencies that any layer rotates by, at least one."""
        found = {name for name in self.rotary if name is not None}
        return tuple(sorted(found)) or ("",)


@dataclass(frozen=True, slots=True)
class RotarySet:
    """Rotary embeddings of some layers, as `transformers` derives them from the configuration."""

    frequencies: tuple[float, ...]
    """Float32 values, half as many as elements of a head are rotated."""
    scaling: float
    """Factor of cosines and sines."""


LLAMA = DecoderRecipe()
"""Also Mistral's, Qwen2's and Qwen3's: the only recipe with a fast path on GPUs, with plain
matrices, and in tensor-parallel groups."""


def matrices(recipe: DecoderRecipe) -> dict[str, tuple[str, ...]]:
    """Return the matrices of a layer by role, and the modules within the layer that each consists
    of."""
    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    gate_up = ("mlp.gate_proj", "mlp.up_proj")
    return {
        "qkv": ("self_attn.qkv_proj",) if recipe.qkv_stored_whole else qkv,
        "o": ("self_attn.o_proj",),
        "gate_up": ("mlp.gate_up_proj",) if recipe.gate_up_stored_whole else gate_up,
        "down": ("mlp.down_proj",),
    }


def vectors(recipe: DecoderRecipe) -> dict[str, str]:
    """Return the norms of a layer by role, and the module within the layer of each.

    `input_norm` comes before attention, `post_norm` before the MLP, `o_norm` and `down_norm` after
    them; `q_norm` and `k_norm` are optional.
    """
    before_mlp = "post_attention_layernorm" if recipe.norms == PRE else "pre_feedforward_layernorm"
    found = {"input_norm": "input_layernorm"} if recipe.norms != POST else {}
    found |= {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
    if recipe.norms != POST:
        found["post_norm"] = before_mlp
    if recipe.norms != PRE:
        found |= {
            "o_norm": "post_attention_layernorm",
            "down_norm": "post_feedforward_layernorm",
        }
    return found
