"""CUDA graphs of host memory that are as literal as real ones, and attention fit for them.

What is recorded is PyTorch's operators with their tensors: nothing of it runs then, no memory is
read, and outputs have no values yet. A replay runs the operators again over the same tensors,
whatever has become of the Python that called them. What cannot be recorded on a GPU (whatever looks
at a value) cannot be here, and what no correct program does is a `Misuse`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ballast.kernels.attention import AttentionParams
from ballast.kernels.gpu.lora import GpuAdaptedRows
from ballast.kernels.plain.attention import PlainAttention
from ballast.kernels.plain.lora import PlainLora
from tests.memory.fake_cuda import FakeDriver, Misuse

_SYNC = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}


class FakeGraph:
    """Implements `ballast.models.gpu.recording.Graph`."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self.ended = self.gone = False
        self.replays = 0

    def replay(self) -> None:
        if not self.ended:
            raise Misuse("a graph is replayed before it was recorded")
        if self.gone:
            raise Misuse("a graph is replayed that was freed")
        self.replays += 1
        with torch.inference_mode():
            for call, args, kwargs, out in self.calls:
                made = call(*args, **kwargs)
                if made is out or call._schema.is_mutable:
                    continue
                for target, value in zip(tree_leaves(out), tree_leaves(made), strict=True):
                    if isinstance(target, Tensor):
                        target.copy_(value)


class FakeRecorder:
    """Implements `ballast.models.gpu.recording.GraphRecorder`."""

    def __init__(
        self, driver: FakeDriver | None = None, stream: int = 0, graph_bytes: int = 1 << 20
    ) -> None:
        self.n_bytes = 0
        self.session_bytes = graph_bytes
        """Bytes that a session's graphs take."""
        self.graphs: list[FakeGraph] = []
        self.sessions = 0
        self.recorded = threading.Event()
        """Set whenever something was."""
        self._driver, self._stream = driver, stream
        self._mode: _Mode | None = None
        self._inside = self._usable = False

    @contextmanager
    def session(self) -> Iterator[None]:
        if self._inside:
            raise Misuse("two recordings at a time")
        if self._driver is not None and self._driver.streams[self._stream]:
            raise Misuse(f"recorded on stream {self._stream}, which has work")
        self._inside = True
        self.sessions += 1
        try:
            yield
            self._usable = True
        finally:
            self._inside = False
            if self._mode is not None:
                raise Misuse("a recording was left open")
            self.n_bytes += self.session_bytes
            if not self._usable:
                self.clear()
        self.recorded.set()

    def begin(self) -> None:
        if not self._inside or self._mode is not None:
            raise Misuse("begun outside of a session, or twice")
        self._mode = _Mode(FakeGraph())
        self._mode.__enter__()

    def end(self) -> FakeGraph:
        graph = self._leave()
        if graph is None:
            raise Misuse("ended what was not begun")
        if not graph.calls:
            raise Misuse("a graph of nothing")
        graph.ended = True
        self.graphs.append(graph)
        return graph

    @property
    def n_graphs(self) -> int:
        return len(self.graphs)

    def abandon(self) -> None:
        """PyTorch has to keep what cannot be used, too, until all is freed."""
        graph = self._leave()
        if graph is not None:
            self.graphs.append(graph)

    def clear(self) -> None:
        if self._mode is not None:
            raise Misuse("graphs are freed while one is recorded")
        for graph in self.graphs:
            graph.gone = True
        self.graphs.clear()
        self.n_bytes, self._usable = 0, False

    def output(self, tensor: Tensor) -> Tensor:
        return tensor

    def _leave(self) -> FakeGraph | None:
        mode, self._mode = self._mode, None
        if mode is None:
            return None
        mode.__exit__(None, None, None)
        return mode.graph


