"""Make the operation tables of a fused model, once: embeddings, norms, rotary position and KV.

Fields that differ from job to job (`rows`, items, the next item) are filled in by `FusedModel`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ballast.core.model import ModelSpec
from ballast.kernels import layer, layer_code, linear
from ballast.kernels.paged_attention import KvArray
from ballast.kernels.panel_forms import number_of, panel_bytes
from ballast.models.fused.angles import Angles
from ballast.models.fused.workspace import ActivationBuffers, qkv_width
from ballast.weights.decoder_recipe import DecoderRecipe
from ballast.weights.packing import PANELS
from ballast.weights.segment import PackedTensor, TensorsByRole

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class FusedTables:
    """Makes the operation tables of one model, each int64 (operations, fields): see
    `kernels.layer`."""

    spec: ModelSpec
    recipe: DecoderRecipe
    buffers: ActivationBuffers
    dtype: torch.dtype
    epsilon: int
    """Epsilon of all norms, as the bits of a float32."""

    def embedding(self, packed: PackedTensor, address: int, scale: float) -> Array:
        """Make the table that reads rows of the embeddings by token, times `scale`."""
        b, spec = self.buffers, self.spec
        if packed.form:
            return layer.tables(
                1,
                width=spec.hidden,
                source=address,
                source_row=panel_bytes(packed.form, spec.hidden),
                target=b.hidden,
                target_row=spec.hidden,
                index=b.tokens,
                panel_form=number_of(packed.form),
                scale=layer.bits_of(scale),
            )
        panels = packed.layout == PANELS
        _, steps, _, group = (*linear.packed_shape(spec.vocab, spec.hidden, self.dtype), 1)[:4]
        return layer.tables(
            1,
            width=spec.hidden,
            source=address,
            source_row=steps * group if panels else spec.hidden,
            target=b.hidden,
            target_row=spec.hidden,
            index=b.tokens,
            panel_group=group if panels else 0,
            scale=layer.bits_of(scale),
        )

    def norms(self, weights: Sequence[TensorsByRole]) -> Array:
        """Make the tables of the two norms of each layer, and of the last norm, which is of sampled
        rows only."""
        b, spec = self.buffers, self.spec
        roles = ("input_norm", "post_norm") if self.recipe.norms_before else ()
        addresses = [w[role][1] for w in weights[:-1] for role in roles]
        tables = layer.tables(
            len(addresses) + 1,
            width=spec.hidden,
            source=b.hidden,
            source_row=spec.hidden,
            target=b.normed,
            target_row=spec.hidden,
            weight=np.array([*addresses, weights[-1]["norm"][1]]),
            epsilon=self.epsilon,
        )
        tables[-1, layer_code.INDEX] = b.sampled
        return tables

    def lands(self, weights: Sequence[TensorsByRole]) -> Array:
        """Make the two tables of each layer that norm or scale outputs before they are added, if it
        needs them."""
        b, spec = self.buffers, self.spec
        if not self.recipe.lands_apart:
            return layer.tables(0)
        norms = [w.get(role) for w in weights for role in ("o_norm", "down_norm")]
        return layer.tables(
            len(norms),
            width=spec.hidden,
            source=b.normed,
            source_row=spec.hidden,
            target=b.hidden,
            target_row=spec.hidden,
            weight=np.array([0 if norm is None else norm[1] for norm in norms]),
            epsilon=self.epsilon,
            scale=layer.bits_of(self.recipe.residual_scale),
        )

    def rotary(
        self, weights: Sequence[TensorsByRole], angles: Angles, kv: KvArray, rows: int
    ) -> Array:
        """Make the table of each layer that rotates queries and keys and writes KV, of at most
        `rows`."""
        b, spec = self.buffers, self.spec
        normed = "q_norm" in weights[0]
        sets = [self.recipe.rotary_of(i) for i in range(spec.n_layers)]
        cosine, sine = np.array([angles.addresses(name) for name in sets]).T
        return layer.tables(
            spec.n_layers,
            width=spec.head_dim,
            source=b.qkv,
            source_row=qkv_width(spec),
            heads=spec.n_heads,
            kv_heads=spec.kv_heads,
            rotary=np.array([0 if name is None else angles.width for name in sets]),
            cosine=cosine,
            sine=sine,
            whole=int(normed and self.recipe.whole_head_norms),
            weight=np.array([w["q_norm"][1] for w in weights]) if normed else 0,
            key_weight=np.array([w["k_norm"][1] for w in weights]) if normed else 0,
            epsilon=self.epsilon,
            kv=np.array([kv.layer_address(i) for i in range(spec.n_layers)]),
            places=b.places + 8 * rows * np.array(kv.groups or 0),
            values=kv.values,
            scales=int(kv.scales > 0),
        )
