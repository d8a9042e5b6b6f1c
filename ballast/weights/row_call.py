"""Call a module of `transformers` for a flat batch: positions of its rows, logits of some rows.

Most modules take both as arguments. Of others, positions go to the embedding that would count them
(BART and its kin), and the head is given the wanted rows alone. Positions of RoBERTa's kin begin
beyond the padding token's. ALiBi finds them by itself (`ballast.weights.spelt_attention`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

SPELT = "ballast_spelt"
"""Attribute of models that `ballast.weights.spelt_attention` prepares; its `alibi`: whether they
have no other positions."""
POSITIONS: ContextVar[Tensor | None] = ContextVar("ballast_positions", default=None)
"""(T,) positions of the rows of the batch that a module is called for."""
_PREPARED = "ballast_rows"
_wanted: ContextVar[Tensor | None] = ContextVar("ballast_wanted", default=None)


class RowCall:
    """How one module is called."""

    def __init__(self, module: Any) -> None:
        """Prepares `module`; what is no module of PyTorch's takes both as arguments."""
        self._places = self._keeps = True
        self._masked = False
        """Whether the module makes masks, of which one for padding is given: there is none."""
        self._first = 0
        if not isinstance(module, nn.Module):
            return
        taken = signature(module.forward).parameters
        self._places, self._keeps = "position_ids" in taken, "logits_to_keep" in taken
        self._first, self._masked = first_position(module), SPELT in vars(module)
        if not self._places:
            for part in _counting(module):
                _prepare(part, _placed)
        if not self._keeps and (head := _head(module)) is not None:
            _prepare(head, _kept)

    def __call__(
        self, part: Any, ids: Tensor, positions: Tensor | None, rows: Tensor | None, **more: Any
    ) -> Any:
        """Call the module, or its base model as `part`, with ids (T,) at positions (T,), its own if
        None; logits at `rows`."""
        more = {"input_ids": ids[None], "use_cache": False, **more}
        if self._masked:
            more.setdefault("attention_mask", torch.ones_like(ids)[None])
        if positions is not None and self._first:
            positions = positions + self._first
        if positions is not None and self._places:
            more["position_ids"] = positions[None]
        if rows is not None and self._keeps:
            more["logits_to_keep"] = rows
        tokens = POSITIONS.set(positions), _wanted.set(rows)
        try:
            return part(**more)
        finally:
            POSITIONS.reset(tokens[0])
            _wanted.reset(tokens[1])


def lacking(module: nn.Module) -> str | None:
    """Return what the module's code cannot be given; None: nothing."""
    taken = signature(module.forward).parameters
    if "position_ids" not in taken and not _counting(module) and not has_alibi(module):
        return "the positions of tokens"
    if "logits_to_keep" not in taken and _head(module) is None:
        return "at which tokens logits are wanted"
    return None


def first_position(module: nn.Module) -> int:
    """Return the position of a sequence's first token, which some modules count from the padding
    token's on."""
    for part in module.modules():
        index = getattr(part, "padding_idx", None)
        if index is not None and hasattr(part, "create_position_ids_from_input_ids"):
            return int(index) + 1
    return 0


def _counting(module: nn.Module) -> list[nn.Module]:
    """Return the embeddings that count positions from the length of a cache on."""
    found: list[nn.Module] = []
    for part in module.modules():
        taken = signature(type(part).forward).parameters
        if isinstance(part, nn.Embedding) and {"position_ids", "cache_length"} <= taken.keys():
            found.append(part)
    return found


def has_alibi(module: nn.Module) -> bool:
    """Whether a prepared model has no positions but those of ALiBi."""
    return bool(getattr(vars(module).get(SPELT), "alibi", False))


def _head(module: Any) -> nn.Module | None:
    head: nn.Module | None = module.get_output_embeddings()
    return head


def _prepare(part: Any, how: Callable[..., Callable[..., Any]]) -> None:
    if not hasattr(part, _PREPARED):
        setattr(part, _PREPARED, True)
        part.forward = how(part.forward)


def _placed(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*args: Any, **more: Any) -> Tensor:
        positions = POSITIONS.get()
        return forward(*args, **(more if positions is None else more | {"position_ids": positions}))

    return run


def _kept(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(hidden: Tensor) -> Tensor:
        rows = _wanted.get()
        return forward(hidden if rows is None else hidden[:, rows])

    return run
