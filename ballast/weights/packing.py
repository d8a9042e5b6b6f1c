"""Choose the memory layout of each tensor of a segment: as stored, or packed for our GEMM kernels.

`as_stored` keeps the architecture's own tensors, for `models/transformers.py`. `fused` lays out
Llama-like layers by their recipe (`ballast.weights.decoder_recipe`), for `models/fused/model.py`:
query, key and value projections as one matrix, gate and up as another, all matrices in panels, so
that a step reads each from front to back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from ballast.core.units import ceil_div
from ballast.kernels import linear, panel_forms, quantised
from ballast.kernels.linear_code import PANEL
from ballast.kernels.quantised import PackedRows
from ballast.weights import packing_experts
from ballast.weights.architecture import Architecture, ModelTensor
from ballast.weights.decoder_recipe import LLAMA, DecoderRecipe, matrices, vectors
from ballast.weights.segment import PLAIN, PackedTensor, Segment

PANELS = "panels"
"""Layout of a matrix in panels (`kernels/linear.py`)."""
GATED = "gated"
"""Layout in panels each of which has as many rows of gate as of up, so that one item computes
both."""
WIDE = "wide"
"""Layout of a bias: float32, zeros up to the end of the last panel."""
GATED_WIDE = "gated wide"
"""`WIDE` for a matrix in the layout `GATED`: rows of gate and of up are interleaved as there."""
SHIFTED = "shifted"
"""Layout of a norm's weights w: 1 + w in float32, as bfloat16 would round it."""

