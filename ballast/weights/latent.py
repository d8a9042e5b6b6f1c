"""Attend over latents in place of the keys and values that they stand for (DeepSeek V2, 2.1.2).

Multi-head latent attention computes K and V of all heads from one latent c per token: k_h is U_h c
and the rotated part r that heads share, v_h is W_h c. So the score of a query (q, s) is that of
(U_h^T q, s) with (c, r), one head for all, and a head's output is W_h times its sum of latents.
Modules are found by their parts, and `ballast.weights.agreement` compares what they compute so;
where it is something else, full keys and values are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

_PARTS = ("expand_kv", "kv_b_proj")
_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_NAME = "ballast_latent"
UP = "kv_b_proj"
"""The linear module that makes K and V of latents."""


def latent_size(module: Any) -> int | None:
    """Return the elements of a token's latent and rotated key; None: it keeps K and V."""
    if not all(hasattr(module, name) for name in (*_PARTS, *_SIZES)):
        return None
    up: Any = module.kv_b_proj
    plain = isinstance(up, nn.Linear)
    if not plain or up.bias is not None:
        return None
    return int(module.kv_lora_rank) + int(module.qk_rope_head_dim)


def latent_paths(module: nn.Module) -> list[str]:
    """Return the paths of modules that attend over latents once `absorb` has prepared them."""
    return [path for path, part in module.named_modules() if latent_size(part) is not None]


def absorb(module: nn.Module) -> None:
    """Make all modules with latents attend over these, by an attention `over_latents`."""
    for path in latent_paths(module):
        part: Any = module.get_submodule(path)
        latent = _Latent(part)
        setattr(part, _NAME, latent)
        part.expand_kv = latent.hold


@contextmanager
def absorbed(module: nn.Module) -> Iterator[None]:
    """`absorb` within."""
    absorb(module)
    try:
        yield
    finally:
        for path in latent_paths(module):
            part: Any = module.get_submodule(path)
            delattr(part, _NAME)
            del part.expand_kv


def over_latents(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Return `attend`, an attention of `transformers`' interface, for modules with latents too."""

    @wraps(attend)
    def run(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **more: Any) -> Any:
        latent: _Latent | None = getattr(module, _NAME, None)
        if latent is None:
            return attend(module, query, key, value, *args, **more)
        key = latent.take()
        out, weights = attend(module, latent.queries(query), key, key, *args, **more)
        return latent.values(out), weights

    return run


class _Latent:
    """The latents of one attention module, within a call of it."""

    def __init__(self, part: Any) -> None:
        self._up = part.kv_b_proj
        self._nope, self._value = int(part.qk_nope_head_dim), int(part.v_head_dim)
        self._rank, self._rotary = int(part.kv_lora_rank), int(part.qk_rope_head_dim)
        self._heads = self._up.out_features // (self._nope + self._value)
        self._key: Tensor | None = None

    def hold(self, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """Keep (1, 1, T, rank) and (1, 1, T, rotary) for the attention; returns stand-ins of K and
        V, without memory."""
        self._key = torch.cat((latent, rotated), -1)
        empty = latent.new_zeros(()).expand(latent.shape[0], self._heads, latent.shape[2], 1)
        return (
            empty.expand(-1, -1, -1, self._nope + self._rotary),
            empty.expand(-1, -1, -1, self._value),
        )

    def take(self) -> Tensor:
        """Return the key (1, 1, T, rank + rotary) that is held."""
        key, self._key = self._key, None
        assert key is not None  # `hold` is called by the module before it attends
        return key

    def queries(self, query: Tensor) -> Tensor:
        """Return queries (1, heads, T, nope + rotary) as (1, heads, T, rank + rotary)."""
        plain, rotated = torch.split(query, [self._nope, self._rotary], -1)
        return torch.cat((plain @ self._matrices[:, : self._nope], rotated), -1)

    def values(self, out: Tensor) -> Tensor:
        """Return sums of latents (1, T, heads, at least rank) as values (1, T, heads, value)."""
        sums = out[..., : self._rank].transpose(1, 2)
        return (sums @ self._matrices[:, self._nope :].transpose(1, 2)).transpose(1, 2)

    @property
    def _matrices(self) -> Tensor:
        """(heads, nope + value, rank)."""
        weight = self._up.weight
        if "forward" in vars(self._up):  # by `ballast.weights.weightless`
            weight = self._up(torch.eye(self._rank, dtype=weight.dtype, device=weight.device)).T
        return weight.reshape(self._heads, -1, self._rank)  # type: ignore[no-any-return]
