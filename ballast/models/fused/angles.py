"""Compute cosines and sines of a job's positions, in the layout of the fused path's rotary
kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ballast.memory.tensor import tensor_at
from ballast.weights.decoder_recipe import RotarySet

Array = np.ndarray[Any, Any]


class Angles:
    """Rotary angles by position, from the frequencies that `transformers` derives.

    A model has one set of frequencies, or one for each kind of its layers. Its cosines and sines
    lie in two buffers, one set after the other.
    """

    def __init__(
        self, sets: Mapping[str, RotarySet], cosine: int, sine: int, set_bytes: int
    ) -> None:
        """`sets`: in the order of `DecoderRecipe.rotary_sets`; `cosine`, `sine`: addresses of the
        first set; `set_bytes`: from one set to the next."""
        dtype = torch.float32
        self._sets = [(torch.tensor(s.frequencies, dtype=dtype), s.scaling) for s in sets.values()]
        self._at = {n: (cosine + i * set_bytes, sine + i * set_bytes) for i, n in enumerate(sets)}
        self.width = 2 * len(self._sets[0][0])
        """Elements of a head that are rotated; the same in all sets."""

    def addresses(self, name: str | None) -> tuple[int, int]:
        """Return the addresses of the cosines and of the sines of a set, each float32 (T, width /
        2).

        `name` None: those of any set, as the layer does not rotate.
        """
        return self._at[name] if name is not None else next(iter(self._at.values()))

    def fill(self, positions: Array) -> None:
        """Compute cosines and sines for (T,) positions.

        Angles are float32, as in `transformers`, but cosines and sines are computed in float64: in
        float32 the last bit of PyTorch's result depends on an element's place in a vector, and so
        on other sequences.
        """
        shape = (len(positions), self.width // 2)
        columns = torch.from_numpy(positions).float()[:, None]
        for (steps, scale), (cosine, sine) in zip(self._sets, self._at.values(), strict=True):
            angles = (columns * steps).double()
            _view(cosine, shape).copy_(angles.cos().mul_(scale))
            _view(sine, shape).copy_(angles.sin().mul_(scale))


def _view(address: int, shape: tuple[int, int]) -> Tensor:
    return tensor_at(address, shape, torch.float32)
