"""Hold the sequences of one job as GPU tensors at stable addresses: the twin of `PagedBatch`.

Used by the GPU executor and its CUDA graphs. Inputs that all layers share are written once per job:
into pinned host memory, then by one asynchronous copy. The tensors are views of one buffer of a
bucket, so that a CUDA graph captured over them serves every job of the bucket; unused entries are
padding without effect. Kernels read the amount of work (`counts`) on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from ballast.core.errors import BrokenPromise
from ballast.kernels.attention import Attention, AttentionParams
from ballast.kernels.gpu.attention_plan import (
    ITEM_FIELDS,
    MERGE_FIELDS,
    AttentionPlan,
    AttentionShape,
    Bucket,
    plan,
)
from ballast.kernels.gpu.kv import GpuKv
from ballast.kernels.gpu.lora import GpuAdaptedRows
from ballast.kernels.gpu.staging import Sizes, StagingBuffer, put
from ballast.kernels.paged_attention import LayerPlaces

Array = np.ndarray[Any, Any]

NOWHERE = -1
"""Slot of a padding row."""


class GpuAttention(Attention, Protocol):
    """An implementation of attention for one bucket's jobs; `GpuBatch` checks its arguments."""

    replayable: ClassVar[bool]
    """Whether `write` and `attend` launch the same work for every job of a bucket."""


class Scratch:
    """Memory that all batches of a model share, since it runs one job at a time.

    Grow-only buffers with stable addresses: requests up to the largest so far reuse one. Also knows
    the pinned memory through which its batches are filled.
    """

    def __init__(self, device: torch.device, common: Scratch | None = None) -> None:
        """`common`: of several models, if their jobs never run at the same time."""
        self._device, self._common = device, common
        self._kept: dict[str, Tensor] = {}
        self._staged: WeakSet[StagingBuffer] = WeakSet()

    def staged(self, sizes: Sizes) -> StagingBuffer:
        """Return tensors to be filled for each job."""
        made = StagingBuffer(sizes, self._device)
        self._staged.add(made)
        return made

    def close(self) -> None:
        """Free the pinned memory of all batches, which run no job any more (`StagingBuffer`)."""
        for staged in list(self._staged):
            staged.close()

    def tensor(
        self, use: str, shape: tuple[int, ...], dtype: torch.dtype, *, common: bool = False
    ) -> Tensor:
        """Return a tensor of any content that was finite once; shared by all of the same `use`.
        `common`: always in one dtype, whatever it holds, and may be shared with other models."""
        if common and self._common is not None:
            return self._common.tensor(use, shape, dtype)
        n = int(np.prod(shape))
        kept = self._kept.get(use)
        if kept is None or len(kept) < n:
            self._kept[use] = kept = torch.zeros(n, dtype=dtype, device=self._device)
        return kept[:n].view(shape)


