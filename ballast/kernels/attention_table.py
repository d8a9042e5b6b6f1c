"""Define the fields of the int64 table that CPU attention kernels read, and their scratch sizes.

Shared by `paged_attention` (which fills tables) and the compiled code (which reads them).
"""

from __future__ import annotations

from ballast.kernels.vector_code import LANES

# Fields of the table.
NEXT = 0
"""Next item to be processed; 0 before each run."""
ITEMS = 1
"""Total number of items."""
TILES = 2
"""Address of int64 (tiles, 4): first row of the batch, tokens, position of the first, table at."""
TABLES = 3
"""Address of int32: the block tables, one after the other."""
KV = 4
"""Address of K of the layer in block 0."""
BLOCK_STRIDE = 5
"""Elements from a block to the next."""
BLOCK_TOKENS = 6
HEADS = 7
"""Query heads."""
KV_HEADS = 8
HEAD_DIM = 9
SOURCE = 10
"""Address of the queries (attend) or of the new keys (write)."""
SOURCE_TOKEN = 11
"""Elements from a token of the source to the next."""
SOURCE_HEAD = 12
"""Elements from a head of the source to the next."""
TARGET = 13
"""Attend: address of the output, contiguous (tokens, heads, head_dim)."""
SCALE = 14
"""Attend: the softmax scale, as the bits of a float64."""
VALUE = 15
"""Write: address of the new values."""
VALUE_TOKEN = 16
VALUE_HEAD = 17
MAX_ROWS = 18
"""Attend: bound of the rows of a tile."""
WORKERS = 19
"""Attend: threads so far; 0 before each run."""
SCRATCH = 20
"""Attend: address of `SCRATCH_BYTES` for each worker, a multiple of `ALIGNMENT`."""
SCRATCH_BYTES = 21
ITEM_HEADS = 22
"""Attend: KV heads of an item; divides KV_HEADS."""
SOFTCAP = 23
"""Attend: scores become softcap * tanh(score / softcap); bits of a float64, 0 for as they are."""
WINDOW = 24
"""Attend: positions that a token sees, its own and those before it; at least 1."""
ORDER = 25
"""Attend: address of int64 (items / parts, 3): tile, split or -1 for all, slot of its sums; parts =
KV_HEADS / ITEM_HEADS, the parts of one entry being items one after the other."""
SLOTS = 26
"""Attend: address of `slot_floats` float32 for each slot. A tile's slots lie side by side."""
PENDING = 27
"""Attend: address of int64 (tiles, parts): splits done. 0 before each run, and after it."""
SINKS = 28
"""Attend: address of a float32 for each query head, which is one more score of its rows that no
value belongs to; 0: there are none."""
VALUES = 29
"""Elements from a token's K to its V; 0: its V is the beginning of its K."""
TOKEN = 30
"""Elements from a token's K to the next token's."""
SCALES = 31
"""Bytes from a token's K, in int8, to the scales of its heads, as from its V; 0: there are none."""
N_FIELDS = 32

NO_WINDOW = 1 << 62
"""Window larger than any context: no window."""
CHUNK = 64
"""Tokens whose scores are computed at once."""
SPLIT = 256
"""Tokens of a split, whose sums are merged with those of other splits; a multiple of CHUNK."""
ALIGNMENT = 64
MOST_ROWS_IN_PLACE = 8
"""Bound of the rows of a tile for which K and V are widened in registers, once per row."""
VALUE_STEP = 8
"""Tokens whose values go through all heads before the next ones."""


def row_width(head_dim: int) -> int:
    """Elements of a row of queries or sums: a head, padded with zeros to whole vectors."""
    return (head_dim + LANES - 1) // LANES * LANES


def scratch_bytes(max_rows: int, item_heads: int, head_dim: int) -> int:
    """Bytes of scratch memory of one worker of attend: queries, two times sums, maxima and totals;
    scores, offsets and scales of tokens; K or V where they have to be padded."""
    width, rows = row_width(head_dim), item_heads * max_rows
    padded = CHUNK * width if is_staged(max_rows, head_dim) else 0
    n_bytes = 4 * (rows * (3 * width + CHUNK + 4) + CHUNK + padded) + 16 * (CHUNK + LANES)
    return (n_bytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def is_staged(rows: int, head_dim: int) -> bool:
    """Return whether K and V are widened into a buffer first instead of read in place.

    With many rows they are read many times; heads that are not whole vectors need padding.
    """
    return rows > MOST_ROWS_IN_PLACE or head_dim % LANES != 0


def slot_floats(max_rows: int, kv_heads: int, head_dim: int) -> int:
    """float32 of a slot: sums, maxima and totals of all rows of a tile."""
    return max_rows * kv_heads * (row_width(head_dim) + 2)