_VECTORS = (WIDE, GATED_WIDE, SHIFTED)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Dtypes that can be served."""

Read = Callable[[str, torch.dtype], Tensor]
"""Reads the whole tensor of a name in the architecture, in a dtype."""

Forms = Mapping[str, str]
"""Forms (`ballast.kernels.panel_forms`) of the matrices that stay quantised, by the names of their
weights in the architecture."""
NO_FORMS: Forms = MappingProxyType({})


Layout = tuple[tuple[str, tuple[PackedTensor, ...]], ...]
"""(name, tensors) of each segment, in load order; offsets are not set yet."""


def as_stored(
    architecture: Architecture,
    dtype: str,
    linears: Collection[str] = frozenset(),
    forms: Forms = NO_FORMS,
) -> Layout:
    """Lay tensors out as in the architecture, except weights named in `linears`, which are in
    panels, quantised if they have one of `forms`, and experts all of which have one.

    In `dtype`, except tensors with a dtype of their own.
    """
    experts = packing_experts.kept_packed(architecture, forms)

    def tensor(w: ModelTensor) -> PackedTensor:
        if (turned := experts.get(w.names[0])) is not None:
            return packing_experts.as_panels(w, dtype, forms[w.names[0]], turned)
        layout = PANELS if w.names[0] in linears and len(w.names) == 1 else PLAIN
        form = forms.get(w.names[0], "") if layout == PANELS and w.dtype is None else ""
        return _tensor(w.names, w.shape, w.dtype or dtype, layout, (w.names[0],), form)

    return tuple((name, tuple(tensor(w) for w in wanted)) for name, wanted in architecture.segments)


def fused(
    architecture: Architecture, dtype: str, *, packed: bool = True, forms: Forms = NO_FORMS
) -> Layout | None:
    """Return the layout of the fast path, by the roles of `models/fused/model.py`; None: it has
    none for this architecture.

    Roles: `embeddings`, `norm` and `head` (`embeddings` and `head` on one tensor if they are tied);
    in layers the matrices and norms of `ballast.weights.decoder_recipe`, and biases as `qkv.bias`
    and so on; in layers of experts, in place of the last two matrices, the roles of
    `packing_experts`. Matrices are plain if not `packed`, for which only Llama's recipe without
    experts has a fast path, on CPUs and GPUs. Those of `forms` are quantised panels; a merged
    matrix of several forms is in parts (`is_part`).
    """
    mixed = packed and packing_experts.is_known(architecture)
    recipe = LLAMA if mixed else architecture.recipe
    if recipe is None or not (packed or recipe == LLAMA):
        return None
    if any(w.dtype is not None for _, wanted in architecture.segments for w in wanted):
        return None
    forms = packing_experts.uniform_forms(architecture, forms) if mixed else forms
    layers = architecture.segments[1 : 1 + architecture.n_layers]
    found = [(name, _layer(wanted, dtype, packed, recipe, forms)) for name, wanted in layers]
    ends = (architecture.segments[0], *architecture.segments[1 + len(layers) :])
    model = architecture.prefix.removesuffix("layers.")
    outside = _outside([wanted for _, part in ends for wanted in part], model)
    if outside is None or any(tensors is None for _, tensors in found):
        return None
    table, norm, head = outside
    panels = PANELS if packed else PLAIN
    end = _vector("norm", norm, dtype, recipe)
    middle = tuple((name, tensors) for name, tensors in found if tensors is not None)
    if head is None:
        form, names = forms.get(table.names[0], ""), ("embeddings", "head")
        tied = _tensor(names, table.shape, dtype, panels, (table.names[0],), form)
        return (("embeddings", (tied, end)), *middle)
    form = forms.get(table.names[0], "")
    layout = PANELS if form else PLAIN
    first = _tensor(("embeddings",), table.shape, dtype, layout, (table.names[0],), form)
    form = forms.get(head.names[0], "")
    last = _tensor(("head",), head.shape, dtype, panels, (head.names[0],), form)
    return (("embeddings", (first,)), *middle, ("head", (end, last)))


def read_dtype(tensor: PackedTensor, served: torch.dtype) -> torch.dtype:
    """Return the dtype in which a tensor's sources are read: vectors that are kept in float32 are
    rounded to the `served` dtype all the same."""
    return served if tensor.layout in _VECTORS else DTYPES[tensor.dtype]


def build(tensor: PackedTensor, read: Read, served: torch.dtype) -> Tensor:
    """Build the elements of a packed tensor as they lie in memory, flat."""
    vector, dtype = tensor.layout in _VECTORS, read_dtype(tensor, served)
    parts = [read(name, dtype) for name in tensor.sources]
    stacked = parts[0] if len(parts) == 1 else torch.cat(parts)
    if tensor.layout in (GATED, GATED_WIDE):
        stacked = linear.gated(*stacked.chunk(2))
    if not vector:
        return linear.pack(stacked)
    if tensor.layout == SHIFTED:
        return 1 + stacked.float()
    more = tensor.n_bytes // 4 - len(stacked)
    return torch.nn.functional.pad(stacked.float(), (0, more))


def build_quantised(tensor: PackedTensor, rows: Sequence[PackedRows]) -> Tensor:
    """Build the bytes of quantised panels from the rows of each source."""
    stacked = quantised.stacked(rows)
    if tensor.layout == GATED:
        stacked = quantised.gated(stacked)
    return quantised.pack(stacked, tensor.form, tensor.shape[1])


def words_on_forms(
    segments: Sequence[Segment], types: Collection[tuple[str, str]], dtype: str
) -> str:
    """Return a sentence on which of a checkpoint's quantised types stay packed in a model's
    segments; `types`: each with its form."""
    found = [tensor.form for segment in segments for tensor in segment.tensors if tensor.form]
    forms = {panel_forms.exact(form) for form in found}
    kept = {name for name, form in types if form in forms}
    left = sorted({name for name, _ in types} - kept)
    words = [f"{', '.join(sorted(kept))} stay packed in memory"] if kept else []
    words += [f"{', '.join(left)} are dequantised to {dtype} at load"] if left else []
    words += ["activations are rounded to int8"] if forms != {*found} else []
    return "; ".join(words) or f"its matrices are served in {dtype}"


def is_part(name: str, role: str) -> bool:
    """Return whether a tensor's name is that of a matrix of a role, or of some rows of it:
    `qkv.0`, `qkv.1`."""
    return name == role or (name.startswith(f"{role}.") and name[len(role) + 1 :].isdigit())


def _tensor(
    names: tuple[str, ...],
    shape: tuple[int, ...],
    dtype: str,
    layout: str,
    sources: tuple[str, ...],
    form: str = "",
) -> PackedTensor:
    """Return a packed tensor, with its bytes in its layout."""
    if form:
        n_bytes = panel_forms.packed_bytes(form, shape[0], shape[1])
    elif layout == PLAIN:
        n_bytes = math.prod(shape) * DTYPES[dtype].itemsize
    elif layout in (WIDE, GATED_WIDE):
        n_bytes, dtype = 4 * ceil_div(shape[0], PANEL) * PANEL, "float32"
    elif layout == SHIFTED:
        n_bytes, dtype = 4 * shape[0], "float32"
    else:
        n_bytes = linear.packed_bytes(shape[0], shape[1], DTYPES[dtype])
    return PackedTensor(names, shape, dtype, 0, n_bytes, layout, sources, form=form)


MATRICES = matrices(LLAMA)
"""The fused matrices of a Llama layer by role, and the modules in each, in their order."""


def _layer(
    wanted: Sequence[ModelTensor], dtype: str, packed: bool, recipe: DecoderRecipe, forms: Forms
) -> tuple[PackedTensor, ...] | None:
    """Return a layer's tensors by role; None if it has others than expected."""
    by_part = {_part(w.names[0]): w for w in wanted}
    found = list(packing_experts.pop_experts(by_part, dtype, forms)) if packed else []
    roles = matrices(recipe)
    if found:
        roles = {role: roles[role] for role in ("qkv", "o")}
    for role, name in vectors(recipe).items():
        vector = by_part.pop(f"{name}.weight", None)
        if vector is not None:
            found.append(_vector(role, vector, dtype, recipe))
    for role, names in roles.items():
        weights = [by_part.pop(f"{name}.weight", None) for name in names]
        biases = [by_part.pop(f"{name}.bias", None) for name in names]
        interleaved = packed and role == "gate_up"
        layout = PLAIN if not packed else GATED if interleaved else PANELS
        merged = _matrices(role, weights, dtype, layout, forms)
        if merged is None:
            return None
        found += merged
        if any(biases):
            bias = _stack(f"{role}.bias", biases, dtype, GATED_WIDE if interleaved else WIDE)
            if bias is None:
                return None
            found.append(bias)
    return None if by_part else tuple(found)


