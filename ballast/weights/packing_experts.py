"""Choose the memory layout of a layer's experts.

`transformers` holds a layer's experts as two tensors, (experts, 2 * inner, hidden) and (experts,
hidden, inner), some kinds with the last two dimensions the other way round. In memory each expert's
matrix is in panels of its own (`kernels/linear.py`), one after the other: a step reads only the
experts that its rows are routed to. The router is as stored. Each expert is read, packed and
written by itself. Quantised ones stay so where those of all layers are in one form, and on the
generic path (`models/packed_experts.py`) in any: `as_panels`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ballast.kernels import linear, panel_forms, quantised
from ballast.kernels.experts import Routing
from ballast.kernels.quantised import PackedRows
from ballast.weights.architecture import Architecture, ModelTensor
from ballast.weights.segment import PLAIN, PackedTensor

EXPERT_PANELS = "expert_panels"
"""Layout of (experts, n, k): each expert's matrix in panels."""
EXPERT_GATED = "expert_gated"
"""Layout of (experts, gates and then ups, k): each expert's matrix in the layout `GATED`."""
LAYOUTS = frozenset({EXPERT_PANELS, EXPERT_GATED})

ROUTER, GATE_UP, DOWN = "router", "experts.gate_up", "experts.down"
"""Roles of a layer's tensors on the fast path (`models/fused/experts.py`)."""
_ROLES = {
    ROUTER: ("mlp.gate.weight", PLAIN),
    GATE_UP: ("mlp.experts.gate_up_proj", EXPERT_GATED),
    DOWN: ("mlp.experts.down_proj", EXPERT_PANELS),
}
"""Name within a layer, and layout, by role."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

ReadPart = Callable[[str, int, Tensor], None]
"""Fills a tensor (1-D) with elements of the named tensor, from a given element on, converted."""


def routing_of(config: Any) -> Routing | None:
    """Return the routing of a decoder with this text configuration, if it is a plain softmax over
    all experts without anything beside these; None: it is not, or not known."""
    if config.model_type == "mixtral":
        return Routing(int(config.num_experts_per_tok), normalised=True)
    if config.model_type == "qwen3_moe":
        return Routing(int(config.num_experts_per_tok), normalised=bool(config.norm_topk_prob))
    return None


def is_known(architecture: Architecture) -> bool:
    """Whether `models/fused/experts.py` can run the experts of a decoder."""
    config = architecture.config.get_text_config()
    routing = routing_of(config)
    # A multimodal model may do more with text than its text model; this is not compared.
    if routing is None or config.hidden_act != "silu" or config is not architecture.config:
        return False
    return routing.top_k == architecture.experts_per_token > 0


def uniform_forms(architecture: Architecture, forms: Mapping[str, str]) -> Mapping[str, str]:
    """Return `forms` without those of experts, unless all of them have one, and those of a role the
    same: tables and kernels of all layers are alike."""
    ends = {role: f".{_ROLES[role][0]}" for role in (GATE_UP, DOWN)}
    names = [w.names[0] for _, wanted in architecture.segments for w in wanted]
    found = {role: [n for n in names if n.endswith(end)] for role, end in ends.items()}
    kinds = [{forms.get(n, "") for n in of} for of in found.values()]
    if all(len(kind) == 1 and "" not in kind for kind in kinds):
        return forms
    return {n: form for n, form in forms.items() if not n.endswith(tuple(ends.values()))}


def kept_packed(architecture: Architecture, forms: Mapping[str, str]) -> Mapping[str, bool]:
    """Return the experts' matrices that the generic path multiplies in panels, as
    `Architecture.experts`: those of the modules all of whose matrices have a form."""
    by_module: dict[str, list[str]] = {}
    for name in architecture.experts:
        by_module.setdefault(name.rpartition(".")[0], []).append(name)
    whole = [names for names in by_module.values() if all(n in forms for n in names)]
    return {name: architecture.experts[name] for names in whole for name in names}


def as_panels(w: ModelTensor, dtype: str, form: str, turned: bool) -> PackedTensor:
    """Return the matrices of a layer's experts as quantised panels, for the generic path; `turned`:
    as of `Architecture.experts`."""
    experts, n, k = w.shape
    shape = (experts, k, n) if turned else (experts, n, k)
    return _tensor(w.names[0], replace(w, shape=shape), dtype, EXPERT_PANELS, form)


def pop_experts(
    by_part: dict[str, ModelTensor], dtype: str, forms: Mapping[str, str]
) -> tuple[PackedTensor, ...]:
    """Remove router and experts from a layer's tensors, by their names, and pack them.

    Empty, with nothing removed, unless all are there.
    """
    names = [name for name, _ in _ROLES.values()]
    if not all(name in by_part for name in names):
        return ()
    router, gate_up, down = (by_part.pop(name) for name in names)
    experts, hidden = router.shape
    if gate_up.shape != (experts, 2 * down.shape[2], hidden) or down.shape[:2] != router.shape:
        by_part.update(zip(names, (router, gate_up, down), strict=True))
        return ()
    found = zip(_ROLES.items(), (router, gate_up, down), strict=True)
    return tuple(
        _tensor(role, w, dtype, layout, forms.get(w.names[0], ""))
        for (role, (_, layout)), w in found
    )


def _tensor(role: str, w: ModelTensor, dtype: str, layout: str, form: str) -> PackedTensor:
    kind = _DTYPES[dtype]
    if layout == PLAIN:
        n_bytes, parts = math.prod(w.shape) * kind.itemsize, 1
    else:
        parts, n, k = w.shape
        each = panel_forms.packed_bytes(form, n, k) if form else linear.packed_bytes(n, k, kind)
        n_bytes = parts * each
    return PackedTensor(
        (role,), w.shape, dtype, 0, n_bytes, layout, (w.names[0],), parts, form=form
    )


def build(tensor: PackedTensor, expert: int, read: ReadPart) -> Tensor:
    """Build one expert's matrix of a tensor in one of `LAYOUTS`, as it lies in memory."""
    _, n, k = tensor.shape
    matrix = torch.empty(n, k, dtype=_DTYPES[tensor.dtype])
    read(tensor.sources[0], expert * n * k, matrix.view(-1))
    if tensor.layout == EXPERT_GATED:
        matrix = linear.gated(matrix[: n // 2], matrix[n // 2 :])
    return linear.pack(matrix)


def build_quantised(tensor: PackedTensor, parts: Sequence[PackedRows]) -> Tensor:
    """Build the quantised panels of one expert's matrix, of its rows in several parts."""
    rows = quantised.stacked(parts)
    if tensor.layout == EXPERT_GATED:
        rows = quantised.gated(rows)
    return quantised.pack(rows, tensor.form, tensor.shape[2])
