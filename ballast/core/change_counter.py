"""Count changes, so that a cached snapshot is known to be stale when its count differs.

Used by the parts of the engine, KV cache, pool and weights whose state a policy's view shows.
"""

from __future__ import annotations


class ChangeCounter:
    """Counter of changes, shared by all objects whose state one snapshot shows."""

    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0
