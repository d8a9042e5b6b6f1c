"""Size SwiftCache's two caches of one device: layer stream cache and regular cache (3.2).

Pure; `benchmarks` and docs compute the paper's figures with it. The device's KV memory holds one
layer of every block that lies elsewhere, and all layers of as many blocks as fit beside these::

    K_master single-layer blocks  =  LSC: one layer of each remote block  +  RC: L layers of a block

Here `StagedBlocks` has the first, of `slots` layers instead of one, and the pages of the cache the
second: both are of one pool, and neither is reserved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StreamCaches(NamedTuple):
    """Blocks of both caches."""

    streamed: int
    """Blocks of the layer stream cache, N_LSC: each has one layer on the device."""
    regular: int
    """Blocks of the regular cache, N_RC: each has all layers on the device."""

    @property
    def longest(self) -> int:
        """Blocks of the longest context."""
        return self.streamed + self.regular


def layer_block_bytes(block_tokens: int, kv_heads: int, head_dim: int, item_bytes: int) -> int:
    """Bytes of K and V of one block in one layer, M_block (equation 1)."""
    return 2 * block_tokens * kv_heads * head_dim * item_bytes


def remote_blocks(lender_bytes: int, layer_bytes: int, layers: int) -> int:
    """Full-layer blocks in memory of one lender, K_i (equation 2)."""
    return lender_bytes // (layer_bytes * layers)


def layer_blocks(device_bytes: int, layer_bytes: int) -> int:
    """Single-layer blocks in the device's own KV memory, K_master (equation 3)."""
    return device_bytes // layer_bytes


def stream_caches(own: int, remote: Sequence[int], layers: int, slots: int = 1) -> StreamCaches:
    """Divide `own` single-layer blocks (K_master) where lenders hold `remote` full-layer blocks
    (K_i): equations 4 and 5. `slots`: layers of a remote block on the device at a time; the paper
    has one."""
    streamed = min(sum(remote), own // slots)
    return StreamCaches(streamed, (own - slots * streamed) // layers)
