"""Plan moves of KV blocks that empty whole slabs, so that their pages can be freed.

Pure planning, used by `KvCache.compact`, which moves the blocks.

::

    before    [a][b][ ][c]    [ ][d][ ][ ]    [e][ ][f][g]
    after     [a][b][d][c]     given back     [e][ ][f][g]

Sparse slabs are emptied first, since they cost the fewest copies; full ones are filled first.
"""

from __future__ import annotations

from collections.abc import Set

from ballast.kv.slabs import Slab, Slabs


def plan(slabs: Slabs, wanted: int, fixed: Set[int]) -> list[tuple[int, int]]:
    """Return moves (source block, target block) that empty up to `wanted` slabs.

    Blocks in `fixed` do not move, but their slabs may receive others. Targets are free blocks of
    slabs in use: filling an idle slab would only exchange pages that can be freed anyway. No block
    moves twice and no source is a target of another move. Of equal slabs the one opened first is
    taken: a slab's index may be its page's number, which a replay does not share.
    """
    size = slabs.blocks_per_slab
    nailed = {block // size for block in fixed}
    hosts = [s for s in slabs.of.values() if s.used and s.free]
    hosts.sort(key=lambda s: (s.index not in nailed, len(s.free)))
    next_host = iter(hosts)
    victims = [s for s in slabs.of.values() if s.index not in nailed]
    victims.sort(key=lambda s: s.occupied)
    holes = slabs.holes
    open_host: list[int] = []
    """Free blocks of the slab that is being filled, the next one last."""
    settled: set[int] = set()
    """Slabs that were emptied or that received blocks: not considered again."""
    moves: list[tuple[int, int]] = []
    for victim in victims:
        if wanted <= 0 or holes <= 0:
            break
        own_holes = len(victim.free) if victim.used else 0
        if victim.index in settled or victim.occupied > holes - own_holes:
            continue
        settled.add(victim.index)
        holes -= own_holes + victim.occupied
        for block in _held(victim, size):
            while not open_host:
                host = next(next_host)
                if host.index not in settled:
                    settled.add(host.index)
                    open_host = list(host.free)
            moves.append((block, open_host.pop()))
        wanted -= 1
    return moves


def _held(slab: Slab, size: int) -> list[int]:
    """Used and cached blocks of a slab, ascending."""
    free = set(slab.free)
    return [b for b in range(slab.index * size, (slab.index + 1) * size) if b not in free]
