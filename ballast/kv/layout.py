"""Compute the block-major memory layout of a model's KV cache: strides, slabs, sizes in pages.

Used by the KV cache, by sizing, and by model executors, whose kernels take its strides. Pure
arithmetic.

The KV cache of a model is one array over reserved addresses::

    (blocks, layers, 2, block_tokens, kv_heads, head_dim)

where axis 2 is K (0) or V (1). Only the first axis has padding: block `b` begins at byte
`b * stride_bytes`, with `state_bytes` of recurrent state if the model has any. A *slab* is the unit
in which the array is backed by memory::

    pages    |  page 0  |  page 1  |  page 2  |  page 3  |  page 4  |  page 5  |
    slabs    |             slab 0             |             slab 1             |
    blocks   |   0   |   1   |   2   |   3    |   4   |   5   |   6   |   7    |

A slab ends where a block ends and where a page ends, so that slabs come and go one by one, while
blocks keep one stride, which is all that kernels need to know.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import isqrt

from ballast.core.errors import ConfigError
from ballast.core.model import ModelSpec
from ballast.core.units import ceil_div

ALIGNMENT = 64
"""Bytes: a cache line, and more than any element size; a stride is a multiple of it."""
GOOD_WASTE = 0.05
"""Waste that is small enough to prefer a smaller slab over less waste."""
MOST_GROUPED = 64
"""Bound of the tokens of a block of models whose layers are in groups, about."""
USUAL_TOKENS = 2048
"""Tokens of a sequence for which blocks that hold a recurrent state waste least."""
MOST_PAGES = MOST_BLOCKS = 8
"""A slab has at most `MOST_PAGES` pages, or the pages of `MOST_BLOCKS` blocks if that is more."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of blocks and slabs. `shape` is that of one block: (layers, 2, block_tokens, ...)."""

    shape: tuple[int, int, int, int, int]
    """(layers, 2, block_tokens, kv_heads, head_dim), but for models with `layer_kv`."""
    block_bytes: int
    """Bytes of one block's data, without padding."""
    page_bytes: int
    slab_pages: int
    blocks_per_slab: int
    state_bytes: int = field(default=0, kw_only=True)
    """Bytes of recurrent state at a block's beginning."""

    @classmethod
    def of(cls, spec: ModelSpec, page_bytes: int) -> Layout:
        """Return the layout of `spec` on a device with pages of `page_bytes`."""
        shape = (spec.kv_layers, 2, spec.block_tokens, spec.kv_heads, spec.head_dim)
        sizes = (spec.block_bytes, page_bytes, *choose(spec.block_bytes, page_bytes))
        return cls(shape, *sizes, state_bytes=spec.state_bytes)

    @property
    def slab_bytes(self) -> int:
        """Bytes from a slab's first block to the next slab's first block."""
        return self.slab_pages * self.page_bytes

    @property
    def stride_bytes(self) -> int:
        """Bytes from one block's start to the next one's; a multiple of `ALIGNMENT`."""
        return self.slab_bytes // self.blocks_per_slab

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's K and V in one block."""
        return (self.block_bytes - self.state_bytes) // self.shape[0]

    @property
    def block_tokens(self) -> int:
        return self.shape[2]

    @property
    def waste(self) -> float:
        """Share of a slab that no block's data uses, 0 <= waste < 1."""
        return 1.0 - self.blocks_per_slab * self.block_bytes / self.slab_bytes

    def pages(self, n_blocks: int) -> int:
        """Return the pages that `n_blocks` take if their slabs hold no other blocks."""
        return ceil_div(n_blocks, self.blocks_per_slab) * self.slab_pages


def choose(block_bytes: int, page_bytes: int) -> tuple[int, int]:
    """Choose (pages, blocks) of a slab for blocks of `block_bytes`.

    The smallest slab that wastes at most `GOOD_WASTE`; if none does, the one with the least waste,
    the smaller of two equals. Raises ConfigError for sizes that cannot be laid out.
    """
    if block_bytes <= 0:
        raise ConfigError("block_bytes", block_bytes, "a block holds at least one byte")
    if page_bytes <= 0 or page_bytes % ALIGNMENT:
        raise ConfigError("page_bytes", page_bytes, f"a multiple of {ALIGNMENT} is needed")
    least = ceil_div(_aligned(block_bytes), page_bytes)
    most = max(MOST_PAGES, ceil_div(MOST_BLOCKS * block_bytes, page_bytes))
    best: tuple[float, int, int] | None = None
    for pages in range(least, most + 1):
        slab_bytes = pages * page_bytes
        blocks = _most_blocks(block_bytes, slab_bytes)
        waste = 1.0 - blocks * block_bytes / slab_bytes
        if waste <= GOOD_WASTE:
            return pages, blocks
        best = min(best, (waste, pages, blocks)) if best else (waste, pages, blocks)
    assert best is not None  # least <= most
    return best[1], best[2]


def fitted(spec: ModelSpec, block_tokens: int | None, page_bytes: int) -> ModelSpec:
    """Return `spec` with blocks of `block_tokens`; None: of about as many as it has, a quarter to
    twice, such that whole blocks fill a page. Where none do (a page holds few tokens), as many as
    it has, and slabs have several pages. With a recurrent state a block has more tokens: longer
    ones hold fewer states, shorter ones leave less of a sequence's last block unused."""
    if block_tokens is not None:
        return replace(spec, block_tokens=block_tokens)
    state, token = spec.state_bytes, spec.token_bytes // spec.kv_groups
    # As many blocks a token as of models with one group, unless they are long.
    usual = min(spec.block_tokens * spec.kv_groups, max(spec.block_tokens, MOST_GROUPED))
    if state:
        least = isqrt(2 * USUAL_TOKENS * state // token)
        usual = min(max(usual, ceil_div(least, usual) * usual), spec.max_model_len)

    def fits(n: int) -> bool:
        n_bytes = n * token + state
        pages, blocks = choose(n_bytes, page_bytes) if n_bytes <= page_bytes else (0, 0)
        return pages == 1 and page_bytes - blocks * n_bytes <= GOOD_WASTE * page_bytes

    fitting = filter(fits, range(max(1, usual // 4), 2 * usual + 1))
    return replace(spec, block_tokens=min(fitting, key=lambda n: abs(n - usual), default=usual))


def divided_blocks(spec: ModelSpec, page_bytes: int) -> str | None:
    """Return a warning about KV that is neither lent memory for nor staged, as its blocks fit no
    page; None: they do."""
    slab = Layout.of(spec, page_bytes).slab_pages
    if slab == 1:
        return None
    return (
        f"blocks of {spec.block_tokens} tokens fit no page and lie in slabs of {slab}: its KV "
        "borrows no memory of other devices, and none of it is staged on the host"
    )


def _aligned(n_bytes: int) -> int:
    return ceil_div(n_bytes, ALIGNMENT) * ALIGNMENT


def _most_blocks(block_bytes: int, slab_bytes: int) -> int:
    """Return the most blocks that divide a slab into equal, aligned strides of >= one block."""
    lines = slab_bytes // ALIGNMENT
    blocks = slab_bytes // _aligned(block_bytes)
    while lines % blocks:
        blocks -= 1
    return blocks
