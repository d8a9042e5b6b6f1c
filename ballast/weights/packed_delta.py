"""Read the matrices of an adapter that are whole differences in few bits.

They are tensors of compressed-tensors, packed in 4 or 8 bits with scales of groups, named as LoRA's
matrices are: `base_model.model.MODULE.weight_packed`, `..._scale`, `..._shape`. They stay so in the
adapter's segment, in the panels of `ballast.kernels.panel_forms`. Used by `adapter`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from ballast.kernels import quantised
from ballast.kernels.panel_forms import BLOCK, packed_bytes
from ballast.weights.assemble import Recipe, Sources
from ballast.weights.packing import PANELS
from ballast.weights.quantisation.config import PACKED, Quantisation
from ballast.weights.quantisation.formats import matrices_in
from ballast.weights.segment import PackedTensor
from ballast.weights.stored import form_of
from ballast.weights.stored_tensor import StoredTensor

GROUP = BLOCK
"""Inputs of a row that share a scale; the last of a row may be fewer."""
KIND = "BALLAST_DELTA"
"""`peft_type` of adapters that may have such matrices: not PEFT's, which would leave them off."""
PREFIX = "base_model.model."
_SUFFIX, _PARTS = ".weight", ("_packed", "_scale", "_shape")


@dataclass(frozen=True, slots=True)
class StoredDelta:
    """The stored difference of one module."""

    module: str
    matrix: StoredTensor

    @property
    def form(self) -> str:
        """Form of its panels."""
        return form_of(self.matrix, "float32")


def split(
    tensors: Mapping[str, StoredTensor], modules: Mapping[str, tuple[int, int]]
) -> tuple[dict[str, StoredTensor], tuple[StoredDelta, ...]]:
    """Divide an adapter's tensors into those of low rank and its differences in few bits, by the
    base's order of modules; `modules`: (inputs, outputs) of these.

    Raises CheckpointError, with the tensor, for those that do not fit.
    """
    found = matrices_in(tensors, Quantisation(KIND, (PACKED,), GROUP))
    matrices = {name: t for name, t in found.items() if t.packing is not None}
    parts = {f"{name}{part}" for name in matrices for part in _PARTS}
    left = {name: t for name, t in found.items() if name not in matrices and name not in parts}
    by_module: dict[str, StoredDelta] = {}
    for name, matrix in matrices.items():
        module = name.removeprefix(PREFIX).removesuffix(_SUFFIX)
        inputs, outputs = modules.get(module, (0, 0))
        if not outputs or name != f"{PREFIX}{module}{_SUFFIX}":
            raise matrix.error(f"the base has no linear module {module!r}")
        if matrix.shape != (outputs, inputs):
            raise matrix.error(f"has shape {matrix.shape}, the base needs {(outputs, inputs)}")
        made = by_module[module] = StoredDelta(module, matrix)
        if not made.form:
            raise matrix.error(f"its groups are not of {GROUP} inputs")
    return left, tuple(by_module[m] for m in modules if m in by_module)


@contextmanager
def reading(deltas: Sequence[StoredDelta]) -> Iterator[Mapping[str, Callable[[], Tensor]]]:
    """Open the files of differences; yields what reads each into panels, flat uint8, by the names
    of `tensor`. These raise CheckpointError for differences that are not finite."""
    with Sources([Recipe.of(d.matrix) for d in deltas]) as sources:
        yield {_name(d): partial(_read, d, sources) for d in deltas}


def _read(delta: StoredDelta, sources: Sources) -> Tensor:
    rows = sources.read_rows(Recipe.of(delta.matrix), delta.form)
    if not quantised.is_finite(rows, delta.form):
        raise delta.matrix.error("it holds NaN or infinite values")
    return quantised.pack(rows, delta.form, delta.matrix.shape[1])


def tensor(delta: StoredDelta) -> PackedTensor:
    """Return a difference's panels as a tensor of a segment."""
    n, k = delta.matrix.shape
    names, n_bytes = (_name(delta),), packed_bytes(delta.form, n, k)
    return PackedTensor(names, (n, k), "float32", 0, n_bytes, PANELS, names, form=delta.form)


def _name(delta: StoredDelta) -> str:
    return f"{delta.module}.delta"
