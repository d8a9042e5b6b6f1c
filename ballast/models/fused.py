"""The fast path of decoders of Llama's kind: a job is one program that all threads run together.

Llama has eight operations in a layer: norm, q/k/v, rotary and KV, attention, output projection,
norm, gate and up, down. What others have otherwise, their recipe says
(`ballast.weights.decoder_recipe`): operations that are not there, or more of them
(`ballast.models.fused_order`), other kernels, or other numbers in the tables.

Weights come packed (`ballast.weights.packing.fused`). Activations are float32 and lie in the lane's
workspace, at addresses that never change: so the operations' tables are made once, and a job fills
in what differs, which is the number of rows, tokens, positions and block tables.
`models/transformers.py` is the reference, and serves everything else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ballast.core.errors import BrokenPromise
from ballast.core.job import SequenceWork
from ballast.core.model import ModelSpec
from ballast.core.units import ceil_div
from ballast.kernels import layer, layer_code, linear, linear_code, team
from ballast.kernels.paged_attention import NO_WINDOW
from ballast.kernels.workspace import Workspace
from ballast.kv.layout import Layout
from ballast.memory.tensor import array_at, tensor_at
from ballast.models.fused_adapters import AdaptedRows, FusedAdapters
from ballast.models.fused_angles import Angles
from ballast.models.fused_order import Order
from ballast.models.library import Library
from ballast.models.served import Rows, Served
from ballast.weights.decoder_recipe import GELU, GELU_TANH, LLAMA, POST, SILU, DecoderRecipe
from ballast.weights.host import HostModel
from ballast.weights.packing import GATED, MATRICES, PANELS
from ballast.weights.segment import PackedTensor
from ballast.weights.sharding import Shard

Array = np.ndarray[Any, Any]

ROWS_ALONE = 8
"""Rows up to which the operations between matrices take one row per item."""
_ALIGNMENT = 64
_GATED = {SILU: linear.GATED, GELU: linear.GATED_ERF, GELU_TANH: linear.GATED_TANH}


class FusedModel(Served):
    """Runs the jobs of a model whose host tier is in the layout `ballast.weights.packing.fused`.

    No two jobs of models that share a workspace may run at the same time.
    """

    def __init__(
        self,
        host: HostModel,
        segment_addresses: Sequence[int],
        kv_base: int,
        layout: Layout,
        workspace: Workspace,
        max_rows: int,
        max_sampled: int,
    ) -> None:
        """`segment_addresses[i]`: where segment i of `host` is while the model is resident.

        `max_rows`, `max_sampled`: most tokens of a job, and most positions sampled in it. Raises
        BrokenPromise where the workspace is too small for them.
        """
        super().__init__(host, kv_base, layout)
        spec = self.spec
        self._recipe = recipe = host.recipe or LLAMA
        self._order = order = Order(recipe, spec.n_layers)
        self._buffers = b = _Buffers.of(spec, workspace, max_rows, max_sampled, recipe)
        self._workspace = workspace  # its memory goes with it
        self._max_rows, self._max_sampled = max_rows, max_sampled
        angles = (b.cosine, b.sine, _angle_bytes(spec, max_rows))
        self._angles = Angles(host.config, recipe.rotary_sets, *angles)
        windows = [NO_WINDOW if w is None else w for w in host.windows]
        self._windows: Array = np.array(windows, np.int64)
        self._scaling = recipe.attention_scale or spec.head_dim**-0.5
        self._softcap = recipe.softcap or 0.0
        self._norm_dtype = torch.float32 if recipe.norm_offset else self.dtype
        """In which the weights of norms lie (`ballast.weights.packing.SHIFTED`)."""
        weights = [
            {role: (p, at + p.offset) for p in segment.tensors for role in p.names}
            for segment, at in zip(host.segments, segment_addresses, strict=False)
        ]
        first, layers = weights[0], weights[1 : 1 + spec.n_layers]
        last = weights[-1] if len(weights) > 1 + spec.n_layers else first
        last = {**last, "head": self._head_of(*last["head"])}
        epsilon = layer.bits_of(host.config.get_text_config().rms_norm_eps)
        self._embed = self._embedding(*first["embeddings"])
        self._norms = self._norm_tables([*layers, last], epsilon)
        self._lands = self._land_tables(layers, epsilon)
        self._rotary = self._rotary_tables(layers, epsilon)
        self._linears = {role: self._linear_tables(role, layers) for role in MATRICES}
        self._linears["head"] = self._linear_tables("head", [last])
        self._operations = np.zeros((len(order), 2), np.int64)
        self._lay_out()
        self._program = team.Program(self._operations)
        self._without_head = team.Program(self._operations[:-1])
        self._without_output = team.Program(self._operations[: order.last_kv])
        self._pieces: dict[tuple[int, int], team.Program] = {}
        self._logits = tensor_at(b.logits, (max_sampled, spec.vocab), torch.float32)
        self._head_out = self._logits
        self._hidden = tensor_at(b.hidden, (max_rows, spec.hidden), torch.float32)
        self._landing = self._hidden
        """Where the output projection and `down` go: what is there is added to, if it is this."""
        if recipe.lands_apart:
            self._landing = tensor_at(b.normed, (max_rows, spec.hidden), torch.float32)
        self._interleaved = layers[0]["gate_up"][0].layout == GATED
        self._library = Library.of(layers, last, self.dtype)
        self._open = self._linears["gate_up"].copy()
        source = self._place("gate_up").source
        linear.place(self._open, 0, (source, spec.hidden), (b.gate_up, _gate_up(spec)))
        self._open[:, linear_code.MODE] = linear.STORE
        self._open[:, linear_code.N] = _gate_up(spec)
        addresses = segment_addresses[len(host.segments) :]
        self._adapters = FusedAdapters(host, addresses, self.dtype, interleaved=self._interleaved)

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
        """Run a job, to its logits or to the norm before the head; how many rows of them."""
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
        sampled = len(rows.wanted)
        self._fill(rows)
        threads = torch.get_num_threads()
        library = self._library
        if library is not None and rows.n < library.from_rows:
            library = None
        adapted = self._adapters.of(work)
        stops = self._begin_pass(work)
        if library is not None or adapted is not None:
            self._run_in_parts(rows.n, sampled, library, adapted, threads, stops, head=head)
        elif stops:
            self._run_in_pieces(rows.n, sampled, threads, stops, head=head)
        else:
            self._run_whole(rows.n, sampled, threads, head=head)

    def _run_whole(self, n: int, sampled: int, threads: int, *, head: bool) -> None:
        """All operations, by our own kernels."""
        if sampled:
            (self._program if head else self._without_head).run(threads)
        else:
            self._without_output.run(threads)

    def _run_in_pieces(
        self, n: int, sampled: int, threads: int, stops: Collection[int], *, head: bool
    ) -> None:
        """The same, each layer of `stops` a program of its own, run when it is there."""
        barriers = self.barriers
        assert barriers is not None, "it has named the stops"
        order = self._order
        end = len(order) - (0 if head else 1) if sampled else order.last_kv
        at = 0
        for i in sorted(stops):
            first, after = order.start(i), min(end, order.start(i + 1))
            self._piece(at, first, threads)
            barriers.wait(i)
            self._piece(first, after, threads)
            barriers.used(i)
            at = after
        self._piece(at, end, threads)

    def _piece(self, at: int, end: int, threads: int) -> None:
        if at == end:
            return
        program = self._pieces.get((at, end))
        if program is None:
            program = self._pieces[at, end] = team.Program(self._operations[at:end])
        program.run(threads)

    def _run_in_parts(
        self,
        n: int,
        sampled: int,
        library: Library | None,
        adapted: AdaptedRows | None,
        threads: int,
        stops: Collection[int],
        *,
        head: bool,
    ) -> None:
        """The same operations, matrix by matrix: by a library's kernels, or with adapters."""
        b, spec = self._buffers, self.spec
        landing, adds = self._landing[:n], self._landing is self._hidden

        def rows_at(address: int, width: int, rows: int = n) -> Tensor:
            return tensor_at(address, (rows, width), torch.float32)

        def multiply(role: str, i: int, x: Tensor, out: Tensor) -> None:
            if library is not None:
                library.multiply(role, i, x, out, add=out is landing and adds)
            else:
                table = (self._open if role == "gate_up" else self._linears[role])[i]
                team.run(linear.kernel(self.dtype), table.ctypes.data, threads)
            if adapted is not None:
                adapted.add(role, i, x, out)

        order, places = self._order, {role: self._place(role) for role in ("qkv", "gate_up")}
        into_qkv, into_mlp = (rows_at(p.source, spec.hidden) for p in places.values())
        qkv, gated = rows_at(b.qkv, _qkv(spec)), rows_at(b.gated, spec.intermediate)
        attended = rows_at(b.attended, spec.n_heads * spec.head_dim)
        gate_up = rows_at(b.gate_up, _gate_up(spec))
        mode = places["gate_up"].mode
        self._open[:, linear_code.NEXT] = 0
        self._open[:, linear_code.ROWS] = n
        for i in range(spec.n_layers):
            at = partial(order.at, i)
            # What is before a layer's first matrix is its own, but for the embeddings.
            with self._passing(i, stops):
                self._piece(order.start(i) if i else 0, at("qkv"), threads)
                multiply("qkv", i, into_qkv, qkv)
                self._piece(at("rotary"), at("o"), threads)
                if i == spec.n_layers - 1 and not sampled:
                    return
                multiply("o", i, attended, landing)
                self._landed(n)
                self._piece(at("o") + 1, at("gate_up"), threads)
                multiply("gate_up", i, into_mlp, gate_up)
                linear.gate(gate_up, gated, interleaved=self._interleaved, mode=mode)
                multiply("down", i, gated, landing)
                self._landed(n)
                self._piece(at("down") + 1, order.start(i + 1), threads)
        self._piece(len(order) - 2, len(order) - 1, threads)
        if head:
            normed = rows_at(b.normed, spec.hidden, sampled)
            multiply("head", 0, normed, self._head_out[:sampled])

    @contextmanager
    def _passing(self, layer: int, stops: Collection[int]) -> Iterator[None]:
        """Around a layer's work."""
        if layer not in stops or self.barriers is None:
            yield
            return
        self.barriers.wait(layer)
        yield
        self.barriers.used(layer)

    # -- what a rank of several does otherwise (`models/parallel.py`) ------------------------------

    def _head_of(self, packed: PackedTensor, address: int) -> tuple[PackedTensor, int]:
        """What of the head is computed here, and where it is."""
        return packed, address

    def _landed(self, n: int) -> None:
        """`_landing` has been written, for n rows."""

    def _place(self, role: str) -> Place:
        """What a matrix reads and writes."""
        b, spec = self._buffers, self.spec
        h, q, inner = spec.hidden, spec.n_heads * spec.head_dim, spec.intermediate
        recipe = self._recipe
        source = b.hidden if recipe.norms == POST else b.normed
        # What a norm wrote was read before attention, or the MLP, gets to its last matrix.
        landing, mode = (b.normed, linear.STORE) if recipe.lands_apart else (b.hidden, linear.ADD)
        return {
            "qkv": Place(_qkv(spec), h, source, b.qkv, _qkv(spec)),
            "o": Place(h, q, b.attended, landing, h, mode),
            "gate_up": Place(2 * inner, h, source, b.gated, inner, _GATED[recipe.activation]),
            "down": Place(h, inner, b.gated, landing, h, mode),
            "head": Place(spec.vocab, h, b.normed, b.logits, spec.vocab),
        }[role]

    # -- tables, made once ------------------------------------------------------------------------

    def _embedding(self, packed: PackedTensor, address: int) -> Array:
        b, spec = self._buffers, self.spec
        panels = packed.layout == PANELS
        _, steps, _, group = (*linear.packed_shape(spec.vocab, spec.hidden, self.dtype), 1)[:4]
        return layer.tables(
            1,
            width=spec.hidden,
            source=address,
            source_row=steps * group if panels else spec.hidden,
            target=b.hidden,
            target_row=spec.hidden,
            index=b.tokens,
            panel_group=group if panels else 0,
            scale=layer.bits_of(self._embedding_scale),
        )

    @property
    def _embedding_scale(self) -> float:
        scale = self._recipe.embedding_scale
        if self._recipe.embedding_scale_rounded:
            scale = float(torch.tensor(scale, dtype=self.dtype))
        return scale

    def _norm_tables(self, weights: Sequence[_Roles], epsilon: int) -> Array:
        """Of each layer those before its matrices, and the last: the sampled rows alone."""
        b, spec = self._buffers, self.spec
        roles = [name for name in self._order.layer if name in ("input_norm", "post_norm")]
        addresses = [w[role][1] for w in weights[:-1] for role in roles]
        tables = layer.tables(
            len(addresses) + 1,
            width=spec.hidden,
            source=b.hidden,
            source_row=spec.hidden,
            target=b.normed,
            target_row=spec.hidden,
            weight=np.array([*addresses, weights[-1]["norm"][1]]),
            epsilon=epsilon,
        )
        tables[-1, layer_code.INDEX] = b.sampled
        return tables

    def _land_tables(self, weights: Sequence[_Roles], epsilon: int) -> Array:
        """Two of each layer, where it has any."""
        b, spec = self._buffers, self.spec
        if not self._recipe.lands_apart:
            return layer.tables(0)
        norms = [w.get(role) for w in weights for role in ("o_norm", "down_norm")]
        return layer.tables(
            len(norms),
            width=spec.hidden,
            source=b.normed,
            source_row=spec.hidden,
            target=b.hidden,
            target_row=spec.hidden,
            weight=np.array([0 if norm is None else norm[1] for norm in norms]),
            epsilon=epsilon,
            scale=layer.bits_of(self._recipe.residual_scale),
        )

    def _rotary_tables(self, weights: Sequence[_Roles], epsilon: int) -> Array:
        b, spec = self._buffers, self.spec
        normed = "q_norm" in weights[0]
        sets = [self._recipe.rotary_of(i) for i in range(spec.n_layers)]
        cosine, sine = np.array([self._angles.addresses(name) for name in sets]).T
        return layer.tables(
            spec.n_layers,
            width=spec.head_dim,
            source=b.qkv,
            source_row=_qkv(spec),
            heads=spec.n_heads,
            kv_heads=spec.kv_heads,
            rotary=np.array([0 if name is None else self._angles.width for name in sets]),
            cosine=cosine,
            sine=sine,
            whole=int(normed and self._recipe.whole_head_norms),
            weight=np.array([w["q_norm"][1] for w in weights]) if normed else 0,
            key_weight=np.array([w["k_norm"][1] for w in weights]) if normed else 0,
            epsilon=epsilon,
            kv=self._kv.base + np.arange(spec.n_layers) * self._kv.layer_stride,
            places=b.places,
            values=spec.block_tokens * spec.kv_heads * spec.head_dim,
        )

    def _linear_tables(self, role: str, weights: Sequence[_Roles]) -> Array:
        place = self._place(role)
        bias = f"{role}.bias"
        tables = linear.tables(
            np.array([w[role][1] for w in weights]),
            place.n,
            place.k,
            mode=place.mode,
            bias=np.array([w[bias][1] for w in weights]) if bias in weights[0] else 0,
        )
        linear.place(tables, 0, (place.source, place.k), (place.target, place.target_row))
        return tables

    def _lay_out(self) -> None:
        """The operations in order; attention's tables are new in every job."""
        o, order, recipe = self._operations, self._order, self._recipe
        body = o[1:-2].reshape(order.n_layers, len(order.layer), 2)
        embed = "embed" if self._embedding_scale == 1.0 else "embed_scaled"
        norm = layer.kernel("norm", self._norm_dtype)
        rotary = layer.kernel("rotary_wide" if recipe.norm_offset else "rotary", self.dtype)
        land = layer.kernel("land", self._norm_dtype) if recipe.lands_apart else 0
        multiply = linear.kernel(self.dtype)
        kinds = [
            (norm, self._norms[:-1], [n for n in order.layer if n in ("input_norm", "post_norm")]),
            (land, self._lands, [n for n in order.layer if n.startswith("land")]),
            (rotary, self._rotary, ["rotary"]),
            *((multiply, self._linears[role], [role]) for role in MATRICES),
        ]
        for kernel, tables, names in kinds:
            columns = [order.layer.index(name) for name in names]
            body[:, columns, 0] = kernel
            body[:, columns, 1] = _rows(tables).reshape(order.n_layers, len(names))
        o[0] = layer.kernel(embed, self.dtype), _rows(self._embed)[0]
        o[-2] = norm, _rows(self._norms)[-1]
        o[-1] = multiply, _rows(self._linears["head"])[0]
        self._attention = body[:, order.layer.index("attend")]

    # -- what differs from job to job -------------------------------------------------------------

    def _fill(self, rows: Rows) -> None:
        b, spec, n, sampled = self._buffers, self.spec, rows.n, len(rows.wanted)
        array_at(b.tokens, (n,), np.int64)[:] = rows.tokens
        array_at(b.sampled, (sampled,), np.int64)[:] = rows.wanted
        array_at(b.places, (n,), np.int64)[:] = rows.places
        self._angles.fill(rows.positions)
        at_once = 1 if n <= ROWS_ALONE else ceil_div(n, 4 * torch.get_num_threads())
        for tables in (self._embed, self._norms, self._lands, self._rotary):
            tables[:, layer_code.NEXT] = 0
            tables[:, layer_code.ROWS] = n
            tables[:, layer_code.ITEM_ROWS] = at_once
        self._norms[-1, layer_code.ROWS] = sampled
        for tables in self._linears.values():
            tables[:, linear_code.NEXT] = 0
            tables[:, linear_code.ROWS] = n
        self._linears["head"][:, linear_code.ROWS] = sampled
        kernel, tables = rows.paged.attend_tables(
            b.qkv,
            (_qkv(spec), spec.head_dim),
            b.attended,
            torch.float32,
            self._scaling,
            self._windows,
            self._softcap,
        )
        self._attention[:, 0], self._attention[:, 1] = kernel, _rows(tables)
        self._attending = tables


