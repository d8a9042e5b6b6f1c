"""Keep recurrent states in the blocks of a model's KV cache, and serve them to a job's modules.

A block begins with the state after its last computed token::

    block    [position | conv, recurrent state of each module | K, V of each layer that attends]

So a sequence goes on from its last block, a cached prefix from the end of its last block, and what
moves, stores or drops blocks does so with states. `position` is the number of tokens that the state
has seen: it is compared before states are read. A job writes states in place, block by block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ballast.core.errors import BrokenPromise
from ballast.core.job import SequenceWork
from ballast.core.model import ModelSpec
from ballast.kv.layout import Layout
from ballast.memory.tensor import tensor_at
from ballast.weights.carried_state import StateKey, Stretch, carrying
from ballast.weights.packing import DTYPES

_IN_PROGRESS = -1


@dataclass(frozen=True, slots=True)
class _Piece:
    """Tokens of one sequence in one block."""

    row: int
    tokens: int
    is_decode: bool
    """Whether it is all of its sequence's work: a single token."""
    end: int
    """Position after them."""
    source: int | None
    """Block with the state before them; None: they begin the sequence."""
    target: int
    """Their block."""


class PooledStates:
    """The recurrent states of one model's sequences."""

    def __init__(self, spec: ModelSpec, kv_base: int, layout: Layout) -> None:
        self._block_tokens = spec.block_tokens
        self._base, self._stride = kv_base, layout.stride_bytes
        kept = {"conv": DTYPES[spec.dtype], "recurrent": torch.float32}
        self._places: dict[StateKey, tuple[int, tuple[int, ...], torch.dtype]] = {
            (s.module, s.kind, s.index): (at, s.shape, kept[s.kind])
            for s, (at, _) in zip(spec.states, spec.state_places, strict=True)
        }
        self._blocks = 0
        self._views: dict[StateKey, Tensor] = {}
        """By state: it in each block below `_blocks`, (blocks, ...)."""
        self._positions = torch.empty(0, dtype=torch.int64)
        self.checked = True
        """Whether positions are compared; not by jobs whose results do not matter."""

    @contextmanager
    def job(self, work: Sequence[SequenceWork]) -> Iterator[None]:
        """Have modules called within carry the states of `work`.

        Raises BrokenPromise if a sequence's state is not that before its work. Where a job fails,
        states of its sequences are lost.
        """
        pieces = list(self._pieces(work))
        self._cover(1 + max((b for w in work for b in w.blocks), default=0))
        positions = self._positions
        for w in work:
            at = w.blocks[(w.start - 1) // self._block_tokens] if w.start and w.tokens else None
            if at is not None and self.checked and positions[at] != w.start:
                raise BrokenPromise(
                    f"{w.request_id}: block {at} has the state after {int(positions[at])} tokens, "
                    f"its work begins after {w.start}"
                )
        for piece in pieces:
            positions[piece.target] = _IN_PROGRESS
        with carrying(_JobStates(pieces, self._views)):
            yield
        for piece in pieces:
            positions[piece.target] = piece.end

    def _pieces(self, work: Sequence[SequenceWork]) -> Iterator[_Piece]:
        size, row = self._block_tokens, 0
        for w in work:
            at = w.start
            while at < w.end:
                i = at // size
                end = min(w.end, (i + 1) * size)
                source = w.blocks[(at - 1) // size] if at else None
                is_decode = len(w.tokens) == 1 and source is not None
                yield _Piece(row, end - at, is_decode, end, source, w.blocks[i])
                row += end - at
                at = end

    def _cover(self, blocks: int) -> None:
        """Have views of at least so many blocks; memory beyond those in use is never touched."""
        if blocks <= self._blocks:
            return
        self._blocks = n = 1 << blocks.bit_length()
        self._positions = self._view(0, (), torch.int64, n)
        self._views = {k: self._view(*place, n) for k, place in self._places.items()}

    def _view(self, at: int, shape: tuple[int, ...], dtype: torch.dtype, blocks: int) -> Tensor:
        strides = torch.empty(shape, device="meta").stride()
        apart = self._stride // dtype.itemsize
        return tensor_at(self._base + at, (blocks, *shape), dtype, (apart, *strides))


class _JobStates:
    """The `StateBatch` of one job: single tokens of all sequences together, then each piece of a
    prompt."""

    def __init__(self, pieces: Sequence[_Piece], views: dict[StateKey, Tensor]) -> None:
        decodes = [p for p in pieces if p.is_decode]
        self._groups = [decodes] if decodes else []
        self._groups += [[p] for p in pieces if not p.is_decode]
        self._views = views
        self.stretches = [
            Stretch(
                slice(g[0].row, g[0].row + g[0].tokens)
                if len(g) == 1
                else torch.tensor([p.row for p in g]),
                len(g),
                g[0].source is None,
            )
            for g in self._groups
        ]
        self._targets = [torch.tensor([p.target for p in g]) for g in self._groups]
        self._sources = [torch.tensor([p.source or 0 for p in g]) for g in self._groups]

    def load(self, stretch: int, key: StateKey) -> Tensor:
        return self._views[key][self._sources[stretch]]

    def store(self, stretch: int, key: StateKey, state: Tensor) -> None:
        view = self._views[key]
        view[self._targets[stretch]] = state.to(view.dtype)
