"""Run Llama-shaped families on a GPU by the fast path: a layer is ten launches, four of them GEMMs.

Weights lie as `ballast.weights.packing.fused` packs them for plain matrices: queries, keys and
values as one matrix, gate and up as another. Between GEMMs run our own kernels
(`kernels/gpu/layer.py`), which also write keys and values to their blocks. Batches, graphs and
rotating layers are handled as in `models/gpu/executor.py`, whose generic path is the reference and
runs all other decoders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ballast.core.errors import BrokenPromise
from ballast.kernels.attention import AttentionParams
from ballast.kernels.gpu.batch import GpuBatch
from ballast.kernels.gpu.layer import HeadVectors, LayerKernels, layer_kernels
from ballast.kernels.gpu.lora import GpuLoraGroup
from ballast.models.fused.adapters import inputs_of, targets_by_role
from ballast.models.gpu.adapters import Place
from ballast.models.gpu.executor import GpuExecutor
from ballast.weights.host import HostModel
from ballast.weights.packing import DTYPES, WIDE
from ballast.weights.segment import PLAIN, Segment

ONE_ROW = True
"""Whether a decode of one sequence is multiplied by our own kernel: on an H200 a step of 8 billion
parameters took 4.5 ms of the device with it, 4.9 with PyTorch's."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """Matrices (outputs, inputs) and vectors of one layer."""

    input_norm: Tensor
    qkv: Tensor
    vectors: HeadVectors
    o: Tensor
    o_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor

    @classmethod
    def of(cls, roles: dict[str, Tensor]) -> _Layer:
        vectors = HeadVectors(roles.get("qkv.bias"), roles.get("q_norm"), roles.get("k_norm"))
        names = ("o", "post_norm", "gate_up", "down")
        more = {name: roles[name] for name in names}
        return cls(roles["input_norm"], roles["qkv"], vectors, o_bias=roles.get("o.bias"), **more)


