"""Compute SwiftCache's elastic units, and what Algorithm 1 moves (3.3).

Section and equation numbers are the paper's. Blocks are KV blocks of all layers unless stated.
Used by `policy.fleet.elastic_lending`; pure arithmetic. `kv.stream_caches` sizes the caches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ballast.core.units import ceil_div


@dataclass(frozen=True, slots=True)
class ElasticUnits:
    """Smallest numbers of blocks that are equally large (equations 8 and 9)."""

    master: int
    worker: int


def block_elements(layers: int, block_tokens: int, kv_heads: int, head_dim: int) -> int:
    """Return the elements of a block, as the paper counts them (equations 6 and 7)."""
    return layers * block_tokens * kv_heads * head_dim


def elastic_units(master: int, worker: int) -> ElasticUnits:
    """Return the blocks that a master and a worker exchange at least, by the elements of their
    blocks (equations 8 and 9). Pages make these units unnecessary: any page of one device backs
    blocks of the other."""
    common = math.lcm(master, worker)
    return ElasticUnits(common // master, common // worker)


def scale_up(
    blocks: int, block_tokens: int, units: ElasticUnits, request_tokens: int
) -> tuple[int, int]:
    """Return (worker's, master's) blocks that a worker takes back for a request: Algorithm 1,
    ScaleUp.

    `blocks`: the worker's, as published all of them, in use or not. A worker whose blocks other
    requests use gets none by that; `policy.fleet.elastic_lending` corrects that.
    """
    missing = ceil_div(request_tokens, block_tokens) - blocks
    if missing <= 0:
        return 0, 0
    k = ceil_div(missing, units.worker)
    return k * units.worker, k * units.master


def scale_down(
    blocks: int, block_tokens: int, units: ElasticUnits, lengths: Iterable[int]
) -> tuple[int, int]:
    """Return (worker's, master's) blocks that a worker gives up: Algorithm 1, ScaleDown.

    `lengths`: tokens of the requests of the last while. As published, room stays for the longest
    one alone, however many run at a time.
    """
    spare = blocks - ceil_div(max(lengths, default=0), block_tokens)
    k = max(0, spare) // units.worker
    return k * units.worker, k * units.master
