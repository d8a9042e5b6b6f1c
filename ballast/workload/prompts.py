"""Generate token ids for requests of which a workload holds only lengths.

Every token is a hash of (seed, its block or request, position within that), so prompts need no
storage, are the same in every run and every process, and two requests share exactly the tokens of
the prefix blocks that they share. Used by `bench.record`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ballast.workload.workload import WorkloadRequest

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)
_OWN, _SHARED = 0, 1


def prompt_for(
    request: WorkloadRequest, vocab: int, seed: int = 0, lowest: int = 0
) -> tuple[int, ...]:
    """`request.prompt_tokens` token ids in [lowest, vocab).

    Position p lies in block `p // block_tokens`. If the request names that block, the token is a
    function of (seed, block id, position in block) and equal in all requests that name it; beyond
    the named blocks it is a function of (seed, request id, p) and the request's own. `lowest`
    keeps clear of special tokens, which tokenizers put first. Raises ValueError for an empty range.
    """
    if not 0 <= lowest < vocab:
        raise ValueError(f"no token ids in [{lowest}, {vocab})")
    positions = np.arange(request.prompt_tokens, dtype=np.uint64)
    streams = np.full(request.prompt_tokens, _stream(seed, _OWN, request.id), dtype=np.uint64)
    if request.prefix_blocks:
        size = request.block_tokens
        blocks = _mix(np.asarray(request.prefix_blocks, dtype=np.uint64) * _GOLDEN)
        covered = min(request.prompt_tokens, len(blocks) * size)
        keys = _mix(blocks ^ _stream(seed, _SHARED, 0))
        streams[:covered] = np.repeat(keys, size)[:covered]
        positions[:covered] %= np.uint64(size)
    hashes = _mix(streams + (positions + np.uint64(1)) * _GOLDEN)
    span = np.uint64(vocab - lowest)
    return tuple(((hashes >> np.uint64(11)) % span + np.uint64(lowest)).tolist())


def _stream(seed: int, kind: int, owner: int) -> np.uint64:
    """A 64-bit key of one source of tokens."""
    key = np.array([0], dtype=np.uint64)
    for part in (seed, kind, owner):
        key = _mix((key ^ np.uint64(part % 2**64)) + _GOLDEN)
    return np.uint64(key[0])


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64; multiplication wraps by intent."""
    values = (values ^ (values >> np.uint64(30))) * _MIX1
    values = (values ^ (values >> np.uint64(27))) * _MIX2
    return values ^ (values >> np.uint64(31))
