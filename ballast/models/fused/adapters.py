"""Apply LoRA adapters to the merged matrices (q/k/v, gate/up) of a fused model.

Used by the fast paths on CPU and, for the targets of each matrix, on GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ballast.core.job import SequenceWork
from ballast.core.model import ModelSpec
from ballast.kernels.linear_code import PANEL
from ballast.kernels.lora import AdapterRows, LoraGroup, LoraTarget, kernels
from ballast.models.adapters import matrices_of, rows_of
from ballast.weights.host import HostModel
from ballast.weights.packing import MATRICES, is_part
from ballast.weights.segment import Segment


class FusedAdapters:
    """All adapters of a model, by matrix."""

    def __init__(
        self,
        host: HostModel,
        addresses: Sequence[int],
        dtype: torch.dtype,
        *,
        interleaved: bool,
    ) -> None:
        """`addresses`: of the adapters' segments. `interleaved`: see `kernels.linear.gate`."""
        spec = host.spec
        if host.adapters:
            kernels(torch.float32, dtype)
        found = targets_by_role(host, addresses, interleaved=interleaved)
        self._groups = {
            role: [LoraGroup(inputs_of(role, spec), t, dtype) if t else None for t in of]
            for role, of in found.items()
        }

    def of(self, work: Sequence[SequenceWork]) -> AdaptedRows | None:
        """Return the adapters of one job's rows; None if no row has one."""
        rows = rows_of(work)
        return None if rows is None else AdaptedRows(self._groups, *rows)


class AdaptedRows:
    """The adapters of one job's rows."""

    def __init__(
        self,
        groups: dict[str, list[LoraGroup | None]],
        rows: AdapterRows,
        sampled: AdapterRows,
    ) -> None:
        self._groups, self._rows, self._sampled = groups, rows, sampled

    def add(self, role: str, i: int, x: Tensor, y: Tensor) -> None:
        """Add to y (rows, outputs of layer i's matrix `role`) the adapters' products of x (rows,
        inputs)."""
        group = self._groups[role][i]
        if group is not None:
            rows = self._sampled if role == "head" else self._rows
            group.add(rows, x, y[:, : group.width])


def inputs_of(role: str, spec: ModelSpec) -> int:
    """Return the number of inputs of the matrices of a role."""
    inputs = {"o": spec.n_heads * spec.head_dim, "down": spec.intermediate}
    return inputs.get(role, spec.hidden)


def targets_by_role(
    host: HostModel,
    addresses: Sequence[int],
    *,
    interleaved: bool,
) -> dict[str, list[list[LoraTarget] | None]]:
    """Collect the adapters' targets of each matrix, by role and layer (`head` has one entry); None:
    no adapter changes it. `addresses`, `interleaved`: as of `FusedAdapters`."""
    spec = host.spec
    found = matrices_of(host.adapters, addresses)
    attended, kv = spec.n_heads * spec.head_dim, spec.kv_heads * spec.head_dim
    half, up = PANEL // 2, spec.intermediate
    columns = {"qkv": (0, attended, attended + kv), "gate_up": (0, up)}
    outputs: dict[str, tuple[int, ...]]
    outputs = {"qkv": (attended, kv, kv), "gate_up": (up, up), "head": (spec.vocab,)}
    if interleaved:
        columns["gate_up"] = (0, half)

    def targets(role: str, paths: Sequence[str]) -> list[LoraTarget] | None:
        made = []
        blocks = (half, PANEL) if interleaved and role == "gate_up" else (None, 0)
        for i, path in enumerate(paths):
            if (matrices := found.get(path)) is not None:
                n = outputs[role][i] if role in outputs else spec.hidden
                if len(paths) == 1 and role in outputs:  # stored as one matrix
                    n = sum(outputs[role])
                column = columns[role][i] if role in columns else 0
                made.append(matrices.target(n, column, *blocks))
        return made or None

    layers = host.segments[1 : 1 + spec.n_layers]
    return {
        **{
            role: [targets(role, _modules(segment, role)) for segment in layers]
            for role in MATRICES
        },
        "head": [targets("head", ["lm_head"])],
    }


def _modules(segment: Segment, role: str) -> list[str]:
    """Return the paths of the modules that a layer's matrix was merged from; none for roles that a
    layer of experts lacks."""
    sources = [name for t in segment.tensors if is_part(t.names[0], role) for name in t.sources]
    return [name.removesuffix(".weight") for name in sources]