class Place(NamedTuple):
    """What a matrix of n outputs and k inputs reads and writes: addresses; `target_row`: elements
    from a row of the target to the next."""

    n: int
    k: int
    source: int
    target: int
    target_row: int
    mode: int = linear.STORE


_Roles = dict[str, tuple[PackedTensor, int]]
"""A segment's tensors and their device addresses, by role."""


def _rows(tables: Array) -> Array:
    """Address of each row."""
    return tables.ctypes.data + np.arange(len(tables)) * tables.strides[0]


def _gate_up(spec: ModelSpec) -> int:
    """Gates and ups of one token, in elements: of whole panels."""
    return ceil_div(2 * spec.intermediate, linear_code.PANEL) * linear_code.PANEL


def _qkv(spec: ModelSpec) -> int:
    """Queries, keys and values of one token, in elements."""
    return (spec.n_heads + 2 * spec.kv_heads) * spec.head_dim


@dataclass(frozen=True, slots=True)
class _Buffers:
    """Addresses in the workspace: float32, except for `tokens`, `sampled` and `places`: int64.

    The last four are for a rank of several: its part of a sum, all ranks' parts, and the same of
    logits.
    """

    hidden: int
    normed: int
    qkv: int
    attended: int
    gated: int
    gate_up: int
    logits: int
    cosine: int
    sine: int
    tokens: int
    sampled: int
    places: int
    part: int
    parts: int
    head_part: int
    head_parts: int

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        workspace: Workspace,
        rows: int,
        sampled: int,
        recipe: DecoderRecipe,
    ) -> _Buffers:
        addresses = []
        at = workspace.address
        for n_bytes in _sizes(spec, rows, sampled, recipe):
            addresses.append(at)
            at += ceil_div(n_bytes, _ALIGNMENT) * _ALIGNMENT
        if at > workspace.address + workspace.n_bytes:
            raise BrokenPromise(f"{spec.name}: the workspace has {workspace.n_bytes} bytes")
        return cls(*addresses)