class GpuFusedModel(GpuExecutor):
    """Runs the jobs of a model whose host tier is in the layout `ballast.weights.packing.fused`,
    with plain matrices."""

    def __init__(
        self,
        *where: Any,
        kernels: LayerKernels | None = None,
        one_row: bool = ONE_ROW,
        invariant: bool = False,
        **more: Any,
    ) -> None:
        """`where`, `invariant`, `more`: as of `GpuExecutor`; `kernels`: by default chosen by the
        device; `one_row`: whether they also multiply a decode of one sequence, if not invariant:
        that kernel adds in another order."""
        super().__init__(*where, invariant=invariant, **more)
        self._one_row = one_row and not invariant
        self._kernels = k = kernels or layer_kernels(self._device)
        self._row = partial(k.multiply_row, epsilon=self._epsilon)

    def _set_up(self, host: HostModel, addresses: tuple[int, ...]) -> None:
        self._segments, self._last = host.segments, len(host.segments) - 1
        self._layers: list[_Layer] = []
        for i, address in enumerate(addresses):
            self._move(i, address)
        self._angles = _Angles(host.config, self.dtype, self._device)
        self._epsilon = float(host.config.get_text_config().rms_norm_eps)
        scale = self.spec.head_dim**-0.5
        self._attention_params = [AttentionParams(scale, window) for window in host.windows]

    def _move(self, segment: int, address: int) -> None:
        roles, n = self._roles(self._segments[segment], address), self.spec.n_layers
        if segment == 0:
            self._table = roles["embeddings"]
        if segment == self._head_segment:
            self._norm, self._head = roles["norm"], roles["head"]
        if 1 <= segment <= n:
            self._layers[segment - 1 : segment] = [_Layer.of(roles)]

    @property
    def _head_segment(self) -> int:
        """The segment with the head and the norm before it; with tied embeddings, the first."""
        return self._last if self._last > self.spec.n_layers else 0

    def _adapted(self, host: HostModel, addresses: Sequence[int]) -> Mapping[Place, GpuLoraGroup]:
        found = targets_by_role(host, addresses, interleaved=False)
        return {
            _place(role, i): GpuLoraGroup(inputs_of(role, self.spec), tuple(targets))
            for role, of in found.items()
            for i, targets in enumerate(of)
            if targets is not None
        }

    def _roles(self, segment: Segment, address: int) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for packed in segment.tensors:
            if packed.layout not in (PLAIN, WIDE):
                raise BrokenPromise(f"{packed.names} lies in {packed.layout}, which is of CPUs")
            tensor = self._view(address + packed.offset, packed.shape, DTYPES[packed.dtype])
            found |= dict.fromkeys(packed.names, tensor)
        return found

    def _compute_logits(self, batch: GpuBatch, n: int) -> Tensor:
        if n and self._alone(batch):
            return self._row(self._pass_of_row(batch), self._head, norm=self._norm).float()
        return self._multiply(batch, "head", self._head, self._compute_hidden(batch, n)).float()

    def _compute_hidden(self, batch: GpuBatch, n: int) -> Tensor:
        k, last = self._kernels, self.spec.n_layers - 1
        cosine, sine = self._angles(batch.positions)
        hidden = torch.nn.functional.embedding(batch.tokens, self._table)
        more: Tensor | None = None
        for i, layer in enumerate(self._layers):
            self._reach(i)
            x = k.add_norm(hidden, more, None, layer.input_norm, self._epsilon)
            qkv = self._multiply(batch, "qkv", layer.qkv, x, i)
            query = k.rotate(batch, i, qkv, layer.vectors, self._epsilon, cosine, sine)
            if i == last and not n:
                # Only its keys and values are needed.
                self._leave(i)
                return hidden[:0]
            batch.attend(i, query, batch.out, self._attention_params[i])
            more = self._multiply(batch, "o", layer.o, batch.out.flatten(1), i)
            x = k.add_norm(hidden, more, layer.o_bias, layer.post_norm, self._epsilon)
            gated = k.gate(self._multiply(batch, "gate_up", layer.gate_up, x, i))
            more = self._multiply(batch, "down", layer.down, gated, i)
            self._leave(i)
        wanted = batch.wanted[:n]
        ends = [x.index_select(0, wanted) for x in (hidden, more) if x is not None]
        return k.add_norm(ends[0], ends[1], None, self._norm, self._epsilon)

    def _alone(self, batch: GpuBatch) -> bool:
        """Whether the batch is one row that our own kernels multiply."""
        return self._one_row and batch.n_tokens == 1 and batch.adapted is None

    def _pass_of_row(self, batch: GpuBatch) -> Tensor:
        """Compute the last norm's input (1, hidden) of a decode of one sequence: seven launches a
        layer, of which attention takes two."""
        k, row = self._kernels, self._row
        cosine, sine = self._angles(batch.positions)
        hidden = torch.nn.functional.embedding(batch.tokens, self._table)
        for i, layer in enumerate(self._layers):
            self._reach(i)
            qkv = row(hidden, layer.qkv, norm=layer.input_norm)
            query = k.rotate(batch, i, qkv, layer.vectors, self._epsilon, cosine, sine)
            batch.attend(i, query, batch.out, self._attention_params[i])
            hidden = row(batch.out.flatten(1), layer.o, bias=layer.o_bias, added=hidden)
            gated = row(hidden, layer.gate_up, norm=layer.post_norm, gated=True)
            hidden = row(gated, layer.down, added=hidden)
            self._leave(i)
        return hidden

    def _multiply(
        self, batch: GpuBatch, role: str, matrix: Tensor, x: Tensor, layer: int = 0
    ) -> Tensor:
        """Return x W^T of a layer's matrix, or of the head, with the products of the rows' adapters
        added."""
        segment = self._head_segment if role == "head" else 1 + layer
        if segment in self._reads.units:
            y = self._kernels.multiply_host(x, matrix, self._reads.os_share)
        elif self._invariant:
            y = self._kernels.multiply(x, matrix)
        else:
            y = torch.nn.functional.linear(x, matrix)
        if batch.adapted is not None:
            self._adapters.add(_place(role, layer), batch.adapted[role == "head"], x, y)
        return y


def _place(role: str, layer: int) -> Place:
    return f"{role} {layer}"


class _Angles:
    """Rotary angles by position, from the frequencies that `transformers` derives."""

    def __init__(self, config: Any, dtype: torch.dtype, device: torch.device) -> None:
        from ballast.weights.meta_module import rotary_of  # its imports take seconds

        rotary = rotary_of(config)
        self._frequencies: Tensor = rotary.inv_freq.float().to(device)
        self._scale, self._dtype = float(rotary.attention_scaling), dtype

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of (T,) positions, each (T, head_dim / 2), computed in
        float32."""
        angles = positions[:, None] * self._frequencies
        turned = angles.cos(), angles.sin()
        cosine, sine = ((t * self._scale).to(self._dtype) for t in turned)
        return cosine, sine
