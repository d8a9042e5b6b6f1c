"""Run layers of experts on the fast path, in place of gate and up, and of down.

::

    norm   q/k/v   rotary   attention   o   norm   gate/up               down
                                                   route, gate_up │      down, combine │

Each of the two is a program of its own, with barriers between its operations as in a job's program
(`kernels/team.py`). So a layer has as many operations as one without experts, and the code that
cuts passes into programs need not distinguish them. The kernels are those of `kernels/experts.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ballast.core.errors import BrokenPromise
from ballast.core.model import ModelSpec
from ballast.core.units import ceil_div
from ballast.kernels import experts, program_code, team
from ballast.models.fused.passes import PlannedPass
from ballast.weights.packing_experts import DOWN, GATE_UP, ROUTER, routing_of
from ballast.weights.segment import TensorsByRole

Array = np.ndarray[Any, Any]

_ALIGNMENT = 64


class FusedExperts:
    """The layers of one model that have experts. One job at a time."""

    def __init__(
        self,
        spec: ModelSpec,
        config: Any,
        weights: Sequence[TensorsByRole],
        dtype: torch.dtype,
        memory: int,
        hidden: tuple[int, int],
        rows: int,
    ) -> None:
        """`config`: of the text; `weights`: of all layers, of which some have experts; `memory`:
        address of `experts_bytes` bytes; `hidden`: addresses of the experts' inputs and of the
        tensor that their sum is added to, float32 (rows, hidden) each; `rows`: most rows of a
        job."""
        self.layers = layers_of_experts(weights)
        self._number = {layer: i for i, layer in enumerate(self.layers)}
        found = [weights[i] for i in self.layers]
        routing = routing_of(config)
        (n, _, inner) = found[0][DOWN][0].shape
        if routing is None or (routing.top_k, inner) != (
            spec.experts_per_token,
            spec.expert_intermediate,
        ):
            raise BrokenPromise(f"{spec.name}: its experts are not those of its configuration")
        addresses = {
            role: np.array([w[role][1] for w in found])[:, None]
            + np.arange(n) * (found[0][role][0].n_bytes // n)
            for role in (GATE_UP, DOWN)
        }
        self._experts = experts.Experts(
            np.array([w[ROUTER][1] for w in found]),
            addresses[GATE_UP],
            addresses[DOWN],
            spec.hidden,
            inner,
            routing,
            dtype,
            experts.ExpertBuffers(*hidden, *_places(spec, rows, memory)),
            rows,
            (found[0][GATE_UP][0].form, found[0][DOWN][0].form),
        )
        kernels = experts.kernels(dtype)
        tables = team.rows_of(self._experts.tables)
        self._bytes = [w[GATE_UP][0].n_bytes + w[DOWN][0].n_bytes for w in found]
        self._operations = np.zeros((len(found), 2, 2, 2), np.int64)
        flat = self._operations.reshape(len(found), 4, 2)
        flat[..., 0] = kernels
        flat[..., 1] = tables[:, None]
        self._programs = team.program_tables(self._operations.reshape(-1, 2, 2))

    def describe(self, into: PlannedPass, layer: int) -> bool:
        """Add a layer's two programs of experts to a pass, in place of gate and up and of down;
        False: it has no experts."""
        i = self._number.get(layer)
        if i is None:
            return False
        for program in (2 * i, 2 * i + 1):
            into.operation(team.program_kernel(), self._programs, program)
        return True

    def bytes_of(self, layer: int) -> int:
        """Return the bytes of all experts of a layer; 0: it has none."""
        i = self._number.get(layer)
        return 0 if i is None else self._bytes[i]

    def chosen_bytes(self, layer: int) -> int:
        """Return the bytes of a layer's experts that had rows in the last job."""
        i = self._number.get(layer)
        if i is None:
            return 0
        counts = self._experts.counts[i]
        return self._bytes[i] // len(counts) * int(np.count_nonzero(counts))

    @property
    def counts(self) -> Array:
        """int64 (layers with experts, experts): rows of each in the last job."""
        return self._experts.counts.copy()

    def fill(self, rows: int, item_rows: int) -> None:
        """Set the number of rows of the next job, and of each item."""
        self._programs[:, program_code.PROGRESS] = 0
        self._experts.fill(rows, item_rows)


def layers_of_experts(weights: Sequence[TensorsByRole]) -> list[int]:
    """Return the numbers of the layers that have experts."""
    return [i for i, w in enumerate(weights) if ROUTER in w]


def experts_bytes(spec: ModelSpec, rows: int) -> int:
    """Return the bytes of workspace that experts need in jobs of up to `rows` tokens; 0: no
    experts."""
    return sum(ceil_div(n, _ALIGNMENT) * _ALIGNMENT for n in _sizes(spec, rows))


def _sizes(spec: ModelSpec, rows: int) -> tuple[int, ...]:
    return experts.sizes(rows, spec.experts_per_token, spec.hidden, spec.expert_intermediate)


def _places(spec: ModelSpec, rows: int, memory: int) -> list[int]:
    """Address of each buffer."""
    found = []
    for n_bytes in _sizes(spec, rows):
        found.append(memory)
        memory += ceil_div(n_bytes, _ALIGNMENT) * _ALIGNMENT
    return found
