"""What carries the KV of rotating layers between device and host, and keeps it there meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ballast.core.link import Direction
from ballast.core.rotation import Rotation
from ballast.kv.blocks import KvCache


class KvSwapper(Protocol):
    """Of one model. Called between its jobs; in them it loads and stores what they need.

    Between jobs the host has all KV of layers that rotate.
    """

    @property
    def host(self) -> int | None:
        """Offset from a device KV address to its host copy; None: no memory is behind either
        (virtual time)."""

    def carry(self, layers: Sequence[int], slabs: Sequence[int], direction: Direction) -> None:
        """The next job, which computes nothing, copies all that lies there in these layers."""

    def turn(self, rotation: Rotation) -> None:
        """`rotation` is in force from the next job on."""


MakeSwapper = Callable[[KvCache], KvSwapper]
