"""Run Llama-like decoders by the fast path on CPU: a job is one program that all threads run.

Llama has eight operations in a layer: norm, q/k/v, rotary and KV, attention, output projection,
norm, gate and up, down. How other decoders differ is in their recipe
(`ballast.weights.decoder_recipe`): fewer or more operations, other kernels, or other numbers in the
tables. A layer of experts has programs in place of the last two (`ballast.models.fused.experts`).

Weights come packed (`ballast.weights.packing.fused`). Activations are float32 and lie in the lane's
workspace, at addresses that never change: so the operations' tables are made once, and only what
differs is filled in for each job: the number of rows, tokens, positions and block tables.
`models/transformers.py` is the reference, and runs all other decoders.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ballast.core.errors import BrokenPromise
from ballast.core.job import SequenceWork
from ballast.core.units import ceil_div
from ballast.kernels import layer, layer_code, linear, linear_code, quantised
from ballast.kernels.paged_attention import NO_WINDOW
from ballast.kernels.workspace import Workspace
from ballast.kv.layout import Layout
from ballast.memory.tensor import array_at, tensor_at
from ballast.models.executor import ModelExecutor, Rows
from ballast.models.fused.adapters import AdaptedRows, FusedAdapters
from ballast.models.fused.angles import Angles
from ballast.models.fused.experts import FusedExperts, layers_of_experts
from ballast.models.fused.library import Library
from ballast.models.fused.linears import FusedLinears
from ballast.models.fused.passes import Due, End, PassStop, PlannedPass
from ballast.models.fused.tables import FusedTables
from ballast.models.fused.workspace import (
    ActivationBuffers,
    MatrixPlace,
    angle_bytes,
    gate_up_width,
    qkv_width,
)
from ballast.weights.decoder_recipe import GELU, GELU_TANH, LLAMA, POST, SILU
from ballast.weights.host import HostModel
from ballast.weights.packing import GATED, MATRICES
from ballast.weights.segment import PackedTensor, Segment, TensorsByRole

Array = np.ndarray[Any, Any]

ROWS_ALONE = 8
"""Rows up to which the operations between matrices compute one row per item."""
_GATED = {SILU: linear.GATED, GELU: linear.GATED_ERF, GELU_TANH: linear.GATED_TANH}


def _is_interleaved(layers: Sequence[TensorsByRole]) -> bool:
    """Whether rows of gate and up alternate in memory, in all layers that have such a matrix."""
    return all(w["gate_up"][0].layout == GATED for w in layers if "gate_up" in w)


class FusedModel(ModelExecutor):
    """Runs the jobs of a model whose host tier is in the layout `ballast.weights.packing.fused`.

    No two jobs of models that share a workspace may run at the same time.
    """

    SUMS = False
    """Whether hidden states are sums over ranks (`_sum_up`)."""

    def __init__(
        self,
        host: HostModel,
        segment_addresses: Sequence[int],
        kv_base: int,
        layout: Layout,
        workspace: Workspace,
        max_rows: int,
        max_sampled: int,
        invariant: bool = False,
    ) -> None:
        """`segment_addresses[i]`: address of segment i of `host` while the model is resident.

        `max_rows`, `max_sampled`: most tokens of a job, and most positions sampled in it;
        `invariant`: a row's result in bfloat16 depends on no other row. Raises BrokenPromise if the
        workspace is too small for them.
        """
        super().__init__(host, kv_base, layout)
        spec = self.spec
        self._recipe = recipe = host.recipe or LLAMA
        self._buffers = b = ActivationBuffers.of(spec, workspace, max_rows, max_sampled, recipe)
        self._workspace = workspace  # keeps its memory mapped
        self._max_rows, self._max_sampled = max_rows, max_sampled
        angles = (b.cosine, b.sine, angle_bytes(spec, max_rows))
        self._angles = Angles(host.rotary, *angles)
        windows = [NO_WINDOW if w is None else w for w in host.windows]
        self._windows: Array = np.array(windows, np.int64)
        self._scaling = recipe.attention_scale or spec.head_dim**-0.5
        self._softcap = recipe.softcap or 0.0
        self._norm_dtype = torch.float32 if recipe.norm_offset else self.dtype
        """Dtype of norms' weights in memory (`ballast.weights.packing.SHIFTED`)."""
        first, layers, last = self._weights_by_role(host.segments, segment_addresses)
        assert host.norm_epsilon is not None  # it is laid out for this code
        epsilon = layer.bits_of(host.norm_epsilon)
        self._make_operation_tables(first, layers, last, epsilon)
        self.experts: FusedExperts | None = None
        if layers_of_experts(layers):
            text, hidden = host.config.get_text_config(), (b.normed, b.hidden)
            self.experts = FusedExperts(spec, text, layers, self.dtype, b.experts, hidden, max_rows)
        self._logits = tensor_at(b.logits, (max_sampled, spec.vocab), torch.float32)
        self._hidden = tensor_at(b.hidden, (max_rows, spec.hidden), torch.float32)
        self._make_matrix_tables(layers, last, invariant)
        addresses = segment_addresses[len(host.segments) :]
        interleaved = _is_interleaved(layers)
        self._adapters = FusedAdapters(host, addresses, self.dtype, interleaved=interleaved)
        self._passes: dict[tuple[frozenset[str], bool], PlannedPass] = {}
        self._product: Tensor | None = None
        """The library's last product, kept while the next operations read it."""

    def expert_bytes(self, layer: int) -> int:
        return 0 if self.experts is None else self.experts.bytes_of(layer)

    def chosen_bytes(self, layer: int) -> int:
        return 0 if self.experts is None else self.experts.chosen_bytes(layer)

    @torch.inference_mode()
    def logits(self, work: Sequence[SequenceWork]) -> Tensor:
        logits = self._logits[: self._compute(work, head=True)]
        if self._recipe.logits_divisor != 1.0:
            logits /= self._recipe.logits_divisor
        cap = self._recipe.logits_softcap
        if cap is not None:
            logits.div_(cap).tanh_().mul_(cap)
        return logits

    @torch.inference_mode()
    def hidden(self, work: Sequence[SequenceWork]) -> Tensor:
        n = self._compute(work, head=False)
        return tensor_at(self._buffers.normed, (n, self.spec.hidden), torch.float32)

    def _compute(self, work: Sequence[SequenceWork], *, head: bool) -> int:
        """Run a job, up to its logits or to the norm before the head; returns the number of sampled
        rows."""
        rows = self.rows(work)
        sampled = len(rows.wanted)
        if rows.n > self._max_rows or sampled > self._max_sampled:
            raise BrokenPromise(
                f"a job of {rows.n} rows and {sampled} samples; the most is {self._max_rows} and "
                f"{self._max_sampled}"
            )
        self._execute(rows, work, head=head)
        return sampled

    def _execute(self, rows: Rows, work: Sequence[SequenceWork], *, head: bool) -> None:
        n, sampled, library = rows.n, len(rows.wanted), self._library
        item_rows = 1 if n <= ROWS_ALONE else ceil_div(n, 4 * torch.get_num_threads())
        self._fill(rows, item_rows)
        by_library: frozenset[str] = frozenset()
        if library is not None:
            by_library = library.roles(n, sampled)
            library.begin(by_library, n, sampled, item_rows)
        adapted = self._adapters.of(work)
        planned = self._pass_of(by_library, adapted=adapted is not None)
        kernel, attending = self._attend(rows)
        planned.set_attention(kernel, attending)
        stops = self._begin_pass(work)
        end = End.KV if not sampled else End.HEAD if head else End.NORM
        meet = partial(self._meet, n, sampled, adapted)
        planned.run(end, torch.get_num_threads(), stops, meet)
        self._product = None

    def _meet(self, n: int, sampled: int, adapted: AdaptedRows | None, stop: PassStop) -> None:
        """Do the work that is due at a stop of a job of n rows."""
        barriers = self.barriers
        if stop.due is Due.LIBRARY:
            assert self._library is not None
            self._product = None  # free its memory before the next is allocated
            self._product = self._library.multiply(stop.role, stop.layer)
        elif stop.due is Due.ADAPTERS:
            assert adapted is not None
            x, y = self._rows_of(stop.role, sampled if stop.role == "head" else n)
            adapted.add(stop.role, stop.layer, x, y)
        elif stop.due is Due.SUM:
            self._sum_up(n)
        else:
            assert barriers is not None, "it has named the layers"
            (barriers.wait if stop.due is Due.WAIT else barriers.used)(stop.layer)

    def _rows_of(self, role: str, n: int) -> tuple[Tensor, Tensor]:
        """Return the inputs of a matrix and its product before gating, n rows each."""
        place = self._places["opened" if role == "gate_up" else role]
        x = tensor_at(place.source, (n, place.k), torch.float32)
        return x, tensor_at(place.target, (n, place.target_row), torch.float32)

    # -- the order of operations ------------------------------------------------------------------

    def _pass_of(self, by_library: frozenset[str], *, adapted: bool) -> PlannedPass:
        """Return the pass in which a library multiplies the matrices of these roles, and adapters
        are applied if `adapted`."""
        key = by_library, adapted
        if key not in self._passes:
            self._passes[key] = self._describe(by_library, adapted=adapted)
        return self._passes[key]

    def _describe(self, by_library: frozenset[str], *, adapted: bool) -> PlannedPass:
        planned, dtype, recipe = PlannedPass(), self.dtype, self._recipe
        norm = layer.kernel("norm", self._norm_dtype)
        land = layer.kernel("land", self._norm_dtype) if recipe.lands_apart else 0
        rotary = layer.kernel("rotary_wide" if recipe.norm_offset else "rotary", dtype)
        embed = "embed" if self._embedding_scale == 1.0 else "embed_scaled"
        multiply = partial(self._multiply, planned, by_library, adapted=adapted)
        table = quantised.embed_kernel() if self._form else layer.kernel(embed, dtype)
        planned.operation(table, self._embed, 0)
        for i in range(self.spec.n_layers):
            planned.stop(Due.WAIT, i)
            if recipe.norms_before:
                planned.operation(norm, self._norms, 2 * i)
            multiply("qkv", i)
            planned.operation(rotary, self._rotary, i)
            planned.end(End.KV)
            planned.attention()
            multiply("o", i)
            if recipe.lands_apart:
                planned.operation(land, self._lands, 2 * i)
            if recipe.norms_before:
                planned.operation(norm, self._norms, 2 * i + 1)
            if self.experts is None or not self.experts.describe(planned, i):
                multiply("gate_up", i)
                multiply("down", i)
            if recipe.lands_apart:
                planned.operation(land, self._lands, 2 * i + 1)
            planned.stop(Due.USED, i)
        planned.operation(norm, self._norms, len(self._norms) - 1)
        planned.end(End.NORM)
        multiply("head", 0)
        planned.end(End.HEAD)
        return planned

    def _multiply(
        self, planned: PlannedPass, by_library: frozenset[str], role: str, i: int, *, adapted: bool
    ) -> None:
        """Add the matrix `role` of layer i to a pass, and the operations and stops that follow
        it."""
        if role in by_library:
            assert self._library is not None
            self._library.describe(planned, role, i, gate=not adapted)
        else:
            opened = adapted and role == "gate_up"
            (self._opened_linears if opened else self._linears[role]).describe(planned, i)
        if adapted:
            planned.stop(Due.ADAPTERS, i, role)
            if role == "gate_up":
                planned.operation(linear.gate_kernel(torch.float32), self._gate, i)
        if self.SUMS and role in ("o", "down"):
            planned.stop(Due.SUM, i, role)

    # -- what a rank of several overrides (`models/parallel/model.py`) -----------------------------

    def _head_of(self, packed: PackedTensor, address: int) -> tuple[PackedTensor, int]:
        """Return the part of the head that is computed here, and its address."""
        return packed, address

    def _sum_up(self, n: int) -> None:
        """Complete the hidden states of n rows, to which the output projection or `down` has
        contributed this rank's part; called only with `SUMS`."""
        raise NotImplementedError

    def _place(self, role: str) -> MatrixPlace:
        """Return the operands of a matrix."""
        b, spec = self._buffers, self.spec
        h, q, inner = spec.hidden, spec.n_heads * spec.head_dim, spec.intermediate
        recipe = self._recipe
        source = b.hidden if recipe.norms == POST else b.normed
        # The norm's output has been read by the time that the last matrix is multiplied.
        landing, mode = (b.normed, linear.STORE) if recipe.lands_apart else (b.hidden, linear.ADD)
        return {
            "qkv": MatrixPlace(qkv_width(spec), h, source, b.qkv, qkv_width(spec)),
            "o": MatrixPlace(h, q, b.attended, landing, h, mode),
            "gate_up": MatrixPlace(2 * inner, h, source, b.gated, inner, _GATED[recipe.activation]),
            "down": MatrixPlace(h, inner, b.gated, landing, h, mode),
            "head": MatrixPlace(spec.vocab, h, b.normed, b.logits, spec.vocab),
        }[role]

    def _opened(self) -> MatrixPlace:
        """Return the operands of gate and up if these are not gated at once."""
        b, spec = self._buffers, self.spec
        width = gate_up_width(spec)
        return MatrixPlace(width, spec.hidden, self._place("gate_up").source, b.gate_up, width)

    # -- tables, made once ------------------------------------------------------------------------

    def _weights_by_role(
        self, segments: Sequence[Segment], addresses: Sequence[int]
    ) -> tuple[TensorsByRole, Sequence[TensorsByRole], TensorsByRole]:
        """Return tensors and their addresses, by role: of the first segment, the layers, and the
        last."""
        n_layers = self.spec.n_layers
        weights = [
            {role: (p, at + p.offset) for p in segment.tensors for role in p.names}
            for segment, at in zip(segments, addresses, strict=False)
        ]
        first = weights[0]
        last = weights[-1] if len(weights) > 1 + n_layers else first
        return first, weights[1 : 1 + n_layers], {**last, "head": self._head_of(*last["head"])}

    def _make_operation_tables(
        self,
        first: TensorsByRole,
        layers: Sequence[TensorsByRole],
        last: TensorsByRole,
        epsilon: int,
    ) -> None:
        """Make the tables of operations between the matrices: embedding, norms, rotary and KV."""
        tables = FusedTables(self.spec, self._recipe, self._buffers, self.dtype, epsilon)
        self._embed = tables.embedding(*first["embeddings"], self._embedding_scale)
        self._form = first["embeddings"][0].form
        self._norms = tables.norms([*layers, last])
        self._lands = tables.lands(layers)
        self._rotary = tables.rotary(layers, self._angles, self._kv, self._max_rows)

    def _make_matrix_tables(
        self, layers: Sequence[TensorsByRole], last: TensorsByRole, invariant: bool
    ) -> None:
        """Make the tables of the matrices, by role, for our kernel and for the library's."""
        b, spec = self._buffers, self.spec
        stored = dict.fromkeys(MATRICES, layers) | {"head": [last]}
        places = {role: self._place(role) for role in stored} | {"opened": self._opened()}
        self._places = places
        self._linears = {
            role: FusedLinears(role, of, places[role], self.dtype) for role, of in stored.items()
        }
        self._library = Library.of(layers, last, self.dtype, places, b.gate_up, invariant)
        self._opened_linears = FusedLinears("gate_up", layers, places["opened"], self.dtype)
        self._gate = linear.gate_tables(
            spec.n_layers,
            spec.intermediate,
            interleaved=_is_interleaved(layers),
            mode=places["gate_up"].mode,
        )
        linear.place(self._gate, 0, (b.gate_up, gate_up_width(spec)), (b.gated, spec.intermediate))

    @property
    def _embedding_scale(self) -> float:
        scale = self._recipe.embedding_scale
        if self._recipe.embedding_scale_rounded:
            scale = float(torch.tensor(scale, dtype=self.dtype))
        return scale

    # -- what differs from job to job -------------------------------------------------------------

    def _fill(self, rows: Rows, item_rows: int) -> None:
        b, n, sampled = self._buffers, rows.n, len(rows.wanted)
        array_at(b.tokens, (n,), np.int64)[:] = rows.tokens
        array_at(b.sampled, (sampled,), np.int64)[:] = rows.wanted
        places = array_at(b.places, (self._kv.n_groups, self._max_rows), np.int64)
        places[:, :n] = rows.places
        self._angles.fill(rows.positions)
        for tables in (self._embed, self._norms, self._lands, self._rotary):
            tables[:, layer_code.NEXT] = 0
            tables[:, layer_code.ROWS] = n
            tables[:, layer_code.ITEM_ROWS] = item_rows
        self._norms[-1, layer_code.ROWS] = sampled
        self._gate[:, linear_code.NEXT], self._gate[:, linear_code.ROWS] = 0, n
        for linears in (*self._linears.values(), self._opened_linears):
            linears.begin(n)
        self._linears["head"].begin(sampled)
        if self.experts is not None:
            self.experts.fill(n, item_rows)

    def _attend(self, rows: Rows) -> tuple[int, Array]:
        """Return attention's kernel, and each layer's table."""
        b, spec = self._buffers, self.spec
        return rows.paged.attend_tables(
            b.qkv,
            (qkv_width(spec), spec.head_dim),
            b.attended,
            torch.float32,
            self._scaling,
            self._windows,
            self._softcap,
        )