class GpuBatch:
    """Tensors for the jobs of one bucket; `fill` sets the next job.

    Tensors, of which a job fills the beginning: `tokens`, `positions` int64 (T,), `wanted` int64
    (bucket.wanted,): rows of which the model's output is wanted; int32: `slots` (T,), `tables`
    (blocks,), `few`, `many`, `merges` and `counts` (few, many, merges): see `AttentionPlan`. Rows
    of padding are token 0 at position 0, of no sequence.
    """

    def __init__(
        self,
        kv: GpuKv,
        heads: int,
        bucket: Bucket,
        attention: Callable[[GpuBatch], GpuAttention],
        scratch: Scratch | None = None,
        invariant: bool = False,
    ) -> None:
        """`scratch`: that of the model, if it has other batches. `invariant`: a row's result must
        depend neither on the batch nor on how its sequence is cut into chunks."""
        self.kv, self.heads, self.bucket = kv, heads, bucket
        self.shape = AttentionShape(heads, kv.kv_heads, kv.block_tokens)
        self.invariant = invariant
        self.few_tokens = 1 if bucket.decodes else self.shape.few
        """Bound of the new tokens of a sequence that is cut by its keys."""
        self.scratch = scratch or Scratch(kv.device)
        self._staged = self.scratch.staged(_sizes(bucket, self.shape))
        views = self._staged.tensors
        self.tokens, self.positions = views["tokens"], views["positions"]
        self.wanted, self.slots = views["wanted"], views["slots"]
        self.tables, self.counts = views["tables"], views["counts"]
        self.few, self.many, self.merges = views["few"], views["many"], views["merges"]
        self.adapted = GpuAdaptedRows.both(views, bucket)
        """Tables of the rows, and of the `wanted` rows, that use adapters; None: none does."""
        self.plan: AttentionPlan
        """Plan of the present job; unset before the first."""
        self.n_wanted = 0
        self._layer_tables: StagingBuffer | None = None
        """Block tables of each layer, (layers, blocks) int32; made for the first job with any."""
        self._units: tuple[Tensor, Tensor] | None = None
        """K and V by which the present job's layers have tables of their own; None: they do not."""
        self.out = self.scratch.tensor("out", (bucket.tokens, heads, kv.head_dim), kv.dtype)
        """Output of attention, reused by all layers, one after the other."""
        self._attention = attention(self)

    @property
    def n_tokens(self) -> int:
        """Rows of the batch, padding included."""
        return self.bucket.tokens

    @property
    def replayable(self) -> bool:
        """Whether a CUDA graph may be recorded over the batch."""
        return self._attention.replayable

    @property
    def n_rows(self) -> int:
        """Rows of the job."""
        return len(self.plan.positions)

    def blocks(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return K and V, (places, block_tokens, kv_heads, head_dim), and the block tables by which
        a layer's are found there, int32."""
        if self._units is None or self._layer_tables is None:
            return *self.kv.layer(layer), self.tables
        return *self._units, self._layer_tables.tensors["tables"][layer]

    def fill(
        self,
        tokens: Sequence[int] | Array,
        starts: Sequence[int],
        counts: Sequence[int],
        tables: Sequence[Sequence[int]],
        wanted: Sequence[int] | Array,
        adapters: Sequence[int] = (),
        places: LayerPlaces | None = None,
    ) -> None:
        """Set the next job: `counts[i]` new tokens of sequence i, from position `starts[i]`.

        `tokens` (T,): those of all sequences in order; `tables[i]`: blocks of sequence i; `wanted`:
        rows; `adapters[i]`: of sequence i, -1: none; `places`: of blocks with numbers below zero,
        which only earlier positions have: no graph may be recorded of the job. Does not wait for
        the device, unless it is `STAGES` jobs behind. Kernels that are launched on this stream from
        now on see this job. Raises BrokenPromise where the job does not fit into the bucket, or a
        sequence not into its blocks.
        """
        made = plan(self.shape, starts, counts, tables)
        self._check(made, len(wanted))
        if max(adapters, default=-1) >= self.bucket.adapters:
            raise BrokenPromise(f"rows of adapter {max(adapters)} in {self.bucket}")
        host = self._staged.host()
        put(host["tokens"], tokens)
        put(host["positions"], made.positions)
        put(host["wanted"], wanted)
        put(host["slots"], made.slots, rest=NOWHERE)
        host["counts"][:] = len(made.few), len(made.many), len(made.merges)
        for name, rows in (("few", made.few), ("many", made.many), ("merges", made.merges)):
            host[name][: len(rows)] = rows
        host["tables"][: len(made.tables)] = made.tables
        if self.adapted is not None:
            of_rows = np.repeat(adapters, counts)
            of_wanted = of_rows[np.asarray(wanted, np.int64)]
            for adapted, of in zip(self.adapted, (of_rows, of_wanted), strict=True):
                adapted.fill(host, of, self.bucket.adapted_rows)
        self._staged.send(made.tables.nbytes)
        self._place(places, made.tables)
        self.plan, self.n_wanted = made, len(wanted)

    def forget_places(self) -> None:
        """Have all layers read the tables of whole blocks again: a graph will be recorded."""
        self._units = None

    def _place(self, places: LayerPlaces | None, tables: Array) -> None:
        self._units = None
        if places is None:
            return
        shape, item = (self.kv.layers, self.bucket.blocks), self.kv.dtype.itemsize
        if self._layer_tables is None:
            self._layer_tables = self.scratch.staged({"tables": (shape, torch.int32)})
        found = places.tables(
            tables, self.kv.cache.stride(0) * item, self.kv.cache.stride(1) * item, self.kv.layers
        )
        host = self._layer_tables.host()["tables"]
        host[:, : found.shape[1]] = found
        self._layer_tables.send(host.nbytes)
        self._units = self.kv.units(places.unit // item)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """As `Attention.write`."""
        self._like(key, self.kv.kv_heads)
        self._like(value, self.kv.kv_heads)
        self._attention.write(layer, key, value)

    def attend(self, layer: int, query: Tensor, out: Tensor, params: AttentionParams) -> None:
        """As `Attention.attend`."""
        self._like(query, self.heads)
        if out.shape != query.shape or out.dtype != query.dtype or not out.is_contiguous():
            raise BrokenPromise("attention's output is not like its query, and contiguous")
        sinks = params.sinks
        if sinks is not None and (
            sinks.shape != (self.heads,) or sinks.dtype != query.dtype or sinks.stride(0) != 1
        ):
            raise BrokenPromise(f"attention got {sinks.dtype} {tuple(sinks.shape)} as sinks")
        self._attention.attend(layer, query, out, params)

    def _like(self, given: Tensor, heads: int) -> None:
        shape = (self.n_tokens, heads, self.kv.head_dim)
        if given.shape != shape or given.dtype != self.kv.dtype or given.stride(2) != 1:
            raise BrokenPromise(
                f"attention got {given.dtype} {tuple(given.shape)} {given.stride()}; "
                f"the batch is {self.kv.dtype} {shape}"
            )

    def _check(self, made: AttentionPlan, wanted: int) -> None:
        """A job within its bucket's sequences, rows and blocks has no more items than fit."""
        b = self.bucket
        needed = (len(made.lengths), len(made.positions), wanted, len(made.tables))
        room = (b.sequences, b.tokens, b.wanted, b.blocks)
        if any(a > r for a, r in zip(needed, room, strict=True)):
            raise BrokenPromise(f"a job of {needed} does not fit into {b}")
        if b.decodes and len(made.positions) > len(made.lengths):
            raise BrokenPromise("a sequence has several new tokens in a bucket of decodes")


def _sizes(bucket: Bucket, shape: AttentionShape) -> Sizes:
    """`tables` comes last: only what a job uses of it is copied, as it may be long."""
    n, rows = bucket.sequences, bucket.tokens
    wide, narrow = torch.int64, torch.int32
    return {
        "tokens": ((rows,), wide),
        "positions": ((rows,), wide),
        "wanted": ((bucket.wanted,), wide),
        "slots": ((rows,), narrow),
        "counts": ((3,), narrow),
        "few": ((bucket.items(shape), ITEM_FIELDS), narrow),
        "many": ((bucket.tiles(shape), ITEM_FIELDS), narrow),
        "merges": ((n, MERGE_FIELDS), narrow),
        **GpuAdaptedRows.sizes(bucket),
        "tables": ((bucket.blocks,), narrow),
    }