def workspace_bytes(
    spec: ModelSpec, rows: int, sampled: int, recipe: DecoderRecipe | None = None
) -> int:
    """What jobs of up to `rows` tokens, of which `sampled` are sampled, need of a workspace.

    `recipe`: the model's; Llama's if not given.
    """
    sizes = _sizes(spec, rows, sampled, recipe or LLAMA)
    return sum(ceil_div(n, _ALIGNMENT) * _ALIGNMENT for n in sizes)


def _angle_bytes(spec: ModelSpec, rows: int) -> int:
    """Cosines, or sines, of so many positions by one set of frequencies; whole cache lines."""
    return ceil_div(2 * rows * spec.head_dim, _ALIGNMENT) * _ALIGNMENT


def _sizes(spec: ModelSpec, rows: int, sampled: int, recipe: DecoderRecipe) -> tuple[int, ...]:
    """Bytes of each buffer, in the order of `_Buffers`."""
    hidden, attended = 4 * rows * spec.hidden, 4 * rows * spec.n_heads * spec.head_dim
    angles = len(recipe.rotary_sets) * _angle_bytes(spec, rows)
    part = head_part = 0
    if spec.ranks > 1:
        part, head_part = hidden, 4 * sampled * len(Shard(0, spec.ranks).tokens(spec.vocab))
    return (
        hidden,
        hidden,
        4 * rows * _qkv(spec),
        attended,
        4 * rows * spec.intermediate,
        4 * rows * _gate_up(spec),
        4 * sampled * spec.vocab,
        angles,
        angles,
        8 * rows,
        8 * rows,
        8 * rows,
        part,
        spec.ranks * part,
        head_part,
        spec.ranks * head_part,
    )
