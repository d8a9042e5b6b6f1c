"""Model the bytes of one pass of a model whose weights are read in host memory (C2CServe, 5, 6.3).

A pass multiplies its rows by each layer's matrices, and the sampled ones by the head's. Of a
layer's experts it reads those that a row has chosen; their expected number assumes that rows choose
evenly and independently. Used by the simulator and by policies' estimates.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ballast.core.gemm_traffic import GemmShape, GemmTile, GemmTraffic, hybrid
from ballast.core.model import ModelSpec

OS_TILE = GemmTile(128, 128, 64)
"""Tile of the output-stationary part."""
WS_TILE = GemmTile(128, 128, 512)
"""Tile of the weight-stationary part; its depth is what shared memory holds of the weights."""

TOGETHER = 4
"""Columns of tiles that run together, so that they share activations: an assumption, by which the
GEMM of the paper's figure 4b moves 1.43 GB in device memory (there: 1.23)."""


@dataclass(frozen=True, slots=True)
class PassSizes:
    """Sizes of a model's matrices. Each pair: output columns, and elements of K."""

    layers: int
    item: int
    """Bytes of an element."""
    dense: tuple[tuple[int, int], ...]
    """Matrices of a layer by which every row is multiplied."""
    expert: tuple[tuple[int, int], ...]
    """Matrices of one expert."""
    experts: int
    """Experts of a layer; 0: the model has none."""
    chosen: int
    """Experts that a row goes through."""
    head: tuple[int, int]

    @classmethod
    def of(cls, spec: ModelSpec) -> PassSizes:
        """Return the sizes of a spec; the number of experts follows from a layer's bytes."""
        hidden, inner = spec.hidden, spec.intermediate
        queries, keys = spec.n_heads * spec.head_dim, spec.kv_heads * spec.head_dim
        dense = [(queries + 2 * keys, hidden), (hidden, queries)]
        if inner:
            dense += [(2 * inner, hidden), (hidden, inner)]
        experts, expert = 0, []
        if spec.experts_per_token:
            each = spec.expert_intermediate
            expert = [(2 * each, hidden), (hidden, each)]
            others = sum(n * k for n, k in dense)
            left = spec.segment_bytes[1] // spec.dtype_bytes - others
            experts = max(spec.experts_per_token, left // sum(n * k for n, k in expert))
        return cls(
            layers=spec.n_layers,
            item=spec.dtype_bytes,
            dense=tuple(dense),
            expert=tuple(expert),
            experts=experts,
            chosen=spec.experts_per_token,
            head=(spec.vocab, hidden),
        )

    @property
    def expert_bytes(self) -> int:
        """Bytes of all experts of all layers."""
        return self.layers * self.experts * self.item * sum(n * k for n, k in self.expert)

    @property
    def not_chosen(self) -> float:
        """Probability that a row does not go through a given expert of a layer."""
        return 1.0 - self.chosen / self.experts if self.experts else 0.0

    def read_experts(self, rows: int) -> float:
        """Return the expected number of a layer's experts that a pass of `rows` rows reads."""
        if not self.experts:
            return 0.0
        return self.experts * (1.0 - self.not_chosen**rows)


def decode_bytes(spec: ModelSpec) -> float:
    """Return the bytes that a decode step of one row reads of weights that are all in host memory:
    of embeddings, only where they are the head as well; of experts, those chosen."""
    tied = len(spec.segment_bytes) <= spec.n_layers + 1
    read = sum(spec.segment_bytes if tied else spec.segment_bytes[1:])
    sizes = PassSizes.of(spec)
    return read - sizes.not_chosen * sizes.expert_bytes


def pass_traffic(
    sizes: PassSizes, rows: int, samples: int, os_share: float, multiprocessors: int
) -> GemmTraffic:
    """Return the traffic of a pass with all weights in host memory.

    `rows`: tokens of the pass; `samples`: tokens that go through the head; `os_share`: share of
    output columns computed output-stationary (`core.gemm_traffic`).
    """
    return _layers(sizes, rows, os_share, multiprocessors) + _gemm(
        sizes.head, max(1, samples), sizes.item, os_share, multiprocessors
    )


@lru_cache(maxsize=4096)
def _layers(sizes: PassSizes, rows: int, os_share: float, programs: int) -> GemmTraffic:
    layer = GemmTraffic(0, 0)
    for matrix in sizes.dense:
        layer += _gemm(matrix, rows, sizes.item, os_share, programs)
    read = sizes.read_experts(rows)
    if read:
        each = max(1, round(rows * sizes.chosen / read))
        for matrix in sizes.expert:
            layer += _gemm(matrix, each, sizes.item, os_share, programs).times(read)
    return layer.times(sizes.layers)


def _gemm(
    matrix: tuple[int, int], rows: int, item: int, os_share: float, programs: int
) -> GemmTraffic:
    """Traffic of one product. One tile of rows reads weights once either way: it is computed
    output-stationary, without partial sums, whatever the share."""
    n, k = matrix
    os_share = 1.0 if rows <= OS_TILE.rows else os_share
    return hybrid(GemmShape(rows, n, k, item), OS_TILE, WS_TILE, os_share, programs, TOGETHER)
