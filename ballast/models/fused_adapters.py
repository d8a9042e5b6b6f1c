"""Adapters of a fused model: what each adds to the rows of the matrices that were put together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ballast.core.job import SequenceWork
from ballast.core.model import ModelSpec
from ballast.kernels.linear_code import PANEL
from ballast.kernels.lora import AdapterRows, LoraGroup, Matrices, Target, kernels
from ballast.models.adapters import matrices_of
from ballast.weights.host import HostAdapter
from ballast.weights.packing import MATRICES


class FusedAdapters:
    """All adapters of a model, matrix by matrix."""

    def __init__(
        self,
        spec: ModelSpec,
        adapters: Sequence[HostAdapter],
        addresses: Sequence[int],
        dtype: torch.dtype,
        *,
        interleaved: bool,
    ) -> None:
        """`addresses`: of the adapters' segments. `interleaved`: see `library.gate`."""
        if adapters:
            kernels(torch.float32, dtype)
        found = matrices_of(adapters, addresses)
        attended, kv = spec.n_heads * spec.head_dim, spec.kv_heads * spec.head_dim
        half, up = PANEL // 2, spec.intermediate
        inputs = {"o": attended, "down": spec.intermediate}
        columns = {"qkv": (0, attended, attended + kv), "gate_up": (0, up)}
        outputs = {"qkv": (attended, kv, kv), "gate_up": (up, up)}
        if interleaved:
            columns["gate_up"] = (0, half)

        def group(role: str, paths: Sequence[str]) -> LoraGroup | None:
            targets = []
            for i, path in enumerate(paths):
                entries: Sequence[Matrices | None] | None = found.get(path)
                if entries is None:
                    continue
                n = outputs[role][i] if role in outputs else spec.hidden
                n = spec.vocab if role == "head" else n
                blocks = (half, PANEL) if interleaved and role == "gate_up" else (None, 0)
                column = columns[role][i] if role in columns else 0
                targets.append(Target(n, tuple(entries), column, *blocks))
            if not targets:
                return None
            return LoraGroup(inputs.get(role, spec.hidden), targets, dtype)

        self._groups = {
            role: [
                group(role, [f"model.layers.{i}.{part}" for part in parts])
                for i in range(spec.n_layers)
            ]
            for role, parts in MATRICES.items()
        }
        self._groups["head"] = [group("head", ["lm_head"])]

    def of(self, work: Sequence[SequenceWork]) -> AdaptedRows | None:
        """For one job; None if none of its rows goes through an adapter."""
        adapters = [-1 if w.adapter is None else w.adapter for w in work]
        if all(a < 0 for a in adapters):
            return None
        rows = [a for a, w in zip(adapters, work, strict=True) for _ in w.tokens]
        sampled = [a for a, w in zip(adapters, work, strict=True) if w.sample is not None]
        return AdaptedRows(self._groups, AdapterRows(rows), AdapterRows(sampled))


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
        """Add to y (rows, outputs of layer i's matrix `role`) what x (rows, inputs) makes there."""
        group = self._groups[role][i]
        if group is not None:
            rows = self._sampled if role == "head" else self._rows
            group.add(rows, x, y[:, : group.width])
