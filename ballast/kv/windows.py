"""Block tables of models whose layers are in groups, those with a window apart; pure.

A table has a step of `block_tokens` tokens after the other, in each one block of every group::

    group 0, all       | b7 |      | b9 |      | b2 |      | b4 |
    group 1, window    |    | GONE |    | b8   |    | b3   |    | b1 |
    step                     0           1           2           3

Entries behind a group's window are `GONE`; so are those ahead of it, in a prompt whose blocks of
other groups are allocated as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from ballast.core.model import ModelSpec
from ballast.core.units import ceil_div

GONE = -(1 << 31)
"""Number of no block: below those of all staged ones, and within 32 bits."""


def first_step(spec: ModelSpec, window: int | None, position: int) -> int:
    """Return the first step that a query at `position`, or a later one, may see."""
    if window is None:
        return 0
    return max(0, position + 1 - spec.kept_tokens(window)) // spec.block_tokens


def lacking(
    spec: ModelSpec, blocks: Sequence[int], n_tokens: int, computed: int, *, ahead: bool
) -> list[int]:
    """Return the places in a table that need a block so that `n_tokens` are covered, of which
    `computed` have KV; `ahead`: groups with a window need no more than that beyond these."""
    groups, size = spec.kv_groups, spec.block_tokens
    have, steps = len(blocks) // groups, ceil_div(n_tokens, size)
    found: list[int] = []
    for group, window in enumerate(spec.kv_windows):
        end = steps
        if window is not None and ahead:
            end = min(steps, ceil_div(computed + spec.kept_tokens(window), size))
        begin = have if window is None else computed // size
        places = range(begin * groups + group, end * groups, groups)
        found += [at for at in places if at >= len(blocks) or blocks[at] == GONE]
    return found


def fill(spec: ModelSpec, blocks: list[int], places: Sequence[int], new: Sequence[int]) -> None:
    """Put new blocks into these places of a table, which is extended by whole steps."""
    groups = spec.kv_groups
    end = ceil_div(max(places) + 1, groups) * groups
    blocks += [GONE] * (end - len(blocks))
    for at, block in zip(places, new, strict=True):
        blocks[at] = block


def leave(spec: ModelSpec, blocks: list[int], computed: int) -> list[int]:
    """Remove the blocks that no query from `computed` on can see from a table; returns them."""
    groups = spec.kv_groups
    left: list[int] = []
    for group, window in enumerate(spec.kv_windows):
        at = (first_step(spec, window, computed) - 1) * groups + group
        while at >= 0 and blocks[at] != GONE:
            left.append(blocks[at])
            blocks[at] = GONE
            at -= groups
    return left
