"""What every implementation of attention is compared with: plain softmax, in float64, over ragged
batches and odd shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

Ragged = list[tuple[int, int]]
"""Start and count of the tokens of each sequence of a job."""
SHORT: st.SearchStrategy[Ragged] = st.lists(
    st.tuples(st.integers(0, 90), st.one_of(st.just(1), st.integers(1, 70))), min_size=1, max_size=5
)


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of q (n, heads, dim), which begins at `start`, in float64."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("nhd,chd->hnc", q.double(), k) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    back = start + torch.arange(len(q))[:, None] - torch.arange(len(k))[None]
    unseen = back < 0 if window is None else (back < 0) | (back >= window)
    scores = scores.masked_fill(unseen, float("-inf"))
    if sinks is not None:
        one = sinks.double()[:, None, None].expand(-1, len(q), 1)
        scores = torch.cat([scores, one], -1)
    weights = scores.softmax(-1)[..., : len(k)]
    return torch.einsum("hnc,chd->nhd", weights, v)


@dataclass(frozen=True)
class Example:
    """A job's shape, and what its layer asks of attention."""

    ragged: Ragged
    heads: tuple[int, int]
    """Of queries, and of keys and values."""
    dim: int
    block_tokens: int
    window: int | None
    softcap: float | None
    sunk: bool
    seed: int

    @property
    def starts(self) -> list[int]:
        return [start for start, _ in self.ragged]

    @property
    def counts(self) -> list[int]:
        return [count for _, count in self.ragged]

    def layer(self, dtype: torch.dtype) -> tuple[int | None, float | None, torch.Tensor | None]:
        """Seed all that is random; window, soft cap and sinks."""
        torch.manual_seed(self.seed)
        sinks = torch.randn(self.heads[0]).mul(4).to(dtype) if self.sunk else None
        return self.window, self.softcap, sinks

    def compare(
        self,
        out: torch.Tensor,
        q: torch.Tensor,
        read: Callable[[int, slice], tuple[torch.Tensor, torch.Tensor]],
        sinks: torch.Tensor | None,
        tolerance: dict[str, float],
    ) -> None:
        """`read`: K and V of all tokens of a sequence, whose rows in the job are the slice."""
        row = 0
        for i, (start, count) in enumerate(self.ragged):
            part = slice(row, row + count)
            scale, more = self.dim**-0.5, (self.window, self.softcap, sinks)
            expected = reference(q[part], *read(i, part), start, scale, *more)
            torch.testing.assert_close(out[part].double(), expected, **tolerance)
            row += count


def examples(
    ragged: st.SearchStrategy[Ragged] = SHORT, dims: tuple[int, ...] = (1, 8, 20, 64, 80)
) -> st.SearchStrategy[Example]:
    return st.builds(
        Example,
        ragged=ragged,
        heads=st.sampled_from([(1, 1), (4, 4), (6, 2), (9, 3), (8, 1), (33, 1)]),
        dim=st.sampled_from(dims),
        block_tokens=st.sampled_from([1, 5, 16, 48]),
        window=st.sampled_from([None, None, 1, 7, 40, 300, 1000]),
        softcap=st.sampled_from([None, None, 0.5, 30.0]),
        sunk=st.booleans(),
        seed=st.integers(0, 2**31),
    )
