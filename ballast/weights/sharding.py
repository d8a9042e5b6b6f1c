"""Divide a model's tensors over the ranks of a tensor-parallel group.

::

    q, k, v, gate, up   by outputs: each rank has its heads, its part of the intermediate
    o, down             by inputs: ranks sum their products (the bias is the first rank's)
    head                by tokens, in panels
    everything else     whole on every rank: norms, embeddings (of which a tied head is a part)

As in Megatron-LM (Shoeybi et al. 2019, section 3): two sums over the ranks per layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ballast.core.errors import ConfigError
from ballast.core.units import ceil_div
from ballast.kernels.linear_code import PANEL
from ballast.weights.architecture import Architecture, ModelTensor
from ballast.weights.assemble import Recipe, narrow

_BY_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_BY_INPUTS = ("o_proj", "down_proj")
_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a model, 0 <= rank < ranks."""

    rank: int
    ranks: int

    def of(self, n: int) -> range:
        """Return the rank's part of `n` elements, which `ranks` divides."""
        each = n // self.ranks
        return range(self.rank * each, (self.rank + 1) * each)

    def tokens(self, vocab: int) -> range:
        """Return the tokens whose logits the rank computes: whole panels, no rank more than the
        first."""
        each = ceil_div(ceil_div(vocab, PANEL), self.ranks) * PANEL
        return range(min(vocab, self.rank * each), min(vocab, (self.rank + 1) * each))


WHOLE = Shard(0, 1)


def divided(architecture: Architecture, name: str, shard: Shard) -> Architecture:
    """Return the architecture of one rank's part. Raises ConfigError where sizes do not divide."""
    a = architecture
    for what, n in (
        ("heads", a.heads),
        ("KV heads", a.kv_heads),
        ("intermediate elements", a.intermediate),
    ):
        if n % shard.ranks:
            raise ConfigError(
                "tensor_parallel", shard.ranks, f"{name} has {n} {what}, which it must divide"
            )
    last = Shard(shard.ranks - 1, shard.ranks)
    if not last.tokens(a.vocab):
        raise ConfigError(
            "tensor_parallel",
            shard.ranks,
            f"the {a.vocab} tokens of {name} do not make {PANEL} for each rank",
        )
    return replace(
        a,
        heads=a.heads // shard.ranks,
        kv_heads=a.kv_heads // shard.ranks,
        intermediate=a.intermediate // shard.ranks,
        segments=tuple(
            (title, tuple(_part(w, a.vocab, shard) for w in wanted)) for title, wanted in a.segments
        ),
    )


def narrowed(
    plan: Mapping[str, Recipe], architecture: Architecture, shard: Shard
) -> dict[str, Recipe]:
    """Narrow recipes of whole tensors to the parts in `architecture`, which is divided."""
    found = {}
    for _, wanted in architecture.segments:
        for w in wanted:
            whole = plan[w.names[0]]
            for dim, (n, part) in enumerate(zip(whole.shape, w.shape, strict=True)):
                if n != part:
                    first = shard.tokens(n).start if w.names[0] == _HEAD else shard.of(n).start
                    whole = narrow(whole, dim, first, part)
            found[w.names[0]] = whole
    return found


def absent(name: str, shard: Shard) -> bool:
    """Whether a tensor is zero on this rank: a bias that the first rank adds to the ranks' sum."""
    return shard.rank > 0 and name.endswith(tuple(f"{part}.bias" for part in _BY_INPUTS))


def _part(w: ModelTensor, vocab: int, shard: Shard) -> ModelTensor:
    name, shape = w.names[0], w.shape
    if len(w.names) > 1:
        return w
    if name == _HEAD:
        return replace(w, shape=(len(shard.tokens(vocab)), *shape[1:]))
    module, kind = name.split(".")[-2:]
    if module in _BY_OUTPUTS:
        return replace(w, shape=(len(shard.of(shape[0])), *shape[1:]))
    if module in _BY_INPUTS and kind == "weight":
        return replace(w, shape=(shape[0], len(shard.of(shape[1]))))
    return w
