"""The fast path of the Llama-shaped families: a job is one program that all threads run together.

Per layer eight operations: norm, q/k/v, rotary and KV, attention, output projection, norm, gate and
up, down; a layer of experts has programs in place of the last two (`fused_experts.py`). Weights
come packed (`ballast.weights.packing.fused`). Activations are float32 and lie in the lane's
workspace, at addresses that never change: so the operations' tables are made once, and a job fills
in what differs, which is the number of rows, tokens, positions and block tables.
`models/transformers.py` is the reference, and serves everything else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
from ballast.models.fused_experts import FusedExperts, experts_bytes, layers_of_experts
from ballast.models.library import Library
from ballast.models.served import Rows, Served
from ballast.weights.architecture import rotary_of
from ballast.weights.host import HostModel
from ballast.weights.packing import GATED, MATRICES, PANELS
from ballast.weights.segment import PackedTensor
from ballast.weights.sharding import Shard

Array = np.ndarray[Any, Any]

ROWS_ALONE = 8
"""Rows up to which the operations between matrices take one row per item."""
_ALIGNMENT = 64


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
        self._buffers = b = _Buffers.of(spec, workspace, max_rows, max_sampled)
        self._workspace = workspace  # its memory goes with it
        self._max_rows, self._max_sampled = max_rows, max_sampled
        self._angles = _Angles(host.config)
        windows = [NO_WINDOW if w is None else w for w in host.windows]
        self._windows: Array = np.array(windows, np.int64)
        self._scaling = spec.head_dim**-0.5
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
        self._rotary = self._rotary_tables(layers, epsilon)
        self._linears = {role: self._linear_tables(role, layers) for role in MATRICES}
        self._linears["head"] = self._linear_tables("head", [last])
        self.experts: FusedExperts | None = None
        if layers_of_experts(layers):
            text, hidden = host.config.get_text_config(), (b.normed, b.hidden)
            self.experts = FusedExperts(spec, text, layers, self.dtype, b.experts, hidden, max_rows)
        self._operations = np.zeros((3 + 8 * spec.n_layers, 2), np.int64)
        self._lay_out()
        self._program = team.Program(self._operations)
        self._without_head = team.Program(self._operations[:-1])
        self._last_kv = len(self._operations) - (2 + 5)
        """Operations up to the one that writes the last layer's KV."""
        self._without_output = team.Program(self._operations[: self._last_kv])
        self._pieces: dict[tuple[int, int], team.Program] = {}
        self._logits = tensor_at(b.logits, (max_sampled, spec.vocab), torch.float32)
        self._head_out = self._logits
        self._hidden = tensor_at(b.hidden, (max_rows, spec.hidden), torch.float32)
        self._landing = self._hidden
        """Where the output projection and `down` go: what is there is added to, if it is this."""
        self._interleaved = all(w["gate_up"][0].layout == GATED for w in layers if "gate_up" in w)
        self._before = _between(self._operations, spec.n_layers)
        self._library = Library.of(layers, last, self.dtype)
        self._open = self._linears["gate_up"].copy()
        linear.place(self._open, 0, (b.normed, spec.hidden), (b.gate_up, _gate_up(spec)))
        self._open[:, linear_code.MODE] = linear.STORE
        self._open[:, linear_code.N] = _gate_up(spec)
        addresses = segment_addresses[len(host.segments) :]
        self._adapters = FusedAdapters(
            spec, host.adapters, addresses, self.dtype, interleaved=self._interleaved
        )

    @torch.inference_mode()
    def logits(self, work: Sequence[SequenceWork]) -> Tensor:
        return self._logits[: self._compute(work, head=True)]

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
        end = len(self._operations) - (0 if head else 1) if sampled else self._last_kv
        at = 0
        for i in sorted(stops):
            first, after = 1 + 8 * i, min(end, 9 + 8 * i)
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

        normed = rows_at(b.normed, spec.hidden)
        qkv, gated = rows_at(b.qkv, _qkv(spec)), rows_at(b.gated, spec.intermediate)
        attended = rows_at(b.attended, spec.n_heads * spec.head_dim)
        gate_up = rows_at(b.gate_up, _gate_up(spec))
        self._open[:, linear_code.NEXT] = 0
        self._open[:, linear_code.ROWS] = n
        for i in range(spec.n_layers):
            # What is before a layer's first matrix is its own, but for the embeddings.
            with self._passing(i, stops):
                self._before["qkv"][i].run(threads)
                multiply("qkv", i, normed, qkv)
                self._before["o"][i].run(threads)
                if i == spec.n_layers - 1 and not sampled:
                    return
                multiply("o", i, attended, landing)
                self._landed(n)
                self._before["gate_up"][i].run(threads)
                if self.experts is not None and self.experts.run(i, threads):
                    continue
                multiply("gate_up", i, normed, gate_up)
                linear.gate(gate_up, gated, interleaved=self._interleaved)
                multiply("down", i, gated, landing)
                self._landed(n)
        self._before["head"][0].run(threads)
        if head:
            multiply("head", 0, normed[:sampled], self._head_out[:sampled])

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
        return {
            "qkv": Place(_qkv(spec), h, b.normed, b.qkv, _qkv(spec)),
            "o": Place(h, q, b.attended, b.hidden, h, linear.ADD),
            "gate_up": Place(2 * inner, h, b.normed, b.gated, inner, linear.GATED),
            "down": Place(h, inner, b.gated, b.hidden, h, linear.ADD),
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
        )

    def _norm_tables(self, weights: Sequence[_Roles], epsilon: int) -> Array:
        """Two of each layer, and the last: the sampled rows alone."""
        b, spec = self._buffers, self.spec
        addresses = [w[role][1] for w in weights[:-1] for role in ("input_norm", "post_norm")]
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

    def _rotary_tables(self, weights: Sequence[_Roles], epsilon: int) -> Array:
        b, spec = self._buffers, self.spec
        normed = "q_norm" in weights[0]
        return layer.tables(
            spec.n_layers,
            width=spec.head_dim,
            source=b.qkv,
            source_row=_qkv(spec),
            heads=spec.n_heads,
            kv_heads=spec.kv_heads,
            rotary=self._angles.width,
            cosine=b.cosine,
            sine=b.sine,
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
            # A layer of experts runs none of its own in place of these.
            np.array([w[role][1] if role in w else 0 for w in weights]),
            place.n,
            place.k,
            mode=place.mode,
            bias=np.array([w[bias][1] for w in weights]) if bias in weights[0] else 0,
        )
        linear.place(tables, 0, (place.source, place.k), (place.target, place.target_row))
        return tables

    def _lay_out(self) -> None:
        """The operations in order; attention's tables are new in every job."""
        o, n = self._operations, self.spec.n_layers
        body = o[1 : 1 + 8 * n].reshape(n, 8, 2)
        norm = layer.kernel("norm", self.dtype)
        multiply = linear.kernel(self.dtype)
        o[0] = layer.kernel("embed", self.dtype), _rows(self._embed)[0]
        body[:, 0, 0] = body[:, 5, 0] = norm
        body[:, 0, 1], body[:, 5, 1] = _rows(self._norms)[:-1].reshape(n, 2).T
        for place, role in ((1, "qkv"), (4, "o"), (6, "gate_up"), (7, "down")):
            body[:, place, 0], body[:, place, 1] = multiply, _rows(self._linears[role])
        body[:, 2, 0] = layer.kernel("rotary", self.dtype)
        body[:, 2, 1] = _rows(self._rotary)
        if self.experts is not None:
            body[self.experts.layers, 6:] = self.experts.operations
        o[-2] = norm, _rows(self._norms)[-1]
        o[-1] = multiply, _rows(self._linears["head"])[0]
        self._attention = body[:, 3]

    # -- what differs from job to job -------------------------------------------------------------

    def _fill(self, rows: Rows) -> None:
        b, spec, n, sampled = self._buffers, self.spec, rows.n, len(rows.wanted)
        array_at(b.tokens, (n,), np.int64)[:] = rows.tokens
        array_at(b.sampled, (sampled,), np.int64)[:] = rows.wanted
        array_at(b.places, (n,), np.int64)[:] = rows.places
        half = self._angles.width // 2
        self._angles.fill(
            rows.positions,
            tensor_at(b.cosine, (n, half), torch.float32),
            tensor_at(b.sine, (n, half), torch.float32),
        )
        at_once = 1 if n <= ROWS_ALONE else ceil_div(n, 4 * torch.get_num_threads())
        for tables in (self._embed, self._norms, self._rotary):
            tables[:, layer_code.NEXT] = 0
            tables[:, layer_code.ROWS] = n
            tables[:, layer_code.ITEM_ROWS] = at_once
        self._norms[-1, layer_code.ROWS] = sampled
        for tables in self._linears.values():
            tables[:, linear_code.NEXT] = 0
            tables[:, linear_code.ROWS] = n
        self._linears["head"][:, linear_code.ROWS] = sampled
        if self.experts is not None:
            self.experts.fill(n, at_once)
        kernel, tables = rows.paged.attend_tables(
            b.qkv,
            (_qkv(spec), spec.head_dim),
            b.attended,
            torch.float32,
            self._scaling,
            self._windows,
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


_rows = team.rows_of


def _between(operations: Array, n_layers: int) -> dict[str, list[team.Program]]:
    """What comes before each matrix, for each layer, as programs."""
    starts = range(1, 1 + 8 * n_layers, 8)
    return {
        "qkv": [team.Program(operations[s - (s == 1) : s + 1]) for s in starts],
        "o": [team.Program(operations[s + 2 : s + 4]) for s in starts],
        "gate_up": [team.Program(operations[s + 5 : s + 6]) for s in starts],
        "head": [team.Program(operations[-2:-1])],
    }


def _gate_up(spec: ModelSpec) -> int:
    """Gates and ups of one token, in elements: of whole panels."""
    return ceil_div(2 * spec.intermediate, linear_code.PANEL) * linear_code.PANEL


def _qkv(spec: ModelSpec) -> int:
    """Queries, keys and values of one token, in elements."""
    return (spec.n_heads + 2 * spec.kv_heads) * spec.head_dim


class _Angles:
    """Rotary angles by position, from the frequencies that `transformers` derives."""

    def __init__(self, config: Any) -> None:
        rotary = rotary_of(config)
        self._frequencies: Tensor = rotary.inv_freq.float()
        self._scale = float(rotary.attention_scaling)
        self.width = 2 * len(self._frequencies)
        """Elements of a head that turn."""

    def fill(self, positions: Array, cosine: Tensor, sine: Tensor) -> None:
        """Cosines and sines of (T,) positions, into (T, width / 2).

        Of float32 angles, as `transformers` has them, but in float64: in float32 PyTorch's result
        depends, in the last bit, on where in a vector an element lies, and so on other sequences.
        """
        angles = (torch.from_numpy(positions).float()[:, None] * self._frequencies).double()
        cosine.copy_(angles.cos().mul_(self._scale))
        sine.copy_(angles.sin().mul_(self._scale))


@dataclass(frozen=True, slots=True)
class _Buffers:
    """Addresses in the workspace: float32, except for `tokens`, `sampled` and `places`: int64.

    `part` and the three after it are for a rank of several: its part of a sum, all ranks' parts,
    and the same of logits; `experts` is divided by `fused_experts.py`.
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
    experts: int

    @classmethod
    def of(cls, spec: ModelSpec, workspace: Workspace, rows: int, sampled: int) -> _Buffers:
        addresses = []
        at = workspace.address
        for n_bytes in _sizes(spec, rows, sampled):
            addresses.append(at)
            at += ceil_div(n_bytes, _ALIGNMENT) * _ALIGNMENT
        if at > workspace.address + workspace.n_bytes:
            raise BrokenPromise(f"{spec.name}: the workspace has {workspace.n_bytes} bytes")
        return cls(*addresses)


def workspace_bytes(spec: ModelSpec, rows: int, sampled: int) -> int:
    """What jobs of up to `rows` tokens, of which `sampled` are sampled, need of a workspace."""
    return sum(ceil_div(n, _ALIGNMENT) * _ALIGNMENT for n in _sizes(spec, rows, sampled))


def _sizes(spec: ModelSpec, rows: int, sampled: int) -> tuple[int, ...]:
    """Bytes of each buffer, in the order of `_Buffers`."""
    hidden, attended = 4 * rows * spec.hidden, 4 * rows * spec.n_heads * spec.head_dim
    angles = 2 * rows * spec.head_dim
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
        experts_bytes(spec, rows),
    )
