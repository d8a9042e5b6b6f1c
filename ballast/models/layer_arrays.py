"""Divide a block into the KV of layers that keep different KV.

A block has the KV of one layer after the other::

    block     [state | K, V of layer 0 | K, V of layer 1 | latents of layer 2 | ...]

Where layers are in groups (`ModelSpec.kv_windows`), a block has those of one group. Layers with
equal heads are one `KvArray`, in which attention finds each by its offset. A layer that reads
another's KV has no part of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from ballast.core.model import LayerKv, ModelSpec
from ballast.kernels.paged_attention import KvArray


@dataclass(frozen=True, slots=True)
class LayerArray:
    """KV of all layers with equal heads."""

    kv: KvArray
    numbers: Mapping[int, int]
    """Number in `kv` of each layer that reads it."""
    readers: Collection[int]
    """Layers that read what another one has written."""


def arrays_of(spec: ModelSpec, whole: KvArray) -> list[LayerArray]:
    """Return the arrays of a model's layers, in blocks as those of `whole`, which is the only one
    if all layers keep the same."""
    if not spec.layer_kv:
        return [LayerArray(whole, {n: i for i, n in enumerate(spec.attention_layers)}, ())]
    offsets: dict[int, int] = {}
    ends = [0] * spec.kv_groups
    for kv in spec.layer_kv:
        offsets[kv.layer] = ends[kv.group] if kv.source is None else offsets[kv.source]
        ends[kv.group] += kv.kept * spec.head_bytes(kv.size) * spec.block_tokens
    forms: dict[tuple[int, int, bool], list[LayerKv]] = {}
    for kv in spec.layer_kv:
        forms.setdefault((kv.heads, kv.size, kv.latent), []).append(kv)
    return [
        LayerArray(
            replace(
                whole,
                n_layers=len(layers),
                kv_heads=heads,
                head_dim=size,
                latent=latent,
                offsets=tuple(offsets[kv.layer] for kv in layers),
                groups=tuple(kv.group for kv in layers) if spec.kv_windows else (),
                n_groups=spec.kv_groups,
            ),
            {kv.layer: i for i, kv in enumerate(layers)},
            frozenset(kv.layer for kv in layers if kv.source is not None),
        )
        for (heads, size, latent), layers in forms.items()
    ]
