"""Note which experts the layers of `transformers`' own module route rows to.

Used by `transformers`, for passes that read weights over a link: experts that no row has chosen are
not read. Modules of experts are those of `transformers`' interface, which are called with the
experts of each row; others are read whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ballast.models.module import layer_path
from ballast.weights.segment import PackedTensor, Segment

CHOSEN = "top_k_index"
"""Name of the experts' argument with the experts of each row, the second by position."""


class RoutedExperts:
    """Bytes of the experts in each layer, and of those that rows chose in the last pass."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        segments: Sequence[Segment],
        counts: Callable[[int], bool],
    ) -> None:
        """`segments`: of each layer, and any after these. `counts`: whether the present pass asks
        for the experts of a layer."""
        self._matrices: dict[int, list[PackedTensor]] = {}
        """By layer, (experts, outputs, inputs) each."""
        self._counts = counts
        self._chosen: dict[int, int] = {}
        """Experts that rows chose, by layer."""
        for i, (layer, segment) in enumerate(zip(layers, segments, strict=False)):
            for path, owner in layer.named_modules(prefix=layer_path(segment)):
                if found := _matrices_of(path, owner, segment):
                    self._matrices.setdefault(i, []).extend(found)
                    note = partial(self._note, i)
                    owner.register_forward_pre_hook(note, with_kwargs=True)

    def bytes_of(self, layer: int) -> int:
        """Return the bytes of all experts of a layer; 0: it has none, or they are read whole."""
        return sum(matrix.n_bytes for matrix in self._matrices.get(layer, ()))

    def chosen_bytes(self, layer: int) -> int:
        """Return the bytes of a layer's experts that had rows in the last pass."""
        n = self._chosen.get(layer, 0)
        return sum(n * (m.n_bytes // m.shape[0]) for m in self._matrices.get(layer, ()))

    def _note(self, layer: int, owner: nn.Module, given: tuple[Any, ...], named: Any) -> None:
        if self._counts(layer):
            chosen: Tensor = (
                named[CHOSEN] if CHOSEN in named else given[1]
            )  # (rows, experts of one)
            self._chosen[layer] = len(torch.unique(chosen))


def _matrices_of(path: str, owner: nn.Module, segment: Segment) -> list[PackedTensor]:
    """Return the matrices of a module of experts, if it is one."""
    if not hasattr(owner, "_is_expert_parallel"):
        return []
    from ballast.weights.weightless import expert_matrices  # its imports take seconds

    names = {f"{path}.{name}" for name in expert_matrices(owner)}
    return [tensor for tensor in segment.tensors if not names.isdisjoint(tensor.names)]