class _Mode(TorchDispatchMode):
    def __init__(self, graph: FakeGraph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SYNC:
            raise RuntimeError("operation not permitted when stream is capturing")
        with self:
            # First: `reshape` and its like may be views, or copies.
            out = func.decompose(*args, **kwargs)
        if out is not NotImplemented:
            return out
        if func._schema.is_mutable:
            out = kwargs.get("out", args[0])
        elif func.is_view:
            return func(*args, **kwargs)  # of addresses alone
        else:
            out = _without_values(func, args, kwargs)
        self.graph.calls.append((func, args, kwargs, out))
        return out


def _without_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Results as they will be, without looking at what they are computed from."""

    def meta(x: Tensor) -> Tensor:
        return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")

    def filled(x: Tensor) -> Tensor:
        made = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype)
        return made.fill_(math.nan if made.is_floating_point() else 0)

    there, named = tree_map_only(Tensor, meta, (args, {**kwargs}))
    if "device" in named:
        named["device"] = torch.device("meta")
    return tree_map_only(Tensor, filled, func(*there, **named))


class StaticAttention(PlainAttention):
    """As its base, by operators whose shapes and tensors are those of the bucket."""

    replayable: ClassVar[bool] = True
    most_keys: ClassVar[int] = 512
    """Most keys of a sequence of any test's model."""

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        batch, kv = self._batch, self._batch.kv
        for row in range(batch.n_tokens):
            slot = batch.slots[row : row + 1].long()
            live = slot >= 0
            # Padding writes back what is where the first row, which is none, belongs.
            at = torch.where(live, slot, batch.slots[:1].long())
            where = (at // kv.block_tokens, at % kv.block_tokens)
            for cache, new in zip(kv.layer(layer), (key, value), strict=True):
                kept = torch.where(live[:, None, None], new[row : row + 1], cache[where])
                cache.index_put_(where, kept)

    def attend(self, layer: int, query: Tensor, out: Tensor, params: AttentionParams) -> None:
        batch, kv = self._batch, self._batch.kv
        more = (params.window, params.softcap, params.sinks)
        if any(asked is not None for asked in more):
            super().attend(layer, query, out, params)
            return
        n, group, size = batch.n_tokens, batch.shape.group, kv.block_tokens
        # Table of each row, from its items, of which a long sequence has several.
        items, row = torch.cat([batch.few, batch.many]).long(), torch.arange(n)[:, None]
        live = torch.cat(
            [
                torch.arange(len(of)) < batch.counts[i]
                for i, of in enumerate((batch.few, batch.many))
            ]
        )
        mine = live & (row >= items[:, 1]) & (row < items[:, 1] + items[:, 2])
        first = torch.where(mine, items[:, 0], 0).amax(1, keepdim=True)
        keys = torch.where(mine.any(1), batch.positions + 1, 0)[:, None]
        place = torch.arange(-(-self.most_keys // size))
        # Only its own blocks are sure to be backed; padding has the first block of the first.
        at = torch.where(place * size < keys, first + place, torch.where(keys > 0, first, 0))
        *caches, table = batch.blocks(layer)
        blocks = table.long().index_select(0, at.flatten()).view(n, -1)
        seen = torch.arange(len(place) * size) < keys
        k, v = (torch.where(seen[..., None, None], x[blocks].flatten(1, 2), 0) for x in caches)
        q = query[:n].reshape(n, kv.kv_heads, group, kv.head_dim)
        scores = torch.einsum("nhgd,nchd->nhgc", q.float(), k.float()) * params.scale
        scores = scores.masked_fill(~seen[:, None, None], -1e30)
        attended = torch.einsum("nhgc,nchd->nhgd", scores.softmax(-1), v.float())
        out[:n].copy_(attended.reshape(n, batch.heads, kv.head_dim))


class StaticLora(PlainLora):
    """As its base; by operators that look at no adapter's number on the host."""

    replayable: ClassVar[bool] = True

    def add(self, group: int, rows: GpuAdaptedRows, x: Tensor, y: Tensor) -> None:
        if not rows.decodes:
            super().add(group, rows, x, y)
            return
        self._groups[group].check(rows, x, y, self._dtype)
        place = torch.arange(len(rows.order))
        for adapter in range(len(self._groups[group].targets[0].adapters)):
            first, count, of = (rows.tiles[:, i, None].long() for i in range(3))
            mine = (of == adapter) & (place >= first) & (place < first + count)
            chosen = torch.zeros(len(rows.order), dtype=torch.int64)
            chosen = chosen.index_add(0, rows.order.long(), mine.any(0).long())[: len(y), None] > 0
            # What it adds to other rows, padding with them, is anything.
            for delta, columns in self._deltas(group, adapter, x.float()):
                y[:, columns].copy_(torch.where(chosen, y[:, columns] + delta, y[:, columns]))


Make = Callable[[int], FakeRecorder]


class Recorders:
    """Makes them, and keeps them."""

    def __init__(self, driver: FakeDriver | None = None, graph_bytes: int = 1 << 20) -> None:
        self.made: dict[int, FakeRecorder] = {}
        self._driver, self._each = driver, graph_bytes

    def __call__(self, stream: int) -> FakeRecorder:
        made = self.made[stream] = FakeRecorder(self._driver, stream, self._each)
        return made

    @property
    def graphs(self) -> list[FakeGraph]:
        return [graph for made in self.made.values() for graph in made.graphs]