def _part(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` -> `mlp.up_proj.weight`."""
    parts = name.split(".")
    return ".".join(parts[next(i for i, p in enumerate(parts) if p.isdigit()) + 1 :])


def _outside(
    wanted: Sequence[ModelTensor], model: str
) -> tuple[ModelTensor, ModelTensor, ModelTensor | None] | None:
    """Return (embeddings, final norm, head or None if tied); None if there is more or less.

    `model`: prefix of all names but the head's.
    """
    by_name = {w.names[0]: w for w in wanted}
    table = by_name.pop(f"{model}embed_tokens.weight", None)
    norm = by_name.pop(f"{model}norm.weight", None)
    head = by_name.pop("lm_head.weight", None)
    if table is None or norm is None or by_name:
        return None
    return table, norm, head


def _vector(role: str, w: ModelTensor, dtype: str, recipe: DecoderRecipe) -> PackedTensor:
    """Return a norm's weights in the layout of its kernel."""
    layout = SHIFTED if recipe.norm_offset else PLAIN
    return _tensor((role,), w.shape, dtype, layout, (w.names[0],))


def _matrices(
    role: str, parts: Sequence[ModelTensor | None], dtype: str, layout: str, forms: Forms
) -> list[PackedTensor] | None:
    """Merge matrices into one, or into parts if they have several forms; None unless all are
    there. Gate and up, which are interleaved, are quantised only if they have one form."""
    by_part = ["" if p is None else forms.get(p.names[0], "") for p in parts]
    if len(set(by_part)) > 1 and layout != GATED:
        each = zip(parts, by_part, strict=True)
        found = [_stack(f"{role}.{i}", [p], dtype, layout, f) for i, (p, f) in enumerate(each)]
    else:
        form = by_part[0] if len(set(by_part)) == 1 else ""
        found = [_stack(role, parts, dtype, layout, form)]
    there = [tensor for tensor in found if tensor is not None]
    return there if len(there) == len(found) else None


def _stack(
    role: str, parts: Sequence[ModelTensor | None], dtype: str, layout: str, form: str = ""
) -> PackedTensor | None:
    """Stack tensors along the first dimension; None unless all are present."""
    there = [p for p in parts if p is not None]
    if len(there) != len(parts):
        return None
    shape = (sum(p.shape[0] for p in there), *there[0].shape[1:])
    return _tensor((role,), shape, dtype, layout, tuple(p.names[0] for p in there), form)
