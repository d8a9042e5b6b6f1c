"""Check that a module computes what its recipe says, so that the fast path can replace it.

The recipe is carried out here in plain tensors, with the module's own linear layers and vectors,
and its logits are compared with the module's. Both run without the model's weights, in the batches
of `ballast.weights.agreement`: the check takes milliseconds, and holds for any family.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ballast.weights import agreement
from ballast.weights.decoder_recipe import GELU, SILU, DecoderRecipe, matrices, vectors
from ballast.weights.recipe_search import LayerSizes, frequencies, scaling

_TOLERANCE = 1e-3
"""Largest difference, in standard deviations of the logits. Rounding causes about 1e-6."""


@torch.inference_mode()
def follows(
    module: Any,
    recipe: DecoderRecipe,
    path: str,
    rotary: Any,
    windows: Sequence[int | None],
    sizes: LayerSizes,
    positions: int,
) -> bool:
    """Whether `module` computes, within `positions`, the logits of `recipe`.

    `module` is weightless, with its list of layers, the first ones of all, at `path`; `rotary`: its
    submodule for angles, with the frequencies that will be served; `windows`: of each layer.
    """
    if not _have_one_epsilon(module):
        return False
    spelt_out = SpeltOut(module, recipe, path, rotary, windows, sizes)
    vocab = len(module.get_input_embeddings().weight)
    ours = agreement.batched(spelt_out, positions, vocab)
    theirs = agreement.batched(module, positions, vocab)
    return all(
        a.shape == b.shape and float((a - b).abs().max()) <= _TOLERANCE * float(b.std())
        for a, b in zip(ours, theirs, strict=True)
    )


def _have_one_epsilon(module: Any) -> bool:
    """Whether all norms add the configuration's `rms_norm_eps`: outputs of weightless ones hardly
    show it."""
    epsilon = module.config.get_text_config().rms_norm_eps
    found = {
        getattr(part, name)
        for part in module.get_decoder().modules()
        for name in ("eps", "variance_epsilon")
        if isinstance(getattr(part, name, None), float)
    }
    return found <= {epsilon}


@dataclass(frozen=True, slots=True)
class SpeltOut:
    """A decoder that computes by its recipe, with the linear layers and vectors of `module`."""

    module: Any
    recipe: DecoderRecipe
    path: str
    rotary: Any
    windows: Sequence[int | None]
    sizes: LayerSizes

    def __call__(
        self, *, input_ids: Tensor, position_ids: Tensor, logits_to_keep: Tensor, use_cache: bool
    ) -> Any:
        """Return `logits` (1, kept, vocab) of input_ids (1, T) at position_ids (1, T)."""
        recipe = self.recipe
        embeddings = self.module.get_input_embeddings().weight
        hidden = embeddings[input_ids[0]] * recipe.embedding_scale
        for i, layer in enumerate(self.module.get_submodule(self.path)):
            hidden = self._layer(i, layer, hidden, position_ids[0])
        model = self.module.get_submodule(self.path.rpartition(".")[0])
        hidden = self._norm(hidden[logits_to_keep], model.norm.weight)
        head = self.module.get_output_embeddings()
        logits = _capped(head(hidden) / recipe.logits_divisor, recipe.logits_softcap)
        return SimpleNamespace(logits=logits[None])

    def _layer(self, i: int, layer: nn.Module, hidden: Tensor, positions: Tensor) -> Tensor:
        recipe = self.recipe
        norms: dict[str, Tensor] = {}
        for role, name in vectors(recipe).items():
            if any(path == name for path, _ in layer.named_modules()):
                weight = layer.get_submodule(name).weight
                assert isinstance(weight, Tensor)
                norms[role] = weight
        linear = {
            role: [layer.get_submodule(name) for name in names]
            for role, names in matrices(recipe).items()
        }

        def normed(x: Tensor, role: str) -> Tensor:
            return self._norm(x, norms[role]) if role in norms else x

        def multiply(role: str, x: Tensor) -> Tensor:
            return torch.cat([part(x) for part in linear[role]], -1)

        qkv = multiply("qkv", normed(hidden, "input_norm"))
        o = multiply("o", self._attended(i, qkv, norms, positions))
        hidden = hidden + recipe.residual_scale * normed(o, "o_norm")
        gate, up = multiply("gate_up", normed(hidden, "post_norm")).chunk(2, -1)
        down = multiply("down", _activated(recipe.activation, gate) * up)
        return hidden + recipe.residual_scale * normed(down, "down_norm")

    def _attended(self, i: int, qkv: Tensor, norms: dict[str, Tensor], positions: Tensor) -> Tensor:
        recipe, sizes, n = self.recipe, self.sizes, len(qkv)
        heads = (sizes.heads, sizes.kv_heads, sizes.kv_heads)
        parts = list(torch.split(qkv, [h * sizes.head_dim for h in heads], -1))
        for at, role in enumerate(("q_norm", "k_norm")):
            if role in norms:
                x = parts[at] if recipe.whole_head_norms else parts[at].view(n, heads[at], -1)
                parts[at] = self._norm(x, norms[role]).reshape(n, -1)
        query, key, value = (
            part.view(n, h, sizes.head_dim).transpose(0, 1)
            for part, h in zip(parts, heads, strict=True)
        )
        name = recipe.rotary_of(i)
        if name is not None:
            query, key = (self._rotated(x, name, positions) for x in (query, key))
        scale = recipe.attention_scale or sizes.head_dim**-0.5
        out, _ = agreement.attend(
            SimpleNamespace(layer_idx=i),
            query[None],
            key[None],
            value[None],
            None,
            scale,
            self.windows[i],
            recipe.softcap,
        )
        return out.reshape(n, -1)

    def _rotated(self, x: Tensor, name: str, positions: Tensor) -> Tensor:
        """Rotate the first elements of each head of x (heads, T, head_dim), in halves."""
        steps = getattr(self.rotary, frequencies(name)).float()
        factor = float(getattr(self.rotary, scaling(name)))
        angles = positions.float()[:, None] * steps
        cosine, sine = angles.cos() * factor, angles.sin() * factor
        half = len(steps)
        left, right, rest = torch.split(x, [half, half, x.shape[-1] - 2 * half], -1)
        turned = (left * cosine - right * sine, right * cosine + left * sine)
        return torch.cat([*turned, rest], -1)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        epsilon = self.module.config.get_text_config().rms_norm_eps
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
        return x * scale * (1 + weight if self.recipe.norm_offset else weight)


def _activated(name: str, x: Tensor) -> Tensor:
    if name == SILU:
        return torch.nn.functional.silu(x)
    return torch.nn.functional.gelu(x, approximate="none" if name == GELU else "tanh")


def _capped(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)
